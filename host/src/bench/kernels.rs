//! Each kernel of a decoder in bf16, against what the device can do.

use serde::Serialize;

use super::device::{self, REPLAYS, Sequences};
use super::steps::attention_flops;
use crate::runner::Runner;
use crate::runner::cuda::Dtype;
use crate::runner::cuda::measure::{Kernel, Replayed, linear_shape, matrix_bytes};
use crate::runner::model_config::ModelConfig;

/// Most layers that are loaded. A replay goes through all, so that what it reads comes from memory: no cache
/// holds as many matrices of a published shape.
const LAYERS: usize = 28;
/// Launches in a replay of a kernel that is not of a layer.
const LAUNCHES: usize = 20;
/// Most rows of a step that is a graph.
pub const MAX_STEP_ROWS: u32 = 64;

/// What to measure.
#[derive(Debug)]
pub struct Kernels<'a> {
    pub ordinal: u32,
    /// Tokens before the rows, for attention.
    pub contexts: &'a [u32],
    /// Up to [`MAX_STEP_ROWS`] rows are of a sequence each, more are a piece of one prompt.
    pub rows: &'a [u32],
}

/// One kernel at one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KernelTime {
    pub kernel: &'static str,
    pub rows: u32,
    /// Tokens before the rows; `None` where they do not matter.
    pub context: Option<u32>,
    /// Of one launch.
    pub microseconds: f64,
    /// Bytes that it must read and write, each once.
    pub bytes: u64,
    /// Operations of its matrix products; 0 for kernels without any.
    pub flops: f64,
}

/// What was measured of one shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ShapeKernels {
    pub shape: &'static str,
    pub description: String,
    pub kernels: Vec<KernelTime>,
}

/// In the order of a step.
const ALL: [(Kernel, &str); 10] = [
    (Kernel::Embed, "embed"),
    (Kernel::Qkv, "qkv"),
    (Kernel::Prepare, "prepare"),
    (Kernel::Attention, "attention"),
    (Kernel::Output, "o"),
    (Kernel::Gated, "gated"),
    (Kernel::Down, "down"),
    (Kernel::FinalRows, "final_rows"),
    (Kernel::Head, "head"),
    (Kernel::Sample, "sampling"),
];

/// Measure one shape. The error is one sentence.
pub fn kernels(shape: &'static str, config: &ModelConfig, what: &Kernels<'_>) -> Result<ShapeKernels, String> {
    let cut = ModelConfig { layers: config.layers.min(LAYERS), ..config.clone() };
    let all = what.rows.iter().flat_map(|rows| what.contexts.iter().map(|context| sequences(*rows, *context)));
    let all: Vec<Sequences> = all.collect();
    let mut runner = device::load(shape, &cut, (what.ordinal, Dtype::Bf16), &all)?;
    let mut times = Vec::new();
    for (kernel, name) in ALL {
        for of in &all {
            let rows = of.count * of.rows;
            let attention = kernel == Kernel::Attention;
            let again = !attention && Some(&of.context) != what.contexts.first();
            if again || (of_samples(kernel) && rows > MAX_STEP_ROWS) {
                continue;
            }
            let launches = launches(kernel, cut.layers);
            let made = of.make(runner.info().vocab_size);
            let ms = runner.replay(&made.batch(), Replayed::Kernels(&launches), REPLAYS)?;
            times.push(KernelTime {
                kernel: name,
                rows,
                context: attention.then_some(of.context),
                microseconds: 1e3 * ms / launches.len() as f64,
                bytes: bytes(kernel, &cut, *of),
                flops: flops(kernel, &cut, *of),
            });
        }
    }
    Ok(ShapeKernels { shape, description: config.describe(), kernels: times })
}

fn sequences(rows: u32, context: u32) -> Sequences {
    let (count, rows) = if rows <= MAX_STEP_ROWS { (rows, 1) } else { (1, rows) };
    Sequences { count, context, rows }
}

/// It computes sampled rows only.
fn of_samples(kernel: Kernel) -> bool {
    matches!(kernel, Kernel::FinalRows | Kernel::Head | Kernel::Sample)
}

fn launches(kernel: Kernel, layers: usize) -> Vec<(Kernel, usize)> {
    if Kernel::LAYER.contains(&kernel) {
        (0..layers).map(|layer| (kernel, layer)).collect()
    } else {
        vec![(kernel, 0); LAUNCHES]
    }
}

/// Bytes that a launch must read and write: weights, K/V and rows, each once; norms and lists are left out.
fn bytes(kernel: Kernel, config: &ModelConfig, of: Sequences) -> u64 {
    let rows = u64::from(of.count * of.rows);
    let hidden = config.hidden as u64;
    let (q, kv) = ((config.heads * config.head_dim) as u64, (config.kv_heads * config.head_dim) as u64);
    if let Some([outputs, inputs]) = linear_shape(kernel, config) {
        let (out, read) = (outputs as u64, inputs as u64 * 2);
        let written = match kernel {
            // A number in bf16 for each pair of gate and up.
            Kernel::Gated => out,
            // The residual stream, read and written, and the next input.
            Kernel::Output | Kernel::Down => out * (4 + 4 + 2),
            _ => out * 4,
        };
        return matrix_bytes([outputs, inputs], Dtype::Bf16) + rows * (read + written);
    }
    match kernel {
        Kernel::Embed => rows * hidden * (2 + 4 + 2),
        Kernel::Prepare => rows * (q + 2 * kv) * (4 + 2),
        Kernel::Attention => of.kv_bytes(config, Dtype::Bf16) / config.layers as u64 + rows * q * (2 + 2),
        Kernel::FinalRows => rows * hidden * (4 + 2 + 4),
        // Sampling reads all logits.
        _ => rows * config.vocab_size as u64 * 4,
    }
}

/// Operations of a launch's matrix products.
fn flops(kernel: Kernel, config: &ModelConfig, of: Sequences) -> f64 {
    match linear_shape(kernel, config) {
        Some([outputs, inputs]) => 2.0 * f64::from(of.count * of.rows) * (outputs * inputs) as f64,
        None if kernel == Kernel::Attention => attention_flops(config, of),
        None => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::cuda::measure::step_weight_bytes;
    use crate::runner::model_config::shapes;

    #[test]
    fn the_kernels_of_a_step_read_what_a_step_reads() {
        let config = shapes::find("qwen3-8b").unwrap().config(None).unwrap();
        let no_rows = Sequences { count: 0, context: 0, rows: 1 };
        let once = |kernel| if Kernel::LAYER.contains(&kernel) { config.layers as u64 } else { 1 };
        let all: u64 = ALL.iter().map(|(kernel, _)| once(*kernel) * bytes(*kernel, &config, no_rows)).sum();
        let expected = step_weight_bytes(&config, Dtype::Bf16);
        // Norms are not counted.
        assert!(all <= expected && expected - all < expected / 1000, "{all} of {expected}");
    }

    #[test]
    fn what_is_moved_and_computed() {
        let config = shapes::find("qwen3-0.6b").unwrap().config(None).unwrap();
        let of = sequences(8, 1024);
        assert_eq!((of.count, of.rows), (8, 1));
        assert_eq!(bytes(Kernel::Attention, &config, of), 8 * 1025 * 2 * 8 * 128 * 2 + 8 * 16 * 128 * 4);
        assert_eq!(bytes(Kernel::Gated, &config, of), 2 * 3072 * 1024 * 2 + 8 * (1024 * 2 + 3072 * 2));
        assert_eq!(flops(Kernel::Down, &config, of), 2.0 * 8.0 * 1024.0 * 3072.0);
        assert_eq!(flops(Kernel::Attention, &config, of), 4.0 * 16.0 * 128.0 * 8.0 * 1025.0);
        assert_eq!(flops(Kernel::Sample, &config, of), 0.0);
        assert_eq!((sequences(2048, 8192).count, sequences(2048, 8192).rows), (1, 2048));
    }

    #[test]
    fn a_kernel_of_a_layer_is_launched_in_each() {
        assert_eq!(launches(Kernel::Down, 3), [(Kernel::Down, 0), (Kernel::Down, 1), (Kernel::Down, 2)]);
        assert_eq!(launches(Kernel::Sample, 3).len(), LAUNCHES);
    }
}
