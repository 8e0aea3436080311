//! WASM policies: what is refused, what is survived, and that a good one decides as its native twin.

mod hostile;
mod mutated;
mod refused;
mod rstitch;
pub mod support;
