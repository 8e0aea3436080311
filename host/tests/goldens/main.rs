//! The CPU runner against logits, tokens and signals that were computed independently in f32.

mod bad_files;
mod demo;
mod support;
mod tiny;
