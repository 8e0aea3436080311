//! `tokenrouter plugin …`: for authors of policies.

mod args;
mod inspect;

pub use args::Plugin;

use super::output::Failure;
use args::PluginCommand;

pub fn run(arguments: &Plugin) -> Result<(), Failure> {
    match &arguments.command {
        PluginCommand::Inspect(inspect) => inspect::run(inspect),
    }
}
