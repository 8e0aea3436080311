//! Which device computes each model, and the memory of devices.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use crate::config::{DeviceChoice, DtypeChoice, ModelConfig, Weights};
use crate::runner::cuda::{self, Dtype};

/// A device that computes models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Device {
    Cpu,
    /// The CUDA device with this number.
    Cuda(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Memory of a CUDA device, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    pub total: u64,
    /// Used by nobody now.
    pub free: u64,
    pub name: String,
}

/// The CUDA devices of this machine; each is asked once.
pub struct Devices<'a> {
    look: &'a dyn Fn(u32) -> Result<DeviceMemory, String>,
    seen: BTreeMap<u32, Result<DeviceMemory, String>>,
    /// Why `auto` means the CPU has been told.
    told: bool,
}

/// Ask the CUDA driver.
pub fn cuda_memory(ordinal: u32) -> Result<DeviceMemory, String> {
    cuda::device(ordinal).map(|d| DeviceMemory { total: d.total, free: d.free, name: d.name })
}

impl<'a> Devices<'a> {
    /// `look`: the device with this number, or one sentence about what was looked for and where.
    pub fn new(look: &'a dyn Fn(u32) -> Result<DeviceMemory, String>) -> Self {
        Self { look, seen: BTreeMap::new(), told: false }
    }

    /// The CUDA device `ordinal`.
    pub fn cuda(&mut self, ordinal: u32) -> Result<&DeviceMemory, &str> {
        self.seen.entry(ordinal).or_insert_with(|| (self.look)(ordinal)).as_ref().map_err(String::as_str)
    }

    /// Where and as what `model` is computed, or a message about its keys.
    pub fn place(&mut self, model: &ModelConfig) -> Result<(Device, Dtype), String> {
        let name = &model.name;
        let device = match model.device {
            DeviceChoice::Cpu => Device::Cpu,
            DeviceChoice::Cuda(ordinal) => match self.cuda(ordinal) {
                Ok(_) => Device::Cuda(ordinal),
                Err(reason) => return Err(format!("models.{name}.device = \"cuda:{ordinal}\": {reason}")),
            },
            DeviceChoice::Auto => match self.cuda(0).map(|memory| memory.name.clone()).map_err(str::to_owned) {
                Ok(device) => {
                    tracing::info!(model = name, "device auto: cuda:0, {device}");
                    Device::Cuda(0)
                }
                Err(reason) => {
                    if let Weights::Random(shape) = model.weights {
                        let shape = shape.name;
                        return Err(format!("models.{name}.shape = {shape:?}: runs on CUDA only, and {reason}"));
                    }
                    if model.dtype == DtypeChoice::Bf16 {
                        return Err(format!(
                            "models.{name}.dtype = \"bf16\": the CPU computes in f32, and {reason}; use \"auto\""
                        ));
                    }
                    // It holds for all models.
                    if !std::mem::replace(&mut self.told, true) {
                        tracing::info!("device auto: the CPU, since {reason}");
                    }
                    Device::Cpu
                }
            },
        };
        let dtype = match (model.dtype, device) {
            (DtypeChoice::F32, _) | (DtypeChoice::Auto, Device::Cpu) => Dtype::F32,
            (DtypeChoice::Bf16, _) | (DtypeChoice::Auto, Device::Cuda(_)) => Dtype::Bf16,
        };
        Ok((device, dtype))
    }
}

/// Memory of the machine and of the control group that can be taken now; `None` where the system does
/// not say.
pub fn host_memory() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(Path::new(path)).ok();
    let limit = read("/sys/fs/cgroup/memory.max");
    available(&read("/proc/meminfo")?, limit.as_deref(), read("/sys/fs/cgroup/memory.current").as_deref())
}

/// Available memory by the texts of `/proc/meminfo` and of a control group's limit and use.
fn available(meminfo: &str, limit: Option<&str>, used: Option<&str>) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let machine = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)?;
    let number = |text: Option<&str>| text.and_then(|t| t.trim().parse::<u64>().ok());
    Some(match number(limit) {
        Some(limit) => machine.min(limit.saturating_sub(number(used).unwrap_or(0))),
        None => machine,
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::config::Config;

    fn models(keys: &str) -> Vec<ModelConfig> {
        let text = format!("[models.m]\n{keys}\n");
        Config::parse(&text, Path::new("c.toml"), &BTreeMap::new()).unwrap().models
    }

    #[test]
    fn places() {
        let asked = Cell::new(0);
        let look = |ordinal: u32| {
            asked.set(asked.get() + 1);
            let memory = DeviceMemory { total: 9, free: 8, name: "H200".into() };
            if ordinal < 2 { Ok(memory) } else { Err(format!("there is no device {ordinal}")) }
        };
        let mut devices = Devices::new(&look);
        let mut place = |keys: &str| devices.place(&models(keys)[0]);
        for (keys, expected) in [
            ("path = 'm'", (Device::Cuda(0), Dtype::Bf16)),
            ("path = 'm'\ndtype = 'f32'", (Device::Cuda(0), Dtype::F32)),
            ("path = 'm'\ndevice = 'cuda:1'", (Device::Cuda(1), Dtype::Bf16)),
            ("path = 'm'\ndevice = 'cpu'", (Device::Cpu, Dtype::F32)),
            ("shape = 'qwen3-8b'\ntokenizer = 't'", (Device::Cuda(0), Dtype::Bf16)),
        ] {
            assert_eq!(place(keys), Ok(expected), "{keys}");
        }
        let error = place("path = 'm'\ndevice = 'cuda:7'").unwrap_err();
        assert_eq!(error, "models.m.device = \"cuda:7\": there is no device 7");
        assert_eq!(asked.get(), 3);
    }

    #[test]
    fn places_without_a_gpu() {
        let look = |_| Err("no library was found".to_owned());
        let mut devices = Devices::new(&look);
        let mut place = |keys: &str| devices.place(&models(keys)[0]);
        assert_eq!(place("path = 'm'"), Ok((Device::Cpu, Dtype::F32)));
        for (keys, message) in [
            ("path = 'm'\ndevice = 'cuda'", "models.m.device = \"cuda:0\": no library was found"),
            (
                "path = 'm'\ndtype = 'bf16'",
                "models.m.dtype = \"bf16\": the CPU computes in f32, and no library was found; use \"auto\"",
            ),
            (
                "shape = 'qwen3-8b'\ntokenizer = 't'",
                "models.m.shape = \"qwen3-8b\": runs on CUDA only, and no library was found",
            ),
        ] {
            assert_eq!(place(keys).unwrap_err(), message);
        }
    }

    #[test]
    fn available_memory() {
        let meminfo = "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n";
        assert_eq!(available(meminfo, None, None), Some(8_192_000_000));
        assert_eq!(available(meminfo, Some("max\n"), Some("5\n")), Some(8_192_000_000));
        assert_eq!(available(meminfo, Some("1000\n"), Some("400\n")), Some(600));
        assert_eq!(available(meminfo, Some("1000"), Some("4000")), Some(0));
        assert_eq!(available("nothing", None, None), None);
    }
}
