//! Times by the device's clock, for `bench`: of steps and of some of their kernels.

mod bandwidth;

use tokenrouter_kernels::gpu::ops::{MAX_STREAMED_ROWS, packed_numbers};
use tokenrouter_kernels::gpu::{Device, Event, GpuError, Stream};

pub use bandwidth::Bandwidth;

pub(crate) use super::forward::Kernel;
use super::forward::{GRAPHS, Size, graph_of};
use super::memory::qkv_width;
use super::{CudaRunner, Dtype, page_bytes, step, weight_bytes};
use crate::runner::RowBatch;
use crate::runner::model_config::ModelConfig;

/// Replays before those that are measured.
const WARM_UP: usize = 3;

/// What is replayed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Replayed<'a> {
    /// Whole steps, sampling and signals included.
    Steps,
    /// These kernels, each with its layer; they read what a whole step left. bf16 only.
    Kernels(&'a [(Kernel, usize)]),
}

impl CudaRunner {
    /// Fill all K/V with random numbers, as if prompts had been computed.
    pub(crate) fn fill_kv(&self, seed: u64) -> Result<(), String> {
        let count = u64::from(self.info.pages) * page_bytes(&self.config, self.dtype) / self.dtype.size();
        let fill = || -> Result<(), GpuError> {
            self.device.make_current()?;
            let bf16 = self.dtype == Dtype::Bf16;
            // SAFETY: the pool has as many numbers.
            unsafe { self.kernels.fill_random(&self.stream, bf16, (self.kv, count), seed, (0.0, 1.0))? };
            self.stream.synchronize()
        };
        fill().map_err(|error| error.to_string())
    }

    /// Milliseconds that graphs of `batch` take, without upload and download: the sum over its steps of the
    /// medians of `replays` replays each.
    pub(crate) fn replay(&mut self, batch: &RowBatch<'_>, what: Replayed<'_>, replays: usize) -> Result<f64, String> {
        let mut sum = 0.0;
        for parts in step::steps(batch, self.capacity) {
            let rows: usize = parts.iter().map(|part| part.end - part.start).sum();
            let layout = self.layout(rows);
            let prompt = rows > MAX_STREAMED_ROWS as usize;
            let step = step::fill(batch, &parts, layout, prompt, self.fixed, &mut self.upload)?;
            let size = if prompt { Size::of_prompt(&step) } else { GRAPHS[graph_of(&step)] };
            sum += self.replay_step(&step, size, what, replays).map_err(|error| error.to_string())?;
        }
        Ok(sum)
    }

    fn replay_step(
        &mut self,
        step: &step::Step,
        size: Size,
        what: Replayed<'_>,
        replays: usize,
    ) -> Result<f64, GpuError> {
        self.device.make_current()?;
        let stream = &self.stream;
        // SAFETY: the upload memory has room for all words, and `upload` is not written before the stream was
        // waited for; addresses and sizes are of this runner.
        unsafe {
            stream.upload_async(self.buffers.upload, &self.upload, step.words * 4)?;
            let forward = self.parts(self.layout(step.rows));
            let whole = stream.capture(|| forward.enqueue(size))?;
            let graph = match what {
                Replayed::Steps => whole,
                Replayed::Kernels(kernels) => {
                    whole.launch(stream)?;
                    stream.capture(|| {
                        kernels.iter().try_for_each(|(kernel, layer)| forward.kernel(*kernel, *layer, size))
                    })?
                }
            };
            graph.upload(stream)?;
            time(&self.device, stream, replays, || graph.launch(stream))
        }
    }
}

/// Median milliseconds of `replays` times `work`, which are enqueued behind each other so that the device
/// does not wait for the host in between.
fn time(
    device: &Device,
    stream: &Stream,
    replays: usize,
    mut work: impl FnMut() -> Result<(), GpuError>,
) -> Result<f64, GpuError> {
    let events = (0..=replays).map(|_| Event::new(device)).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..WARM_UP {
        work()?;
    }
    for (index, event) in events.iter().enumerate() {
        if index > 0 {
            work()?;
        }
        event.record(stream)?;
    }
    stream.synchronize()?;
    let times = events.windows(2).map(|pair| Event::elapsed_ms(&pair[0], &pair[1]).map(f64::from));
    Ok(median(times.collect::<Result<_, _>>()?))
}

/// The middle one, or the mean of the two in the middle; 0 of nothing.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => values[half],
        _ => (values[half - 1] + values[half]) / 2.0,
    }
}

/// Bytes of weights that a step reads: all but a table of embeddings that is not the head as well.
pub(crate) fn step_weight_bytes(config: &ModelConfig, dtype: Dtype) -> u64 {
    let table = if config.tied { 0 } else { matrix_bytes([config.vocab_size, config.hidden], dtype) };
    weight_bytes(config, dtype) - table
}

/// Bytes of a matrix `[outputs, inputs]` in memory.
pub(crate) fn matrix_bytes([outputs, inputs]: [usize; 2], dtype: Dtype) -> u64 {
    let numbers = match dtype {
        Dtype::Bf16 => packed_numbers(outputs, inputs),
        Dtype::F32 => outputs * inputs,
    };
    numbers as u64 * dtype.size()
}

/// Outputs and inputs of a linear layer; `None` for other kernels.
pub(crate) fn linear_shape(kernel: Kernel, config: &ModelConfig) -> Option<[usize; 2]> {
    let q = config.heads * config.head_dim;
    match kernel {
        Kernel::Qkv => Some([qkv_width(config), config.hidden]),
        Kernel::Output => Some([config.hidden, q]),
        Kernel::Gated => Some([2 * config.intermediate, config.hidden]),
        Kernel::Down => Some([config.hidden, config.intermediate]),
        Kernel::Head => Some([config.vocab_size, config.hidden]),
        _ => None,
    }
}
