//! The program as its users meet it: exit status, one line for each mistake, answers, signals.
//!
//! The plugins must be built beside the program, as `cargo xtask test` does.
#![allow(clippy::unwrap_used)] // Helpers of tests.

mod check;
mod serve;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tokenrouter"));
    command.current_dir(root()).stdin(Stdio::null());
    for (name, _) in std::env::vars() {
        if name.starts_with("TOKENROUTER__") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    command
}

fn run(arguments: &[&str]) -> Output {
    program().args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The one line of a refused command.
fn refusal(output: &Output) -> String {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    assert_eq!(error.lines().count(), 1, "{error}");
    error.strip_prefix("error: ").unwrap().trim_end().into()
}

/// A directory with a copy of the small demo model as `model`, and a configuration.
fn copied(config: &str) -> (TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(root().join("models/demo/small")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    let file = dir.path().join("c.toml");
    let demo = root().join("models/demo").display().to_string();
    std::fs::write(&file, config.replace("DEMO", &demo)).unwrap();
    let file = file.display().to_string();
    (dir, file)
}

const ONE: &str = "[models.m]\npath = 'model'\nkv_memory = '8MiB'\n";
const PAIR: &str = "[models.m]\npath = 'model'\n[models.n]\npath = 'DEMO/medium'\n";

/// A pipe whose reader has left.
fn broken_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn full_disk() -> Stdio {
    std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

#[test]
fn output_that_fails() {
    let generate = ["generate", "config/demo.toml", "--route", "small", "--prompt", "x", "--max-tokens", "2"];
    for arguments in [&["check", "config/demo.toml"][..], &generate] {
        let output = program().args(arguments).stdout(broken_pipe()).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""), "{arguments:?}");
        let output = program().args(arguments).stdout(full_disk()).stderr(Stdio::piped()).output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.starts_with("error: standard output: ") && error.lines().count() == 1, "{error}");
    }
    // What cannot be told does not change how it ends.
    let refused = program().args(["check", "none.toml"]).stderr(broken_pipe()).status().unwrap();
    assert_eq!(refused.code(), Some(2));
    assert_eq!(program().args(generate).stdout(Stdio::null()).stderr(full_disk()).status().unwrap().code(), Some(0));
}

#[test]
fn refused_arguments() {
    let refused = refusal(&run(&["check", "none.toml"]));
    assert!(refused.starts_with("none.toml: there is no such file"), "{refused}");
    let refused = refusal(&run(&["generate", "config/demo.toml", "--route", "rstich", "--prompt", "x"]));
    assert_eq!(refused, "--route \"rstich\": config/demo.toml has no such route or model: did you mean `rstitch`?");
    let refused = refusal(&run(&["generate", "config/demo.toml", "--route", "small", "--prompt-ids", "1,99999"]));
    assert_eq!(refused, "--prompt: prompt token 99999 is outside the vocabulary; ids are below 2048");
    let long = ["generate", "config/demo.toml", "--route", "small", "--prompt", "x", "--max-tokens", "4000"];
    let refused = refusal(&run(&long));
    assert!(refused.contains("maximum context length is 2048 tokens"), "{refused}");
    let refused = refusal(&run(&["check", "config/demo.toml", "--log", "a=b=c"]));
    assert!(refused.starts_with("--log \"a=b=c\": "), "{refused}");
    // Mistakes in the arguments themselves are clap's to report.
    let output = run(&["generate", "c.toml", "--route", "r", "--prompt", "x", "--temperature", "-1"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("'-1' for '--temperature <T>': must be from 0 to 2"));
}

#[test]
fn help_has_examples() {
    for command in ["serve", "generate", "check", "doctor"] {
        let output = run(&[command, "--help"]);
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stdout).contains(&format!("tokenrouter {command} config/demo.toml")), "{command}");
    }
}

/// One of the demo's problems that the small model does not solve alone.
const QUESTION: &str = "Ivan has 16 boxes of 28 shoes and 86 single shoes. 6 shops get the same number. How many shoes \
                        does a shop get?";

#[test]
fn a_generated_answer() {
    let question = ["generate", "config/demo.toml", "--route", "rstitch", "--prompt", QUESTION];
    let plain = run(&question);
    assert_eq!(plain.status.code(), Some(0), "{}", text(&plain.stderr));
    let answer = text(&plain.stdout);
    assert!(!answer.contains('\x1b'));
    let legend = text(&plain.stderr);
    assert!(legend.contains("small ") && legend.contains("large ") && legend.contains("hand-off"), "{legend}");

    let json = run(&[&question[..], &["--json"]].concat());
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["text"].as_str().unwrap().to_owned() + "\n", answer);
    let tokens = json["tokens"].as_array().unwrap();
    let joined: String = tokens.iter().map(|t| t["text"].as_str().unwrap()).collect();
    assert_eq!(joined, json["text"].as_str().unwrap());
    assert_eq!(json["usage"]["completion_tokens"].as_u64().unwrap(), tokens.len() as u64);
    for model in ["small", "large"] {
        let count = tokens.iter().filter(|t| t["model"] == model).count();
        assert!(count > 0, "{json}");
        assert_eq!(json["usage"]["tokens_by_model"][model], count);
    }
    assert!(tokens.iter().all(|t| t["logprob"].is_number() && t["signals"]["entropy_norm"].is_number()), "{json}");

    let mut piped = program()
        .args(["generate", "config/demo.toml", "--route", "rstitch", "--prompt", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    piped.stdin.take().unwrap().write_all(QUESTION.as_bytes()).unwrap();
    assert_eq!(text(&piped.wait_with_output().unwrap().stdout), answer);
}

#[test]
fn a_look_at_the_machine() {
    let output = run(&["doctor", "config/demo.toml", "--json"]);
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&seen["version"], &seen["config"]["ok"]), (&env!("CARGO_PKG_VERSION").into(), &true.into()), "{seen}");
    assert!(seen["memory"]["total"].as_u64().is_some() && seen["cuda"]["devices"].is_array(), "{seen}");
    assert_eq!(output.status.code(), Some(i32::from(seen["faults"] != 0)), "{seen}");
    let output = run(&["doctor", "nowhere.toml"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("! config       nowhere.toml: there is no such file"));
}

#[test]
fn completions_for_shells() {
    for (shell, part) in
        [("bash", "complete -F _tokenrouter"), ("zsh", "#compdef tokenrouter"), ("fish", "-a \"doctor\"")]
    {
        let output = run(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stdout).contains(part), "{shell}");
    }
}

#[test]
fn the_readme_shows_what_works() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    // The plugin API's documentation tests compile this example.
    let documentation = std::fs::read_to_string(root().join("plugin-api/src/lib.rs")).unwrap();
    let example = documentation.split("//! ```\n").nth(1).unwrap();
    let example: String =
        example.lines().map(|line| line[3..].strip_prefix(' ').unwrap_or(&line[3..]).to_owned() + "\n").collect();
    assert!(readme.contains(&format!("```rust\n{example}```")), "README.md and the plugin API's example differ");
    let config = readme.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let (_dir, file) = copied(&config.replace("../models/demo", "DEMO"));
    assert_eq!(run(&["check", &file]).status.code(), Some(0));
}
