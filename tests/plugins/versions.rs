//! Plugins and hosts of different versions of the contract. The later version is built from
//! `tests/next-minor`, with the compiler and the dependencies of this build.

use std::path::{Path, PathBuf};
use std::process::Command;

use tokenrouter::policy::native::{NativePlugin, Reason};
use tokenrouter_plugin_api::host;

use crate::support::{built, library};

/// Builds the later version; returns the directory of what was built.
fn next_minor() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("next-minor/Cargo.toml");
    let target = built().ancestors().nth(1).unwrap().join("next-minor");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--locked", "--quiet", "--manifest-path"]).arg(manifest).arg("--target-dir").arg(&target);
    // The flags of an instrumented build of this test are not meant for it.
    build.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS").env_remove("CARGO_BUILD_TARGET");
    let output = build.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target.join("debug")
}

/// A host of 1.1 runs a plugin of 1.0, before and after one of its own version.
#[test]
fn case_08_an_older_minor_version_runs() {
    let next = next_minor();
    let (old, new) = (library("librstitch.so"), next.join("libnext_rstitch.so"));
    let output = Command::new(next.join("next-loader")).args([&old, &new, &old]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let step = "SignalSet(2) [Some(Stay), Some(To(1))]";
    let (old_line, new_line) = (
        format!("host 1.1 plugin 1.0 rstitch next None {step}"),
        format!("host 1.1 plugin 1.1 rstitch next Some(1) {step}"),
    );
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(printed.lines().collect::<Vec<_>>(), [&old_line, &new_line, &old_line]);
}

/// This host, 1.0, does not run a plugin of 1.1.
#[test]
fn case_09_a_newer_minor_version_is_refused() {
    let new = next_minor().join("libnext_rstitch.so");
    let error = NativePlugin::load(&new, None).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "plugin `{}`: plugin rstitch 0.9.0 needs plugin ABI 1.1, this server provides 1.0; update the server or \
             rebuild the plugin with tokenrouter-plugin-api 1.0",
            new.display()
        )
    );
}

/// Nor one that says 1.0 and is not.
#[test]
fn case_07_another_layout_at_the_same_version_is_refused() {
    let next = next_minor();
    let error = NativePlugin::load(&next.join("libskewed_rstitch.so"), None).unwrap_err();
    let Reason::Library(layout @ host::LoadError::Layout { .. }) = &error.reason else { panic!("{error}") };
    let text = error.to_string();
    assert!(text.contains("the plugin's types differ from this server's (Error:"), "{text}");
    assert!(text.contains("rebuild the plugin with an unchanged tokenrouter-plugin-api 1.0"), "{text}");
    assert!(!text.contains('\n') && text.len() < 900, "{text}");
    assert!(layout.detail().unwrap().len() > text.len());
}
