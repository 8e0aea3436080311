//! Delayed batching: how many requests each model should wait for before it starts a step.
//!
//! Pure: no I/O, no clock, no state. [`chain`] gives the exact throughput of thresholds, [`simulation`] an
//! estimate where the chain is too large, [`search`] the best thresholds for a number of requests. Times are
//! milliseconds, rates are by second.

pub mod case;
pub mod chain;
pub mod connected;
pub mod grid;
pub mod online;
mod random;
pub mod search;
pub mod simulation;
pub mod system;

pub use grid::Grain;
pub use system::{Fault, Model, Setting, System};
