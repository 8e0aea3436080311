//! `tokenrouter check`

use super::args::Check;
use super::output::Failure;
use super::progress::Progress;
use super::serve::{plugin_infos, sources};
use super::{build, report};
use crate::config::{self, Config};

pub fn run(arguments: &Check) -> Result<(), Failure> {
    let config = Config::load(&arguments.config, &config::environment()).map_err(Failure::input)?;
    let prepared = build::prepare(config)?;
    // Weights are read and policies created as for serving: only that shows that they work.
    drop(prepared.start(&Progress::stderr())?);
    print!("{}\n{}\n{}", prepared.plan, sources(&prepared), report::routes(&prepared.config, &plugin_infos(&prepared)));
    println!("\n{} is in order", prepared.config.file.display());
    Ok(())
}
