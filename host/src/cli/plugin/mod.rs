//! `tokenrouter plugin …`: for authors of policies.

mod args;
mod check;
mod child;
pub(crate) mod inspect;
mod new;
mod report;

pub use args::Plugin;

use super::output::Failure;
use args::PluginCommand;

pub fn run(arguments: &Plugin) -> Result<(), Failure> {
    match &arguments.command {
        PluginCommand::Inspect(inspect) => inspect::run(inspect),
        PluginCommand::New(new) => new::run(new),
        PluginCommand::Check(check) => match &check.findings {
            Some(findings) => child::run(check, findings),
            None => check::run(check),
        },
    }
}
