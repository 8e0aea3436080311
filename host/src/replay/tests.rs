//! The reference traces before R-Stitch in each of its forms, and what a report says of a difference.

use std::path::{Path, PathBuf};

use rstitch::RStitch;
use serde_json::json;
use tokenrouter_plugin_api::{ModelDescription, NoServices, Services};

use super::*;
use crate::policy::monitor::Monitors;
use crate::policy::plugin::Plugin;
use crate::policy::{Linked, PolicyFactory};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All reference traces: name, algorithm, parameter, trace.
fn traces() -> Vec<(String, String, serde_json::Value, Trace)> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(root().join("tests/fixtures/goldens/traces")).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    let load = |path: PathBuf| {
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let algorithm = json["algorithm"].as_str().unwrap().to_owned();
        (name, algorithm, json["parameter"].clone(), read(&path, None).unwrap())
    };
    paths.into_iter().map(load).collect()
}

fn models(trace: &Trace) -> Vec<ModelDescription> {
    let small = if trace.models.iter().any(|model| model == "small-collm") { "small-collm" } else { "small" };
    let described = |(name, role): (&str, &str)| ModelDescription { name: name.into(), role: role.into() };
    [(small, "slm"), ("large", "llm")].map(described).into()
}

fn replay(policy: &dyn PolicyFactory, threshold: f64, trace: &Trace) -> Vec<Played> {
    let (models, services): (_, [&dyn Services; 2]) = (models(trace), [&NoServices; 2]);
    let place = Place {
        route: "r",
        models: &models,
        entry: 0,
        vocab_size: trace.vocab_size,
        eos: &[],
        services: &services,
        monitors: &Monitors::default(),
    };
    let settings = json!({ "threshold": threshold }).to_string();
    let team = || Team::new(policy, &settings, &place, trace).unwrap();
    play(trace, &mut team(), &mut team()).unwrap()
}

/// Native, from WebAssembly text and from AssemblyScript: the same decisions about every row of every algorithm's
/// traces, and the recorded ones on its own.
#[test]
fn all_forms_of_r_stitch_decide_alike() {
    let wasm = |file: &str| Plugin::load(&root().join("plugins/rstitch").join(file), None).unwrap().policy;
    let (text, script) = (wasm("rstitch.wat"), wasm("assemblyscript/rstitch.wasm"));
    let traces = traces();
    assert_eq!(traces.len(), 24);
    let (mut own, mut handoffs) = (0, 0);
    for (name, algorithm, parameter, trace) in &traces {
        let threshold = if algorithm == "rstitch" { parameter.as_f64().unwrap() } else { 0.03 };
        let native = replay(&Linked::<RStitch>::default(), threshold, trace);
        for other in [&text, &script] {
            assert_eq!(replay(&**other, threshold, trace), native, "{name}");
        }
        handoffs += native[0].handoffs;
        if algorithm == "rstitch" {
            own += 1;
            let [played] = &native[..] else { panic!("{name}") };
            assert_eq!((played.alike, played.unasked, &played.first), (played.compared, 0, &None), "{name}");
            assert_eq!((&played.chosen, played.handoffs), (&played.recorded, played.recorded_handoffs), "{name}");
        }
    }
    assert!(own == 4 && handoffs > 20, "{own} {handoffs}");
}

#[test]
fn a_report_names_the_first_difference() {
    let traces = traces();
    let (_, _, _, trace) = traces.iter().find(|(name, ..)| name == "rstitch-2").unwrap();
    // Nothing is uncertain enough: the small model writes all of it.
    let played = replay(&Linked::<RStitch>::default(), 1.0, trace);
    let first = played[0].first.clone().unwrap();
    assert_eq!((first.position, first.model.as_str(), first.candidate), (8, "small", 17));
    assert_eq!((first.recorded.as_str(), first.chosen.as_str()), ("to large", "stay"));
    assert!(first.signals[0].0 == "entropy_norm" && (first.signals[0].1 - 0.06478).abs() < 1e-4, "{first:?}");
    let text = |_| Some("x\x1b".to_owned());
    let models = vec!["small".to_owned(), "large".to_owned()];
    let report = Report {
        policy: "rstitch 0.1.0 (librstitch.so)".into(),
        trace: trace.source.clone(),
        models,
        played: &played,
        notes: &[],
        text: &text,
    };
    let table = report.table();
    assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
    for part in [
        "\ntokens by small                         16 ( 84.2 %)        19 (100.0 %)\n",
        "\ntokens by large                          3 ( 15.8 %)         0 (  0.0 %)\n",
        "\nhand-offs a request                             6.00                0.00\n",
        "\ntokens without a recorded row                                0 (  0.0 %)\n",
        "\ndecisions alike 18 ( 85.7 %) of 21 rows, all of them in 0 of 1 requests\n",
        "\n       0      8  small       \"x\\u{1b}\" #17       to large      stay          entropy_norm 0.0648\n",
        "are exact, after it a guess. `tokenrouter eval` measures.\n",
    ] {
        assert!(table.contains(part), "{part}\nis not in\n{table}");
    }
    let json = report.json();
    assert_eq!((&json["chosen"]["tokens_by_model"]["small"], &json["exact"]), (&json!(19), &json!(false)));
    assert_eq!(json["first_differences"][0]["chosen"], "stay");
    let mut csv = Vec::new();
    report.csv(&mut csv).unwrap();
    let csv = String::from_utf8(csv).unwrap();
    assert!(
        csv.starts_with("request,tokens,recorded_small,recorded_large,chosen_small,chosen_large,recorded_"),
        "{csv}"
    );
    assert!(csv.lines().nth(1).unwrap().contains(",8,small,17,to large,stay,entropy_norm=0.0647"), "{csv}");
}

#[test]
fn what_is_no_trace() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.json");
    let error = |text: &str| {
        std::fs::write(&path, text).unwrap();
        read(&path, None).unwrap_err()
    };
    assert!(error("{").contains("is neither a recording nor an answer of `tokenrouter generate --json`"));
    assert!(error("{\"route\": \"r\"}").contains("(missing field `usage`"));
    let empty = r#"{"route": "r", "usage": {"prompt_tokens": 1, "handoffs": 0}, "tokens": []}"#;
    assert!(error(empty).ends_with("holds no evaluation of a request that ended"));
    let one = |prompt: u64, id: u64| {
        let (usage, token) =
            (json!({"prompt_tokens": prompt, "handoffs": 0}), json!({"id": id, "model": "m", "signals": {}}));
        error(&json!({"route": "r", "usage": usage, "tokens": [token]}).to_string())
    };
    assert!(one(1, 4294967295).ends_with("x.json: tokens/0: 4294967295 is no token's id"));
    assert!(
        one(u64::MAX, 1)
            .ends_with("x.json: usage: prompt_tokens = 18446744073709551615: more than 16777216 are not replayed")
    );
    let steps = |candidate: u64, id: u64| {
        let steps = json!([{"evaluations": [{"model": "m", "candidate": candidate}]}]);
        let ids = json!({"algorithm": "a", "max_new_tokens": 1, "prompt_ids": [id], "token_ids": [1], "models": ["m"], "steps": steps});
        error(&ids.to_string())
    };
    assert!(steps(1, 4294967295).ends_with("x.json: prompt_ids/0: 4294967295 is no token's id"));
    assert!(steps(4294967296, 1).ends_with("x.json: steps/0: an evaluation has no `candidate that is a token's id`"));
    assert!(read(directory.path(), None).unwrap_err().contains("is no recording: it has no manifest.json"));
    // Nobody writes to it: a read would wait for ever.
    let pipe = directory.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(read(&pipe, None).unwrap_err().contains("pipe: is not a regular file; give a run of a recording"));
    let run = directory.path().join("run");
    std::fs::create_dir(&run).unwrap();
    std::fs::rename(&pipe, run.join("manifest.json")).unwrap();
    assert!(read(&run.join("manifest.json"), None).unwrap_err().contains("is no recording"));
    assert!(read(&directory.path().join("none"), None).unwrap_err().contains("none: there is no such file; give"));
}
