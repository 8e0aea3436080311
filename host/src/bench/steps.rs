//! Whole steps of models with random weights against the time that reading their weights takes.

use std::io::Write;
use std::path::Path;

use crate::runner::cuda::{self, Dtype};
use crate::runner::model_config::shapes::Shape;

/// What to measure.
#[derive(Debug)]
pub struct Steps<'a> {
    pub ordinal: u32,
    pub shapes: &'a [&'static Shape],
    pub dtype: Dtype,
    /// Tokens of each sequence before the step.
    pub context_len: u32,
    /// Rows of a step; each number is measured.
    pub rows: &'a [u32],
    /// Where to write the results as JSON.
    pub json: Option<&'a Path>,
}

/// Measure and write a table. The error is one sentence.
pub fn steps(what: &Steps<'_>, _out: &mut dyn Write) -> Result<(), String> {
    Err(match cuda::device(what.ordinal) {
        Err(reason) => reason,
        Ok(device) => format!("steps cannot be measured on {}: this build has no CUDA runner", device.name),
    })
}
