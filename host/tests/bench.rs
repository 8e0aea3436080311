//! `tokenrouter bench` on the demo.
//!
//! The plugins must be built beside the program, as `cargo xtask test` does.
#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tokenrouter"));
    command.current_dir(root()).stdin(Stdio::null()).arg("bench").args(arguments);
    for (name, _) in std::env::vars() {
        if name.starts_with("TOKENROUTER__") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The one line of a refused command.
fn refusal(arguments: &[&str]) -> String {
    let output = bench(arguments);
    let error = text(&output.stderr);
    assert_eq!((output.status.code(), output.stdout.len(), error.lines().count()), (Some(2), 0, 1), "{error}");
    error
}

const RANDOM: [&str; 7] = ["config/demo.toml", "--route", "random", "--output-len", "24", "--input-len", "20"];

#[test]
fn a_load_on_the_demo() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (json, trace, svg) = (at("out.json"), at("trace.json"), at("out.svg"));
    let files = ["--json", &json, "--timeline", &trace, "--timeline-svg", &svg];
    let output = bench(&[&RANDOM[..], &["--requests", "1,2", "--total", "3"], &files].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for part in ["tokens/s", "TTFT p50", "handoffs", "busy", "gap p50", "small", "large"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let read = |file: &str| -> Value { serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap() };
    let results = read(&json);
    assert_eq!((&results["route"], &results["models"][1]["device"]), (&"random".into(), &"cpu".into()));
    let loads = results["loads"].as_array().unwrap();
    for (load, requests) in loads.iter().zip([1, 2]) {
        assert_eq!((&load["requests"], &load["total"], &load["tokens"]), (&requests.into(), &3.into(), &72.into()));
        let models = load["models"].as_array().unwrap();
        let sum = |key: &str| models.iter().map(|model| model[key].as_u64().unwrap()).sum::<u64>();
        assert_eq!((models.len(), sum("tokens")), (2, 72));
        // A visit goes there and back, unless the request ends with it.
        let large = models[1]["tokens"].as_u64().unwrap();
        let handoffs = load["handoffs"].as_u64().unwrap();
        assert!((2 * large - 3..=2 * large).contains(&handoffs), "{handoffs} {large}");
        // The small model computes every token, those of the large one too.
        assert!(models[0]["steps"].as_f64().unwrap() * models[0]["mean_batch"].as_f64().unwrap() >= 72.0);
        // There is none when the first request ends before the second has a token.
        let decode = &load["decode_tokens_per_second"];
        assert!(decode.as_f64().is_some_and(|rate| rate > 0.0) || (requests == 2 && decode.is_null()), "{decode}");
        let [first, ninety_nine] = ["p50", "p99"].map(|p| load["ttft_ms"][p].as_f64().unwrap());
        assert!(first > 0.0 && ninety_nine >= first);
    }
    // The last load's steps, and a name for each track.
    let steps: u64 = loads[1]["models"].as_array().unwrap().iter().map(|model| model["steps"].as_u64().unwrap()).sum();
    assert_eq!(read(&trace)["traceEvents"].as_array().unwrap().len() as u64, steps + 2);
    let svg = std::fs::read_to_string(&svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("small: busy "), "{svg}");
}

/// The same seed makes the same prompts and draws, so the same models write the same number of tokens.
#[test]
fn loads_can_be_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = |name: &str, seed: &str| -> Vec<u64> {
        let file = dir.path().join(name);
        let more = ["--requests", "2", "--seed", seed, "--json", file.to_str().unwrap()];
        let output = bench(&[&RANDOM[..], &more].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let results: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let models = results["loads"][0]["models"].as_array().unwrap();
        models.iter().map(|model| model["tokens"].as_u64().unwrap()).collect()
    };
    let first = tokens("a.json", "7");
    assert_eq!(first.iter().sum::<u64>(), 96);
    assert_eq!(first, tokens("b.json", "7"));
}

#[test]
fn refusals_are_one_line() {
    let load = ["--requests", "1", "--input-len", "8"];
    for (arguments, message) in [
        (&["config/demo.toml", "--route", "rnadom", "--output-len", "4"][..], "did you mean `random`?"),
        (
            &["config/demo.toml", "--route", "small", "--output-len", "100000"],
            "--input-len, --output-len: This model's maximum context length is ",
        ),
        (
            &["config/demo.toml", "--route", "small", "--output-len", "4", "--json", "no/such/place.json"],
            "--json: no/such/place.json cannot be written",
        ),
        (
            &["config/demo.toml", "--route", "small", "--output-len", "4", "--timeline-svg", "out.png"],
            "--timeline-svg: out.png must end in .svg",
        ),
    ] {
        let refused = refusal(&[arguments, &load].concat());
        assert!(refused.contains(message), "{refused}");
    }
    for what in ["--kernels", "--steps"] {
        let refused = refusal(&[what, "--device", "cuda:1023"]);
        assert!(refused.starts_with("error: --device cuda:1023: "), "{refused}");
    }
}
