//! What can go wrong on the device.

use cudarc::driver::{result::DriverError, sys::CUresult};
use cudarc::nvrtc::sys::nvrtcResult;

use super::MissingLibrary;

/// The CUDA version of the oldest driver that has every function called here.
pub(super) const DRIVER: (u32, u32) = (12, 8);

#[derive(Debug, Clone, thiserror::Error)]
pub enum GpuError {
    #[error(transparent)]
    Library(#[from] MissingLibrary),
    #[error("the NVIDIA driver supports CUDA {0}.{1}, {need_0}.{need_1} is needed; install a newer driver", need_0 = DRIVER.0, need_1 = DRIVER.1)]
    OldDriver(u32, u32),
    #[error("device {ordinal}: this machine has {count} CUDA devices; use a smaller number")]
    NoDevice { ordinal: usize, count: usize },
    #[error("{asked} multiprocessors are asked for, and {left} are left; reserve fewer (`multiprocessors`)")]
    Multiprocessors { asked: u32, left: u32 },
    #[error("GPU memory: {wanted} bytes wanted, {free} free; use smaller models or fewer pages")]
    OutOfMemory { wanted: usize, free: usize },
    #[error("arena: {wanted} bytes wanted, {free} of {capacity} left; plan a larger arena")]
    ArenaFull { wanted: usize, free: usize, capacity: usize },
    #[error("CUDA driver: {what}: {name} ({text})")]
    Driver { what: &'static str, code: u32, name: String, text: String },
    #[error("NVRTC: {what}: {name}")]
    Nvrtc { what: &'static str, name: String },
    #[error("kernels `{program}` do not compile: {log}")]
    Compile { program: String, log: String },
    #[error("kernels `{program}` have no function `{function}`; use an `extern \"C\"` name")]
    NoFunction { program: String, function: String },
    #[error("kernels `{program}`: {what} holds a NUL byte; remove it")]
    Nul { program: String, what: &'static str },
}

impl GpuError {
    /// Whether the device context is lost: every later call of this process on this device fails, too.
    pub fn is_fatal(&self) -> bool {
        const FATAL: [CUresult; 16] = [
            CUresult::CUDA_ERROR_CONTAINED,
            CUresult::CUDA_ERROR_EXTERNAL_DEVICE,
            CUresult::CUDA_ERROR_DEINITIALIZED,
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
            CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
            CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUresult::CUDA_ERROR_ASSERT,
            CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
            CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
            CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
            CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
            CUresult::CUDA_ERROR_INVALID_PC,
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            CUresult::CUDA_ERROR_UNKNOWN,
        ];
        match self {
            Self::Driver { code, .. } => FATAL.iter().any(|fatal| *fatal as u32 == *code),
            _ => false,
        }
    }
}

/// The result of a driver call; `what` names the step that made it.
pub(super) fn driver(what: &'static str, code: CUresult) -> Result<(), GpuError> {
    let Err(error) = code.result() else { return Ok(()) };
    Err(driver_error(what, error))
}

fn driver_error(what: &'static str, error: DriverError) -> GpuError {
    let text = |text: Result<&std::ffi::CStr, _>| text.map_or("unknown".into(), |t| t.to_string_lossy().into_owned());
    GpuError::Driver { what, code: error.0 as u32, name: text(error.error_name()), text: text(error.error_string()) }
}

pub(super) fn nvrtc(what: &'static str, code: nvrtcResult) -> Result<(), GpuError> {
    code.result().map_err(|error| GpuError::Nvrtc { what, name: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lost_context_is_fatal() {
        let driver = |code: CUresult| GpuError::Driver {
            what: "test",
            code: code as u32,
            name: String::new(),
            text: String::new(),
        };
        assert!(driver(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS).is_fatal());
        assert!(driver(CUresult::CUDA_ERROR_LAUNCH_FAILED).is_fatal());
        assert!(!driver(CUresult::CUDA_ERROR_INVALID_VALUE).is_fatal());
        assert!(!driver(CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES).is_fatal());
        assert!(!GpuError::OutOfMemory { wanted: 2, free: 1 }.is_fatal());
    }
}
