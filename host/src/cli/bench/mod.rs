//! `tokenrouter bench`

mod args;
mod compare;
mod csv;
mod device;
mod device_report;
mod engines;
mod files;
mod help;
mod json;
mod load;
mod load_args;
mod report;
mod running;
mod sweep;
mod variant;

pub use args::Bench;

use super::output::Failure;
use files::{check_places, write_json};

pub fn run(arguments: &Bench) -> Result<(), Failure> {
    check_places(arguments)?;
    if arguments.kernels || arguments.steps { device::run(arguments) } else { load::run(arguments) }
}
