//! Launching kernels.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys;

use super::error::driver;
use super::{DevicePtr, Function, GpuError, Stream};

/// How a kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory; above 48 KiB after [`Function::set_max_dynamic_shared`].
    pub shared: u32,
    /// It may start while the kernel before it ends (programmatic dependent launch): it must wait on the
    /// device before it reads what earlier work wrote, and before it writes.
    pub overlap: bool,
}

const MAX_ARGS: usize = 24;

/// Arguments of a kernel in its order, each at most 8 bytes, stored inline.
#[derive(Debug, Clone, Copy)]
pub struct Args {
    values: [u64; MAX_ARGS],
    len: usize,
}

impl Args {
    pub fn new() -> Self {
        Self { values: [0; MAX_ARGS], len: 0 }
    }

    pub fn ptr(self, value: DevicePtr) -> Self {
        self.u64(value.0)
    }

    /// # Panics
    /// At the 25th argument.
    pub fn u64(mut self, value: u64) -> Self {
        self.values[self.len] = value;
        self.len += 1;
        self
    }

    pub fn u32(self, value: u32) -> Self {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&value.to_ne_bytes());
        self.u64(u64::from_ne_bytes(bytes))
    }

    pub fn i32(self, value: i32) -> Self {
        self.u32(value.cast_unsigned())
    }

    pub fn f32(self, value: f32) -> Self {
        self.u32(value.to_bits())
    }

    fn pointers(&mut self) -> [*mut c_void; MAX_ARGS] {
        self.values.each_mut().map(|value| std::ptr::from_mut(value).cast())
    }
}

impl Default for Args {
    fn default() -> Self {
        Self::new()
    }
}

/// Enqueue `function` with `args`; nothing is allocated.
///
/// # Safety
/// The arguments are those of the kernel in order and type; the addresses among them hold what
/// the kernel reads and writes until it is done, and for as long as a graph that holds it is launched.
pub unsafe fn launch(function: &Function, launch: &Launch, stream: &Stream, mut args: Args) -> Result<(), GpuError> {
    if args.len != function.parameters() {
        let (given, taken) = (args.len, function.parameters());
        return Err(GpuError::Arguments { function: function.name().into(), given, taken });
    }
    let mut overlap = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let [x, y, z] = launch.grid;
    let config = sys::CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: launch.block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: launch.shared,
        hStream: stream.raw(),
        attrs: &mut overlap,
        numAttrs: u32::from(launch.overlap),
    };
    let mut pointers = args.pointers();
    // SAFETY: the driver copies the arguments before it returns; the rest is the caller's.
    driver("launching a kernel", unsafe {
        sys::cuLaunchKernelEx(&config, function.raw(), pointers.as_mut_ptr(), null_mut())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_argument_lies_at_the_beginning_of_its_slot() {
        let mut args = Args::new().ptr(DevicePtr(0x1234_5678_9abc)).u32(7).i32(-2).f32(1.5).u64(u64::MAX);
        let pointers = args.pointers();
        // SAFETY: the slots live in `args`.
        unsafe {
            assert_eq!(*pointers[0].cast::<u64>(), 0x1234_5678_9abc);
            assert_eq!(*pointers[1].cast::<u32>(), 7);
            assert_eq!(*pointers[2].cast::<i32>(), -2);
            assert_eq!(*pointers[3].cast::<f32>(), 1.5);
            assert_eq!(*pointers[4].cast::<u64>(), u64::MAX);
            assert_eq!(*pointers[MAX_ARGS - 1].cast::<u64>(), 0);
        }
    }

    #[test]
    #[should_panic(expected = "out of bounds")]
    fn too_many_arguments_are_refused() {
        let _ = (0..=MAX_ARGS as u32).fold(Args::new(), Args::u32);
    }
}
