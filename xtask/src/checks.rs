//! What a change must pass before its tests are worth running.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::{Workspace, kernels, step::step};

const CARGO_DENY: &str = "0.20.2";
/// A database that has not come by then will not come.
const FETCH_LIMIT: Duration = Duration::from_secs(120);

pub fn before_tests(workspace: &Workspace) -> Result<()> {
    step("checking the format", &mut workspace.cargo(&["fmt", "--all", "--check"]))?;
    let clippy = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    step("running the lints (the first time takes minutes)", &mut workspace.cargo(&clippy))?;
    let without = ["clippy", "--package", "tokenrouter", "--no-default-features", "--", "-D", "warnings"];
    step("running the lints of the server without traces", &mut workspace.cargo(&without))?;
    dependencies(workspace)?;
    kernels::compile(workspace)
}

/// Licences, bans and sources of all dependencies, and advisories if their database can be had.
fn dependencies(workspace: &Workspace) -> Result<()> {
    let deny = cargo_deny(workspace)?;
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&deny);
        command.current_dir(&workspace.root).args(arguments);
        command
    };
    step("checking licences, bans and sources", &mut run(&["check", "licenses", "bans", "sources"]))?;
    match fetch(&mut run(&["fetch", "db"])) {
        Ok(()) => step("checking advisories", &mut run(&["check", "--disable-fetch", "advisories"])),
        Err(reason) => {
            eprintln!("xtask: advisories not checked: {reason:#}");
            Ok(())
        }
    }
}

/// The program, built into the target directory once. A fixed version, because the format of
/// `deny.toml` changes between versions.
fn cargo_deny(workspace: &Workspace) -> Result<PathBuf> {
    let home = workspace.target.join("tools");
    let program = home.join("bin").join("cargo-deny");
    let version = |program: &Path| Command::new(program).arg("--version").output().map(|o| o.stdout);
    if version(&program).is_ok_and(|v| String::from_utf8_lossy(&v).trim() == format!("cargo-deny {CARGO_DENY}")) {
        return Ok(program);
    }
    let mut install = workspace.cargo(&["install", "cargo-deny", "--version", CARGO_DENY, "--locked", "--debug"]);
    install.args(["--quiet", "--force", "--root"]).arg(&home).env("CARGO_PROFILE_DEV_DEBUG", "0");
    // Its own target directory, made and removed by cargo.
    install.env_remove("CARGO_TARGET_DIR");
    step("installing cargo-deny (once, takes minutes)", &mut install)?;
    Ok(program)
}

/// Fetch the database of advisories. It lives at a git host that not every machine can reach.
fn fetch(command: &mut Command) -> Result<()> {
    command.env("GIT_TERMINAL_PROMPT", "0").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot run cargo-deny")?;
    let start = Instant::now();
    while child.try_wait()?.is_none() {
        if start.elapsed() > FETCH_LIMIT {
            child.kill()?;
            child.wait()?;
            anyhow::bail!("the database did not come within {} s", FETCH_LIMIT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let reason = lines().find(|line| line.starts_with("fatal:")).or_else(|| lines().next_back());
    anyhow::bail!("{}", reason.unwrap_or("fetching the database failed without a message"))
}
