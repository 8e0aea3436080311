//! TokenRouter: an LLM server that routes tokens, not requests, between models.
//!
//! Arrows point downward only: `cli` and `api` → `engine` → `subserver` → {`policy`, `runner`,
//! `request`}. `text` and `config` stand beside the engine: models and policies never see either.
//! `metrics` is below all of them. `online` tunes what the engine runs. `record` watches an engine from outside, `bench` measures one. `replay`
//! puts a `policy` before what `record` wrote.

pub mod api;
pub mod bench;
pub mod chart;
pub mod cli;
pub mod config;
pub mod constraint;
pub mod engine;
pub mod eval;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod metrics;
pub mod online;
mod plain;
pub mod policy;
pub mod record;
pub mod replay;
pub mod request;
pub mod runner;
pub mod simulation;
pub mod subserver;
pub mod text;
