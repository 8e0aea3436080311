//! Each kernel against the device's bandwidth and arithmetic, measured in the same run.

use std::io::Write;

use crate::runner::cuda;

/// Measure on the CUDA device `ordinal` and write a table. The error is one sentence.
pub fn kernels(ordinal: u32, _out: &mut dyn Write) -> Result<(), String> {
    Err(match cuda::device(ordinal) {
        Err(reason) => reason,
        Ok(device) => format!("kernels cannot be measured on {}: this build has no CUDA runner", device.name),
    })
}
