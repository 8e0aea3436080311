//! The CUDA runner against the CPU runner and the goldens, and against itself: no bit of a result depends on
//! company, pieces or pages.
//!
//! Without a GPU each test says why it is skipped; `TOKENROUTER_REQUIRE_GPU=1` makes that a failure.
//! `TOKENROUTER_TEST_ROOT` names the repository where it lies elsewhere than at build time.

#![allow(clippy::unwrap_used)]

mod bits;
mod device;
mod exact;
mod nets;
mod random_model;
mod sampling;
mod shapes;
#[allow(dead_code)] // What only the CPU's goldens use.
#[path = "../goldens/support.rs"]
mod support;
