//! A runner that is lost in the middle of its work, as when a device's context is.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenrouter::runner::{ModelInfo, RowBatch, RowOutputs, Runner, RunnerError};

use crate::shadow::Shadow;

/// Computes `life` forwards, then fails fatally.
pub struct Mortal {
    pub inner: Shadow,
    pub life: u64,
    /// Forwards asked for beyond `life`: the fatal one, and none after it.
    pub beyond: Arc<AtomicU64>,
}

impl Runner for Mortal {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        let Some(left) = self.life.checked_sub(1) else {
            self.beyond.fetch_add(1, Ordering::Relaxed);
            return Err(RunnerError::fatal("the device is gone"));
        };
        self.life = left;
        self.inner.forward(batch)
    }
}
