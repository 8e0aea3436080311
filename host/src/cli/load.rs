//! Models at their devices: what they take, and loading them.

use std::path::Path;

use super::build::Prepared;
use super::device::{self, Device, Devices};
use super::output::Failure;
use super::plan::DevicePlan;
use super::progress::Progress;
use crate::config::{GpuConfig, ModelConfig, Weights};
use crate::runner::cpu::{self, CpuRunner};
use crate::runner::cuda::{self, CudaRunner, Dtype, Partition, Source};
use crate::runner::model_config::ModelConfig as Architecture;
use crate::runner::{Runner, model_config::LoadError};

/// A model and where it is computed.
#[derive(Clone)]
pub struct Placed {
    pub architecture: Architecture,
    pub device: Device,
    dtype: Dtype,
    /// Most rows of a forward.
    pub max_rows: u32,
    /// Most prompt rows of one request in a forward.
    pub prefill_chunk: u32,
}

/// Rows of a forward and prompt rows of one request where the configuration gives none: short forwards on
/// the CPU, and on CUDA as many as its kernels for prompts need to be busy.
const CPU_ROWS: (u32, u32) = (256, 128);
const CUDA_ROWS: (u32, u32) = (2048, 1024);

/// Rows and chunk by what is given and by the device.
fn row_limits(device: Device, rows: Option<u32>, chunk: Option<u32>) -> (u32, u32) {
    let (default_rows, default_chunk) = match device {
        Device::Cpu => CPU_ROWS,
        Device::Cuda(_) => CUDA_ROWS,
    };
    let rows = rows.unwrap_or(default_rows.max(chunk.unwrap_or(0)));
    (rows, chunk.unwrap_or(default_chunk).min(rows))
}

impl Placed {
    /// `directory`: the model's or, for random weights, its tokenizer's. The error names the field.
    pub fn new(model: &ModelConfig, directory: &Path, devices: &mut Devices<'_>) -> Result<Self, String> {
        let load = |context| {
            let architecture = match model.weights {
                Weights::Directory => Architecture::load(directory, context).map_err(|e| e.to_string()),
                Weights::Random(shape) => shape.config(context),
            };
            architecture.map_err(|e| format!("models.{}: {e}", model.name))
        };
        // Some models can only be served with a context that is lowered, so theirs alone does not load.
        let architecture = load(model.context).map_err(|error| match (model.context, load(None)) {
            (Some(context), Ok(Architecture { context: most, .. })) if context as usize > most => {
                format!("models.{}.context = {context}: the model's own is {most}; set at most that", model.name)
            }
            _ => error,
        })?;
        let (device, dtype) = devices.place(model)?;
        if let Device::Cuda(_) = device {
            cuda::check_config(&architecture, dtype).map_err(|e| format!("models.{}: {e}", model.name))?;
        }
        let (max_rows, prefill_chunk) = row_limits(device, model.max_rows, model.prefill_chunk);
        Ok(Self { architecture, device, dtype, max_rows, prefill_chunk })
    }

    /// Bytes of the weights.
    pub fn weight_bytes(&self) -> u64 {
        match self.device {
            Device::Cpu => cpu::weight_bytes(&self.architecture),
            Device::Cuda(_) => cuda::weight_bytes(&self.architecture, self.dtype),
        }
    }

    /// Bytes of one K/V page over all layers.
    pub fn page_bytes(&self) -> u64 {
        match self.device {
            Device::Cpu => cpu::page_bytes(&self.architecture),
            Device::Cuda(_) => cuda::page_bytes(&self.architecture, self.dtype),
        }
    }

    /// Bytes besides weights and K/V, as far as they are taken beforehand.
    pub fn workspace_bytes(&self) -> u64 {
        match self.device {
            Device::Cpu => 0,
            Device::Cuda(_) => cuda::workspace_bytes(&self.architecture, self.dtype, self.max_rows),
        }
    }
}

/// The devices that are used and what the models on each may take.
pub fn device_plans(placed: &[Placed], devices: &mut Devices<'_>, gpu: GpuConfig) -> Vec<DevicePlan> {
    let mut used: Vec<Device> = placed.iter().map(|placed| placed.device).collect();
    used.sort_unstable();
    used.dedup();
    let mut plan = |device| match device {
        Device::Cpu => Some(DevicePlan { device, name: String::new(), available: device::host_memory() }),
        Device::Cuda(ordinal) => {
            // A model was placed there, so it was found.
            let memory = devices.cuda(ordinal).ok()?;
            let budget = (memory.total as f64 * gpu.memory_fraction) as u64;
            Some(DevicePlan { device, name: memory.name.clone(), available: Some(budget.min(memory.free)) })
        }
    };
    used.into_iter().filter_map(&mut plan).collect()
}

impl Prepared {
    /// Load all models at the same time.
    pub fn load(&self, progress: &Progress) -> Result<Vec<Box<dyn Runner>>, Failure> {
        let load = |index: usize| {
            let model = &self.config.models[index];
            let bar = progress.model(&model.name);
            let runner = self.load_model(index, &mut |done, total| bar.advance(done, total));
            bar.finish();
            runner.map_err(|e| Failure::input(self.config.model_error(model, format!("models.{}: {e}", model.name))))
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.config.models.len()).map(|index| scope.spawn(move || load(index))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| Err(Failure::work("loading a model panicked"))))
                .collect()
        })
    }

    /// The part of its device that a model computes on, if some model there has multiprocessors of its own.
    fn partition(&self, index: usize) -> Option<Partition> {
        let device = self.placed[index].device;
        let neighbours = self.placed.iter().zip(&self.config.models).enumerate();
        let own = neighbours.filter(|(_, (placed, _))| placed.device == device);
        let own = own.filter_map(|(model, (_, config))| Some((model, config.multiprocessors?))).collect::<Vec<_>>();
        let part = own.iter().position(|(model, _)| *model == index).unwrap_or(own.len());
        (!own.is_empty()).then(|| Partition { reserved: own.into_iter().map(|(_, count)| count).collect(), part })
    }

    fn load_model(&self, index: usize, told: &mut dyn FnMut(u64, u64)) -> Result<Box<dyn Runner>, LoadError> {
        let (model, placed, directory) = (&self.config.models[index], &self.placed[index], &self.directories[index]);
        let (name, id, pages) = (model.name.clone(), self.noise_keys[index], self.plan.models[index].pages);
        let ordinal = match placed.device {
            Device::Cuda(ordinal) => ordinal,
            Device::Cpu => {
                let (context, progress) = (model.context, Some(told as cpu::Progress<'_>));
                let options = cpu::LoadOptions { name, model: id, pages, context, progress };
                return Ok(Box::new(CpuRunner::load(directory, options)?));
            }
        };
        let source = match model.weights {
            Weights::Directory => Source::Directory(directory),
            Weights::Random(_) => Source::Random { seed: u64::from(id.0) },
        };
        // Short steps do not wait for long ones.
        let parameters = placed.architecture.parameters();
        let larger = |other: &Placed| other.device == placed.device && other.architecture.parameters() > parameters;
        let options = cuda::LoadOptions {
            name,
            model: id,
            ordinal,
            dtype: placed.dtype,
            pages,
            max_rows: placed.max_rows,
            partition: self.partition(index),
            graphs: self.config.gpu.graphs,
            high_priority: self.placed.iter().any(larger),
            progress: Some(told),
        };
        CudaRunner::load(placed.architecture.clone(), source, options)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::device::DeviceMemory;
    use super::super::plan::{MemoryPlan, ModelPlan};
    use super::*;
    use crate::config::Config;

    /// The plan of `file` on a device of so many GiB, with every K/V pool open.
    fn plan(file: &str, gib: u64, free: u64) -> MemoryPlan {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config").join(file);
        let config = Config::load(&file, &BTreeMap::new()).unwrap();
        let look = |_| Ok(DeviceMemory { total: gib << 30, free: free << 30, name: "test".into() });
        let mut devices = Devices::new(&look);
        let place = |model: &ModelConfig| Placed::new(model, Path::new("none"), &mut devices).unwrap();
        let placed: Vec<Placed> = config.models.iter().map(place).collect();
        let models = config.models.iter().zip(&placed).map(|(model, placed)| ModelPlan {
            name: model.name.clone(),
            description: placed.architecture.describe(),
            device: placed.device,
            weight_bytes: placed.weight_bytes(),
            workspace_bytes: placed.workspace_bytes(),
            page_bytes: placed.page_bytes(),
            pages: 0,
            context: placed.architecture.context as u32,
        });
        let mut plan =
            MemoryPlan { models: models.collect(), devices: device_plans(&placed, &mut devices, config.gpu) };
        plan.share_out(&(0..placed.len()).collect::<Vec<_>>());
        plan
    }

    #[test]
    fn rows_follow_the_device_unless_they_are_given() {
        assert_eq!(row_limits(Device::Cpu, None, None), (256, 128));
        assert_eq!(row_limits(Device::Cuda(1), None, None), (2048, 1024));
        assert_eq!(row_limits(Device::Cuda(0), Some(64), None), (64, 64));
        assert_eq!(row_limits(Device::Cpu, None, Some(300)), (300, 300));
        assert_eq!(row_limits(Device::Cpu, Some(500), Some(300)), (500, 300));
    }

    #[test]
    fn contexts_that_are_lowered() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/small/config.json");
        let mut raw: serde_json::Value = serde_json::from_slice(&std::fs::read(demo).unwrap()).unwrap();
        let look = |_| unreachable!();
        let place = |raw: &serde_json::Value, context: &str| {
            let directory = tempfile::tempdir().unwrap();
            std::fs::write(directory.path().join("config.json"), raw.to_string()).unwrap();
            let text = format!("[models.m]\npath = \"m\"\ndevice = \"cpu\"\n{context}\n");
            let config = Config::parse(&text, "c.toml".as_ref(), &BTreeMap::new()).unwrap();
            let placed = Placed::new(&config.models[0], directory.path(), &mut Devices::new(&look));
            placed.map(|placed| placed.architecture.context)
        };
        assert_eq!(place(&raw, ""), Ok(2048));
        assert_eq!(place(&raw, "context = 64"), Ok(64));
        assert_eq!(
            place(&raw, "context = 2049").unwrap_err(),
            "models.m.context = 2049: the model's own is 2048; set at most that"
        );
        // What a model is only served with.
        raw["use_sliding_window"] = true.into();
        raw["sliding_window"] = 64.into();
        assert_eq!(place(&raw, "context = 64"), Ok(64));
        let refused = place(&raw, "").unwrap_err();
        assert!(refused.contains("set the model's context to at most 64"), "{refused}");
    }

    #[test]
    fn the_benchmarks_fit_a_large_device() {
        for (file, count, length) in [("bench-r2r.toml", 2, 9216), ("bench-me.toml", 3, 3072)] {
            let plan = plan(file, 139, 138);
            assert_eq!((plan.models.len(), plan.check()), (count, Ok(())), "{plan}");
            // Room for 16 requests of this length, at every model the same.
            let pages = plan.models[0].pages;
            assert!(plan.models.iter().all(|model| model.pages == pages) && pages > 16 * length / 16, "{plan}");
        }
        assert_eq!(plan("bench-r2r.toml", 100, 90).devices[0].available, Some(90 << 30));
        assert_eq!(plan("bench-r2r.toml", 100, 100).devices[0].available, Some(92 << 30));
        let small = plan("bench-r2r.toml", 64, 64);
        assert!(small.check().unwrap_err().message.contains("the weights and workspaces alone do not fit"), "{small}");
    }
}
