//! What can be written after `tokenrouter plugin`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::Value;
use tokenrouter_plugin_api::ModelDescription;

use crate::policy::check::parse_roles;

/// For authors of policies: look at a plugin, check it, begin a new one
#[derive(Debug, Args)]
pub struct Plugin {
    #[command(subcommand)]
    pub command: PluginCommand,
}

#[derive(Debug, Subcommand)]
pub enum PluginCommand {
    Inspect(Inspect),
    Check(Check),
    New(New),
}

/// Say what a plugin file is, without running any of its code
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tokenrouter plugin inspect target/release/libmy_policy.so

Exit status is 0 when this server would open the file, 2 when it would not.")]
pub struct Inspect {
    /// The plugin's file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Write JSON
    #[arg(long)]
    pub json: bool,
}

/// Run a plugin through every case that a server may bring, in a process of its own
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tokenrouter plugin check target/release/libmy_policy.so
  tokenrouter plugin check target/release/libme.so --settings '{\"weights\": {\"small\": 0.5, \"large\": 0.5}}'
  tokenrouter plugin check target/release/libcascade.so --roles small=slm,medium=mlm,large=llm

Exit status is 0 when nothing failed (warnings are no failure), 1 when something did.")]
pub struct Check {
    /// The plugin's file
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The settings to create it with, as JSON [default: {}]
    #[arg(long, value_name = "JSON", value_parser = settings)]
    pub settings: Option<Value>,
    /// The models of the made-up route, as NAME=ROLE or, for a role of the same name, NAME. The first is
    /// the entry
    #[arg(long, value_name = "MODELS", default_value = "small=slm,large=llm", value_parser = parse_roles)]
    pub roles: Roles,
    /// Seconds that one check may take
    #[arg(long, value_name = "S", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// Write JSON
    #[arg(long)]
    pub json: bool,
    /// Be the process in which the plugin runs: write findings to this file ...
    #[arg(long, hide = true, value_name = "FILE")]
    pub findings: Option<PathBuf>,
    /// ... from this check on
    #[arg(long, hide = true, value_name = "N", default_value_t = 0)]
    pub from: usize,
}

/// A type of its own: clap would take a plain list for repeated values.
pub type Roles = std::sync::Arc<[ModelDescription]>;

/// Begin a policy: a crate that builds, with a test and a README, or a WASM policy
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tokenrouter plugin new my-policy
  tokenrouter plugin new my-policy --wasm
  tokenrouter plugin new my-policy --wasm=assemblyscript
  tokenrouter plugin new my-policy --dir ~/policies --api ~/tokenrouter/plugin-api

The crate brings a copy of the plugin API's sources along, so that it needs no clone of this server's
repository. --api names a directory to use in its place.")]
pub struct New {
    /// Name of the crate and the policy: lower-case letters, digits, `-` and `_`
    #[arg(value_name = "NAME")]
    pub name: String,
    /// A language after `--wasm` without `=`, for the error
    #[arg(hide = true, value_name = "LANGUAGE", requires = "wasm")]
    pub stray: Option<String>,
    /// Where to make the directory NAME; it is made, too, if it is missing
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// Depend on the plugin API in this directory in place of a copy
    #[arg(long, value_name = "DIR", conflicts_with = "wasm")]
    pub api: Option<PathBuf>,
    /// Begin a WASM policy, which decides by numbers alone and needs nobody's trust: as WebAssembly text, which the
    /// server itself translates, or in AssemblyScript [default: wat]
    #[arg(long, value_name = "LANGUAGE", num_args = 0..=1, require_equals = true, default_missing_value = "wat")]
    pub wasm: Option<Language>,
}

/// What a WASM policy is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Language {
    Wat,
    #[value(name = "assemblyscript")]
    AssemblyScript,
}

pub fn settings(text: &str) -> Result<Value, String> {
    serde_json::from_str(text)
        .map_err(|e| format!("not JSON ({e}); quote the whole of it for the shell: '{{\"a\": 1}}'"))
}
