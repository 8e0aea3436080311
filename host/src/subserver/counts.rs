//! What a model's thread counts of its steps, for whoever watches a server.

use crate::metrics::{Histogram, bounds};

/// One model's steps. Its own thread writes.
#[derive(Debug)]
pub struct StepCounts {
    /// Requests of a step.
    pub requests: Histogram,
    /// Rows of a step.
    pub rows: Histogram,
    /// A step with all that comes of it.
    pub time: Histogram,
    /// From when requests were ready, or the last step ended, to the next step.
    pub gate_wait: Histogram,
    /// From the end of the step that handed a request over to the start of the next step here.
    pub handoff: Histogram,
}

impl Default for StepCounts {
    fn default() -> Self {
        let time = || Histogram::new(&bounds::STEP);
        Self {
            requests: Histogram::new(&bounds::BATCH),
            rows: Histogram::new(&bounds::ROWS),
            time: time(),
            gate_wait: time(),
            handoff: time(),
        }
    }
}
