//! The CPU runner against logits, tokens and signals that were computed independently in f32.

#![allow(clippy::unwrap_used)]

mod bad_files;
mod batches;
mod demo;
mod support;
mod tiny;
