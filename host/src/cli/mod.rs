//! The commands of the program.

mod args;
mod build;
mod check;
mod generate;
mod output;
mod plan;
mod printer;
mod progress;
mod report;
mod serve;

use std::process::ExitCode;

use clap::Parser;

use args::{Arguments, Command};

/// Run the command line of this process. Exit status: 0, 1 when something went wrong while working, 2
/// when the input is at fault.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let default = if matches!(arguments.command, Command::Serve(_)) { "info" } else { "warn" };
    let result = output::log_to_stderr(arguments.log.as_deref(), default).and_then(|()| match &arguments.command {
        Command::Serve(serve) => serve::run(serve),
        Command::Generate(generate) => generate::run(generate),
        Command::Check(check) => check::run(check),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
