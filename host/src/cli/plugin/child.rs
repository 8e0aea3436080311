//! The process in which a plugin is checked: it tells through a file what it begins and what it found, for
//! the plugin may write to standard output, and end the process.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::args::Check;
use crate::cli::output::Failure;
use crate::policy::check::{CHECKS, Finding, Setup, run as run_checks};
use crate::policy::plugin::Plugin;

/// One line of the file.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    /// The check with this number begins.
    Begins(usize),
    Found(Finding),
    /// The process ends as it should.
    Done,
}

/// Name of the check before all others, number 0.
pub const LOAD: &str = "load";

/// The name of a check by its number here.
pub fn name(number: usize) -> &'static str {
    number.checked_sub(1).map_or(LOAD, |number| CHECKS[number].name)
}

/// Whether nothing can be run after the check with this number fails.
pub fn needed(number: usize) -> bool {
    number.checked_sub(1).is_none_or(|number| CHECKS[number].needed)
}

pub fn run(arguments: &Check, findings: &Path) -> Result<(), Failure> {
    let named = |e| Failure::work(format!("{}: {e}", findings.display()));
    super::group::follow_parent().map_err(Failure::work)?;
    let mut file = OpenOptions::new().append(true).open(findings).map_err(named)?;
    check(arguments, &mut file).and_then(|()| tell(&mut file, &Line::Done)).map_err(named)
}

fn tell(file: &mut File, line: &Line) -> std::io::Result<()> {
    // In one write: whatever the plugin does next, the line is whole.
    file.write_all(format!("{}\n", json!(line)).as_bytes())
}

fn check(arguments: &Check, file: &mut File) -> std::io::Result<()> {
    // Loading counts to the check that it is for.
    tell(file, &Line::Begins(arguments.from))?;
    let loaded = Plugin::load(&arguments.file, None);
    if arguments.from == 0 {
        let finding = match &loaded {
            Ok(plugin) => Finding::ok(format!("{} {}", plugin.policy.name(), plugin.version)),
            Err(e) => Finding::failed(e.to_string(), ""),
        };
        tell(file, &Line::Found(finding.of(LOAD)))?;
    }
    let Ok(plugin) = loaded.map(Plugin::with_made_up_nets) else { return Ok(()) };
    let settings = arguments.settings.clone().unwrap_or_else(|| json!({}));
    let setup = Setup { factory: &*plugin.policy, models: &arguments.roles, settings: &settings };
    let from = arguments.from.saturating_sub(1);
    let file = std::cell::RefCell::new(file);
    run_checks(
        &setup,
        from,
        |number| tell(&mut file.borrow_mut(), &Line::Begins(number + 1)),
        |finding| tell(&mut file.borrow_mut(), &Line::Found(finding)),
    )
}
