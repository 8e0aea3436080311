//! A thin layer over the CUDA driver and NVRTC, both loaded at run time.
//!
//! Memory is addressed as in C: whoever enqueues work answers for the addresses in it, which is why
//! those functions are `unsafe`. A thread calls [`Device::make_current`] once before it enqueues.

// Reason: all of this calls C libraries.
#![allow(unsafe_code)]

mod cache;
mod device;
mod error;
mod graph;
mod launch;
pub mod libraries;
mod memory;
mod module;
mod nvrtc;
pub mod ops;
mod sources;
mod stream;

pub use cache::directory as kernel_cache;
pub use device::{Device, Partition};
pub use error::GpuError;
pub use graph::Graph;
pub use launch::{Args, Launch, launch};
pub use libraries::{Library, MissingLibrary};
pub use memory::{ALIGNMENT, Arena, DevicePtr, Pinned, Pod};
pub use module::{Function, FunctionAttributes, Module};
pub use nvrtc::{Cubin, Program, compile_cubin};
pub use sources::{HEADERS, SOURCES};
pub use stream::{Event, Priority, Stream};
