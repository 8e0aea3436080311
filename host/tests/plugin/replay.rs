//! `tokenrouter replay`

use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::{built, program, root, text};

fn replay(arguments: &[&str]) -> Output {
    let mut command = Command::new(program());
    command.current_dir(root()).stdin(Stdio::null()).env_remove("RUST_LOG");
    command.arg("replay").args(arguments).output().unwrap()
}

/// The library, the text and the module from AssemblyScript decide alike, on R-Stitch's own traces as recorded.
#[test]
fn replays_of_all_forms_of_r_stitch_agree() {
    for (number, other) in [(1, None), (2, None), (3, None), (4, None), (2, Some(0.3))] {
        let trace = format!("tests/fixtures/goldens/traces/rstitch-{number}.json");
        let json: Value = serde_json::from_slice(&std::fs::read(root().join(&trace)).unwrap()).unwrap();
        let threshold = other.or_else(|| json["parameter"].as_f64()).unwrap();
        let settings = json!({ "threshold": threshold }).to_string();
        let forms = [
            built("librstitch.so"),
            "plugins/rstitch/rstitch.wat".into(),
            "plugins/rstitch/assemblyscript/rstitch.wasm".into(),
        ];
        let reports = forms.map(|file| {
            let output = replay(&[&trace, "--plugin", &file, "--settings", &settings, "--json"]);
            assert!(output.status.success(), "{}", text(&output.stderr));
            let mut report: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert!(report["policy"].as_str().unwrap().ends_with(&format!("({file})")), "{report}");
            report["policy"] = Value::Null;
            report
        });
        assert!(reports[0] == reports[1] && reports[0] == reports[2], "{reports:#?}");
        assert_eq!(reports[0]["exact"], json!(other.is_none()), "{}", reports[0]);
    }
}

#[test]
fn replay_refuses_what_it_cannot_follow() {
    let trace = "tests/fixtures/goldens/traces/rstitch-2.json";
    let router = json!({ "router": "models/demo/routers/citer/router.safetensors" }).to_string();
    let (citer, verify, me) = (built("libciter.so"), built("libverify.so"), built("libme.so"));
    for (more, part) in [
        (
            &["--plugin", &citer, "--settings", &router][..],
            "it has no `net_citer` at model `small`, which policy `citer`",
        ),
        (&["--plugin", &verify], "the policy keeps a draft; a replay follows policies that stay and hand over"),
        (&["--plugin", &me], "settings/weights: required but missing"),
        (&["--plugin", "none.so"], "no such file"),
        (&["--plugin", &me, "--recorded", "x"], "is one answer, of one route; leave --recorded out"),
        (&["--plugin", "plugins/rstitch/rstitch.wat", "--roles", "a=slm,b=llm"], "--roles: there is no model `a` in"),
        (&["--config", "config/demo.toml"], "--route <NAME>"),
        (&[], "--plugin <FILE>"),
    ] {
        let output = replay(&[&[trace], more].concat());
        let error = text(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(part) && output.stdout.is_empty(), "{part}: {error}");
    }
}

#[test]
fn a_hook_that_hangs_ends_the_replay() {
    let trace = "tests/fixtures/goldens/traces/rstitch-2.json";
    let settings = json!({ "serve": true, "end": "hang" }).to_string();
    let output = replay(&[trace, "--plugin", &built("libprobe.so"), "--settings", &settings, "--timeout", "1"]);
    let (error, says) =
        (text(&output.stderr), "hook `route` of plugin `probe` at model `small` did not come back within 1 s");
    assert!(output.status.code() == Some(1) && error.contains(says) && output.stdout.is_empty(), "{error}");
}

#[test]
fn a_csv_file_that_cannot_be_made_is_told() {
    let trace = "tests/fixtures/goldens/traces/rstitch-2.json";
    let arguments = [trace, "--plugin", "plugins/rstitch/rstitch.wat", "--csv", "no/such/directory.csv"];
    let error = text(&replay(&arguments).stderr);
    assert!(error.contains("--csv no/such/directory.csv: its directory does not exist; make it, or give"), "{error}");
}

/// Only the rows of tokens that were written; a hand-off shows in none of them.
#[test]
fn an_answer_of_generate_can_be_replayed() {
    let directory = tempfile::tempdir().unwrap();
    let token = |id: u32, model: &str, entropy: f64| json!({ "id": id, "text": "x", "model": model, "logprob": -0.1, "signals": { "entropy_norm": entropy } });
    let answer = json!({
        "route": "rstitch", "text": "xxxx", "finish_reason": "length",
        "usage": { "prompt_tokens": 3, "completion_tokens": 4, "tokens_by_model": {}, "handoffs": 2 },
        "tokens": [
            token(5, "small", 0.01), token(6, "small", 0.02), token(7, "large", 0.01), token(8, "small", 0.2),
        ],
    });
    let file = directory.path().join("answer.json");
    std::fs::write(&file, answer.to_string()).unwrap();
    let csv = directory.path().join("requests.csv");
    let files = [&file, &csv].map(|path| path.to_str().unwrap());
    let output = replay(&[files[0], "--plugin", "plugins/rstitch/rstitch.wat", "--csv", files[1]]);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(table.contains("\nAn answer's JSON has no rows of candidates that were dropped"), "{table}");
    assert!(table.contains("\ntokens without a recorded row"), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
    let csv = std::fs::read_to_string(csv).unwrap();
    assert!(csv.lines().nth(1).unwrap().starts_with("0,4,3,1,"), "{csv}");
}
