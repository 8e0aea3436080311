//! `tokenrouter bench`

mod args;
mod device;
mod device_report;
mod report;

use std::io::{self, IsTerminal};
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::signal::unix::{SignalKind, signal};

pub use args::Bench;

use super::build::{self, Prepared};
use super::output::{Failure, write_stdout};
use super::progress::Progress;
use super::select;
use crate::bench::load::{Load, LoadError};
use crate::bench::summary::Summary;
use crate::bench::timed::{Step, StepLog, Timed};
use crate::bench::timeline;
use crate::config::{self, Config};
use crate::engine::{Engine, RouteInfo};
use crate::request::{ModelId, RouteId};
use crate::runner::Runner;

/// Tokens of the request that warms up.
const WARM_UP: u32 = 16;

pub fn run(arguments: &Bench) -> Result<(), Failure> {
    check_places(arguments)?;
    let (Some(file), Some(route), Some(output_len)) = (&arguments.config, &arguments.route, arguments.output_len)
    else {
        return device::run(arguments);
    };
    let config = Config::load(file, &config::environment()).map_err(Failure::input)?;
    select::known(&config, route)?;
    let prepared = build::prepare(select::only(config, &[route]))?;
    let runners = prepared.load(&Progress::stderr())?;
    let (runners, logs): (Vec<_>, Vec<_>) = runners.into_iter().map(Timed::new).unzip();
    let runners = runners.into_iter().map(|runner| Box::new(runner) as Box<dyn Runner>).collect();
    let routes = (0..prepared.config.routes.len()).map(|index| prepared.route(index)).collect();
    let engine = prepared.engine(runners, routes, None)?;
    let id = engine.find_route(route).ok_or_else(|| Failure::work("the route is not in the engine"))?;
    let bench = Running { arguments, prepared: &prepared, engine: &engine, id, logs, output_len };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::work)?;
    runtime.block_on(bench.measure())
}

/// A file that cannot be written shows before minutes of work, as far as it can.
fn check_places(arguments: &Bench) -> Result<(), Failure> {
    let given =
        [("--json", &arguments.json), ("--timeline", &arguments.timeline), ("--timeline-svg", &arguments.timeline_svg)];
    let mut taken: Vec<&Path> = arguments.config.iter().map(|config| config.as_path()).collect();
    for (flag, file) in given.into_iter().filter_map(|(flag, file)| Some((flag, file.as_deref()?))) {
        let fault = |message: &str| Err(Failure::input(format!("{flag}: {} {message}", file.display())));
        let parent = file.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        if file.is_dir() {
            return fault("is a directory; give a file");
        }
        if !parent.is_dir() {
            return fault("cannot be written: its directory does not exist");
        }
        if taken.contains(&file) {
            return fault("is given twice; give another file");
        }
        if flag == "--timeline-svg" && !file.extension().is_some_and(|e| e.eq_ignore_ascii_case("svg")) {
            return fault("must end in .svg");
        }
        taken.push(file);
    }
    Ok(())
}

/// A route that is measured.
struct Running<'a> {
    arguments: &'a Bench,
    prepared: &'a Prepared,
    engine: &'a Engine,
    id: RouteId,
    /// By model.
    logs: Vec<StepLog>,
    output_len: u32,
}

impl Running<'_> {
    fn route(&self) -> &RouteInfo {
        &self.engine.routes()[self.id.index()]
    }

    async fn measure(&self) -> Result<(), Failure> {
        let names: Vec<String> = self.engine.models().iter().map(|model| model.name.clone()).collect();
        // Every length is the same, so what the engine takes once it takes always.
        let load = self.load(1, 1, 0);
        self.engine.check(&load.request(0)).map_err(|e| Failure::input(format!("--input-len, --output-len: {e}")))?;
        self.carry(&Load { output_len: self.output_len.min(WARM_UP), ..load }).await?;
        let (mut summaries, mut last, mut first) = (Vec::new(), Vec::new(), 1);
        for &requests in &self.arguments.requests {
            let load = self.load(requests, self.arguments.total.unwrap_or(2 * requests), first);
            first += load.total as u64;
            let (summary, steps) = self.carry(&load).await?;
            summaries.push(summary);
            last = steps;
        }
        write_stdout(&report::tables(&summaries))?;
        let places = self.prepared.plan.models.iter().map(|model| model.device.to_string()).collect::<Vec<_>>();
        if let Some(file) = &self.arguments.json {
            let meta = report::Meta { arguments: self.arguments, output_len: self.output_len, places: &places };
            write_json("--json", file, &report::json(&meta, self.engine.models(), &summaries))?;
        }
        if let Some(file) = &self.arguments.timeline {
            write_json("--timeline", file, &timeline::trace(&names, &last))?;
        }
        if let Some(file) = &self.arguments.timeline_svg {
            let requests = self.arguments.requests.last().copied().unwrap_or_default();
            let title = format!("{}, {requests} requests: steps of each model", self.route().name);
            let svg = timeline::svg(&title, &names, &last).map_err(Failure::work)?;
            write("--timeline-svg", file, &svg)?;
        }
        Ok(())
    }

    /// `first`: number of the first request, so that no two of all loads are the same.
    fn load(&self, requests: u32, total: u32, first: u64) -> Load {
        let route = self.route();
        let known = route.models.iter().map(|(m, _)| self.prepared.texts[m.index()].tokenizer.vocab_size() as u32);
        Load {
            route: self.id,
            requests: requests as usize,
            total: total as usize,
            input_len: self.arguments.input_len as usize,
            vocab_size: known.fold(route.vocab_size, u32::min),
            output_len: self.output_len,
            seed: self.arguments.seed.wrapping_add(first),
        }
    }

    /// Put a load on the engine: what it came to, and its steps by model.
    async fn carry(&self, load: &Load) -> Result<(Summary, Vec<Vec<Step>>), Failure> {
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::work)?;
        let bar = bar(load);
        self.logs.iter().for_each(|log| drop(log.take()));
        let counters = || (0..self.logs.len() as u32).map(|model| self.engine.snapshot(ModelId(model)).counters);
        let before: Vec<_> = counters().collect();
        let answers = tokio::select! {
            answers = load.run(self.engine, |tokens| bar.set_position(tokens)) => answers,
            _ = interrupt.recv() => return Err(Failure::work("interrupted")),
        };
        bar.finish_and_clear();
        let answers = answers.map_err(|error| match error {
            LoadError::Refused(error) => Failure::input(error),
            error => Failure::work(error),
        })?;
        let steps: Vec<Vec<Step>> = self.logs.iter().map(StepLog::take).collect();
        let names: Vec<String> = self.engine.models().iter().map(|model| model.name.clone()).collect();
        let mut summary = Summary::new(load.requests, &answers, &names, &steps);
        for (model, (before, after)) in summary.models.iter_mut().zip(before.iter().zip(counters())) {
            model.count_cached(before, &after);
        }
        Ok((summary, steps))
    }
}

/// Tokens of a load so far, on a terminal.
fn bar(load: &Load) -> ProgressBar {
    let terminal = io::stderr().is_terminal();
    let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(load.total as u64 * u64::from(load.output_len)), target);
    if let Ok(style) = ProgressStyle::with_template("{prefix}  {bar:30}  {pos}/{len} tokens  {per_sec}") {
        bar.set_style(style.with_key("per_sec", |state: &indicatif::ProgressState, w: &mut dyn std::fmt::Write| {
            // What cannot be drawn is not missed.
            let _ = write!(w, "{:.0} tokens/s", state.per_sec());
        }));
    }
    bar.set_prefix(format!("{} requests", load.requests));
    bar
}

fn write_json(flag: &str, file: &Path, value: &serde_json::Value) -> Result<(), Failure> {
    write(flag, file, &format!("{value}\n"))
}

fn write(flag: &str, file: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(file, text).map_err(|e| Failure::work(format!("{flag}: {} cannot be written: {e}", file.display())))
}
