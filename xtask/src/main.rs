//! `cargo xtask …`: everything that takes more than one `cargo` command.

mod checks;
mod fuzz;
mod kernels;
mod python;
mod step;
mod wasm;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use step::step;

const USAGE: &str = "\
Usage: cargo xtask COMMAND

Commands:
  build [--release]    build the server and the plugins (without --release the tests, too)
  serve [-- ARGS]      build them for release, then serve config/demo.toml (ARGS go to `tokenrouter serve`)
  test                 build everything, then run the tests of Rust, of the documentation and of Python
  kernels              compile every CUDA source (needs no GPU)
  fuzz [--minutes N] [TARGET...]
                       search for inputs that break a promise, 10 minutes a target of fuzz/fuzz_targets, or of those
                       that are named (nightly, cargo-fuzz)
  ci                   format, lints, dependencies and CUDA sources, then what `test` does
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        ["build"] => workspace().and_then(|w| w.build(Profile::Dev)),
        ["build", "--release"] => workspace().and_then(|w| w.build(Profile::Release)),
        ["serve"] => workspace().and_then(|w| w.serve(&[])),
        ["serve", "--", rest @ ..] => workspace().and_then(|w| w.serve(rest)),
        ["test"] => workspace().and_then(|w| w.test()),
        ["kernels"] => workspace().and_then(|w| kernels::compile(&w)),
        ["fuzz", "--minutes", minutes, targets @ ..] => match minutes.parse() {
            Ok(minutes @ 1..) => workspace().and_then(|w| fuzz::run(&w, minutes, targets)),
            _ => Err(anyhow::anyhow!("--minutes {minutes}: give a whole number from 1 on")),
        },
        ["fuzz", targets @ ..] => workspace().and_then(|w| fuzz::run(&w, 10, targets)),
        ["ci"] => workspace().and_then(|w| checks::before_tests(&w).and_then(|()| w.test())),
        ["help" | "--help" | "-h"] => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprint!("xtask: unknown command `{}`\n\n{USAGE}", arguments.join(" "));
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What is built and tested. One selection for all: cargo builds dependencies anew when the features
/// that a selection needs of them differ.
const SELECTION: [&str; 4] = ["--workspace", "--lib", "--bins", "--tests"];

#[derive(Clone, Copy)]
enum Profile {
    Dev,
    Release,
}

/// Where things are.
struct Workspace {
    root: PathBuf,
    target: PathBuf,
    cargo: PathBuf,
}

fn workspace() -> Result<Workspace> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask is not in a workspace")?.to_path_buf();
    // This program is TARGET/PROFILE/xtask.
    let executable = std::env::current_exe().context("cannot find this program")?;
    let target = executable.ancestors().nth(2).context("this program is not in a target directory")?.to_path_buf();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()).into();
    Ok(Workspace { root, target, cargo })
}

impl Workspace {
    fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.cargo);
        command.current_dir(&self.root).args(arguments);
        // Variables that cargo set for this program would make the inner cargo build things anew.
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST") {
                command.env_remove(&*name);
            }
        }
        command
    }

    /// Names of the plugin packages, after their directories in `plugins/` and `examples/`.
    fn plugins(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for (directory, prefix) in [("plugins", "tokenrouter-plugin-"), ("examples", "")] {
            for entry in
                std::fs::read_dir(self.root.join(directory)).with_context(|| format!("cannot list {directory}/"))?
            {
                let path = entry?.path();
                if let (true, Some(name)) = (path.join("Cargo.toml").is_file(), path.file_name()) {
                    // Libraries have `_` where packages have `-`.
                    names.push(format!("{prefix}{}", name.to_string_lossy().replace('_', "-")));
                }
            }
        }
        names.sort();
        Ok(names)
    }

    fn build(&self, profile: Profile) -> Result<()> {
        let plugins = self.plugins()?;
        let directory = match profile {
            Profile::Dev => {
                let title = "building the server, the plugins and the tests (the first time takes minutes)";
                step(title, &mut self.cargo(&[&["build"], SELECTION.as_slice()].concat()))?;
                "debug"
            }
            Profile::Release => {
                let mut arguments = vec!["build", "--release", "--package", "tokenrouter"];
                arguments.extend(plugins.iter().flat_map(|plugin| ["--package", plugin]));
                let title = format!(
                    "building the server and {} plugins for release (the first time takes minutes)",
                    plugins.len()
                );
                step(&title, &mut self.cargo(&arguments))?;
                "release"
            }
        };
        wasm::translate(&self.root.join("plugins"), &self.target.join(directory))
    }

    fn serve(&self, arguments: &[&str]) -> Result<()> {
        self.build(Profile::Release)?;
        let program = self.target.join("release").join("tokenrouter");
        // The program takes this one's place, so that signals reach it.
        let error =
            Command::new(&program).current_dir(&self.root).args(["serve", "config/demo.toml"]).args(arguments).exec();
        bail!("cannot start {}: {error}", program.display())
    }

    fn test(&self) -> Result<()> {
        self.build(Profile::Dev)?;
        if self.cargo(&["nextest", "--version"]).output().is_ok_and(|o| o.status.success()) {
            step("running the Rust tests", &mut self.cargo(&["nextest", "run", "--workspace"]))?;
        } else {
            eprintln!(
                "xtask: cargo-nextest is not installed (`cargo install cargo-nextest --locked`); using `cargo test`"
            );
            step("running the Rust tests", &mut self.cargo(&[&["test"], SELECTION.as_slice()].concat()))?;
        }
        let documentation = ["test", "--doc", "--package", "tokenrouter-plugin-api"];
        step("running the examples in the plugin API's documentation", &mut self.cargo(&documentation))?;
        python::tests(self)
    }
}
