//! Plugins that end their process, or would.

use std::path::PathBuf;
use std::process::Command;

use crate::support::built;

/// The newest library of the plugin API that was built beside this test.
fn api() -> PathBuf {
    let files = std::fs::read_dir(built().join("deps")).unwrap().map(|entry| entry.unwrap().path());
    let is_api = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with("libtokenrouter_plugin_api-") && name.ends_with(".rlib")
    };
    files.filter(is_api).max_by_key(|path| path.metadata().unwrap().modified().unwrap()).unwrap()
}

#[test]
fn case_11_a_plugin_that_could_not_unwind_does_not_compile() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("lib.rs");
    let text = "use tokenrouter_plugin_api::*;
        struct P;
        impl Policy for P {
            const NAME: &'static str = \"p\";
            fn create(_: &Context<'_>, _: &str) -> Result<Self, PolicyError> { Ok(P) }
            fn route(&mut self, _: &RouteBatch<'_>, _: &mut [Decision]) {}
        }
        export_policy!(P);";
    std::fs::write(&source, text).unwrap();
    let compile = |panic: &str| {
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        rustc.args(["--edition", "2024", "--crate-type", "lib", "--crate-name", "p", "--emit", "metadata"]);
        rustc.env("CARGO_PKG_VERSION", "1.0.0").env("CARGO_CRATE_NAME", "p");
        rustc.arg("-C").arg(format!("panic={panic}")).arg("-L").arg(built().join("deps"));
        rustc.arg("--extern").arg(format!("tokenrouter_plugin_api={}", api().display()));
        let output = rustc.arg("--out-dir").arg(dir.path()).arg(&source).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let (compiles, errors) = compile("unwind");
    assert!(compiles, "{errors}");
    let (compiles, errors) = compile("abort");
    assert!(!compiles && errors.contains("a TokenRouter plugin needs panic = \"unwind\""), "{errors}");
}

/// Nothing can hold them in the server's process, so the kit for authors runs plugins in another one.
#[test]
fn case_11_a_plugin_that_ends_its_process_is_found_before_it_serves() {
    let program = built().join("tokenrouter");
    assert!(program.is_file(), "{} is not built; run the tests with `cargo xtask test`", program.display());
    for (end, how) in [("abort", "by signal 6 (SIGABRT)"), ("exit", "with exit status 0")] {
        let settings = format!(r#"{{"serve": true, "end": "{end}"}}"#);
        let mut check = Command::new(&program);
        check.args(["plugin", "check", "--settings", &settings]).arg(built().join("libprobe.so"));
        let output = check.output().unwrap();
        let table = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(1), "{table}");
        // The table breaks long lines.
        let words = table.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(&format!("the plugin ended the process {how}")), "{table}");
    }
}
