//! The long search of `fuzz/`, which needs a nightly compiler and cargo-fuzz. The tests replay its corpora
//! without either.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;

use anyhow::{Context, Result, bail};

use crate::{Workspace, step::step};

/// What an input may take: MiB, and seconds.
const MEMORY: u32 = 2048;
const TIMEOUT: u32 = 10;

/// Build the targets that are `named`, or all, then run each for `minutes`, as many at once as there are cores.
pub fn run(workspace: &Workspace, minutes: u32, named: &[&str]) -> Result<()> {
    needed(&["cargo", "--version"], "a nightly compiler: `rustup toolchain install nightly`")?;
    needed(&["cargo", "fuzz", "--version"], "cargo-fuzz: `cargo install cargo-fuzz --locked`")?;
    let fuzz = workspace.root.join("fuzz");
    let mut targets = names(&fuzz.join("fuzz_targets"))?;
    targets.sort();
    if let Some(unknown) = named.iter().find(|name| !targets.iter().any(|target| target == *name)) {
        bail!("there is no fuzz target `{unknown}`; there are {}", targets.join(", "));
    }
    if !named.is_empty() {
        targets.retain(|target| named.contains(&&**target));
    }
    // It takes one name or none.
    let of: Vec<Option<&String>> = if named.is_empty() { vec![None] } else { targets.iter().map(Some).collect() };
    for target in of {
        let mut build = nightly(&["cargo", "fuzz", "build", "--sanitizer", "none", "--fuzz-dir"]);
        build.arg(&fuzz).args(target).current_dir(&workspace.root);
        step("building fuzz targets (the first time takes many minutes)", &mut build)?;
    }

    let found = workspace.target.join("fuzz");
    eprintln!("xtask: {} targets, {minutes} min each; logs and findings in {}", targets.len(), found.display());
    let programs = fuzz.join(format!("target/{}-unknown-linux-gnu/release", std::env::consts::ARCH));
    let (queue, failed) = (Mutex::new(targets.into_iter()), Mutex::new(Vec::new()));
    let next = || queue.lock().ok().and_then(|mut queue| queue.next());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(target) = next() {
                    let result = search(&target, &programs, &fuzz.join("corpus").join(&target), &found, minutes);
                    if let (Err(error), Ok(mut failed)) = (result, failed.lock()) {
                        failed.push(format!("{target}: {error:#}"));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_default();
    if failed.is_empty() { Ok(()) } else { bail!("{}", failed.join("\n")) }
}

/// One target. New inputs and the log go to `found`; the committed corpus is only read.
fn search(target: &str, programs: &Path, corpus: &Path, found: &Path, minutes: u32) -> Result<()> {
    let inputs = found.join(target);
    std::fs::create_dir_all(&inputs).with_context(|| format!("cannot make {}", inputs.display()))?;
    let log = found.join(format!("{target}.log"));
    let file = std::fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let status = Command::new(programs.join(target))
        .args([&inputs, corpus])
        .arg(format!("-max_total_time={}", 60 * minutes))
        .args([format!("-rss_limit_mb={MEMORY}"), format!("-timeout={TIMEOUT}")])
        .arg(format!("-artifact_prefix={}/{target}-", found.display()))
        .stdout(Stdio::null())
        .stderr(file)
        .status()
        .context("cannot run it")?;
    if !status.success() {
        bail!(
            "broke a promise ({status}); see {}, and add the input to fuzz/corpus/{target} once mended",
            log.display()
        );
    }
    Ok(())
}

/// A command of the nightly toolchain. This program's own cargo is of another one.
fn nightly(arguments: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly"]).args(arguments);
    for name in ["CARGO", "RUSTUP_TOOLCHAIN", "RUSTFLAGS"] {
        command.env_remove(name);
    }
    command
}

fn needed(arguments: &[&str], what: &str) -> Result<()> {
    let output = nightly(arguments).output();
    if output.is_ok_and(|output| output.status.success()) { Ok(()) } else { bail!("fuzzing needs {what}") }
}

/// Names of the targets, after their files.
fn names(directory: &Path) -> Result<Vec<String>> {
    let list = || std::fs::read_dir(directory)?.collect::<std::io::Result<Vec<_>>>();
    let entries = list().with_context(|| format!("cannot list {}", directory.display()))?;
    let stem = |path: &Path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    Ok(entries.iter().filter_map(|entry| stem(&entry.path())).collect())
}
