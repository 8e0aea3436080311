//! Numeric kernels: on the CPU, in f32, and ([`gpu`]) what CUDA kernels are compiled and launched with.
//!
//! All CPU kernels are *batch invariant*: the result of a row is made by the same operations in the same
//! order whatever other rows are computed with it and however many threads share the work. Batching,
//! chunking and scheduling therefore cannot change a bit of any result.

mod attention;
mod convert;
mod distribution;
mod elementwise;
mod exp;
pub mod gpu;
mod linear;
mod norm;
mod rope;
mod tile;
mod top;

pub use attention::{KvPool, KvShape, PAGE, Query, attention};
pub use convert::{bf16_to_f32, f16_to_f32, f32_from_le};
pub use distribution::{Distribution, pick, weights};
pub use elementwise::{add, add_bias, gelu, relu, sigmoid, silu, silu_mul, tanh};
pub use linear::{PackedMatrix, linear};
pub use norm::{layer_norm, rms_norm, rms_norm_in_place};
pub use rope::{RopeTable, rotate_half};
pub use top::top;
