//! A target that is measured: made, put under load, and ended.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::signal::unix::{SignalKind, signal};

use super::engines::{Held, routed, standard, under_way};
use super::json;
use super::load::{Measured, dataset_fault};
use super::load_args::LoadArgs;
use super::variant::{Mode, Variant};
use crate::bench::ask::Ask;
use crate::bench::http::Client;
use crate::bench::load::{Load, Pace};
use crate::bench::openai::OpenAi;
use crate::bench::servers::Servers;
use crate::bench::summary::Summary;
use crate::bench::target::Target;
use crate::bench::timed::{ModelLog, StepLog};
use crate::bench::workload::{Missing, Workload};
use crate::cli::build::Prepared;
use crate::cli::output::Failure;
use crate::engine::Engine;
use crate::subserver::coordinator::Ladders;

/// Requests of one round do not come again in another.
pub const ROUND: u64 = 1 << 24;
/// Most tokens of a request that warms up.
const WARM_UP: u32 = 16;
/// A target that is measured.
pub struct Running<'a> {
    load: &'a LoadArgs,
    workload: Workload,
    target: Arc<Target>,
    /// What the target is, for people.
    pub title: String,
    /// The target as the JSON has it.
    pub about: serde_json::Value,
    /// By model; empty for a server elsewhere.
    pub names: Vec<String>,
    logs: Vec<StepLog>,
    /// `None` for a server elsewhere.
    prepared: Option<&'a Prepared>,
    /// Of standard serving.
    servers: Option<Servers>,
}

impl<'a> Running<'a> {
    /// A route in this process.
    pub fn in_process(
        load: &'a LoadArgs,
        workload: Workload,
        variant: &Variant,
        route: &str,
        held: Held<'a>,
    ) -> Result<Self, Failure> {
        let Held { prepared, runners, logs } = held;
        let (target, vocab_size, servers) = match variant.mode {
            Mode::Routed => {
                let (engine, vocab_size) = routed(prepared, route, runners, &logs)?;
                (Target::InProcess(engine), vocab_size, None)
            }
            Mode::StandardServing => {
                let (dispatcher, vocab_size, servers) = standard(prepared, route, runners, under_way(load)?)?;
                (Target::Dispatcher(dispatcher), vocab_size, Some(servers))
            }
        };
        Ok(Self {
            load,
            workload: Workload { vocab_size: Some(vocab_size), ..workload },
            target: Arc::new(target),
            title: route.to_owned(),
            about: json::route(&variant.file, route, variant.mode, &prepared.plan),
            names: prepared.config.models.iter().map(|model| model.name.clone()).collect(),
            logs,
            prepared: Some(prepared),
            servers,
        })
    }

    /// A server elsewhere.
    pub async fn elsewhere(load: &'a LoadArgs, workload: Workload, url: &str) -> Result<Self, Failure> {
        let fault = |error: String| Failure::input(format!("--url: {error}"));
        let client = Client::new(url, load.api_key.as_deref()).map_err(fault)?;
        let server = OpenAi::connect(client, load.model.as_deref()).await.map_err(fault)?;
        Ok(Self {
            load,
            workload,
            title: format!("{} at {url}", server.model()),
            about: json::server(url, server.model()),
            target: Arc::new(Target::Url(server)),
            names: Vec::new(),
            logs: Vec::new(),
            prepared: None,
            servers: None,
        })
    }

    /// Put other ladders in force. Only for a route in an engine of this process.
    pub fn set_ladders(&self, ladders: Ladders) -> Result<(), Failure> {
        match &*self.target {
            Target::InProcess(engine) => engine.set_ladders(ladders).map_err(Failure::work),
            Target::Dispatcher(_) | Target::Url(_) => Err(Failure::work("only an engine in this process has ladders")),
        }
    }

    /// End it and keep the weights. Only for a route in this process.
    pub fn stop(self) -> Result<Held<'a>, Failure> {
        let lost = || Failure::work("a model is down or its engine did not end, so its weights are lost");
        let runners = match (Arc::into_inner(self.target), self.servers) {
            (Some(Target::InProcess(engine)), _) => engine.into_engine().map(Engine::stop).ok_or_else(lost)?,
            (dispatcher, Some(servers)) => {
                drop(dispatcher);
                servers.stop()
            }
            _ => return Err(lost()),
        };
        let runners = runners.into_iter().collect::<Option<Vec<_>>>().ok_or_else(lost)?;
        Ok(Held { prepared: self.prepared.ok_or_else(lost)?, runners, logs: self.logs })
    }

    /// Warm up, then carry all loads. Requests are numbered from `first` on. `what`: of the progress.
    pub async fn measure(&self, first: u64, what: &str) -> Result<Vec<Measured>, Failure> {
        let loads = self.loads(first)?;
        self.warm_up(first).await?;
        let mut measured = Vec::with_capacity(loads.len());
        for (pace, load) in loads {
            measured.push(self.carry(pace, load, what).await?);
        }
        Ok(measured)
    }

    /// One closed load, without a warm-up; by default as many requests in all as are under way.
    pub async fn closed(&self, requests: u32, first: u64, what: &str) -> Result<Measured, Failure> {
        let pace = Pace::Closed { requests };
        let first = first + u64::from(self.load.warm_up);
        let count = self.load.total.map_or(requests as usize, |total| total as usize);
        self.carry(pace, Load::new(pace, self.sessions(first, count)?, 0), what).await
    }

    /// All loads, so that what is wrong with one shows before the first.
    fn loads(&self, first: u64) -> Result<Vec<(Pace, Load)>, Failure> {
        let arguments = self.load;
        let closed = arguments.requests.iter().map(|&requests| Pace::Closed { requests });
        let (burstiness, most) = (arguments.burstiness, arguments.max_concurrency);
        let open = arguments.rate.iter().map(|&rate| Pace::Open { rate, burstiness, most });
        let mut next = first + u64::from(arguments.warm_up);
        let mut loads = Vec::new();
        for pace in closed.chain(open) {
            let usual = match pace {
                Pace::Closed { requests } => Some(2 * requests as usize),
                Pace::Open { .. } => None,
            };
            let count = arguments.total.map(|total| total as usize).or(self.workload.len()).or(usual);
            let count = count.ok_or_else(|| {
                Failure::input("--total is missing; an open load of random prompts needs a number of requests")
            })?;
            let seed = arguments.seed.wrapping_add(next);
            loads.push((pace, self.bounded(Load::new(pace, self.sessions(next, count)?, seed))));
            next += count as u64;
        }
        Ok(loads)
    }

    /// No longer than `--max-seconds` says.
    fn bounded(&self, load: Load) -> Load {
        Load { longest: self.load.max_seconds.map(Duration::from_secs_f64), ..load }
    }

    fn sessions(&self, first: u64, count: usize) -> Result<Vec<Vec<Ask>>, Failure> {
        let missing = |Missing { line, what }| match line {
            Some(line) => dataset_fault(self.load, line, what),
            None => Failure::input(what),
        };
        let mut sessions = self.workload.sessions(first, count).map_err(missing)?;
        for ask in sessions.iter_mut().filter(|turns| turns.len() == 1).flatten() {
            self.target.prepare(ask).map_err(|error| match ask.line {
                Some(line) => dataset_fault(self.load, line, &error),
                None => Failure::input(format!("--input-len, --prefix-len, --output-len: {error}")),
            })?;
        }
        Ok(sessions)
    }

    /// Random prompts of their own, or the first of the data set.
    pub async fn warm_up(&self, first: u64) -> Result<(), Failure> {
        let mut sessions = self.sessions(first, self.load.warm_up as usize)?;
        sessions.iter_mut().for_each(|turns| turns.truncate(1));
        sessions.iter_mut().flatten().for_each(|ask| ask.output_len = ask.output_len.min(WARM_UP));
        let pace = Pace::Closed { requests: 1 };
        let warm = self.carry(pace, self.bounded(Load::new(pace, sessions, 0)), "warm-up: ").await?;
        match warm.summary.failures.first() {
            Some((failure, _)) => Err(Failure::work(format!("the request that warms up failed: {failure}"))),
            None => Ok(()),
        }
    }

    async fn carry(&self, pace: Pace, load: Load, what: &str) -> Result<Measured, Failure> {
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::work)?;
        let bar = bar(&format!("{what}{pace} requests"), load.tokens());
        self.logs.iter().for_each(|log| drop(log.take()));
        let carried = tokio::select! {
            carried = load.run(&self.target, |tokens| bar.set_position(tokens)) => carried.map_err(Failure::work)?,
            _ = interrupt.recv() => return Err(Failure::work("interrupted")),
        };
        bar.finish_and_clear();
        let logs: Vec<ModelLog> = self.logs.iter().map(StepLog::take).collect();
        let summary = Summary::new(pace, &carried, &self.load.goodput, &self.names, &logs);
        Ok(Measured { carried, summary, logs })
    }
}

/// Tokens of a load so far, on a terminal.
fn bar(what: &str, tokens: u64) -> ProgressBar {
    let terminal = io::stderr().is_terminal();
    let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(tokens), target);
    if let Ok(style) = ProgressStyle::with_template("{prefix}  {bar:30}  {pos}/{len} tokens  {per_sec}") {
        bar.set_style(style.with_key("per_sec", |state: &indicatif::ProgressState, w: &mut dyn std::fmt::Write| {
            // What cannot be drawn is not missed.
            let _ = write!(w, "{:.0} tokens/s", state.per_sec());
        }));
    }
    bar.set_prefix(what.to_owned());
    bar
}
