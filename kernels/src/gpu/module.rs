//! Compiled kernels on a device.

use std::ffi::CString;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute, CUresult};

use super::error::driver;
use super::{Device, GpuError, Program, cache, nvrtc};

/// The kernels of one program, loaded on a device.
#[derive(Debug, Clone)]
pub struct Module {
    inner: Arc<Inner>,
    log: String,
    cached: bool,
}

#[derive(Debug)]
struct Inner {
    device: Device,
    raw: sys::CUmodule,
    name: String,
}

// SAFETY: a loaded module does not change and may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Module {
    /// Compile `program` for the device, or take the machine code from directory `cache`. Failing to write
    /// to the cache costs the next start time, nothing else, and is no error.
    pub fn compile(device: &Device, program: &Program, cache: Option<&Path>) -> Result<Self, GpuError> {
        let (major, minor) = device.capability();
        let arch = format!("sm_{major}{minor}{}", program.arch_suffix);
        let key = cache::key(program, &arch, nvrtc::version()?);
        let cached = cache.and_then(|directory| cache::load(directory, &key));
        if let Some(image) = &cached {
            return Self::load(device, program.name, image, String::new(), true);
        }
        let cubin = nvrtc::compile_cubin(&arch, program)?;
        if let Some(directory) = cache {
            let _ = cache::save(directory, &key, &cubin.image);
        }
        Self::load(device, program.name, &cubin.image, cubin.log, false)
    }

    fn load(device: &Device, name: &str, image: &[u8], log: String, cached: bool) -> Result<Self, GpuError> {
        device.make_current()?;
        let mut raw = null_mut();
        // SAFETY: the image is a cubin, whole: it came from the compiler or has the right digest.
        driver("loading kernels", unsafe { sys::cuModuleLoadData(&mut raw, image.as_ptr().cast()) })?;
        Ok(Self { inner: Arc::new(Inner { device: device.clone(), raw, name: name.into() }), log, cached })
    }

    /// The kernel `name`, an `extern "C"` function.
    pub fn function(&self, name: &str) -> Result<Function, GpuError> {
        let program = || self.inner.name.clone();
        let text = CString::new(name).map_err(|_| GpuError::Nul { program: program(), what: "a function's name" })?;
        let mut raw = null_mut();
        // SAFETY: the module is loaded; the name ends with a NUL.
        match unsafe { sys::cuModuleGetFunction(&mut raw, self.inner.raw, text.as_ptr()) } {
            CUresult::CUDA_ERROR_NOT_FOUND => Err(GpuError::NoFunction { program: program(), function: name.into() }),
            code => {
                driver("finding a kernel", code)?;
                Ok(Function { raw, name: name.into(), _module: self.inner.clone() })
            }
        }
    }

    /// The compiler's warnings; empty if the machine code was cached.
    pub fn log(&self) -> &str {
        &self.log
    }

    /// Whether the machine code came from the cache.
    pub fn cached(&self) -> bool {
        self.cached
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.device.make_current();
        // SAFETY: loaded in `load`, unloaded once. A failure leaves nothing to do.
        let _ = unsafe { sys::cuModuleUnload(self.raw) };
    }
}

/// A kernel. It keeps its module loaded.
#[derive(Debug, Clone)]
pub struct Function {
    raw: sys::CUfunction,
    name: Arc<str>,
    _module: Arc<Inner>,
}

// SAFETY: a handle into a module that may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// What a kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionAttributes {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of static shared memory of a block.
    pub static_shared: u32,
    /// Bytes of local memory of a thread: spilled registers and indexed arrays.
    pub local: u32,
}

impl Function {
    pub(super) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Allow launches with up to `bytes` of dynamic shared memory; needed above 48 KiB.
    pub fn set_max_dynamic_shared(&self, bytes: u32) -> Result<(), GpuError> {
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the module is loaded.
        driver("allowing shared memory", unsafe {
            sys::cuFuncSetAttribute(self.raw, attribute, bytes.min(i32::MAX as u32) as i32)
        })
    }

    /// Prefer a part of a multiprocessor's memory, in percent, to be shared memory; the rest is L1.
    pub fn prefer_shared(&self, percent: u32) -> Result<(), GpuError> {
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the module is loaded.
        driver("dividing shared memory from L1", unsafe {
            sys::cuFuncSetAttribute(self.raw, attribute, percent.min(100) as i32)
        })
    }

    pub fn attributes(&self) -> Result<FunctionAttributes, GpuError> {
        let read = |attribute| {
            let mut value = 0;
            // SAFETY: the module is loaded; the pointer is to a local.
            driver("reading a kernel's attribute", unsafe {
                sys::cuFuncGetAttribute(&mut value, attribute, self.raw)
            })?;
            Ok::<_, GpuError>(value as u32)
        };
        Ok(FunctionAttributes {
            registers: read(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            static_shared: read(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            local: read(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
        })
    }
}
