//! Compiling every CUDA source with NVIDIA's compiler, which needs no GPU.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{Workspace, python, step::step};

/// The oldest architecture that is supported, and the one that is tuned for.
const ARCHITECTURES: [&str; 2] = ["80", "90"];
/// The source with instructions of one architecture alone, and that one.
const SPECIAL: (&str, &str) = ("linear_wgmma", "90a");

/// Compile all CUDA sources with warnings as errors.
pub fn compile(workspace: &Workspace) -> Result<()> {
    let nvcc = nvcc(workspace)?;
    let directory = workspace.root.join("kernels").join("cuda");
    let out = workspace.target.join("cubin");
    std::fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    // What only measures lies beside what it measures for.
    let bench = workspace.root.join("host").join("src").join("runner").join("cuda").join("measure");
    let sources = [sorted(&directory)?, sorted(&bench)?].concat();
    for source in sources.iter().filter(|path| path.extension().is_some_and(|e| e == "cu")) {
        let name = source.file_stem().unwrap_or_default().to_string_lossy();
        let special = (name == SPECIAL.0).then_some(SPECIAL.1);
        for architecture in ARCHITECTURES.into_iter().chain(special) {
            let mut command = Command::new(&nvcc);
            command
                .args(["-std=c++17", "-O3", "-Werror", "all-warnings", "-cubin"])
                .arg(format!("-gencode=arch=compute_{architecture},code=sm_{architecture}"))
                .arg("-I")
                .arg(&directory)
                .arg(source)
                .arg("-o")
                .arg(out.join(format!("{name}.sm_{architecture}.cubin")));
            step(&format!("compiling {name}.cu for sm_{architecture}"), &mut command)?;
        }
    }
    Ok(())
}

/// The compiler, installed once from Python packages of fixed versions.
fn nvcc(workspace: &Workspace) -> Result<PathBuf> {
    let home = workspace.target.join("cuda-13.0");
    let requirements = workspace.root.join("xtask").join("cuda-requirements.txt");
    python::environment(&home, &requirements, "installing the CUDA compiler (once, 270 MB)")?;
    let libraries = home.join("lib");
    for python in sorted(&libraries)? {
        let nvcc = python.join("site-packages").join("nvidia").join("cu13").join("bin").join("nvcc");
        if nvcc.is_file() {
            return Ok(nvcc);
        }
    }
    bail!("no nvcc below {}; remove {} and try again", libraries.display(), home.display())
}

fn sorted(directory: &Path) -> Result<Vec<PathBuf>> {
    let list = || std::fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>();
    let mut paths = list().with_context(|| format!("cannot list {}", directory.display()))?;
    paths.sort();
    Ok(paths)
}
