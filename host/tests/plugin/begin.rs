//! `tokenrouter plugin new`, and our own policy in AssemblyScript.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{check, plugin, program, root, text};

#[test]
fn a_new_policy_builds_and_passes() {
    let dir = tempfile::tempdir().unwrap();
    let within = ["--dir", dir.path().to_str().unwrap()];
    let new = |name: &str| plugin(&[&["new", name], &within[..]].concat());
    let output = new("my-policy");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let crate_ = dir.path().join("my-policy");
    let entries = std::fs::read_dir(dir.path()).unwrap().count();
    assert!(entries == 1 && crate_.join("plugin-api/src/lib.rs").is_file());

    // One directory for every run: only the crate itself is built anew.
    let target = program().ancestors().nth(2).unwrap().join("new-policy");
    for command in [&["test"][..], &["build"]] {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(command).args(["--offline", "--quiet", "--target-dir"]).arg(&target).current_dir(&crate_);
        // The flags of an instrumented build of this test are not meant for it.
        cargo.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS").env_remove("CARGO_BUILD_TARGET");
        let output = cargo.env("CARGO_PROFILE_DEV_DEBUG", "0").output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(!text(&output.stderr).contains("warning"), "{}", text(&output.stderr));
    }
    let library = target.join("debug/libmy_policy.so");
    let (status, findings) = check(library.to_str().unwrap(), &["--settings", r#"{"threshold": 0.4}"#]);
    assert_eq!(status, Some(0), "{findings:#?}");

    let again = new("my-policy");
    assert!(again.status.code() == Some(2) && text(&again.stderr).contains("exists already"));
    assert!(text(&new("My").stderr).contains("`My` is no name for a policy"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_new_wasm_policy_passes_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let output = plugin(&["new", "my-policy", "--wasm", "--dir", dir.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("tokenrouter plugin check my-policy.wat"), "{}", text(&output.stdout));
    let file = dir.path().join("my-policy/my-policy.wat").display().to_string();
    let (status, findings) = check(&file, &["--settings", r#"{"threshold": 0.4}"#]);
    let decided = &findings.iter().find(|(check, ..)| check == "256 requests").unwrap().2;
    assert!(status == Some(0) && !decided.ends_with(" 0 hand-offs"), "{findings:#?}");
    assert!(text(&plugin(&["inspect", &file]).stdout).contains("\nname        my-policy\nversion     0.1.0\n"));

    let refused = plugin(&["new", "p", "--wasm=cobol", "--dir", dir.path().to_str().unwrap()]);
    assert!(refused.status.code() == Some(2) && text(&refused.stderr).contains("wat, assemblyscript"));
    let missing = dir.path().join("a/b");
    let apart = plugin(&["new", "p", "--wasm", "wat", "--dir", missing.to_str().unwrap()]);
    assert!(apart.status.code() == Some(2) && text(&apart.stderr).contains("write the language as --wasm=wat"));
    assert!(!missing.exists());
    let output = plugin(&["new", "p", "--wasm=wat", "--dir", missing.to_str().unwrap()]);
    assert!(output.status.success() && missing.join("p/p.wat").is_file(), "{}", text(&output.stderr));
}

/// The compiler that `npm install` brings into plugins/rstitch/assemblyscript. `None` without it, with the reason.
fn assemblyscript() -> Option<PathBuf> {
    let modules = root().join("plugins/rstitch/assemblyscript/node_modules");
    if modules.join(".bin/asc").exists() {
        return Some(modules);
    }
    eprintln!("skipped: no AssemblyScript compiler; run `npm install` in plugins/rstitch/assemblyscript");
    None
}

fn npm_run_build(directory: &Path) {
    let output = Command::new("npm").args(["run", "--silent", "build"]).current_dir(directory).output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn a_new_policy_in_assemblyscript_builds_and_passes() {
    let Some(modules) = assemblyscript() else { return };
    let dir = tempfile::tempdir().unwrap();
    let output = plugin(&["new", "my-policy", "--wasm=assemblyscript", "--dir", dir.path().to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let policy = dir.path().join("my-policy");
    std::os::unix::fs::symlink(modules, policy.join("node_modules")).unwrap();
    npm_run_build(&policy);
    let file = policy.join("build/my-policy.wasm").display().to_string();
    let (status, findings) = check(&file, &["--settings", r#"{"threshold": 0.4}"#]);
    let decided = &findings.iter().find(|(check, ..)| check == "256 requests").unwrap().2;
    assert!(status == Some(0) && !decided.ends_with(" 0 hand-offs"), "{findings:#?}");
}

/// The module that is kept with its sources is theirs.
#[test]
fn the_module_from_assemblyscript_is_built_from_its_sources() {
    let source = root().join("plugins/rstitch/assemblyscript");
    let sums = std::fs::read_to_string(source.join("SHA256SUMS")).unwrap();
    let files: Vec<(&str, &str)> = sums.lines().map(|line| line.split_once("  ").unwrap()).collect();
    let names: Vec<&str> = files.iter().map(|(_, name)| *name).collect();
    let expected =
        ["assembly/block.ts", "assembly/index.ts", "package.json", "policy.json", "section.mjs", "rstitch.wasm"];
    assert_eq!(names, expected);
    for (sum, name) in files {
        let found = tokenrouter::policy::sha256(&std::fs::read(source.join(name)).unwrap());
        assert_eq!(found, sum, "{name} has changed: run `npm install && npm run build` there");
    }
    let Some(modules) = assemblyscript() else { return };
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("assembly")).unwrap();
    for name in &names[..5] {
        std::fs::copy(source.join(name), dir.path().join(name)).unwrap();
    }
    std::os::unix::fs::symlink(modules, dir.path().join("node_modules")).unwrap();
    npm_run_build(dir.path());
    for name in ["rstitch.wasm", "SHA256SUMS"] {
        let read = |directory: &Path| std::fs::read(directory.join(name)).unwrap();
        assert!(read(dir.path()) == read(&source), "{name} is not what the compiler makes of the sources");
    }
}
