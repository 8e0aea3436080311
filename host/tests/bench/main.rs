//! `tokenrouter bench` on the demo.
//!
//! The plugins must be built beside the program, as `cargo xtask test` does.
#![allow(clippy::unwrap_used)] // Helpers of tests.

mod variants;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn tokenrouter(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tokenrouter"));
    command.current_dir(root()).stdin(Stdio::null()).args(arguments);
    for (name, _) in std::env::vars() {
        if name.starts_with("TOKENROUTER__") || ["RUST_LOG", "OPENAI_API_KEY"].contains(&name.as_str()) {
            command.env_remove(name);
        }
    }
    command
}

fn bench(arguments: &[&str]) -> Output {
    tokenrouter(&[&["bench"], arguments].concat()).output().unwrap()
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

/// The table and the JSON of a load that went well.
fn measured(arguments: &[&str]) -> (String, Value) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.json");
    let output = bench(&[arguments, &["--json", file.to_str().unwrap()]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    (text(&output.stdout), read(&file))
}

fn read(file: impl AsRef<Path>) -> Value {
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

/// Sums of numbers, in arrays of any depth.
fn sum(value: &Value) -> u64 {
    value.as_array().map_or_else(|| value.as_u64().unwrap(), |items| items.iter().map(sum).sum())
}

fn numbers(value: &Value, keys: &[&str]) -> Vec<u64> {
    keys.iter().map(|key| value[*key].as_u64().unwrap_or_else(|| panic!("{key}: {value}"))).collect()
}

/// A server of the demo on a port of its own.
struct Server {
    process: Child,
    url: String,
}

impl Server {
    fn start() -> Self {
        let mut process =
            tokenrouter(&["serve", "config/demo.toml", "--port", "0"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
        let line = lines.find(|line| line.contains(" at http://")).unwrap();
        Self { process, url: line.split_once(" at ").unwrap().1.to_owned() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

const RANDOM: [&str; 7] = ["config/demo.toml", "--route", "random", "--output-len", "24", "--input-len", "20"];

#[test]
fn a_load_on_the_demo() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (trace, svg, plot, csv) = (at("trace.json"), at("out.svg"), at("plot.svg"), at("out.csv"));
    let files = ["--timeline", &trace, "--timeline-svg", &svg, "--plot", &plot, "--csv", &csv];
    let (table, results) = measured(&[&RANDOM[..], &["--requests", "1,2", "--total", "3"], &files].concat());
    for part in ["tokens/s", "TTFT", "hand-off", "handoffs", "busy", "gap p50", "fill", "small", "large"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    assert_eq!((&results["route"], &results["models"][1]["device"]), (&"random".into(), &"cpu".into()));
    let loads = results["loads"].as_array().unwrap();
    for (load, requests) in loads.iter().zip([1, 2]) {
        let keys = ["requests", "total", "tokens", "completed", "failed", "total_input_tokens", "total_output_tokens"];
        assert_eq!(numbers(load, &keys), [requests, 3, 72, 3, 0, 60, 72]);
        assert_eq!(numbers(load, &["max_concurrency", "max_concurrent_requests"]), [requests; 2]);
        let models = load["models"].as_array().unwrap();
        let of = |key: &str| models.iter().map(|model| model[key].as_u64().unwrap()).collect::<Vec<_>>();
        let (tokens, steps) = (of("tokens"), of("steps"));
        assert_eq!((models.len(), tokens.iter().sum::<u64>()), (2, 72));
        assert_eq!(numbers(&load["tokens_by_model"], &["small", "large"]), tokens);
        // A visit goes there and back, unless the request ends with it.
        let handoffs = load["handoffs"].as_u64().unwrap();
        assert!((2 * tokens[1] - 3..=2 * tokens[1]).contains(&handoffs), "{handoffs} {tokens:?}");
        // Every step of a request is a transition or its last.
        let transitions = &load["transitions"];
        assert_eq!(sum(&transitions[0][1]) + sum(&transitions[1][0]), handoffs);
        assert_eq!((sum(&load["begun"]), load["entry"].as_u64()), (3, Some(0)));
        assert_eq!((sum(&load["last_steps"]), sum(&load["commits"]) + sum(&load["last_commits"])), (3, 72));
        // The small model drops what the large one writes.
        assert_eq!(sum(&load["commits"][0][1]), 0);
        assert_eq!(sum(&load["commits"][1]) + sum(&load["last_commits"][1]), tokens[1]);
        let sequences: f64 =
            models.iter().zip(&steps).map(|(m, s)| m["mean_batch"].as_f64().unwrap() * *s as f64).sum();
        assert_eq!(sequences.round() as u64, sum(transitions) + 3);
        // Steps with prompts are not among them: at least one of each model.
        for (model, steps) in models.iter().zip(steps) {
            let batches = model["steps_by_batch"].as_array().unwrap();
            let counted: u64 = batches.iter().map(|batch| batch["steps"].as_u64().unwrap()).sum();
            assert!(counted < steps && batches.iter().all(|batch| sum(&batch["requests"]) <= requests), "{batches:?}");
        }
        // There is none when the first request ends before the second has a token.
        let decode = &load["decode_tokens_per_second"];
        assert!(decode.as_f64().is_some_and(|rate| rate > 0.0) || (requests == 2 && decode.is_null()), "{decode}");
        for time in ["ttft", "tpot", "itl", "e2el"] {
            let all = ["median", "p90", "p95", "p99"].map(|which| load[format!("{which}_{time}_ms")].as_f64().unwrap());
            assert!(all[0] > 0.0 && all.is_sorted(), "{time}: {all:?}");
        }
        let [ttft, e2e] = ["ttft_ms", "e2e_ms"].map(|time| load[time]["mean"].as_f64().unwrap());
        assert!(load["queue_ms"]["mean"].as_f64().unwrap() < ttft && ttft < e2e);
    }
    // The last load's steps, and a name for each track.
    let steps: u64 = loads[1]["models"].as_array().unwrap().iter().map(|model| model["steps"].as_u64().unwrap()).sum();
    assert_eq!(read(&trace)["traceEvents"].as_array().unwrap().len() as u64, steps + 2);
    let svg = std::fs::read_to_string(&svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("small: busy "), "{svg}");
    let plot = std::fs::read_to_string(&plot).unwrap();
    assert!(plot.contains("Requests in a step") && plot.contains("End to end"), "{plot}");
    let csv = std::fs::read_to_string(&csv).unwrap();
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!((rows.len(), rows[0][0], rows[4][0], rows[1][6]), (7, "load", "2", "24"));
}

/// The same seed makes the same prompts and draws, so the same models write the same number of tokens.
#[test]
fn loads_can_be_repeated() {
    let tokens = |seed: &str| -> Vec<u64> {
        let (_, results) = measured(&[&RANDOM[..], &["--requests", "2", "--seed", seed]].concat());
        let models = results["loads"][0]["models"].as_array().unwrap();
        models.iter().map(|model| model["tokens"].as_u64().unwrap()).collect()
    };
    let first = tokens("7");
    assert_eq!(first.iter().sum::<u64>(), 96);
    assert_eq!(first, tokens("7"));
}

/// Drafts are committed by the model that verifies them.
#[test]
fn commits_of_a_verifying_route() {
    let load = ["config/demo.toml", "--route", "verify", "--output-len", "20", "--input-len", "20", "--requests", "2"];
    let (_, results) = measured(&load);
    let load = &results["loads"][0];
    assert_eq!(sum(&load["commits"]) + sum(&load["last_commits"]), 80);
    assert_eq!(sum(&load["last_steps"]), 4);
    assert!(sum(&load["transitions"][0][0]) > 0 && sum(&load["commits"][0]) == 0, "{load}");
}

#[test]
fn an_open_load() {
    let load = ["--rate", "200,inf", "--total", "8", "--burstiness", "0.5", "--max-concurrency", "3"];
    let more = ["--prefix-len", "10", "--goodput", "ttft:1000000", "e2e:0.000001", "--warm-up", "0"];
    let (table, results) = measured(&[&RANDOM[..], &load, &more].concat());
    assert!(table.contains("late") && table.contains("200/s") && table.contains("inf/s"), "{table}");
    for (load, rate) in results["loads"].as_array().unwrap().iter().zip([Value::from(200.0), "inf".into()]) {
        assert_eq!(numbers(load, &["completed", "total_input_tokens", "total_output_tokens"]), [8, 240, 192]);
        assert_eq!((&load["request_rate"], &load["max_concurrency"]), (&rate, &3.into()));
        assert!(load["max_concurrent_requests"].as_u64().unwrap() <= 3);
        // Nobody is that fast.
        assert_eq!(load["request_goodput"], 0.0);
        assert!(load["decode_tokens_per_second"].is_null() && load["requests"].is_null());
    }
}

const DATA: &str = r#"{"messages": [{"role": "user", "content": "Compute 2 + 2."}], "session": "a", "output_len": 6}
{"prompt": "One two three"}
{"messages": [{"role": "user", "content": "And 3 + 3?"}], "session": "a", "output_len": 4}
"#;

/// In process and by URL the same is asked, and the same comes back.
#[test]
fn a_load_of_a_server() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data.jsonl");
    std::fs::write(&data, DATA).unwrap();
    let random = &["--output-len", "24:8", "--input-len", "20:10", "--prefix-len", "5"][..];
    let turns = &["--dataset", data.to_str().unwrap(), "--output-len", "8"][..];
    let server = Server::start();
    for (load, completed) in [(random, 6), (turns, 9)] {
        let load = [load, &["--requests", "2", "--total", "6"]].concat();
        let (_, here) = measured(&[&["config/demo.toml", "--route", "random"], &load[..]].concat());
        let (table, there) =
            measured(&[&["--url", &server.url, "--model", "random", "--vocab-size", "2048"], &load[..]].concat());
        assert!(table.contains("small") && !table.contains("busy"), "{table}");
        assert_eq!(there["model"], "random");
        let (here, there) = (&here["loads"][0], &there["loads"][0]);
        assert_eq!(there["completed"], completed);
        for key in ["completed", "failed", "total_input_tokens", "total_output_tokens", "tokens_by_model", "handoffs"] {
            assert_eq!(here[key], there[key], "{key}");
        }
        let [ttft, e2e] = ["median_ttft_ms", "median_e2el_ms"].map(|time| there[time].as_f64().unwrap());
        assert!(0.0 < ttft && ttft < e2e && there["models"] == Value::Array(Vec::new()));
    }
    for (arguments, message) in [
        (&["--requests", "1"][..], "--url: --model is missing; the server has r2r, "),
        (&["--model", "random", "--requests", "1", "--output-len", "4"], "--vocab-size is missing"),
    ] {
        let refused = refusal(&[&["--url", server.url.as_str()], arguments].concat());
        assert!(refused.contains(message), "{refused}");
    }
}

/// Each load has prefixes of its own, and the answers of earlier turns are known.
#[test]
fn cold_and_warm_prompts_are_told_apart() {
    let load = ["--requests", "1", "--total", "4", "--prefix-len", "320", "--prefixes", "2", "--turns", "2"];
    let (table, results) = measured(&[&RANDOM[..], &load].concat());
    let load = &results["loads"][0];
    let by = &load["ttft_by_cache"];
    assert_eq!(numbers(by, &["cold_requests", "warm_requests"]), [2, 6]);
    // 340 tokens, and then as many with the first answer and 20 more.
    assert_eq!(numbers(load, &["total_input_tokens", "completed"]), [4 * (340 + 340 + 24 + 20), 8]);
    assert!(by["ratio"].as_f64().unwrap() > 0.0 && table.contains("TTFT warm"), "{table}");
    assert!(table.contains("1: median TTFT of the 6 warm requests is "), "{table}");
    let (_, shared) = measured(&[&RANDOM[..], &["--requests", "1", "--prefix-len", "320"]].concat());
    assert!(shared["loads"][0]["ttft_by_cache"].is_null());
}

#[test]
fn a_load_can_be_broken_off() {
    let load = ["config/demo.toml", "--route", "random", "--input-len", "8", "--output-len", "2000"];
    let (table, results) = measured(&[&load[..], &["--requests", "2", "--total", "40", "--max-seconds", "1"]].concat());
    let load = &results["loads"][0];
    assert_eq!(numbers(load, &["cut", "failed"]), [2, 0]);
    let [total, tokens] = numbers(load, &["total", "tokens"])[..] else { panic!() };
    assert!(total < 40 && tokens < 80_000 && load["tokens_per_second"].as_f64().unwrap() > 0.0, "{load}");
    assert_eq!(sum(&load["tokens_by_model"]["small"]) + sum(&load["tokens_by_model"]["large"]), tokens);
    assert!(table.contains("2: broken off after ") && table.contains(" with 2 of "), "{table}");
}

/// They are counted, told, and make the command fail; what went well is reported.
#[test]
fn failures_are_not_hidden() {
    let dir = tempfile::tempdir().unwrap();
    let (data, json, csv) = (dir.path().join("data.jsonl"), dir.path().join("out.json"), dir.path().join("out.csv"));
    let at = |path: &Path| path.to_str().unwrap().to_owned();
    // The second turn of the session does not fit the context, nor what follows it.
    std::fs::write(
        &data,
        "{\"prompt_len\": 8}\n{\"prompt_len\": 9, \"session\": 1}\n{\"prompt_len\": 100000, \"session\": \
                           1}\n{\"prompt_len\": 9, \"session\": 1}\n",
    )
    .unwrap();
    let load = ["config/demo.toml", "--route", "small", "--requests", "2", "--output-len", "4"];
    let output = bench(&[&load[..], &["--dataset", &at(&data), "--json", &at(&json), "--csv", &at(&csv)]].concat());
    let (table, error) = (text(&output.stdout), text(&output.stderr));
    assert_eq!((output.status.code(), error.lines().count()), (Some(1), 1), "{error}");
    assert!(error.starts_with("error: 2 of 4 requests failed: "), "{error}");
    assert!(table.contains("2: 1 of 4 failed: an earlier turn of the session failed: This model's"), "{table}");
    let load = &read(&json)["loads"][0];
    assert_eq!(numbers(load, &["completed", "failed", "total_input_tokens", "total_output_tokens"]), [2, 2, 17, 8]);
    assert_eq!(load["failures"].as_array().unwrap().len(), 2);
    assert_eq!(std::fs::read_to_string(&csv).unwrap().matches("maximum context length").count(), 2);
}

#[test]
fn refusals_are_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let data = |text: &str| {
        let file = dir.path().join(format!("{}.jsonl", text.len()));
        std::fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let (bad, long) = (data("\n{\"prompt\": 3}"), data("{\"prompt_len\": 100000}"));
    let tokens = data("{\"prompt_len\": 3, \"session\": 1}\n{\"prompt_len\": 4, \"session\": 1}");
    let small = ["config/demo.toml", "--route", "small", "--requests", "1", "--input-len", "8"];
    for (arguments, message) in [
        (&["--output-len", "100000"][..], "--output-len: This model's maximum context length is "),
        (&["--json", "no/such/place.json"], "--json: no/such/place.json cannot be written"),
        (&["--timeline-svg", "out.png"], "--timeline-svg: out.png must end in .svg"),
        (&["--plot", "out.png"], "--plot: out.png must end in .svg"),
        (&["--dataset", "no/such.jsonl"], "--dataset: no/such.jsonl: No such file"),
        (&["--dataset", &bad], ".jsonl:2: `prompt` must be text or a list of token ids, not a number"),
        (&["--dataset", &long], ".jsonl:1: This model's maximum context length is "),
    ] {
        let output_len = if arguments[0] == "--output-len" { &[][..] } else { &["--output-len", "4"] };
        let refused = refusal(&[&small, output_len, arguments].concat());
        assert!(refused.contains(message), "{refused}");
    }
    for (arguments, message) in [
        (&["config/demo.toml", "--route", "rnadom", "--requests", "1"][..], "did you mean `random`?"),
        (&["config/demo.toml", "--route", "small", "--requests", "1"], "the length of the answer is missing"),
        (&["config/demo.toml", "--route", "small", "--rate", "1", "--output-len", "4"], "--total is missing"),
        (&["--url", "https://h", "--requests", "1"], "--url: \"https://h\" has the scheme https"),
        (&["--url", "http://127.0.0.1:9", "--requests", "1"], "--url: 127.0.0.1:9: cannot connect: "),
        (&["--url", "http://h", "--requests", "1", "--dataset", &tokens], ".jsonl:1: a session of token ids cannot"),
    ] {
        let refused = refusal(arguments);
        assert!(refused.contains(message), "{refused}");
    }
    for what in ["--kernels", "--steps"] {
        let refused = refusal(&[what, "--device", "cuda:1023"]);
        assert!(refused.starts_with("error: --device cuda:1023: "), "{refused}");
    }
}
