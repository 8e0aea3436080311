//! `tokenrouter plugin` as authors meet it, on the plugins that are built beside the program.
#![allow(clippy::unwrap_used)] // Helpers of tests.

mod begin;
mod nets;
mod replay;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn program() -> PathBuf {
    env!("CARGO_BIN_EXE_tokenrouter").into()
}

fn built(library: &str) -> String {
    let path = program().with_file_name(library);
    assert!(path.is_file(), "{} is not built; run the tests with `cargo xtask test`", path.display());
    path.display().to_string()
}

fn plugin(arguments: &[&str]) -> Output {
    let mut command = Command::new(program());
    command.current_dir(root()).stdin(Stdio::null()).env_remove("RUST_LOG");
    command.arg("plugin").args(arguments).output().unwrap()
}

/// R-Stitch as a WASM policy.
fn module() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rstitch.wasm");
    std::fs::write(&path, wat::parse_file(root().join("plugins/rstitch/rstitch.wat")).unwrap()).unwrap();
    let path = path.display().to_string();
    (dir, path)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Exit status, and the findings as (check, status, what).
fn check(file: &str, more: &[&str]) -> (Option<i32>, Vec<(String, String, String)>) {
    let output = plugin(&[&["check", file, "--json"], more].concat());
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stderr)));
    let field = |finding: &Value, name: &str| finding[name].as_str().unwrap().to_owned();
    let findings = report["checks"].as_array().unwrap().iter();
    let findings: Vec<_> = findings.map(|f| (field(f, "check"), field(f, "status"), field(f, "what"))).collect();
    assert_eq!(report["passed"], json!(output.status.success()));
    (output.status.code(), findings)
}

#[test]
fn inspect_tells_without_running() {
    let file = built("libprobe.so");
    let output = plugin(&["inspect", &file]);
    let shown = text(&output.stdout);
    assert!(output.status.success() && shown.contains("\nname        probe\nversion     3.2.1\n"), "{shown}");
    assert!(shown.contains("not readable without running it"), "{shown}");
    let bytes = std::fs::read(&file).unwrap();
    let report: Value = serde_json::from_slice(&plugin(&["inspect", &file, "--json"]).stdout).unwrap();
    assert_eq!((&report["name"], &report["loads"]), (&json!("probe"), &json!(true)));
    assert_eq!((&report["bytes"], &report["settings_schema"]), (&json!(bytes.len()), &Value::Null));
    let hash = report["sha256"].as_str().unwrap();
    assert!(shown.contains(hash) && hash.len() == 64, "{shown}");

    // A module's schema is no code.
    let (_dir, module) = module();
    let report: Value = serde_json::from_slice(&plugin(&["inspect", &module, "--json"]).stdout).unwrap();
    assert_eq!((&report["kind"], &report["name"]), (&json!("wasm"), &json!("rstitch")));
    assert_eq!(report["settings_schema"]["properties"]["threshold"]["minimum"], json!(0));
    assert!(text(&plugin(&["inspect", &module]).stdout).contains("\nsettings    threshold (--json has the schema)\n"));

    let output = plugin(&["inspect", "README.md"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
    assert!(
        text(&output.stderr).starts_with("error: plugin `README.md`: is some other file, not an ELF shared object")
    );
    let output = plugin(&["inspect", "README.md", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["loads"]), (Some(2), &json!(false)));
}

/// As the server translates it, and as `cargo xtask build` does.
#[test]
fn a_module_may_be_text() {
    let (_dir, module) = module();
    let report =
        |file: &str| -> Value { serde_json::from_slice(&plugin(&["inspect", file, "--json"]).stdout).unwrap() };
    let (text, module) = (report("plugins/rstitch/rstitch.wat"), report(&module));
    for field in ["kind", "name", "version", "settings_schema", "gate"] {
        assert_eq!(text[field], module[field], "{field}");
    }
    assert_ne!(text["sha256"], module["sha256"]);
}

/// What a server would not start with, none of its code has to run for.
#[test]
fn inspect_looks_at_exports() {
    let dir = tempfile::tempdir().unwrap();
    let good = std::fs::read_to_string(root().join("plugins/rstitch/rstitch.wat")).unwrap();
    for (from, to, part) in [
        ("\"tr_block\") i32 (i32.const 0)", "\"tr_block\") i32 (i32.const 60000)", "tr_block is 60000, but memory has"),
        ("\"tr_block\") i32 (i32.const 0)", "\"tr_block\") i64 (i64.const 0)", "`tr_block` is not a constant i32"),
        ("  (memory", "  (func (export \"tr_finished\"))\n  (memory", "`tr_finished` is not a function (i32)"),
        ("  (memory", "  (global (export \"tr_configure\") i32 (i32.const 0))\n  (memory", "`tr_configure` is not a"),
    ] {
        assert!(good.contains(from), "{from}");
        let file = dir.path().join("p.wat");
        std::fs::write(&file, good.replacen(from, to, 1)).unwrap();
        let output = plugin(&["inspect", file.to_str().unwrap()]);
        let error = text(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(part), "{error}");
    }
}

#[test]
fn every_policy_that_comes_along_passes() {
    let plugins = std::fs::read_dir(root().join("plugins")).unwrap();
    let mut names: Vec<_> = plugins.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.push("cascade".into());
    let (_dir, module) = module();
    let files = names.iter().map(|name| (name.as_str(), built(&format!("lib{name}.so"))));
    let written = [
        ("rstitch as a module", module),
        ("rstitch as text", root().join("plugins/rstitch/rstitch.wat").display().to_string()),
        ("rstitch in AssemblyScript", root().join("plugins/rstitch/assemblyscript/rstitch.wasm").display().to_string()),
    ];
    for (name, file) in files.chain(written) {
        let settings = match name {
            "me" | "per_request_random" => json!({ "weights": { "small": 0.5, "large": 0.5 } }),
            "random" => json!({ "probabilities": { "large": 0.3 } }),
            "r2r" | "citer" => json!({ "router": format!("models/demo/routers/{name}/router.safetensors") }),
            _ => json!({}),
        };
        let roles = if name == "cascade" { "small=slm,medium=mlm,large=llm" } else { "small=slm,large=llm" };
        let more = ["--settings", &settings.to_string(), "--roles", roles];
        let (status, findings) = check(&file, &more);
        // What a call costs depends on the machine and the build.
        let bad: Vec<_> = findings.iter().filter(|(check, status, _)| status != "ok" && check != "cost").collect();
        assert!(status == Some(0) && bad.is_empty() && findings.len() == 13, "{name}: {bad:#?}");
    }
}

#[test]
fn panics_are_findings() {
    let file = built("libprobe.so");
    for hook in ["create", "requirements", "entry", "route", "send", "receive", "finished"] {
        let (status, findings) = check(&file, &["--settings", &json!({ "panic": hook }).to_string()]);
        let (name, result, what) = findings.iter().find(|(_, status, _)| status == "failed").unwrap();
        assert_eq!(status, Some(1), "{name} {result}");
        // The probe answers nonsense in other hooks too.
        if ["create", "requirements", "entry", "route"].contains(&hook) {
            let part = format!("failed in {hook}: panicked at tests/plugins/probe/lib.rs");
            assert!(findings.iter().any(|(_, _, what)| what.contains(&part)), "{hook}: {what}");
        }
    }
    let (_, findings) = check(&file, &["--settings", r#"{"error": "no such thing"}"#]);
    let last = findings.last().unwrap();
    assert_eq!((findings[2].1.as_str(), last.1.as_str()), ("failed", "not_run"), "{findings:?}");
    assert!(findings[2].2.ends_with("no such thing"), "{findings:?}");
}

#[test]
fn what_ends_the_process_is_a_finding() {
    let file = built("libprobe.so");
    for (end, timeout, how) in [
        ("abort", "20", "the plugin ended the process by signal 6 (SIGABRT)"),
        ("exit", "20", "the plugin ended the process with exit status 0"),
        ("hang", "1", "the plugin did not come back within 1 s"),
    ] {
        let settings = json!({ "end": end }).to_string();
        let (status, findings) = check(&file, &["--settings", &settings, "--timeout", timeout]);
        assert_eq!((status, findings.len()), (Some(1), 13));
        let of = |name: &str| findings.iter().find(|(check, ..)| check == name).unwrap();
        // The first hook that ends it, and one in a process begun after that.
        assert_eq!((of("create").1.as_str(), of("no rows").2.as_str()), ("ok", how));
        assert_eq!(of("cost").2, how);
    }
}

#[test]
fn what_a_plugin_starts_ends_with_its_check() {
    // A number of seconds that no other process sleeps.
    let seconds = format!("86400.{}", std::process::id());
    let running = || {
        let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path().join("cmdline"));
        let sleeps =
            |path: &PathBuf| std::fs::read(path).is_ok_and(|line| line == format!("sleep\0{seconds}\0").as_bytes());
        processes.filter(sleeps).count()
    };
    let wait = |count: usize| {
        while running() != count {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    };
    // It can be seen, though not at once: a program has its name a moment after it was started.
    let mut sleep = Command::new("sleep").arg(&seconds).spawn().unwrap();
    wait(1);
    sleep.kill().unwrap();
    sleep.wait().unwrap();
    for end in ["", "abort"] {
        let settings = json!({ "leave": seconds, "end": end }).to_string();
        let (_, findings) = check(&built("libprobe.so"), &["--settings", &settings]);
        assert_eq!(findings[2].1, "ok", "{findings:?}");
        // A process that was ended is gone when its parent has seen it.
        wait(0);
    }
}

#[test]
fn the_table_fits_and_says_what_to_do() {
    let output = plugin(&["check", &built("libme.so")]);
    let table = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1));
    assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
    assert!(table.contains("schema             failed   settings/weights: required but missing\n"), "{table}");
    assert!(table.contains("-> Give settings that fit with --settings.") && table.contains("11 not run"), "{table}");
    assert!(text(&output.stderr).contains("1 of 13 checks failed"));
    let missing = plugin(&["check", "missing.so"]);
    assert!(text(&missing.stdout).contains("no such file"), "{}", text(&missing.stdout));
}
