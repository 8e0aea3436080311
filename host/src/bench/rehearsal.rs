//! A model that computes nothing in the place of a server of standard serving: shows before any weights are loaded
//! what a route's policies would ask of it.

use super::remote;
use crate::runner::simulated::SimulatedRunner;
use crate::runner::{ModelInfo, RowBatch, RowOutputs, Runner, RunnerError};

/// K/V pages; more than a rehearsal needs.
const PAGES: u32 = 64;

pub struct Rehearsed(SimulatedRunner);

impl Rehearsed {
    /// In place of the model with `info`, which is number `model`.
    pub fn new(info: &ModelInfo, model: u32) -> Self {
        Self(SimulatedRunner::new(&info.name, model, info.vocab_size, PAGES).ending_with(info.eos.clone()))
    }
}

impl Runner for Rehearsed {
    fn info(&self) -> &ModelInfo {
        self.0.info()
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        let refused = batch.sequences.iter().find_map(|rows| remote::refusal(rows, &batch.signals));
        refused.map_or_else(|| self.0.forward(batch), |refusal| Err(RunnerError::new(refusal)))
    }
}
