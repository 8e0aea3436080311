//! `tokenrouter doctor`: what this machine offers, and what stands in a server's way.

mod look;
mod report;

use std::path::PathBuf;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::args::Arguments;
use super::output::{Failure, write_stdout};

/// Show what this machine offers a server, and what stands in its way
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tokenrouter doctor
  tokenrouter doctor config/demo.toml
  tokenrouter doctor config/demo.toml --json

Exit status is 0 when nothing is wrong, 1 when something is. Nothing of models is read but their tokenizers;
`tokenrouter check` tries everything.")]
pub struct Doctor {
    /// Configuration file to look at as well (TOML)
    pub config: Option<PathBuf>,
    /// Write JSON
    #[arg(long)]
    pub json: bool,
}

/// Write a script that completes this program's commands in a shell
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tokenrouter completions bash > ~/.local/share/bash-completion/completions/tokenrouter
  tokenrouter completions zsh > ~/.zfunc/_tokenrouter
  tokenrouter completions fish > ~/.config/fish/completions/tokenrouter.fish")]
pub struct Completions {
    /// The shell
    pub shell: Shell,
}

pub fn run(arguments: &Doctor) -> Result<(), Failure> {
    let seen = look::look(arguments.config.as_deref());
    let text = if arguments.json { format!("{:#}\n", report::json(&seen)) } else { report::text(&seen) };
    write_stdout(&text)?;
    match seen.faults() {
        0 => Ok(()),
        1 => Err(Failure::work("one thing is wrong; it is marked above")),
        faults => Err(Failure::work(format!("{faults} things are wrong; they are marked above"))),
    }
}

pub fn completions(arguments: &Completions) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Arguments::command(), "tokenrouter", &mut script);
    write_stdout(&String::from_utf8_lossy(&script))
}
