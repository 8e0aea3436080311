//! Loads on a route of a configuration or on a server.

use super::args::Bench;
use super::engines::Held;
use super::files::{write, write_json};
use super::load_args::LoadArgs;
use super::running::Running;
use super::variant::{Mode, Variant, Whole};
use super::{compare, csv, json, report, sweep};
use crate::bench::dataset;
use crate::bench::load::Carried;
use crate::bench::plot::{self, Plotted};
use crate::bench::summary::Summary;
use crate::bench::timed::{ModelLog, Step};
use crate::bench::timeline;
use crate::bench::workload::Workload;
use crate::cli::device::Device;
use crate::cli::output::{Failure, write_stdout};

pub fn run(arguments: &Bench) -> Result<(), Failure> {
    let load = &arguments.load;
    let workload = workload(load)?;
    let (mode, route) = (load.mode, load.route.as_deref().unwrap_or_default());
    if let [first, second] = load.compare.as_slice() {
        return compare::run(arguments, route, &workload, &[first, second].map(|text| Variant::parse(text)));
    }
    if load.ablation
        && let Some(file) = &load.config
    {
        let prepared = Variant::new(file, Mode::Routed).prepare(route)?;
        let models = &prepared.config.models;
        let whole = Whole {
            models: models.iter().map(|model| model.name.clone()).collect(),
            cuda: prepared.placed.iter().any(|placed| placed.device != Device::Cpu),
            ladder: models.iter().any(|model| model.min_batch.iter().any(|batch| *batch > 1)),
        };
        return compare::run(arguments, route, &workload, &Variant::ablation(file, &whole));
    }
    if let Some(model) = &load.sweep {
        return sweep::run(arguments, route, &workload, model);
    }
    if load.rounds.is_some() {
        return Err(Failure::input("--rounds is for --compare, --ablation and --sweep; leave it out"));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::work)?;
    let prepared;
    let running = match (&load.config, &load.url) {
        (Some(file), _) => {
            let variant = Variant::new(file, mode);
            prepared = variant.prepare(route)?;
            Running::in_process(load, workload, &variant, route, Held::of(&prepared, None)?)?
        }
        (None, Some(url)) => runtime.block_on(Running::elsewhere(load, workload, url))?,
        (None, None) => return Err(Failure::input("a configuration with --route, or --url is missing")),
    };
    let measured = runtime.block_on(running.measure(0, ""))?;
    tell(arguments, &running, &measured)
}

/// What the arguments and the data set ask for.
fn workload(load: &LoadArgs) -> Result<Workload, Failure> {
    let sessions = match &load.dataset {
        None => Vec::new(),
        Some(file) => {
            let name = file.display().to_string();
            let bytes = std::fs::read(file).map_err(|e| Failure::input(format!("--dataset: {name}: {e}")))?;
            dataset::parse(&bytes, &name).map_err(Failure::input)?
        }
    };
    if let Some(turn) = sessions.iter().filter(|_| load.url.is_some()).find(|s| s.needs_tokens()) {
        let line = turn.turns.first().map_or(0, |turn| turn.line);
        return Err(dataset_fault(
            load,
            line,
            "a session of token ids cannot go on over HTTP, where answers are text; \
                                              use `prompt` or `messages`",
        ));
    }
    Ok(Workload {
        input: load.input_len,
        output: load.output_len,
        prefix: load.prefix_len,
        prefixes: load.prefixes,
        turns: load.turns,
        vocab_size: load.vocab_size,
        seed: load.seed,
        sessions,
    })
}

/// A fault of a line.
pub fn dataset_fault(load: &LoadArgs, line: usize, message: &str) -> Failure {
    let file = load.dataset.as_ref().map(|file| file.display().to_string()).unwrap_or_default();
    Failure::input(format!("{file}:{line}: {message}"))
}

/// One load, and what it came to.
pub struct Measured {
    pub carried: Carried,
    pub summary: Summary,
    /// By model; empty for a server elsewhere.
    pub logs: Vec<ModelLog>,
}

/// Write everything that was asked for. Failed requests make it fail in the end.
fn tell(arguments: &Bench, running: &Running<'_>, measured: &[Measured]) -> Result<(), Failure> {
    let summaries: Vec<&Summary> = measured.iter().map(|measured| &measured.summary).collect();
    write_stdout(&report::tables(&summaries))?;
    if let Some(file) = &arguments.json {
        write_json("--json", file, &json::results(running.about.clone(), &arguments.load, &summaries))?;
    }
    if let Some(file) = &arguments.load.csv {
        write("--csv", file, csv::rows(measured).map_err(Failure::work)?)?;
    }
    let last = measured.last().map(|last| last.logs.as_slice()).unwrap_or_default();
    if let Some(file) = &arguments.load.plot {
        let loads: Vec<Plotted<'_>> =
            measured.iter().map(|m| Plotted { summary: &m.summary, carried: &m.carried }).collect();
        write("--plot", file, plot::svg(&running.title, &loads, last).map_err(Failure::work)?)?;
    }
    let steps: Vec<Vec<Step>> = last.iter().map(|log| log.steps.clone()).collect();
    if let Some(file) = &arguments.load.timeline {
        write_json("--timeline", file, &timeline::trace(&running.names, &steps))?;
    }
    if let Some(file) = &arguments.load.timeline_svg {
        let pace = measured.last().map(|last| last.summary.pace.to_string()).unwrap_or_default();
        let title = format!("{}, {pace} requests: steps of each model", running.title);
        write("--timeline-svg", file, timeline::svg(&title, &running.names, &steps).map_err(Failure::work)?)?;
    }
    let (failed, total) = summaries.iter().fold((0, 0), |(f, t), s| (f + s.failed, t + s.total()));
    match summaries.iter().find_map(|summary| summary.failures.first()) {
        Some((failure, _)) => Err(Failure::work(format!("{failed} of {total} requests failed: {failure}"))),
        None => Ok(()),
    }
}
