//! Measuring speed: load on an engine or a server, the steps of its models, and what a device can do. `cli::bench` is
//! the command.

pub mod arrivals;
pub mod ask;
pub mod compare;
pub mod dataset;
pub mod device;
pub mod dispatcher;
pub mod flow;
pub mod goodput;
pub mod http;
pub mod in_process;
pub mod kernels;
pub mod load;
pub mod models;
pub mod openai;
pub mod plot;
pub mod remote;
pub mod servers;
pub mod statistics;
pub mod steps;
pub mod summary;
pub mod target;
pub mod timed;
pub mod timeline;
pub mod workload;
