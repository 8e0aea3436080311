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
    /// Blocks along x of a cluster; 1 for none, more from capability 9.0 on.
    pub cluster: u32,
    /// Bytes of dynamic shared memory; above 48 KiB after [`Function::set_max_dynamic_shared`].
    pub shared: u32,
    /// It may start while the kernel before it ends (programmatic dependent launch): it must wait on the
    /// device before it reads what earlier work wrote, and before it writes.
    pub overlap: bool,
}

const MAX_ARGS: usize = 16;
const MAX_WORDS: usize = 40;

/// Arguments of a kernel in its order, stored inline.
#[derive(Debug, Clone, Copy)]
pub struct Args {
    words: [u64; MAX_WORDS],
    used: usize,
    starts: [usize; MAX_ARGS],
    len: usize,
}

impl Args {
    pub fn new() -> Self {
        Self { words: [0; MAX_WORDS], used: 0, starts: [0; MAX_ARGS], len: 0 }
    }

    pub fn ptr(self, value: DevicePtr) -> Self {
        self.u64(value.0)
    }

    pub fn u64(self, value: u64) -> Self {
        self.value(&value)
    }

    pub fn u32(self, value: u32) -> Self {
        self.value(&value)
    }

    pub fn f32(self, value: f32) -> Self {
        self.value(&value)
    }

    /// A number, or a structure as the kernel declares it (`repr(C)`).
    ///
    /// # Panics
    /// At the 17th argument, or when all together are larger than 320 bytes.
    pub fn value<T: Copy>(mut self, value: &T) -> Self {
        let words = size_of::<T>().div_ceil(8);
        assert!(align_of::<T>() <= 8, "alignment of an argument");
        let place = &mut self.words[self.used..self.used + words];
        // SAFETY: `place` has room for `T`, aligned to 8 bytes; padding is copied as it is and never read.
        unsafe { place.as_mut_ptr().cast::<T>().write(*value) };
        self.starts[self.len] = self.used;
        self.used += words;
        self.len += 1;
        self
    }

    fn pointers(&mut self) -> [*mut c_void; MAX_ARGS] {
        let base = self.words.as_mut_ptr();
        // SAFETY: starts are within `words`.
        self.starts.map(|start| unsafe { base.add(start) }.cast())
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
    use sys::CUlaunchAttributeID as Id;
    let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
    let overlap = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
    let cluster = sys::CUlaunchAttributeValue {
        clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: launch.cluster, y: 1, z: 1 },
    };
    let mut attributes = [
        attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, cluster),
        attribute(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, overlap),
    ];
    let skipped = usize::from(launch.cluster == 1);
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
        attrs: attributes[skipped..].as_mut_ptr(),
        numAttrs: u32::from(launch.cluster > 1) + u32::from(launch.overlap),
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
        let mut args = Args::new().ptr(DevicePtr(0x1234_5678_9abc)).u32(7).value(&[1u32, 2, 3]).f32(1.5).u64(u64::MAX);
        let pointers = args.pointers();
        // SAFETY: the slots live in `args`.
        unsafe {
            assert_eq!(*pointers[0].cast::<u64>(), 0x1234_5678_9abc);
            assert_eq!(*pointers[1].cast::<u32>(), 7);
            assert_eq!(*pointers[2].cast::<[u32; 3]>(), [1, 2, 3]);
            assert_eq!(*pointers[3].cast::<f32>(), 1.5);
            assert_eq!(*pointers[4].cast::<u64>(), u64::MAX);
        }
    }

    #[test]
    #[should_panic(expected = "out of bounds")]
    fn too_many_arguments_are_refused() {
        let _ = (0..=MAX_ARGS as u32).fold(Args::new(), Args::u32);
    }
}
