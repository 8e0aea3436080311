//! What the device's memory gives.

use tokenrouter_kernels::gpu::{
    Arena, Args, Device, GpuError, Launch, Module, Priority, Program, Stream, kernel_cache, launch, libraries,
};

use super::time;

/// More than any cache by far.
const BYTES: usize = 4_000_000_000;

/// Bytes per second of the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Bandwidth {
    /// Of a copy, read and written.
    pub copy: f64,
    /// Of reading alone.
    pub read: f64,
}

impl Bandwidth {
    /// By the median of `replays` of each, over 4 GB. The error is one sentence.
    pub(crate) fn measure(ordinal: u32, replays: usize) -> Result<Self, String> {
        measure(ordinal, replays).map_err(|error| format!("the bandwidth cannot be measured: {error}"))
    }
}

fn measure(ordinal: u32, replays: usize) -> Result<Bandwidth, GpuError> {
    libraries::find()?;
    let device = Device::open(ordinal as usize)?;
    let stream = Stream::new(&device, Priority::Default)?;
    let source = include_str!("read.cu");
    let program = Program { name: "read.cu", source, headers: &[], defines: &[], arch_suffix: "" };
    let read_all = Module::compile(&device, &program, kernel_cache().as_deref())?.function("read_all")?;
    let mut arena = Arena::new(&device, 2 * BYTES + 512)?;
    let (from, to) = (arena.alloc(BYTES)?, arena.alloc(BYTES)?);
    let blocks = device.multiprocessors() * 8;
    let how = Launch { grid: [blocks, 1, 1], block: 256, cluster: 1, shared: 0, overlap: false };
    let args = Args::new().ptr(from).u64((BYTES / 16) as u64).ptr(to);
    // SAFETY: both ranges are allocated, and apart; the kernel takes the address of as many vectors, their
    // number and the address of a word.
    let (copy, read) = unsafe {
        stream.fill_u32_async(from, 0x3f80_3f80, BYTES / 4)?;
        let copy = time(&device, &stream, replays, || stream.copy_async(to, from, BYTES))?;
        (copy, time(&device, &stream, replays, || launch(&read_all, &how, &stream, args))?)
    };
    let rate = |bytes: usize, ms: f64| bytes as f64 / (ms / 1e3);
    Ok(Bandwidth { copy: rate(2 * BYTES, copy), read: rate(BYTES, read) })
}
