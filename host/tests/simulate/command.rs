//! `tokenrouter simulate` as its users meet it.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn simulate(arguments: &[&str]) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tokenrouter"));
    command.current_dir(root).env_remove("RUST_LOG").arg("simulate").args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn text_of(output: &Output) -> String {
    text(&output.stderr)
}

#[test]
fn tables_json_and_csv() {
    let dir = tempfile::tempdir().unwrap();
    let [json, csv] = ["r.json", "r.csv"].map(|name| dir.path().join(name).display().to_string());
    let output = simulate(&[
        "config/plans/r2r.toml",
        "--schedule",
        "delayed,step-sync",
        "--concurrency",
        "1,8",
        "--requests",
        "16",
        "--json",
        &json,
        "--csv",
        &csv,
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for part in ["tokens/s", "steady", "TTFT p50", "E2E p50", "handoffs", "step-sync", "busy", "small", "large"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let results: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let runs = results["runs"].as_array().unwrap();
    let named: Vec<_> =
        runs.iter().map(|r| (r["schedule"].as_str().unwrap(), r["concurrency"].as_u64().unwrap())).collect();
    assert_eq!(named, [("delayed", 1), ("delayed", 8), ("step-sync", 1), ("step-sync", 8)]);
    let rate = |run: usize| runs[run]["tokens_per_second"].as_f64().unwrap();
    assert!(rate(1) > 1.2 * rate(3), "delayed {} step-sync {}", rate(1), rate(3));
    let lines = std::fs::read_to_string(csv).unwrap();
    assert_eq!(lines.lines().count(), 1 + 4 * 16);
    let tokens: u64 = lines.lines().skip(1).map(|line| line.split(',').nth(5).unwrap().parse::<u64>().unwrap()).sum();
    assert_eq!(tokens, runs.iter().map(|run| run["tokens"].as_u64().unwrap()).sum::<u64>());
}

/// 16 models with an instance on each of 4 hosts of their own.
#[test]
fn plans_beyond_one_machine() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("large.toml");
    let share = 1.0 / 16.0;
    let routing: Vec<String> = (0..16).map(|model| format!("m{model} = {share}")).collect();
    let mut plan = String::from(
        "[simulation]\narrivals = { closed = 2000 }\nrequests = 10000\nprompt = 16\noutput = [2, 6]\nnetwork_ms = 0.2\n",
    );
    for model in 0..16 {
        let hosts: Vec<String> = (0..4).map(|copy| format!("h{model}-{copy}")).collect();
        let step = 2 + model;
        plan += &format!(
            "[models.m{model}]\nstep_ms = {step}\nhosts = {hosts:?}\nrouting = {{ {} }}\n",
            routing.join(", ")
        );
    }
    std::fs::write(&file, plan).unwrap();
    let json = dir.path().join("r.json").display().to_string();
    let output = simulate(&[&file.display().to_string(), "--json", &json]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let results: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let run = &results["runs"][0];
    assert_eq!((&run["requests"], run["models"].as_array().unwrap().len()), (&10_000.into(), 16));
    assert_eq!(run["models"][3]["instances"], 4);
}

#[test]
fn a_trace_keeps_its_requests() {
    let dir = tempfile::tempdir().unwrap();
    let plan = dir.path().join("p.toml");
    let written = "[simulation]\narrivals = { trace = 't.csv' }\n[models.m]\nstep_ms = 10\n";
    std::fs::write(&plan, written).unwrap();
    std::fs::write(dir.path().join("t.csv"), "arrival_ms,output_tokens\n0,3\n5,2\n").unwrap();
    let [plan, csv] = [plan, dir.path().join("r.csv")].map(|path| path.display().to_string());
    let output = simulate(&[&plan, "--csv", &csv]);
    assert_eq!(output.status.code(), Some(0), "{}", text_of(&output));
    // The second comes in the first step and joins the second.
    let lines = std::fs::read_to_string(csv).unwrap();
    let told: Vec<&str> = lines.lines().skip(1).collect();
    assert_eq!(
        told,
        [
            "delayed,-,0,0.000000,1,3,10.000000,10.000000,30.000000,0",
            "delayed,-,1,5.000000,1,2,15.000000,10.000000,25.000000,0"
        ]
    );
    for flag in ["--concurrency", "--requests"] {
        let refused = simulate(&[&plan, flag, "2"]);
        assert_eq!(refused.status.code(), Some(2));
        assert!(text_of(&refused).contains(&format!("{flag}: the plan's requests are those of its trace")));
    }
}

#[test]
fn refusals_are_one_line() {
    for (arguments, message) in [
        (&["config/plans/r2r.toml", "--concurrency", "0"][..], "0 is not in 1.."),
        (
            &["config/plans/r2r.toml", "--schedule", "lazy"],
            "must be \"delayed\", \"eager\", \"model-sync\" or \"step-sync\"",
        ),
        (&["no/plan.toml"], "no/plan.toml: cannot be read: "),
        (&["config/demo.toml"], "config/demo.toml: "),
    ] {
        let output = simulate(arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(message) && output.stdout.is_empty(), "{error}");
    }
}
