//! What the kernels cannot compute.

use tokenrouter_kernels::gpu::ops::{ATTENTION_DIMS, MAX_VOCABULARY, SHARED_MEMORY};

use super::Dtype;
use crate::runner::model_config::ModelConfig;

/// Refuse a device that the kernels do not run on. `shared`: bytes that a block can have.
pub(super) fn check_device(name: &str, capability: (u32, u32), shared: u32) -> Result<(), String> {
    let remedy = "use an A100, H100 or H200, or set the model's device to \"cpu\"";
    if capability < (8, 0) {
        let (major, minor) = capability;
        return Err(format!("{name} has compute capability {major}.{minor}, at least 8.0 is needed; {remedy}"));
    }
    if shared < SHARED_MEMORY {
        let (has, needed) = (shared / 1024, SHARED_MEMORY / 1024);
        return Err(format!("{name} has {has} KiB of shared memory a block, {needed} KiB are needed; {remedy}"));
    }
    Ok(())
}

/// Refuse a model, with the remedy.
pub fn check_config(config: &ModelConfig, dtype: Dtype) -> Result<(), String> {
    if config.vocab_size > MAX_VOCABULARY {
        return Err(format!("vocab_size is {}; on CUDA at most {MAX_VOCABULARY} are possible", config.vocab_size));
    }
    if config.head_dim > 256 {
        return Err(format!("head_dim is {}; on CUDA at most 256 is possible", config.head_dim));
    }
    if dtype == Dtype::F32 {
        return Ok(());
    }
    let remedy = "set the model's dtype to \"f32\" or its device to \"cpu\"";
    if !ATTENTION_DIMS.contains(&config.head_dim) {
        return Err(format!("head_dim is {}; in bf16 it must be one of {ATTENTION_DIMS:?}; {remedy}", config.head_dim));
    }
    for (name, value) in [("hidden_size", config.hidden), ("intermediate_size", config.intermediate)] {
        if !value.is_multiple_of(32) {
            return Err(format!("{name} is {value}; in bf16 it must be a multiple of 32; {remedy}"));
        }
    }
    Ok(())
}
