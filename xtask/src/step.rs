//! One line before each step and one after it.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// Run `command`, saying what it does, whether it failed and how long it took.
pub fn step(title: &str, command: &mut Command) -> Result<()> {
    eprintln!("xtask: {title}");
    let start = Instant::now();
    let status = command.status().with_context(|| format!("cannot run {}", command.get_program().to_string_lossy()))?;
    let seconds = start.elapsed().as_secs_f64();
    if !status.success() {
        bail!("{title}: failed after {seconds:.1} s ({status})");
    }
    eprintln!("xtask: {title}: done in {seconds:.1} s");
    Ok(())
}
