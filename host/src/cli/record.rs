//! From `[record]` to a recording.

use std::path::PathBuf;
use std::time::Duration;

use super::build::Prepared;
use super::output::Failure;
use crate::config::{Config, RecordConfig};
use crate::record::{Member, Plugin, Recording, Route, Settings, Setup, StartError, inspect};
use crate::runner::ModelInfo;

/// A server with few requests loses no more than this when it is killed.
const KEPT_IN_MEMORY: Duration = Duration::from_secs(600);

fn directory(config: &Config, record: &RecordConfig) -> PathBuf {
    config.directory().join(&record.directory)
}

fn fault(config: &Config, record: &RecordConfig, message: impl std::fmt::Display) -> Failure {
    let value = record.directory.display().to_string();
    Failure::input(config.error("/record/directory", format!("record.directory = {value:?}: {message}")))
}

/// The directory fits. Changes nothing.
pub fn check(config: &Config) -> Result<(), Failure> {
    let Some(record) = &config.record else { return Ok(()) };
    inspect(&directory(config, record)).map(drop).map_err(|e| fault(config, record, e))
}

/// Start the recording that the configuration asks for, of an engine with the routes `served`. Without room
/// for it, work goes on alone.
pub fn start(prepared: &Prepared, models: Vec<ModelInfo>, served: Vec<Served>) -> Result<Option<Recording>, Failure> {
    let config = &prepared.config;
    let Some(record) = &config.record else { return Ok(None) };
    let settings = Settings {
        hidden: record.hidden,
        top_k: record.top_k,
        sample: record.sample,
        requests: record.requests,
        shard_rows: record.shard_rows,
        max_bytes: record.max_bytes,
    };
    let setup = Setup {
        directory: directory(config, record),
        settings,
        models,
        routes: routes(prepared, record, served),
        kept_in_memory: KEPT_IN_MEMORY,
    };
    match Recording::start(setup) {
        Ok(recording) => Ok(Some(recording)),
        Err(full @ StartError::Full { .. }) => {
            tracing::warn!("nothing is recorded: {full}");
            Ok(None)
        }
        Err(error @ StartError::Directory(_)) => Err(fault(config, record, error)),
    }
}

/// A route of the engine, made from one of the configuration.
pub struct Served {
    /// Of the engine's route.
    pub name: String,
    pub settings: serde_json::Value,
    /// The route in the configuration.
    pub index: usize,
}

/// The routes of the configuration as they are.
pub fn configured(prepared: &Prepared) -> Vec<Served> {
    let routes = prepared.config.routes.iter().enumerate();
    routes.map(|(index, r)| Served { name: r.name.clone(), settings: r.settings.clone(), index }).collect()
}

/// In the engine's order: `served`, then each model alone.
fn routes(prepared: &Prepared, record: &RecordConfig, served: Vec<Served>) -> Vec<Route> {
    let config = &prepared.config;
    let recorded = |name: &String| record.routes.as_ref().is_none_or(|names| names.contains(name));
    let routes = served.into_iter().map(|Served { name, settings, index }| {
        let (route, plugin) = (&config.routes[index], &prepared.plugins[index]);
        Route {
            name,
            plugin: Some(Plugin {
                name: plugin.policy.name().into(),
                version: plugin.version.clone(),
                sha256: plugin.sha256.clone(),
            }),
            settings,
            models: route
                .models
                .iter()
                .map(|(model, role)| Member { name: config.models[*model].name.clone(), role: role.clone() })
                .collect(),
            entry: route.entry,
            recorded: recorded(&route.name),
        }
    });
    let alone = config.models.iter().map(|model| Route {
        name: model.name.clone(),
        plugin: None,
        settings: serde_json::json!({}),
        models: vec![Member { name: model.name.clone(), role: model.name.clone() }],
        entry: 0,
        recorded: recorded(&model.name),
    });
    routes.chain(alone).collect()
}

/// What is recorded and where, for the start screen.
pub fn line(config: &Config, recording: &Recording) -> String {
    let Some(record) = &config.record else { return String::new() };
    let of = match &record.routes {
        None => "all routes".into(),
        Some(names) => names.join(", "),
    };
    let share =
        if record.sample < 1.0 { format!("{} % of the requests of ", 100.0 * record.sample) } else { "".into() };
    let with: Vec<String> = [
        record.hidden.then(|| "hidden states".into()),
        (record.top_k > 0).then(|| format!("top {} logits", record.top_k)),
        record.requests.then(|| "token ids of prompts and answers".into()),
    ]
    .into_iter()
    .flatten()
    .collect();
    let with = if with.is_empty() { String::new() } else { format!(" with {}", with.join(", ")) };
    let most = record.max_bytes as f64 / (1u64 << 20) as f64;
    format!("\nRecording {share}{of}{with} into {} (at most {most:.0} MiB)\n", recording.directory().display())
}
