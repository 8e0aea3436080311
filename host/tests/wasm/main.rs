//! WASM policies: what is refused, what is survived, and that a good one decides as its native twin.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod hostile;
mod mutated;
mod nets;
mod refused;
mod rstitch;
mod support;
