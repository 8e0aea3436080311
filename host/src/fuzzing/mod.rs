//! Targets for fuzzing: each takes any bytes and panics where a promise is broken. Built for `cargo-fuzz`
//! (see `fuzz/`) and for the tests, which replay the corpora; the program has none of this.
#![allow(clippy::expect_used)] // A target fails by panicking.

mod nets;
mod policies;
#[cfg(test)]
mod replay;
mod replays;
mod tables;
mod texts;

use std::path::PathBuf;

pub use nets::{net_description, nets_toml, safetensors_nets, torch_file, torch_pickle};
pub use policies::{elf_gate, wasm_loader, wasm_manifest, wat_text};
pub use replays::{replay_answer, replay_recording};
pub use tables::{config_toml, model_config, plan_toml, trace_files};
pub use texts::{chat_template, http_body, structured_form, text_tokens};

/// A message that people read: one line, and nothing in it that moves their cursor.
fn one_line(message: &str) {
    assert!(!message.is_empty() && !message.chars().any(char::is_control), "not one line: {message:?}");
}

/// A file of this thread with these bytes, until the next one of this name.
fn scratch(name: &str, bytes: &[u8]) -> PathBuf {
    thread_local! {
        static DIRECTORY: tempfile::TempDir = tempfile::tempdir().expect("a directory for temporary files");
    }
    let path = DIRECTORY.with(|directory| directory.path().join(name));
    std::fs::write(&path, bytes).expect("a temporary file");
    path
}

/// The parts of `bytes` between NUL bytes.
fn parts(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|byte| *byte == 0)
}
