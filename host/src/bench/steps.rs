//! Whole steps of models with random weights against the time that reading their weights and K/V takes.

use std::time::Instant;

use serde::Serialize;

use super::device::{self, MAX_ROWS, REPLAYS, Sequences};
use crate::runner::cuda::measure::{Kernel, Replayed, linear_shape, median, step_weight_bytes};
use crate::runner::cuda::{CudaRunner, Dtype};
use crate::runner::model_config::ModelConfig;
use crate::runner::{RowBatch, Runner};

/// Whole prompts that are timed.
const PROMPTS: usize = 5;

/// What to measure.
#[derive(Debug)]
pub struct Steps<'a> {
    pub ordinal: u32,
    pub dtype: Dtype,
    /// Tokens of each sequence before the step.
    pub contexts: &'a [u32],
    /// Rows of a step, at most 64.
    pub rows: &'a [u32],
    /// Measure also steps in which each sequence has as many rows.
    pub extend: Option<u32>,
    /// Measure also a prompt of as many tokens; bf16 only.
    pub prefill: Option<u32>,
}

/// Steps of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepTime {
    /// Tokens of each sequence before the step.
    pub context: u32,
    /// Rows of the step, over all sequences.
    pub rows: u32,
    /// Rows of a sequence: 1 for decoding.
    pub rows_each: u32,
    /// Replay of the step's graph by the device's clock, sampling and signals included.
    pub step_ms: f64,
    /// The whole forward by the host's clock: upload, replay, download and the host's own work.
    pub forward_ms: f64,
    /// Bytes of weights that it reads.
    pub weight_bytes: u64,
    /// Bytes of K/V that it reads, each once.
    pub kv_bytes: u64,
}

/// A prompt.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PrefillTime {
    pub tokens: u32,
    /// Rows of its steps.
    pub chunk: u32,
    /// By the host's clock.
    pub forward_ms: f64,
    /// Its linear layers alone, by the device's clock.
    pub linear_ms: f64,
    pub linear_flops: f64,
    /// Its attention alone.
    pub attention_ms: f64,
    pub attention_flops: f64,
}

/// What was measured of one shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ShapeTimes {
    pub shape: &'static str,
    pub description: String,
    pub steps: Vec<StepTime>,
    pub prefill: Option<PrefillTime>,
}

impl StepTime {
    /// Milliseconds to read weights and K/V once at `bandwidth` bytes per second.
    pub fn floor_ms(&self, bandwidth: f64) -> f64 {
        1e3 * (self.weight_bytes + self.kv_bytes) as f64 / bandwidth
    }

    /// Its time by that of the same step at the first context plus the time of the K/V that it reads more;
    /// `None` for steps at the first context.
    pub fn to_first_context(&self, all: &[Self], bandwidth: f64) -> Option<f64> {
        let like = |other: &&Self| (other.rows, other.rows_each) == (self.rows, self.rows_each);
        let first = all.iter().find(like).filter(|first| first.context != self.context)?;
        let more = 1e3 * (self.kv_bytes as f64 - first.kv_bytes as f64) / bandwidth;
        Some(self.step_ms / (first.step_ms + more))
    }

    /// Its time by that of as many rows of a sequence each; `None` for such a step itself.
    pub fn to_single_rows(&self, all: &[Self]) -> Option<f64> {
        let single = |other: &&Self| (other.context, other.rows, other.rows_each) == (self.context, self.rows, 1);
        all.iter().find(single).filter(|_| self.rows_each > 1).map(|single| self.step_ms / single.step_ms)
    }
}

/// Measure one shape. The error is one sentence.
pub fn steps(shape: &'static str, config: &ModelConfig, what: &Steps<'_>) -> Result<ShapeTimes, String> {
    let all = sequences(what.contexts, what.rows, what.extend);
    let prompt = what.prefill.map(|tokens| Sequences { count: 1, context: 0, rows: tokens });
    let room: Vec<Sequences> = all.iter().copied().chain(prompt).collect();
    let mut runner = device::load(shape, config, (what.ordinal, what.dtype), &room)?;
    let vocabulary = runner.info().vocab_size;
    let mut steps = Vec::new();
    for of in all {
        let made = of.make(vocabulary);
        let batch = made.batch();
        steps.push(StepTime {
            context: of.context,
            rows: of.count * of.rows,
            rows_each: of.rows,
            step_ms: runner.replay(&batch, Replayed::Steps, REPLAYS)?,
            forward_ms: forward_ms(&mut runner, &batch, REPLAYS)?,
            weight_bytes: step_weight_bytes(config, what.dtype),
            kv_bytes: of.kv_bytes(config, what.dtype),
        });
    }
    let prefill = prompt.map(|prompt| prefill(&mut runner, config, prompt)).transpose()?;
    Ok(ShapeTimes { shape, description: config.describe(), steps, prefill })
}

/// One row of each of R sequences, for each context and R; then as many rows as `extend` of each, where they
/// make up R.
fn sequences(contexts: &[u32], rows: &[u32], extend: Option<u32>) -> Vec<Sequences> {
    let kinds: Vec<u32> = std::iter::once(1).chain(extend.filter(|extend| *extend > 1)).collect();
    let each = contexts.iter().flat_map(|context| kinds.iter().map(move |each| (*context, *each)));
    let all = each.flat_map(|(context, each)| rows.iter().map(move |rows| (context, each, *rows)));
    let whole = all.filter(|(_, each, rows)| rows.is_multiple_of(*each));
    whole.map(|(context, each, rows)| Sequences { count: rows / each, context, rows: each }).collect()
}

/// Median milliseconds of whole forwards.
fn forward_ms(runner: &mut CudaRunner, batch: &RowBatch<'_>, count: usize) -> Result<f64, String> {
    let mut times = Vec::with_capacity(count);
    for index in 0..=count {
        let start = Instant::now();
        runner.forward(batch).map_err(|error| error.to_string())?;
        // The first one warms up.
        if index > 0 {
            times.push(1e3 * start.elapsed().as_secs_f64());
        }
    }
    Ok(median(times))
}

fn prefill(runner: &mut CudaRunner, config: &ModelConfig, prompt: Sequences) -> Result<PrefillTime, String> {
    let made = prompt.make(runner.info().vocab_size);
    let batch = made.batch();
    let layers = || 0..config.layers;
    let linear = Kernel::LAYER.into_iter().filter(|kernel| linear_shape(*kernel, config).is_some());
    let linear: Vec<Kernel> = linear.collect();
    let mut products: Vec<(Kernel, usize)> =
        layers().flat_map(|layer| linear.iter().map(move |kernel| (*kernel, layer))).collect();
    products.push((Kernel::Head, 0));
    let attention: Vec<(Kernel, usize)> = layers().map(|layer| (Kernel::Attention, layer)).collect();
    Ok(PrefillTime {
        tokens: prompt.rows,
        chunk: prompt.rows.min(MAX_ROWS),
        forward_ms: forward_ms(runner, &batch, PROMPTS)?,
        linear_ms: runner.replay(&batch, Replayed::Kernels(&products), PROMPTS)?,
        linear_flops: linear_flops(config, prompt.rows),
        attention_ms: runner.replay(&batch, Replayed::Kernels(&attention), PROMPTS)?,
        attention_flops: config.layers as f64 * attention_flops(config, prompt),
    })
}

/// Operations of all linear layers for as many rows, of which one is sampled.
fn linear_flops(config: &ModelConfig, rows: u32) -> f64 {
    let layer = Kernel::LAYER.into_iter().filter_map(|kernel| linear_shape(kernel, config));
    let layer: usize = layer.map(|[outputs, inputs]| outputs * inputs).sum();
    2.0 * (f64::from(rows) * (config.layers * layer) as f64 + (config.vocab_size * config.hidden) as f64)
}

/// Operations of attention in one layer, for the positions that rows see.
pub(super) fn attention_flops(config: &ModelConfig, sequences: Sequences) -> f64 {
    4.0 * (config.heads * config.head_dim) as f64 * sequences.positions() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::model_config::shapes;

    fn step(context: u32, rows: u32, rows_each: u32, step_ms: f64) -> StepTime {
        let kv_bytes = u64::from(rows / rows_each * context) * 1000;
        StepTime { context, rows, rows_each, step_ms, forward_ms: step_ms, weight_bytes: 2_000_000, kv_bytes }
    }

    #[test]
    fn ratios() {
        let bandwidth = 1e9;
        let all = [step(1000, 4, 1, 8.0), step(1000, 4, 4, 9.0), step(8000, 4, 1, 40.0), step(8000, 4, 4, 20.0)];
        assert_eq!(all[0].floor_ms(bandwidth), 6.0);
        assert_eq!(all.each_ref().map(|s| s.to_single_rows(&all)), [None, Some(1.125), None, Some(0.5)]);
        let to_first = all.each_ref().map(|s| s.to_first_context(&all, bandwidth));
        // 28 ms more K/V for 4 sequences, 7 ms for one.
        assert_eq!(to_first, [None, None, Some(40.0 / 36.0), Some(20.0 / 16.0)]);
    }

    #[test]
    fn what_is_measured() {
        let of = |count, context, rows| Sequences { count, context, rows };
        assert_eq!(
            sequences(&[10, 20], &[1, 4], Some(4)),
            [of(1, 10, 1), of(4, 10, 1), of(1, 10, 4), of(1, 20, 1), of(4, 20, 1), of(1, 20, 4)]
        );
        assert_eq!(sequences(&[10], &[1, 8], None), [of(1, 10, 1), of(8, 10, 1)]);
        assert_eq!(sequences(&[10], &[8], Some(1)), [of(8, 10, 1)]);
    }

    #[test]
    fn bytes_and_operations_are_those_of_the_parameters() {
        for name in ["qwen3-0.6b", "qwen3-8b"] {
            let config = shapes::find(name).unwrap().config(None).unwrap();
            // Without norms: below a thousandth.
            let table = (config.vocab_size * config.hidden) as f64;
            let read = config.parameters() as f64 - if config.tied { 0.0 } else { table };
            let bytes = step_weight_bytes(&config, Dtype::Bf16) as f64 / 2.0;
            assert!((bytes / read - 1.0).abs() < 1e-3, "{name}: {bytes} for {read}");
            let layers = linear_flops(&config, 1000) - 2.0 * table;
            assert!((layers / (2000.0 * (read - table)) - 1.0).abs() < 1e-3, "{name}");
        }
    }
}
