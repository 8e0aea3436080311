//! The tests that drive the server with the clients people use, from Python.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{Workspace, step::step};

/// Run the tests of `tests/python` against the built server.
pub fn tests(workspace: &Workspace) -> Result<()> {
    let directory = workspace.root.join("tests").join("python");
    let home = workspace.target.join("python");
    let python = environment(&home, &directory.join("requirements.txt"), "installing the Python clients")?;
    let mut command = Command::new(python);
    command
        .current_dir(&workspace.root)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
        .arg(&directory)
        .env("TOKENROUTER_BIN", workspace.target.join("debug").join("tokenrouter"))
        .env("PYTHONDONTWRITEBYTECODE", "1");
    step("running the client tests (Python)", &mut command)
}

/// The interpreter of a virtual environment in `home` that holds `requirements`; made anew when they change.
pub fn environment(home: &Path, requirements: &Path, title: &str) -> Result<PathBuf> {
    let wanted =
        std::fs::read_to_string(requirements).with_context(|| format!("cannot read {}", requirements.display()))?;
    let (python, installed) = (home.join("bin").join("python"), home.join("installed-requirements.txt"));
    if python.is_file() && std::fs::read_to_string(&installed).is_ok_and(|have| have == wanted) {
        return Ok(python);
    }
    let mut create = Command::new("python3");
    create.args(["-m", "venv", "--clear"]).arg(home);
    step("making a Python environment (needs python3 with venv)", &mut create)?;
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"]).arg(requirements);
    step(title, &mut install)?;
    std::fs::write(&installed, wanted).with_context(|| format!("cannot write {}", installed.display()))?;
    Ok(python)
}
