//! The CUDA runner: bf16 or f32 on one device. Steps of up to 64 rows are replayed graphs, one for each
//! bucket of rows; longer ones (prompts) are enqueued kernel by kernel. One upload and one download a step.
//!
//! As on the CPU, a row's result does not depend on what else is computed with it, nor on whether its
//! sequence came in one piece: all kernels keep one order of operations for a row.

#![allow(unsafe_code)]

mod forward;
mod limits;
mod load;
pub(crate) mod measure;
mod memory;
mod nets;
mod outputs;
mod step;

use std::path::Path;

pub use tokenrouter_kernels::gpu::Partition;
use tokenrouter_kernels::gpu::ops::{Kernels, MAX_STREAMED_ROWS, Matrix, SAMPLE_WORDS};
use tokenrouter_kernels::gpu::{Arena, Device, DevicePtr, GpuError, Graph, Pinned, Priority, Stream, kernel_cache};

use super::model_config::{LoadError, ModelConfig};
use super::net::{Net, NetId};
use super::sampler::Sampler;
use super::{ModelInfo, NetScores, PAGE_TOKENS, RowBatch, RowOutputs, Runner, RunnerError, check};
use crate::request::ModelId;
use forward::{Forward, GRAPHS, Size};
pub use limits::check_config;
use load::Loader;
use memory::{Buffers, Counter, SCORES, SLOTS, Tensors, UploadLayout, results};
use nets::{CudaNet, Inputs};
pub use nets::{check_net, check_scores};
use step::{Fixed, Step};

pub use super::cpu::Progress;

/// A device that the CUDA runner can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub ordinal: u32,
    pub name: String,
    /// Bytes of its memory.
    pub total: u64,
    /// Bytes that nobody uses now.
    pub free: u64,
}

/// The device number `ordinal`. The error is one sentence: what was looked for and where.
pub fn device(ordinal: u32) -> Result<DeviceInfo, String> {
    let look = || -> Result<(Device, (usize, usize)), GpuError> {
        tokenrouter_kernels::gpu::libraries::find()?;
        let device = Device::open(ordinal as usize)?;
        let memory = device.memory()?;
        Ok((device, memory))
    };
    let (device, (free, total)) = look().map_err(|error| error.to_string())?;
    limits::check_device(device.name(), device.capability(), device.shared_memory_limit())?;
    Ok(DeviceInfo { ordinal, name: device.name().to_owned(), total: total as u64, free: free as u64 })
}

/// Type of the weights and of K/V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    Bf16,
    F32,
}

impl Dtype {
    /// Bytes of one number.
    pub fn size(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Bytes of the weights, before anything is loaded.
pub fn weight_bytes(config: &ModelConfig, dtype: Dtype) -> u64 {
    let mut counter = Counter::default();
    // A counter does not fail.
    let _ = Tensors::allocate(config, dtype, &mut counter);
    counter.0 as u64
}

/// Bytes of one K/V page over all layers.
pub fn page_bytes(config: &ModelConfig, dtype: Dtype) -> u64 {
    memory::kv_layer_bytes(config, dtype) * config.layers as u64
}

/// Bytes of everything else that a loaded model keeps on its device, the context and graphs included.
pub fn workspace_bytes(config: &ModelConfig, dtype: Dtype, max_rows: u32) -> u64 {
    /// What the driver takes for a context, kernels and graphs: 0.5 GiB on an H200 with driver 580.
    const DRIVER: u64 = 512 << 20;
    /// Pages are not known before the plan; a list of this many words is a part of the work memory.
    const PAGES: usize = 1 << 20;
    let mut counter = Counter::default();
    let _ = Buffers::allocate(config, dtype, memory::capacity(max_rows), PAGES, &mut counter);
    counter.0 as u64 + DRIVER
}

/// Where the weights come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A Hugging Face directory.
    Directory(&'a Path),
    /// Generated on the device.
    Random { seed: u64 },
}

/// How to load a model.
pub struct LoadOptions<'a> {
    /// Name in the configuration.
    pub name: String,
    /// Index of the model; keys its sampling noise.
    pub model: ModelId,
    pub ordinal: u32,
    pub dtype: Dtype,
    /// Pages of the K/V pool.
    pub pages: u32,
    /// Most rows that are computed at a time; longer forwards are cut.
    pub max_rows: u32,
    /// Computes on a part of the device's multiprocessors.
    pub partition: Option<Partition>,
    /// Steps are replayed graphs. Without, each kernel is launched by itself: the same results, more slowly.
    pub graphs: bool,
    /// Its steps go before those of models of normal priority on the same device.
    pub high_priority: bool,
    /// Told how far loading is.
    pub progress: Option<Progress<'a>>,
}

/// A model on a CUDA device.
pub struct CudaRunner {
    info: ModelInfo,
    config: ModelConfig,
    dtype: Dtype,
    fixed: Fixed,
    /// Rows that work memory has room for.
    capacity: usize,
    tensors: Tensors,
    buffers: Buffers,
    kv: DevicePtr,
    hidden_pages: Option<(DevicePtr, Arena)>,
    sampler: Sampler,
    nets: Vec<CudaNet>,
    use_graphs: bool,
    /// By [`GRAPHS`]; captured when first needed.
    graphs: [Option<Graph>; GRAPHS.len()],
    /// By net and by layout (small steps, prompts).
    net_graphs: Vec<[Option<Graph>; 2]>,
    upload: Pinned<u32>,
    download: Pinned<u32>,
    /// A row of logits for the host's sampler.
    logits: Pinned<f32>,
    kernels: Kernels,
    stream: Stream,
    /// Something was enqueued and not waited for: the last forward failed in between.
    busy: bool,
    /// Dropped last: everything above lies in it.
    _arena: Arena,
    device: Device,
}

impl CudaRunner {
    /// Load a model.
    pub fn load(
        config: ModelConfig,
        source: Source<'_>,
        options: LoadOptions<'_>,
    ) -> Result<Box<dyn Runner>, LoadError> {
        Ok(Box::new(Self::new(config, source, options)?))
    }

    pub(crate) fn new(config: ModelConfig, source: Source<'_>, options: LoadOptions<'_>) -> Result<Self, LoadError> {
        let place = match source {
            Source::Directory(directory) => directory.to_owned(),
            Source::Random { .. } => options.name.clone().into(),
        };
        check_config(&config, options.dtype).map_err(|message| LoadError::new(&place, message))?;
        let failed = |e: GpuError| LoadError::new(&place, e.to_string());
        let dtype = options.dtype;
        let mut runner = Self::allocate(&config, &options).map_err(failed)?;
        let buffers = &runner.buffers;
        let mut loader =
            Loader::new(&runner.device, &runner.kernels, &runner.stream, dtype, buffers, &place).map_err(failed)?;
        match source {
            Source::Directory(directory) => loader.load(directory, &config, &runner.tensors, options.progress)?,
            Source::Random { seed } => loader.random(&config, &runner.tensors, seed)?,
        }
        runner.stream.synchronize().map_err(failed)?;
        if runner.use_graphs {
            runner.capture_all().map_err(failed)?;
        }
        Ok(runner)
    }

    /// Everything but the values of the weights.
    fn allocate(config: &ModelConfig, options: &LoadOptions<'_>) -> Result<Self, GpuError> {
        tokenrouter_kernels::gpu::libraries::find()?;
        let (dtype, pages) = (options.dtype, options.pages);
        let device = Device::open_part(options.ordinal as usize, options.partition.as_ref())?;
        let kernels = Kernels::load(&device, kernel_cache().as_deref())?;
        let priority = if options.high_priority { Priority::High } else { Priority::Default };
        let stream = Stream::new(&device, priority)?;
        let capacity = memory::capacity(options.max_rows);
        let kv_bytes = u64::from(pages) * page_bytes(config, dtype);
        let mut counter = Counter::default();
        let lay_out = |to: &mut dyn memory::Allocate| -> Result<_, GpuError> {
            let tensors = Tensors::allocate(config, dtype, to)?;
            let buffers = Buffers::allocate(config, dtype, capacity, pages as usize, to)?;
            Ok((tensors, buffers, to.bytes(kv_bytes as usize)?))
        };
        lay_out(&mut counter)?;
        let mut arena = Arena::new(&device, counter.0)?;
        let (tensors, buffers, kv) = lay_out(&mut arena)?;
        // What padding rows read must be numbers; K/V of pages that are not written yet are masked, but
        // multiplied by zero.
        // SAFETY: all is allocated.
        unsafe {
            let work = buffers.upload;
            stream.fill_u8_async(work, 0, (kv.0 - work.0) as usize)?;
            stream.fill_u8_async(kv, 0, kv_bytes as usize)?;
        }
        let info = ModelInfo {
            name: options.name.clone(),
            description: config.describe(),
            vocab_size: config.vocab_size as u32,
            hidden_size: config.hidden as u32,
            context: config.context as u32,
            eos: config.eos.clone(),
            pages,
            weight_bytes: weight_bytes(config, dtype),
            page_bytes: page_bytes(config, dtype),
        };
        let group = config.heads / config.kv_heads;
        Ok(Self {
            fixed: Fixed { model: options.model, vocabulary: config.vocab_size, group, net_list: 0 },
            sampler: Sampler::new(options.model, info.eos.clone()),
            upload: Pinned::new(&device, buffers.upload_words)?,
            download: Pinned::new(&device, results::WORDS.max(SLOTS * config.hidden))?,
            logits: Pinned::new(&device, memory::pitch(config))?,
            info,
            config: config.clone(),
            dtype,
            capacity,
            tensors,
            buffers,
            kv,
            hidden_pages: None,
            nets: Vec::new(),
            use_graphs: options.graphs,
            graphs: [const { None }; GRAPHS.len()],
            net_graphs: Vec::new(),
            kernels,
            stream,
            busy: false,
            _arena: arena,
            device,
        })
    }

    /// The model's architecture.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn parts(&self, layout: UploadLayout) -> Forward<'_> {
        Forward {
            kernels: &self.kernels,
            stream: &self.stream,
            config: &self.config,
            dtype: self.dtype,
            tensors: &self.tensors,
            buffers: &self.buffers,
            kv: self.kv,
            pages: self.info.pages,
            hidden_pages: self.hidden_pages.as_ref().map(|(at, _)| *at),
            layout,
        }
    }

    /// Small steps have one layout, prompts another.
    fn layout(&self, rows: usize) -> UploadLayout {
        let small = MAX_STREAMED_ROWS as usize;
        UploadLayout { rows: if rows <= small { small } else { self.capacity } }
    }

    /// Capture the steps of all sizes, the largest first.
    fn capture_all(&mut self) -> Result<(), GpuError> {
        for (index, size) in GRAPHS.into_iter().enumerate().rev() {
            self.graphs[index] = Some(self.capture(size)?);
        }
        Ok(())
    }

    fn capture(&self, size: Size) -> Result<Graph, GpuError> {
        let forward = self.parts(self.layout(size.rows as usize));
        // SAFETY: the addresses live as long as the runner, which owns the graph.
        let graph = self.stream.capture(|| unsafe { forward.enqueue(size) })?;
        graph.upload(&self.stream)?;
        Ok(graph)
    }

    /// Compute one step and wait for it; results lie in `download`.
    fn run(&mut self, batch: &RowBatch<'_>, parts: &[step::Part], nets: &[NetId]) -> Result<Step, RunnerError> {
        let text = runner_error;
        let rows: usize = parts.iter().map(|part| part.end - part.start).sum();
        let layout = self.layout(rows);
        let small = rows <= MAX_STREAMED_ROWS as usize;
        // The thread that loaded the model is another one than that which runs it.
        self.device.make_current().map_err(text)?;
        if self.busy {
            self.stream.synchronize().map_err(text)?;
        }
        let step = step::fill(batch, parts, layout, !small, self.fixed, &mut self.upload).map_err(RunnerError::new)?;
        self.busy = true;
        // SAFETY: the upload memory has room for all words, and `upload` is not written before the stream was
        // waited for; graphs and steps are of this runner.
        unsafe {
            self.stream.upload_async(self.buffers.upload, &self.upload, step.words * 4).map_err(text)?;
            if small {
                let index = forward::graph_of(&step);
                if !self.use_graphs {
                    self.parts(layout).enqueue(GRAPHS[index]).map_err(text)?;
                } else if self.graphs[index].is_none() {
                    self.graphs[index] = Some(self.capture(GRAPHS[index]).map_err(text)?);
                }
                if let Some(graph) = &self.graphs[index] {
                    graph.launch(&self.stream).map_err(text)?;
                }
            } else {
                self.parts(layout).enqueue(Size::of_prompt(&step)).map_err(text)?;
            }
        }
        let on_host = step.slots.iter().any(|slot| slot.on_host);
        if !nets.is_empty() && !on_host && !step.slots.is_empty() {
            self.launch_nets(nets, !small).map_err(text)?;
        }
        if step.slots.is_empty() {
            self.stream.synchronize().map_err(text)?;
            return Ok(step);
        }
        let wanted = if step.list > 0 {
            results::WORDS
        } else if !batch.signals.token_logits.is_empty() {
            results::TOP_VALUES
        } else if nets.is_empty() {
            step.slots.len() * SAMPLE_WORDS
        } else {
            results::TOKEN_LOGITS
        };
        // SAFETY: the results have as many words; `download` is read after the stream was waited for.
        unsafe { self.stream.download_async(&mut self.download, self.buffers.results, wanted * 4).map_err(text)? };
        self.stream.synchronize().map_err(text)?;
        Ok(step)
    }

    fn launch_nets(&mut self, nets: &[NetId], prompt: bool) -> Result<(), GpuError> {
        for id in nets {
            let index = id.0 as usize;
            if !self.use_graphs {
                // SAFETY: the addresses are of this runner.
                unsafe { self.enqueue_net(index, prompt)? };
            } else if self.net_graphs[index][usize::from(prompt)].is_none() {
                self.net_graphs[index][usize::from(prompt)] = Some(self.capture_net(index, prompt)?);
            }
            if let Some(graph) = &self.net_graphs[index][usize::from(prompt)] {
                // SAFETY: the graph's addresses are of this runner.
                unsafe { graph.launch(&self.stream)? };
            }
        }
        Ok(())
    }

    fn capture_net(&self, index: usize, prompt: bool) -> Result<Graph, GpuError> {
        // SAFETY: the addresses live as long as the runner, which owns the graph.
        self.stream.capture(|| unsafe { self.enqueue_net(index, prompt) })
    }

    /// # Safety
    /// As for [`Forward::enqueue`].
    unsafe fn enqueue_net(&self, index: usize, prompt: bool) -> Result<(), GpuError> {
        let forward =
            self.parts(self.layout(if prompt { self.capacity.max(MAX_STREAMED_ROWS as usize + 1) } else { 1 }));
        let sampling = forward.sampling();
        let inputs = Inputs {
            at: forward.rows(),
            params: sampling.params,
            samples: sampling.out,
            top_values: sampling.top_values,
            hidden: self.buffers.hidden,
            hidden_pages: forward.hidden_pages.unwrap_or(DevicePtr(0)),
            embedding: self.tensors.embedding,
            packed_embedding: self.dtype == Dtype::Bf16,
        };
        let (net, column) = (&self.nets[index], self.score_column(index));
        let at = self.buffers.results.offset((results::SCORES_AT + column) * 4);
        let out = Matrix { at, pitch: SCORES as u32, width: net.width as u32 };
        // SAFETY: the caller's.
        unsafe { net.enqueue(&self.kernels, &self.stream, &inputs, out) }
    }

    /// First column of a net's scores.
    fn score_column(&self, net: usize) -> usize {
        self.nets[..net].iter().map(|net| net.width).sum()
    }

    /// One step; `nets` are evaluated at its sampled rows.
    fn step(
        &mut self,
        batch: &RowBatch<'_>,
        parts: &[step::Part],
        nets: &[NetId],
        out: &mut RowOutputs,
    ) -> Result<(), RunnerError> {
        let text = runner_error;
        let first_sampled = |part: &step::Part| batch.sequences[part.sequence].scored_positions().end;
        // Scored rows alone need none; beside sampled ones what nets make of them is not read.
        let sampled = parts.iter().any(|part| part.end > first_sampled(part));
        let nets = if sampled { nets } else { &[] };
        let step = self.run(batch, parts, nets)?;
        self.busy = false;
        if step.slots.is_empty() {
            return Ok(());
        }
        let fetched = self.read_logits(batch, &step).map_err(text)?;
        if !nets.is_empty() && step.slots.iter().any(|slot| slot.on_host) {
            self.evaluate_after_host(nets, step.rows > MAX_STREAMED_ROWS as usize, &fetched).map_err(text)?;
        }
        let mut scores = std::mem::take(&mut out.signals.nets);
        self.collect_scores(batch, &step, nets, &mut scores);
        out.signals.nets = scores;
        self.collect(batch, &step, fetched, out);
        if batch.hidden { self.fetch_hidden(&step, out).map_err(text) } else { Ok(()) }
    }
}

impl Runner for CudaRunner {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn load_net(&mut self, net: Net) -> Result<NetId, RunnerError> {
        let text = runner_error;
        let columns = self.score_column(self.nets.len()) + net.width();
        nets::check_scores(&net.name, columns).map_err(RunnerError::new)?;
        self.device.make_current().map_err(text)?;
        let mut loader = Loader::new(
            &self.device,
            &self.kernels,
            &self.stream,
            self.dtype,
            &self.buffers,
            Path::new(&self.info.name),
        )
        .map_err(text)?;
        let net = CudaNet::new(&self.device, &mut loader, net).map_err(RunnerError::new)?;
        if net.back > 0 && self.hidden_pages.is_none() {
            let bytes = self.info.pages as usize * PAGE_TOKENS * self.config.hidden * size_of::<f32>();
            let mut arena = Arena::new(&self.device, bytes).map_err(text)?;
            let at = arena.alloc(bytes).map_err(text)?;
            // SAFETY: allocated above.
            unsafe { self.stream.fill_u8_async(at, 0, bytes) }.map_err(text)?;
            self.hidden_pages = Some((at, arena));
            // Steps now keep hidden states.
            self.graphs = [const { None }; GRAPHS.len()];
        }
        self.fixed.net_list = self.fixed.net_list.max(net.list);
        self.nets.push(net);
        self.net_graphs.push([None, None]);
        Ok(NetId(self.nets.len() as u32 - 1))
    }

    fn forget_nets(&mut self) {
        self.net_graphs.clear();
        self.nets.clear();
        self.fixed.net_list = 0;
        if self.hidden_pages.take().is_some() {
            // Steps keep hidden states no more.
            self.graphs = [const { None }; GRAPHS.len()];
        }
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        let named = |message: String| RunnerError::new(format!("model `{}`: {message}", self.info.name));
        check(&self.info, |net| (net.0 as usize) < self.nets.len(), batch)?;
        if batch.sequences.is_empty() {
            return Ok(RowOutputs::default());
        }
        step::check_signals(batch).map_err(named)?;
        let mut nets: Vec<NetId> = batch.sequences.iter().flat_map(|s| s.nets).copied().collect();
        nets.sort_unstable();
        nets.dedup();
        let mut out = RowOutputs::default();
        let empty = |id: &NetId| (*id, NetScores { width: self.nets[id.0 as usize].width, scores: Vec::new() });
        out.signals.nets = nets.iter().map(empty).collect();
        for parts in step::steps(batch, self.capacity) {
            self.step(batch, &parts, &nets, &mut out)?;
        }
        Ok(out)
    }
}

/// A lost context takes the runner with it.
fn runner_error(error: GpuError) -> RunnerError {
    if error.is_fatal() { RunnerError::fatal(error.to_string()) } else { RunnerError::new(error.to_string()) }
}

#[cfg(test)]
mod tests;
