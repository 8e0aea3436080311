//! When each step of a model began and ended, and which requests it decided about.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokenrouter_plugin_api::DecisionKind;

use crate::request::{Event, NewRequest, RequestId};
use crate::runner::net::{Net, NetId};
use crate::runner::{ModelInfo, RowBatch, RowOutputs, Runner, RunnerError};
use crate::subserver::observe::{Evaluation, Observer, Wanted};

/// Steps for which there is room before the log grows.
const ROOM: usize = 1 << 16;

/// One forward of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub start: Instant,
    pub end: Instant,
    pub rows: u32,
    /// Rows at positions of prompts.
    pub prompt_rows: u32,
    /// Requests in it.
    pub sequences: u32,
    /// Rows that were sampled.
    pub sampled: u32,
}

/// A request that a step sampled a token for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    pub request: RequestId,
    /// The step's place in the log.
    pub step: usize,
    /// Generated tokens before the first candidate of the step.
    pub position: u32,
    /// The last candidate was kept as provisional.
    pub draft: bool,
}

/// What one model did, in order.
#[derive(Clone, Debug, Default)]
pub struct ModelLog {
    pub steps: Vec<Step>,
    pub visits: Vec<Visit>,
}

/// The log of a model that is at work.
#[derive(Clone, Debug, Default)]
pub struct StepLog(Arc<Mutex<ModelLog>>);

impl StepLog {
    /// What was logged so far; the log starts anew.
    pub fn take(&self) -> ModelLog {
        let new = ModelLog { steps: Vec::with_capacity(ROOM), visits: Vec::with_capacity(ROOM) };
        std::mem::replace(&mut *self.log(), new)
    }

    fn log(&self) -> MutexGuard<'_, ModelLog> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A runner with its log. It computes what the runner inside computes.
pub struct Timed {
    inner: Box<dyn Runner>,
    log: StepLog,
}

impl Timed {
    pub fn new(inner: Box<dyn Runner>) -> (Self, StepLog) {
        let log = StepLog::default();
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
        let prompt_rows = batch.sequences.iter().map(|s| s.end.min(s.prompt_len).saturating_sub(s.start));
        let step = Step {
            start,
            end,
            rows: batch.rows() as u32,
            prompt_rows: prompt_rows.sum::<usize>() as u32,
            sequences: batch.sequences.len() as u32,
            sampled: batch.sampled() as u32,
        };
        self.log.log().steps.push(step);
        outputs
    }
}

/// Logs which requests each step decided about. Each model's log is written by the model's thread alone, after
/// [`Timed`] has logged the step.
pub struct Watch(
    /// By model.
    pub Vec<StepLog>,
);

impl Observer for Watch {
    fn wanted(&self) -> Wanted {
        Wanted::default()
    }

    fn submitted(&self, _id: RequestId, _new: &NewRequest) {}

    fn evaluated(&self, evaluation: &Evaluation<'_>) {
        let Some(log) = self.0.get(evaluation.model.index()) else { return };
        let ModelLog { steps, visits } = &mut *log.log();
        // The log may have been taken since the step.
        let Some(step) = steps.len().checked_sub(1) else { return };
        let draft = evaluation.decision.and_then(|decision| decision.kind()) == Some(DecisionKind::Draft);
        match visits.last_mut() {
            // Another row of the same request in the same step.
            Some(last) if last.request == evaluation.request && last.step == step => last.draft = draft,
            _ => visits.push(Visit { request: evaluation.request, step, position: evaluation.position, draft }),
        }
    }

    fn event(&self, _id: RequestId, _event: &Event) {}

    fn cancelled(&self, _id: RequestId) {}
}
