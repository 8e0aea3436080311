//! Configurations and measurements.

use std::collections::BTreeMap;
use std::path::Path;

use super::one_line;
use crate::bench;
use crate::cli::simulate::{read, trace};
use crate::cli::tune::{from, input};
use crate::config::{Config, ENV_PREFIX};
use crate::eval;
use crate::runner::model_config::ModelConfig;

/// A configuration and, each after a NUL, variables `NAME=VALUE` without their prefix.
pub fn config_toml(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (text, rest) = text.split_once('\0').unwrap_or((text, ""));
    let mut variables: BTreeMap<String, String> = rest
        .split('\0')
        .filter_map(|part| part.split_once('='))
        .map(|(name, value)| (format!("{ENV_PREFIX}{name}"), value.to_owned()))
        .collect();
    let parse = |text: &str, variables: &_| Config::parse(text, Path::new("c.toml"), variables);
    let config = match parse(text, &variables) {
        Ok(config) => config,
        Err(error) => return one_line(&error.to_string()),
    };
    assert_eq!(parse(&format!("{text}\n# end\n"), &variables), Ok(config.clone()), "a comment changed it");
    // A variable of another case may be the one that counts.
    if !variables.keys().any(|name| name.to_ascii_uppercase().contains("SERVER")) {
        variables.insert(format!("{ENV_PREFIX}SERVER__PORT"), "1".into());
        let mut wanted = config;
        wanted.server.port = 1;
        let parsed = parse(text, &variables).map(|parsed| Config { places: wanted.places.clone(), ..parsed });
        assert_eq!(parsed, Ok(wanted), "a variable changed more than its key");
    }
}

/// A plan of `simulate`, and the models of `tune`.
pub fn plan_toml(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (text, file) = text.split_once('\0').unwrap_or((text, ""));
    if let Err(fault) = read::plan(text, &|_| Ok(file.to_owned())) {
        one_line(&fault.in_file("plan.toml").to_string());
    }
    match input::described(text) {
        Ok(system) => checked(system),
        Err(error) => one_line(&error),
    }
}

/// What is taken for a system can be solved: rows of probabilities, and times of steps.
fn checked(system: tokenrouter_batching::System) {
    match system.checked() {
        Ok(system) => {
            let sums = system.routing.iter().map(|row| row.iter().sum::<f64>());
            assert!(sums.into_iter().all(|sum| (sum - 1.0).abs() < 1e-9), "{system:?}");
            for model in &system.models {
                assert!([1, 7, 4096].iter().all(|&batch| model.step(batch) > 0.0), "{model:?}");
            }
        }
        Err(fault) => one_line(&fault.to_string()),
    }
}

/// Measurements, cases, traces, data sets and broken-off evaluations: each reader gets all bytes.
pub fn trace_files(bytes: &[u8]) {
    let errors = [
        bench::dataset::parse(bytes, "f").err(),
        eval::dataset::parse(bytes, "f", None).err(),
        eval::resume::read(bytes, "d", "f").err(),
    ];
    errors.iter().flatten().for_each(|error| one_line(error));
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match trace::trace(text) {
        Ok(arrivals) => assert!(arrivals.is_sorted_by_key(|arrival| arrival.at)),
        Err(error) => one_line(&error),
    }
    match from::measured(text) {
        Ok(measured) => {
            let (models, notes) = measured.models();
            assert!(!models.is_empty());
            notes.iter().for_each(|note| one_line(note));
            if let Some((system, _)) = measured.system() {
                checked(system);
            }
        }
        Err(error) => one_line(&error),
    }
    if let Ok(case) = serde_json::from_str::<tokenrouter_batching::case::Case>(text)
        && case.kind == tokenrouter_batching::case::Kind::Infeasible
        && let Err(error) = case.answer(1)
    {
        one_line(&error.to_string());
    }
}

/// `config.json` of a model: what is taken has sizes that can be computed with.
pub fn model_config(bytes: &[u8]) {
    for context in [None, Some(16)] {
        match ModelConfig::from_json(bytes, context) {
            Ok(config) => {
                assert!(config.parameters() > 0 && config.pages_per_sequence() > 0);
                let frequencies = config.rope_frequencies();
                assert_eq!(frequencies.len(), config.head_dim / 2);
                assert!(frequencies.iter().all(|f| f.is_finite() && *f >= 0.0), "{frequencies:?}");
                one_line(&config.describe());
            }
            Err(error) => one_line(&error.to_string()),
        }
    }
}
