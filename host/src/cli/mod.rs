//! The commands of the program.

mod args;
mod asking;
mod bench;
mod build;
mod check;
mod device;
mod doctor;
mod eval;
mod front;
mod generate;
mod listen;
mod load;
mod notify;
mod output;
mod plan;
pub(crate) mod plugin;
mod printer;
mod progress;
mod record;
mod reload;
mod replay;
mod report;
mod select;
mod serve;
pub(crate) mod simulate;
mod stderr;
pub(crate) mod tune;

use std::process::ExitCode;

use clap::Parser;

use args::{Arguments, Command};
use stderr::StderrLines;

/// Run the command line of this process. Exit status: 0, 1 when something went wrong while working, 2
/// when the input is at fault.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let default = if matches!(arguments.command, Command::Serve(_)) { "info" } else { "warn" };
    let Ok(lines) = StderrLines::start() else { return ExitCode::FAILURE };
    output::panics_to_stderr(&lines);
    let logging = output::log_to_stderr(&lines, arguments.log.as_deref(), default);
    let result = logging.and_then(|()| match &arguments.command {
        Command::Serve(serve) => serve::run(serve),
        Command::Generate(generate) => generate::run(generate),
        Command::Eval(eval) => eval::run(eval),
        Command::Bench(bench) => bench::run(bench),
        Command::Simulate(simulate) => simulate::run(simulate),
        Command::Tune(tune) => tune::run(tune),
        Command::Check(check) => check::run(check),
        Command::Plugin(plugin) => plugin::run(plugin),
        Command::Replay(replay) => replay::run(replay),
        Command::Doctor(doctor) => doctor::run(doctor),
        Command::Completions(completions) => doctor::completions(completions),
    });
    let Err(failure) = result else { return ExitCode::SUCCESS };
    let (status, line) = failure.report(output::stderr_is_coloured());
    line.into_iter().for_each(|line| lines.last(line));
    status
}
