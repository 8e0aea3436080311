//! A runner that notes when each of its steps began and ended.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::runner::net::{Net, NetId};
use crate::runner::{ModelInfo, RowBatch, RowOutputs, Runner, RunnerError};

/// Steps for which there is room before the log grows.
const ROOM: usize = 1 << 16;

/// One forward of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub start: Instant,
    pub end: Instant,
    pub rows: u32,
    /// Requests in it.
    pub sequences: u32,
    /// Rows that were sampled.
    pub sampled: u32,
}

/// The steps of one model, in order.
#[derive(Clone, Debug)]
pub struct StepLog(Arc<Mutex<Vec<Step>>>);

impl StepLog {
    /// The steps so far; the log starts anew.
    pub fn take(&self) -> Vec<Step> {
        let mut steps = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *steps, Vec::with_capacity(ROOM))
    }
}

/// A runner with its log. It computes what the runner inside computes.
pub struct Timed {
    inner: Box<dyn Runner>,
    log: StepLog,
}

impl Timed {
    pub fn new(inner: Box<dyn Runner>) -> (Self, StepLog) {
        let log = StepLog(Arc::new(Mutex::new(Vec::with_capacity(ROOM))));
        (Self { inner, log: log.clone() }, log)
    }
}

impl Runner for Timed {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }

    fn load_net(&mut self, net: Net) -> Result<NetId, RunnerError> {
        self.inner.load_net(net)
    }

    fn forget_nets(&mut self) {
        self.inner.forget_nets();
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        let start = Instant::now();
        let outputs = self.inner.forward(batch);
        let end = Instant::now();
        let step = Step {
            start,
            end,
            rows: batch.rows() as u32,
            sequences: batch.sequences.len() as u32,
            sampled: batch.sampled() as u32,
        };
        self.log.0.lock().unwrap_or_else(PoisonError::into_inner).push(step);
        outputs
    }
}
