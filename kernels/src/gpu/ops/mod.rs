//! The kernels of a decoder with their launches: what each reads and writes stands in its CUDA source.
//!
//! All launches are `unsafe` for one reason: the addresses must hold what the kernel reads and writes, with
//! the sizes that its source names, until it is done or for as long as a graph that holds it is launched.

mod attention;
mod layers;
mod linear;
mod nets;
mod sampling;

use std::path::Path;

use super::{Device, Function, GpuError, HEADERS, Module, Program, SOURCES};

pub use attention::{ATTENTION_DIMS, AttentionArgs, ITEM_WORDS, WHOLE_COLUMNS, item_rows, parts};
pub use layers::{PrepareArgs, Rows};
pub use linear::{Epilogue, LinearArgs, MAX_STREAMED_ROWS, TILE, packed_numbers, slices};
pub use nets::{Activation, Matrix};
pub use sampling::{LIST, MAX_VOCABULARY, PARAMS_WORDS, SAMPLE_WORDS, SampleParams, SamplingArgs, chunks, mode};

/// Bytes of shared memory that a block of the largest kernel takes.
pub const SHARED_MEMORY: u32 = 161 * 1024;

/// Words of the header of a step's upload, see `common.cuh`.
pub const HEADER_WORDS: usize = 16;

/// All kernels, compiled for one device.
#[derive(Debug)]
pub struct Kernels {
    /// Blocks can see each other's shared memory (capability 9.0 on).
    clusters: bool,
    multiprocessors: u32,
    attention: attention::Functions,
    layers: layers::Functions,
    linear: linear::Functions,
    nets: nets::Functions,
    sampling: sampling::Functions,
}

impl Kernels {
    /// Compile for `device`, or take machine code from directory `cache`.
    pub fn load(device: &Device, cache: Option<&Path>) -> Result<Self, GpuError> {
        let hopper = device.capability() == (9, 0);
        let clusters = device.capability().0 >= 9;
        let compile = |&(name, source): &(&'static str, &'static str)| {
            // Instructions of this chip alone.
            let arch_suffix = if name == "linear_wgmma.cu" && hopper { "a" } else { "" };
            let program = Program { name, source, headers: HEADERS, defines: &[], arch_suffix };
            Module::compile(device, &program, cache)
        };
        let modules = std::thread::scope(|scope| {
            let threads: Vec<_> = SOURCES.iter().map(|source| scope.spawn(move || compile(source))).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Module, GpuError>>| match thread.join() {
                Ok(module) => module,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            threads.into_iter().map(join).collect::<Result<Vec<_>, _>>()
        })?;
        device.make_current()?;
        let function =
            |file: &str, name: &str| match SOURCES.iter().zip(&modules).find(|((source, _), _)| *source == file) {
                Some((_, module)) => module.function(name),
                None => Err(GpuError::NoFunction { program: file.into(), function: name.into() }),
            };
        Ok(Self {
            clusters,
            multiprocessors: device.multiprocessors(),
            attention: attention::Functions::new(&function, clusters)?,
            layers: layers::Functions::new(&function)?,
            linear: linear::Functions::new(&function, clusters, hopper)?,
            nets: nets::Functions::new(&function)?,
            sampling: sampling::Functions::new(&function)?,
        })
    }
}

/// Finds a kernel by its file and its name.
type Find<'a> = &'a dyn Fn(&str, &str) -> Result<Function, GpuError>;
