//! Measuring speed: load on an engine, the steps of its models, and what a device can do. `cli::bench` is
//! the command.

pub mod device;
pub mod kernels;
pub mod load;
pub mod steps;
pub mod summary;
pub mod timed;
pub mod timeline;
