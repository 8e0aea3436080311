//! What can be written after `tokenrouter plugin`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// For authors of policies: look at a plugin
#[derive(Debug, Args)]
pub struct Plugin {
    #[command(subcommand)]
    pub command: PluginCommand,
}

#[derive(Debug, Subcommand)]
pub enum PluginCommand {
    Inspect(Inspect),
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
