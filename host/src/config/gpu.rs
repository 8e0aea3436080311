//! `[gpu]`, and where and as what a model is computed.

use super::error::Fault;
use super::tree::{Field, Section};

/// `[gpu]`
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuConfig {
    /// Share of a device's memory that all models on it may use together.
    pub memory_fraction: f64,
    /// Steps of models on CUDA devices are replayed graphs.
    pub graphs: bool,
}

impl Default for GpuConfig {
    fn default() -> Self {
        Self { memory_fraction: 0.92, graphs: true }
    }
}

/// Where a model is to be computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA device if there is a usable one, else the CPU.
    #[default]
    Auto,
    Cpu,
    /// The CUDA device with this number.
    Cuda(u32),
}

/// Type of a model's weights and K/V.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DtypeChoice {
    /// bf16 on a CUDA device, f32 on the CPU.
    #[default]
    Auto,
    Bf16,
    F32,
}

pub(super) fn gpu(mut section: Section) -> Result<GpuConfig, Fault> {
    let mut gpu = GpuConfig::default();
    if let Some(field) = section.take("memory_fraction") {
        gpu.memory_fraction = field.number(0.01..=1.0)?;
    }
    if let Some(field) = section.take("graphs") {
        gpu.graphs = field.boolean()?;
    }
    section.end()?;
    Ok(gpu)
}

pub(super) fn device(field: &Field) -> Result<DeviceChoice, Fault> {
    match field.text()?.as_str() {
        "auto" => Ok(DeviceChoice::Auto),
        "cpu" => Ok(DeviceChoice::Cpu),
        "cuda" => Ok(DeviceChoice::Cuda(0)),
        name => {
            let ordinal = name.strip_prefix("cuda:").filter(|n| n.bytes().all(|b| b.is_ascii_digit()));
            let ordinal = ordinal.and_then(|n| n.parse().ok()).filter(|n| *n < 1024);
            ordinal.map(DeviceChoice::Cuda).ok_or_else(|| {
                field.fault("must be \"auto\", \"cpu\", \"cuda\", or \"cuda:N\" with the number of the device")
            })
        }
    }
}

pub(super) fn dtype(field: &Field) -> Result<DtypeChoice, Fault> {
    match field.text()?.as_str() {
        "auto" => Ok(DtypeChoice::Auto),
        "bf16" => Ok(DtypeChoice::Bf16),
        "f32" => Ok(DtypeChoice::F32),
        _ => Err(field.fault("must be \"auto\", \"bf16\" or \"f32\"")),
    }
}
