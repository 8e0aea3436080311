//! A target that is measured: made, put under load, and ended.

use std::io::{self, IsTerminal};
use std::sync::Arc;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::signal::unix::{SignalKind, signal};

use super::json;
use super::load::{Measured, dataset_fault};
use super::load_args::LoadArgs;
use super::variant::{Mode, Variant};
use crate::bench::ask::Ask;
use crate::bench::dispatcher::Dispatcher;
use crate::bench::http::Client;
use crate::bench::in_process::InProcess;
use crate::bench::load::{Load, Pace};
use crate::bench::openai::OpenAi;
use crate::bench::remote::Remote;
use crate::bench::servers::Servers;
use crate::bench::summary::Summary;
use crate::bench::target::Target;
use crate::bench::timed::{ModelLog, StepLog, Timed, Watch};
use crate::bench::workload::{Missing, Workload};
use crate::cli::build::Prepared;
use crate::cli::output::Failure;
use crate::cli::progress::Progress;
use crate::engine::{Engine, ModelSetup, RouteSetup};
use crate::runner::{ModelInfo, Runner};

/// Most tokens of a request that warms up.
const WARM_UP: u32 = 16;
/// Most requests under way at a dispatcher: each has threads of its own there.
const DISPATCHED: u32 = 256;
/// Rows of a call at most: more than a sequence has.
const CALL: usize = 1 << 30;

/// Loaded weights on their way from one run to the next.
pub struct Held<'a> {
    prepared: &'a Prepared,
    /// By model, each with its log.
    runners: Vec<Box<dyn Runner>>,
    logs: Vec<StepLog>,
}

impl<'a> Held<'a> {
    /// The weights that `prepared` needs: those of `held` if its models are the same, else they go first.
    pub fn of(prepared: &'a Prepared, held: Option<Held<'a>>) -> Result<Self, Failure> {
        if let Some(held) = held.filter(|held| same_models(held.prepared, prepared)) {
            return Ok(Self { prepared, ..held });
        }
        let (runners, logs): (Vec<_>, Vec<_>) = prepared.load(&Progress::stderr())?.into_iter().map(Timed::new).unzip();
        let runners = runners.into_iter().map(|runner| Box::new(runner) as Box<dyn Runner>).collect();
        Ok(Self { prepared, runners, logs })
    }
}

/// Whether the models of both are loaded the same way. What only their engines read may differ.
fn same_models(a: &Prepared, b: &Prepared) -> bool {
    let same = |index: usize| {
        let of = |prepared: &Prepared| {
            let (model, placed) = (&prepared.config.models[index], &prepared.placed[index]);
            let place = (prepared.directories[index].clone(), placed.device, placed.max_rows);
            (model.name.clone(), model.weights, model.dtype, model.context, place, prepared.plan.models[index].pages)
        };
        of(a) == of(b)
    };
    a.noise_keys == b.noise_keys && (0..a.noise_keys.len()).all(same)
}

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

    /// Warm up, then carry all loads. Requests are numbered from `first` on.
    pub async fn measure(&self, first: u64) -> Result<Vec<Measured>, Failure> {
        let loads = self.loads(first)?;
        self.warm_up(first).await?;
        let mut measured = Vec::with_capacity(loads.len());
        for (pace, load) in loads {
            measured.push(self.carry(pace, load).await?);
        }
        Ok(measured)
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
            loads.push((pace, Load::new(pace, self.sessions(next, count)?, seed)));
            next += count as u64;
        }
        Ok(loads)
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
    async fn warm_up(&self, first: u64) -> Result<(), Failure> {
        let mut sessions = self.sessions(first, self.load.warm_up as usize)?;
        sessions.iter_mut().for_each(|turns| turns.truncate(1));
        sessions.iter_mut().flatten().for_each(|ask| ask.output_len = ask.output_len.min(WARM_UP));
        let pace = Pace::Closed { requests: 1 };
        let warm = self.carry(pace, Load::new(pace, sessions, 0)).await?;
        match warm.summary.failures.first() {
            Some((failure, _)) => Err(Failure::work(format!("the request that warms up failed: {failure}"))),
            None => Ok(()),
        }
    }

    async fn carry(&self, pace: Pace, load: Load) -> Result<Measured, Failure> {
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::work)?;
        let bar = bar(pace, load.tokens());
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

/// One engine for all models of the route, and the number of token ids that prompts may be made of.
fn routed(
    prepared: &Prepared,
    route: &str,
    runners: Vec<Box<dyn Runner>>,
    logs: &[StepLog],
) -> Result<(InProcess, u32), Failure> {
    let routes = (0..prepared.config.routes.len()).map(|index| prepared.route(index)).collect();
    let engine = prepared.engine(runners, routes, Some(Arc::new(Watch(logs.to_vec()))))?;
    at_route(prepared, route, engine)
}

fn at_route(prepared: &Prepared, route: &str, engine: Engine) -> Result<(InProcess, u32), Failure> {
    let id = engine.find_route(route).ok_or_else(|| Failure::work("the route is not in the engine"))?;
    let info = &engine.routes()[id.index()];
    let tokenizers = info.models.iter().map(|(m, _)| prepared.texts[m.index()].tokenizer.vocab_size() as u32);
    let vocab_size = tokenizers.fold(info.vocab_size, u32::min);
    let text = prepared.texts[info.models[info.entry].0.index()].clone();
    Ok((InProcess::new(Arc::new(engine), id, text), vocab_size))
}

/// Requests under way at most.
fn under_way(load: &LoadArgs) -> Result<u32, Failure> {
    let most = load.requests.iter().max().copied().or(load.max_concurrency);
    let most = most.ok_or_else(|| {
        Failure::input(
            "--max-concurrency is missing; a dispatcher of standard serving is made for a number of requests",
        )
    })?;
    if most > DISPATCHED {
        return Err(Failure::input(format!(
            "{most} requests under way are too many for standard serving, which can have {DISPATCHED}"
        )));
    }
    Ok(most)
}

/// A server for each model, and a dispatcher for `most` requests with the route's policies.
fn standard(
    prepared: &Prepared,
    route: &str,
    runners: Vec<Box<dyn Runner>>,
    most: u32,
) -> Result<(Dispatcher, u32, Servers), Failure> {
    let infos: Vec<ModelInfo> = runners.iter().map(|runner| runner.info().clone()).collect();
    // A server knows of no peers to wait for.
    let alone = |(setup, text)| {
        let engine = Engine::start(vec![ModelSetup { min_batch: vec![1], ..setup }], Vec::new());
        engine.map(|engine| (engine, text)).map_err(Failure::work)
    };
    let engines = prepared.setups(runners).into_iter().zip(prepared.texts.iter().cloned()).map(alone);
    let servers = Servers::start(engines.collect::<Result<_, _>>()?).map_err(Failure::work)?;
    let (clients, runtime) = servers.clients();
    let dispatcher = || {
        let remotes = infos.iter().zip(&clients).map(|(info, client)| {
            Box::new(Remote::new(info.clone(), client.clone(), runtime.clone())) as Box<dyn Runner>
        });
        // A call computes what it needs at once.
        let whole = |setup| ModelSetup { min_batch: vec![1], max_rows: CALL, prefill_chunk: CALL, ..setup };
        let setups = prepared.setups(remotes.collect()).into_iter().map(whole).collect();
        let routes: Vec<RouteSetup> = (0..prepared.config.routes.len()).map(|index| prepared.route(index)).collect();
        let engine = Engine::start(setups, routes).map_err(|e| Failure::input(format!("standard serving: {e}")))?;
        at_route(prepared, route, engine)
    };
    let (dispatchers, sizes): (Vec<InProcess>, Vec<u32>) =
        (0..most).map(|_| dispatcher()).collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    Ok((Dispatcher::new(dispatchers), sizes.into_iter().min().unwrap_or(0), servers))
}

/// Tokens of a load so far, on a terminal.
fn bar(pace: Pace, tokens: u64) -> ProgressBar {
    let terminal = io::stderr().is_terminal();
    let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(tokens), target);
    if let Ok(style) = ProgressStyle::with_template("{prefix}  {bar:30}  {pos}/{len} tokens  {per_sec}") {
        bar.set_style(style.with_key("per_sec", |state: &indicatif::ProgressState, w: &mut dyn std::fmt::Write| {
            // What cannot be drawn is not missed.
            let _ = write!(w, "{:.0} tokens/s", state.per_sec());
        }));
    }
    bar.set_prefix(format!("{pace} requests"));
    bar
}
