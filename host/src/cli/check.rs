//! `tokenrouter check`

use super::args::Check;
use super::front::Secrets;
use super::output::{Failure, write_stdout};
use super::progress::Progress;
use super::serve::{plugin_infos, sources};
use super::{build, record, report};
use crate::config::{self, Config};

pub fn run(arguments: &Check) -> Result<(), Failure> {
    let config = Config::load(&arguments.config, &config::environment()).map_err(Failure::input)?;
    record::check(&config)?;
    drop(Secrets::read(&config)?);
    let prepared = build::prepare(config)?;
    // Weights are read and policies created as for serving: only that shows that they work.
    drop(prepared.start(&Progress::stderr())?);
    let routes = report::routes(&prepared.config, &plugin_infos(&prepared));
    let file = prepared.config.file.display();
    write_stdout(&format!("{}\n{}\n{routes}\n{file} is in order\n", prepared.plan, sources(&prepared)))
}
