//! What the kernels cannot compute.

use tokenrouter_kernels::gpu::ops::{ATTENTION_DIMS, MAX_VOCABULARY, item_rows};

use super::Dtype;
use crate::runner::model_config::ModelConfig;

/// Refuse it, with the remedy.
pub(super) fn check_config(config: &ModelConfig, dtype: Dtype) -> Result<(), String> {
    let group = config.heads / config.kv_heads;
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
    if item_rows(group as u32, false) == 0 {
        return Err(format!("{group} query heads share a key/value head; in bf16 at most 8 can; {remedy}"));
    }
    for (name, value) in [("hidden_size", config.hidden), ("intermediate_size", config.intermediate)] {
        if !value.is_multiple_of(32) {
            return Err(format!("{name} is {value}; in bf16 it must be a multiple of 32; {remedy}"));
        }
    }
    Ok(())
}
