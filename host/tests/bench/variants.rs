//! Ways to serve a route, and thresholds, against each other.

use serde_json::Value;

use super::{RANDOM, bench, measured, read, refusal, sum, text, tokenrouter};

/// Models that are servers of their own, and a dispatcher outside, write the same tokens. `rstitch` needs signals.
#[test]
fn standard_serving_writes_the_same() {
    for route in ["random", "rstitch"] {
        let load = ["config/demo.toml", "--route", route, "--output-len", "10", "--input-len", "12", "--requests", "2"];
        let (_, routed) = measured(&load);
        let (table, standard) = measured(&[&load[..], &["--mode", "standard-serving"]].concat());
        assert!(table.contains("busy") && !table.contains("queue"), "{table}");
        assert_eq!((&routed["mode"], &standard["mode"]), (&"routed".into(), &"standard-serving".into()));
        let (routed, standard) = (&routed["loads"][0], &standard["loads"][0]);
        for key in ["completed", "failed", "total_input_tokens", "total_output_tokens", "tokens_by_model", "handoffs"] {
            assert_eq!(routed[key], standard[key], "{route}: {key}");
        }
        // One call for each time that a model computes a candidate.
        let steps = sum(&routed["transitions"]) + sum(&routed["last_steps"]);
        let calls = standard["models"]
            .as_array()
            .unwrap()
            .iter()
            .map(|model| model["steps"].as_f64().unwrap() * model["mean_batch"].as_f64().unwrap());
        assert_eq!(calls.sum::<f64>().round() as u64, steps);
        assert!(standard.get("transitions").is_none());
    }
    // What no call can give is refused before models are loaded.
    let load = ["config/demo.toml", "--mode", "standard-serving", "--output-len", "8", "--input-len", "8"];
    let refused = refusal(&[&load[..], &["--route", "verify", "--requests", "1"]].concat());
    assert!(refused.contains("route verify: standard serving verifies no drafts"), "{refused}");
    let compared = ["--compare", "config/demo.toml", "standard-serving:config/demo.toml", "--output-len", "8"];
    let refused = refusal(&[&compared[..], &["--route", "verify", "--requests", "1"]].concat());
    assert!(refused.contains("route verify: standard serving verifies no drafts"), "{refused}");
    let refused = refusal(&[&load[..], &["--route", "random", "--rate", "1", "--total", "1"]].concat());
    assert!(refused.contains("--max-concurrency is missing"), "{refused}");
}

#[test]
fn variants_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.json");
    let load = ["--compare", "config/demo.toml", "standard-serving:config/demo.toml", "--rounds", "2"];
    let small = ["--route", "random", "--output-len", "12", "--input-len", "20", "--requests", "1,2"];
    let output = bench(&[&load[..], &small, &["--json", file.to_str().unwrap()]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("standard-serving:config/demo.toml") && table.contains("1.000"), "{table}");
    let results = read(&file);
    let [routed, standard] = results["variants"].as_array().unwrap().as_slice() else { panic!("{results}") };
    assert_eq!((&routed["mode"], &standard["mode"]), (&"routed".into(), &"standard-serving".into()));
    let rounds = |variant: &Value| -> Vec<(Value, Value)> {
        let loads = variant["rounds"].as_array().unwrap().iter().flat_map(|round| round.as_array().unwrap());
        loads.map(|load| (load["tokens_by_model"].clone(), load["total_output_tokens"].clone())).collect()
    };
    let all = rounds(routed);
    assert_eq!((all.len(), &all), (4, &rounds(standard)));
    assert!(all.iter().map(|(_, tokens)| tokens.as_u64().unwrap()).eq([24, 48, 24, 48]));
    let ratios = |variant: &Value| variant["compared"].as_array().unwrap().len();
    assert_eq!((ratios(routed), ratios(standard)), (2, 2));
    let first = &routed["compared"][0]["tokens_per_second"]["to_first"];
    assert_eq!(["least", "median", "most"].map(|end| first[end].as_f64()), [Some(1.0); 3]);
    let spread = &standard["compared"][1]["e2e_ms"]["to_first"];
    let ends = ["least", "median", "most"].map(|end| spread[end].as_f64().unwrap());
    assert!(ends.is_sorted() && ends[0] > 0.0, "{spread}");
}

/// With a ladder of the configuration, and with one that is tuned on the way.
#[test]
fn an_ablation_has_a_row_for_each_step() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.json");
    // Long enough that the large model runs several steps of some size, whatever falls together.
    let load = [&RANDOM[..3], &["--output-len", "240", "--input-len", "8", "--requests", "3", "--total", "3"]].concat();
    let more = ["--ablation", "--rounds", "1", "--json", file.to_str().unwrap()];
    for (ladder, told, thresholds) in
        [("1,1,2", "is that of the configuration", Some(&[1, 1, 2])), ("1", "is tuned from the row before it", None)]
    {
        let mut command = tokenrouter(&[&["bench"], &load[..], &more].concat());
        let output = command.env("TOKENROUTER__MODELS__LARGE__MIN_BATCH", ladder).output().unwrap();
        let (table, told_so) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{told_so}");
        let results = read(&file);
        let variants = results["variants"].as_array().unwrap();
        let names: Vec<&str> = variants.iter().map(|variant| variant["name"].as_str().unwrap()).collect();
        let all = ["standard serving", "+ prefix cache", "+ resident K/V", "+ asynchrony", "+ delayed batching"];
        assert_eq!(names, all);
        assert!(table.contains(told) && table.lines().all(|line| line.chars().count() <= 100), "{table}");
        assert_eq!(told_so.matches("round 1 of 1, ").count(), 5, "{told_so}");
        let written = variants.iter().map(|variant| &variant["rounds"][0][0]["tokens_by_model"]);
        assert!(written.clone().all(|tokens| tokens == &variants[0]["rounds"][0][0]["tokens_by_model"]), "{results}");
        let large = variants[4]["min_batch"][1].as_array().unwrap();
        let large: Vec<u64> = large.iter().map(|batch| batch.as_u64().unwrap()).collect();
        assert!(large.len() == 3 && thresholds.is_none_or(|given| large == given), "{large:?}");
    }
}

/// Of every threshold up to N, and what the chain of the same steps says.
#[test]
fn thresholds_are_swept() {
    let dir = tempfile::tempdir().unwrap();
    let plot = dir.path().join("out.svg");
    let load =
        [&RANDOM[..3], &["--output-len", "150", "--input-len", "4", "--requests", "2,3", "--rounds", "2"]].concat();
    let more = ["--sweep", "large", "--plot", plot.to_str().unwrap()];
    let (table, results) = measured(&[&load[..], &more].concat());
    for (load, requests) in results["loads"].as_array().unwrap().iter().zip([2, 3]) {
        let thresholds = load["swept"]["thresholds"].as_array().unwrap();
        assert!(thresholds.iter().map(|t| t["min_batch"].as_u64().unwrap()).eq(1..=requests), "{load}");
        for threshold in thresholds {
            let ends = ["least", "median", "most"].map(|end| threshold["measured"][end].as_f64().unwrap());
            assert!(ends[0] > 0.0 && ends.is_sorted() && threshold["predicted"].as_f64().unwrap() > 0.0, "{threshold}");
        }
        let routes = &load["system"]["routes"];
        assert_eq!((&routes[1][0], load["system"]["models"].as_array().unwrap().len()), (&1.0.into(), 2));
    }
    assert!(table.contains("3 requests: predicted best "), "{table}");
    let plot = std::fs::read_to_string(&plot).unwrap();
    assert!(plot.contains("min_batch of large") && plot.contains("measured") && plot.contains("2 requests"), "{plot}");
    let refused = refusal(&[&load[..], &["--sweep", "lagre"]].concat());
    assert!(refused.contains("--sweep lagre: no model of the route: did you mean `large`?"), "{refused}");
}
