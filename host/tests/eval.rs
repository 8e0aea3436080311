//! `tokenrouter eval` on the demo.
//!
//! The plugins must be built beside the program, as `cargo xtask test` does.
#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// `tokenrouter eval` of the demo, with these arguments.
fn eval(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tokenrouter"));
    command.current_dir(root()).stdin(Stdio::null()).args(["eval", "config/demo.toml"]).args(arguments);
    for (name, _) in std::env::vars() {
        if name.starts_with("TOKENROUTER__") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    command
}

const DATASET: [&str; 2] = ["--dataset", "models/demo/eval.jsonl"];

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn good(output: Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn run(arguments: &[&str]) -> Output {
    eval(&[&DATASET, arguments].concat()).output().unwrap()
}

fn json(file: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn rows(file: &Path) -> Vec<Value> {
    std::fs::read_to_string(file).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The points without what depends on the clock.
fn results(file: &Path) -> Vec<Value> {
    let mut points = json(file)["points"].as_array().unwrap().clone();
    for point in &mut points {
        let point = point.as_object_mut().unwrap();
        assert!(point.remove("seconds").unwrap().as_f64() > Some(0.0));
        assert!(point.remove("tokens_per_second").unwrap().as_f64() > Some(0.0));
    }
    points
}

#[test]
fn results_in_every_form() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).display().to_string();
    let (output, csv, plot, details) = (file("o.json"), file("o.csv"), file("o.svg"), file("d.jsonl"));
    let places = ["--output", &output, "--csv", &csv, "--plot", &plot, "--details", &details];
    let what = ["--route", "rstitch", "--route", "small", "--limit", "12", "--sweep", "threshold=0.03,0.2"];
    let table = good(run(&[&what[..], &places].concat()));
    assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
    assert!(table.contains("\nrstitch  threshold=0.03 ") && table.contains("\nsmall "), "{table}");

    let json = json(output.as_ref());
    assert_eq!(json["meta"]["questions"], 12);
    let points = json["points"].as_array().unwrap();
    let names: Vec<_> = points.iter().map(|point| (&point["route"], &point["settings"])).collect();
    let settings = |threshold: f64| serde_json::json!({ "threshold": threshold });
    assert_eq!(
        names,
        [(&"rstitch".into(), &settings(0.03)), (&"rstitch".into(), &settings(0.2)), (&"small".into(), &Value::Null)]
    );
    let rows = rows(details.as_ref());
    assert_eq!(rows.len(), 36);
    for (point, rows) in points.iter().zip(rows.chunks(12)) {
        let count = |of: &dyn Fn(&Value) -> u64| rows.iter().map(of).sum::<u64>();
        assert_eq!(point["correct"], count(&|row| row["correct"].as_bool().unwrap().into()));
        let small = count(&|row| row["tokens_by_model"]["small"].as_u64().unwrap());
        assert_eq!(point["tokens_by_model"]["small"], small);
        assert!(small > 0 && rows.iter().all(|row| row["text"].as_str().unwrap().contains("Answer: ")), "{rows:?}");
    }
    assert!(points[0]["accuracy"].as_f64() > points[2]["accuracy"].as_f64(), "{points:?}");

    // The first question, asked another way.
    let dataset = std::fs::read_to_string(root().join(DATASET[1])).unwrap();
    let question: Value = serde_json::from_str(dataset.lines().next().unwrap()).unwrap();
    let question = question["question"].as_str().unwrap();
    let generated = Command::new(env!("CARGO_BIN_EXE_tokenrouter"))
        .current_dir(root())
        .args(["generate", "config/demo.toml", "--route", "rstitch", "--json", "--prompt", question])
        .output()
        .unwrap();
    let generated: Value = serde_json::from_str(&good(generated)).unwrap();
    assert_eq!(rows[0]["text"], generated["text"]);
    assert_eq!(rows[0]["tokens_by_model"], generated["usage"]["tokens_by_model"]);
    let writers: Vec<_> = generated["tokens"].as_array().unwrap().iter().map(|token| &token["model"]).collect();
    assert_eq!(rows[0]["switches"], writers.windows(2).filter(|pair| pair[0] != pair[1]).count());

    assert_eq!(std::fs::read_to_string(&csv).unwrap().lines().count(), 4);
    assert!(std::fs::read_to_string(&plot).unwrap().contains("tokens by large (%)"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4, "the file of kept answers is gone");
}

#[test]
fn goes_on_after_an_interruption() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("w.json"), dir.path().join("b.json"));
    let kept = dir.path().join("b.json.partial.jsonl");
    let arguments = |output: &Path, limit: &str| -> Vec<String> {
        let output = output.display().to_string();
        let what = ["--route", "rstitch", "--sweep", "threshold=0.01,0.05", "--concurrency", "4", "--limit", limit];
        DATASET.iter().chain(&what).copied().chain(["--output", &output]).map(String::from).collect()
    };
    let run = |output: &Path, limit: &str, more: &[&str]| eval(more).args(arguments(output, limit)).output().unwrap();

    let running = eval(&[]).args(arguments(&broken, "60")).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while std::fs::read_to_string(&kept).map_or(0, |text| text.lines().count()) < 4 {
        assert!(start.elapsed() < Duration::from_secs(60), "no answer came");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(Command::new("kill").args(["-INT", &running.id().to_string()]).status().unwrap().success());
    let output = running.wait_with_output().unwrap();
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.starts_with("error: interrupted; ") && told.contains("the same command goes on"), "{told}");
    assert!(!broken.exists());

    // Another evaluation must not take these answers for its own.
    let refused = run(&broken, "61", &[]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("is of another evaluation"), "{}", text(&refused.stderr));

    let lines = std::fs::read_to_string(&kept).unwrap();
    let last = lines.trim_end().rfind('\n').unwrap();
    std::fs::write(&kept, &lines[..last + 20]).unwrap();
    let answers = lines.lines().count() - 2;
    let resumed = run(&broken, "60", &[]);
    let told = text(&resumed.stderr);
    good(resumed);
    assert_eq!(told, format!("{answers} answers are taken over from {}\n", kept.display()));
    assert!(!kept.exists());
    good(run(&whole, "60", &[]));
    assert_eq!(results(&broken), results(&whole));

    std::fs::write(&kept, "something else\n").unwrap();
    assert!(text(&run(&broken, "2", &[]).stderr).contains("--restart"));
    good(run(&broken, "2", &["--restart"]));
    assert_eq!(results(&broken)[0]["questions"], 2);
}

/// A router may be trained anew in its place.
#[test]
fn answers_of_another_router_are_not_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).display().to_string();
    let parts = ["router.safetensors", "router.json"];
    for part in parts {
        std::fs::copy(root().join("models/demo/routers/r2r").join(part), file(part)).unwrap();
    }
    // This evaluation ends once the digest of all that decides its answers is written.
    let question = "again ".repeat(3000);
    std::fs::write(file("d.jsonl"), format!("{{\"question\": \"{question}\", \"answer\": 1}}\n")).unwrap();
    let (router, dataset, output) = (format!("router={}", file(parts[0])), file("d.jsonl"), file("o.json"));
    let digest = || -> Value {
        let what = ["--route", "r2r", "--sweep", &router, "--dataset", &dataset, "--output", &output];
        let error = text(&eval(&what).output().unwrap().stderr);
        assert!(error.contains("d.jsonl:1: This model's maximum context length is"), "{error}");
        rows(format!("{output}.partial.jsonl").as_ref())[0]["digest"].clone()
    };
    for part in parts {
        let before = digest();
        assert!(before.is_string() && digest() == before, "{before}");
        let router = std::fs::File::options().append(true).open(file(part)).unwrap();
        router.set_modified(std::time::SystemTime::now() + Duration::from_secs(60)).unwrap();
        assert_ne!(digest(), before, "{part}");
    }
}

#[test]
fn a_setting_for_a_share() {
    let target = ["--route", "rstitch", "--limit", "10", "--target-share", "0.15", "--tolerance", "0.02"];
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("o.json");
    let told = good(run(&[&target[..], &["--output", &output.display().to_string()]].concat()));
    let lines = told.split_once("\n[routes.rstitch.settings]\n").unwrap().1;
    let threshold: f64 = lines.trim().strip_prefix("threshold = ").unwrap().parse().unwrap();
    let json = json(&output);
    let found = &json["meta"]["target"];
    assert_eq!((found["value"].as_f64(), &found["found"]), (Some(threshold), &Value::Bool(true)));
    let points = json["points"].as_array().unwrap();
    let point = points.iter().find(|point| point["settings"]["threshold"] == threshold).unwrap();
    let share = point["token_share"]["large"].as_f64().unwrap();
    assert!((share - 0.15).abs() <= 0.02 && found["share"] == share, "{json}");

    let failed = run(&[&target[..], &["--range", "0.5,1"]].concat());
    assert_eq!(failed.status.code(), Some(1));
    assert!(text(&failed.stderr).contains("widen --range"), "{}", text(&failed.stderr));
}

/// Drawn answers depend on nothing but the seed and the question's number.
#[test]
fn the_same_answers_for_the_same_seed() {
    let dir = tempfile::tempdir().unwrap();
    let details = dir.path().join("d.jsonl");
    let answers = |more: &[&str]| -> Vec<(String, String)> {
        let drawn = ["--temperature", "2", "--limit", "5", "--max-tokens", "40"];
        let place = details.display().to_string();
        good(run(&[&drawn[..], &["--details", &place], more].concat()));
        let field = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
        rows(&details).iter().map(|row| (field(row, "point"), field(row, "text"))).collect()
    };
    let all = answers(&["--all", "--seed", "3"]);
    let points: std::collections::BTreeSet<_> = all.iter().map(|(point, _)| point).collect();
    assert!(points.len() > 5 && all.len() == 5 * points.len(), "{points:?}");
    for route in ["me", "large"] {
        let here: Vec<_> = all.iter().filter(|(point, _)| point == route).cloned().collect();
        assert_eq!(answers(&["--route", route, "--seed", "3", "--concurrency", "1"]), here);
        let shifted = answers(&["--route", route, "--seed", "4"]);
        assert_ne!(shifted, here);
    }
}

#[test]
fn refused() {
    let refusal = |output: Output| {
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(output.stdout.is_empty() && error.lines().count() == 1, "{error}");
        error
    };
    for (arguments, message) in [
        (&["--route", "rstich"][..], "--route \"rstich\": config/demo.toml has no such route or model: did you mean"),
        (&["--route", "small", "--route", "small"], "--route \"small\" is given twice"),
        (
            &["--route", "rstitch", "--sweep", "threshold=0.1,3"],
            "--sweep: point rstitch[threshold=3]: settings/threshold = 3: the value is greater than the maximum of 1",
        ),
        (&["--route", "rstitch", "--sweep", "treshold=1"], "settings/treshold = 1: no such setting"),
        (&["--route", "rstitch", "--sweep", "threshold"], "--sweep \"threshold\" has no `=`"),
        (&["--route", "rstitch", "--sweep", "threshold=0", "--sweep", "threshold=1"], "`threshold` is swept twice"),
        (&["--route", "small", "--sweep", "threshold=1"], "--sweep: none of the routes has a policy"),
        (
            &["--route", "me", "--sweep", "weights=[{small=0.5, medium=0.3, large=0.3}]"],
            "route `me[weights={large=0.3,medium=0.3,small=0.5}]`, model `small`: ",
        ),
        (&["--route", "small", "--target-share", "0.1"], "--target-share: `small` is a model alone"),
        (
            &["--route", "query-level", "--target-share", "0.1"],
            "does not bound `threshold` on both sides; give --range",
        ),
        (&["--route", "verify", "--target-share", "0.1"], "no such setting; it takes draft_tokens"),
        (&["--route", "rstitch", "--target-share", "0.1", "--range", "0,2"], "point rstitch[threshold=2.0]: "),
        (&["--route", "small", "--answer-pattern", "x"], "--answer-pattern: \"x\" has 0 groups"),
        (&["--route", "small", "--output", "/none/at/all"], "--output: /none/at/all cannot be written"),
        (&["--route", "small", "--csv", "a", "--details", "./a"], "--details: ./a is the file of --csv already"),
        (&["--route", "small", "--csv", "config/demo.toml"], "--csv: config/demo.toml is the configuration"),
        (&["--route", "small", "--output", "models/demo/eval.jsonl"], "eval.jsonl is the dataset; give another file"),
        (&["--route", "small", "--csv", "models/demo/small/a.csv"], "is in the directory of model `small`"),
        (&["--route", "small", "--output", "a", "--csv", "a.partial.jsonl"], "is what --output keeps until"),
        (&["--route", "small", "--plot", "a.png"], "--plot: a.png must end in .svg"),
        (&["--route", "small", "--record"], "--record: the configuration has no [record] table"),
    ] {
        let error = refusal(run(arguments));
        assert!(error.contains(message), "{arguments:?}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let dataset = dir.path().join("d.jsonl");
    let long = "again ".repeat(3000);
    for (line, message) in [
        ("{\"question\": \"x\"}".into(), "d.jsonl:2: `answer` is missing"),
        (
            format!("{{\"question\": \"{long}\", \"answer\": 1}}"),
            "d.jsonl:2: This model's maximum context length is 2048",
        ),
    ] {
        std::fs::write(&dataset, format!("{{\"question\": \"a\", \"answer\": 1}}\n{line}\n")).unwrap();
        let error = refusal(eval(&["--route", "small", "--dataset", &dataset.display().to_string()]).output().unwrap());
        assert!(error.contains(message), "{error}");
    }
    let missing = refusal(eval(&["--route", "small", "--dataset", "none.jsonl"]).output().unwrap());
    assert!(missing.contains("--dataset: none.jsonl cannot be read"), "{missing}");
}

#[test]
fn help_has_examples() {
    let help = Command::new(env!("CARGO_BIN_EXE_tokenrouter")).args(["eval", "--help"]).output().unwrap();
    assert!(good(help).contains("tokenrouter eval config/demo.toml --route rstitch --dataset models/demo/eval.jsonl"));
}
