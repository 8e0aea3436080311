//! The engines that serve a route, from loaded weights: one that routes, or standard serving.

use std::sync::Arc;

use super::load_args::LoadArgs;
use crate::bench::dispatcher::Dispatcher;
use crate::bench::in_process::InProcess;
use crate::bench::rehearsal::Rehearsed;
use crate::bench::remote::Remote;
use crate::bench::servers::Servers;
use crate::bench::timed::{StepLog, Timed, Watch};
use crate::cli::build::Prepared;
use crate::cli::output::Failure;
use crate::cli::progress::Progress;
use crate::engine::{Engine, ModelSetup, RouteSetup};
use crate::request::{Event, NewRequest, RequestError, SamplingParams};
use crate::runner::{ModelInfo, Runner};

/// Most requests under way at a dispatcher: each has threads of its own there.
const DISPATCHED: u32 = 256;
/// Rows of a call at most: more than a sequence has.
const CALL: usize = 1 << 30;

/// Requests of a rehearsal, each with other draws, and the tokens of their prompts and of their answers.
const REHEARSALS: u64 = 4;
const REHEARSED: usize = 24;

/// Loaded weights on their way from one run to the next.
pub struct Held<'a> {
    pub prepared: &'a Prepared,
    /// By model, each with its log.
    pub runners: Vec<Box<dyn Runner>>,
    pub logs: Vec<StepLog>,
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
            let part = (model.context, model.multiprocessors, prepared.plan.models[index].pages);
            (model.name.clone(), model.weights, model.dtype, part, place)
        };
        of(a) == of(b)
    };
    a.config.gpu.graphs == b.config.gpu.graphs && a.noise_keys == b.noise_keys && (0..a.noise_keys.len()).all(same)
}

/// One engine for all models of the route, and the number of token ids that prompts may be made of.
pub fn routed(
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
    let info = engine.route(route).ok_or_else(|| Failure::work("the route is not in the engine"))?;
    let id = info.id;
    let tokenizers = info.models.iter().map(|(m, _)| prepared.texts[m.index()].tokenizer.vocab_size() as u32);
    let vocab_size = tokenizers.fold(info.vocab_size, u32::min);
    let text = prepared.texts[info.models[info.entry].0.index()].clone();
    drop(info);
    Ok((InProcess::new(Arc::new(engine), id, text), vocab_size))
}

/// Requests under way at most.
pub fn under_way(load: &LoadArgs) -> Result<u32, Failure> {
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
pub fn standard(
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
    let dispatching = || {
        let remotes = infos.iter().zip(&clients).map(|(info, client)| {
            Box::new(Remote::new(info.clone(), client.clone(), runtime.clone())) as Box<dyn Runner>
        });
        at_route(prepared, route, dispatcher(prepared, remotes.collect())?)
    };
    let (dispatchers, sizes): (Vec<InProcess>, Vec<u32>) =
        (0..most).map(|_| dispatching()).collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    Ok((Dispatcher::new(dispatchers), sizes.into_iter().min().unwrap_or(0), servers))
}

/// The engine of a dispatcher. `runners`: what stands for the servers, by model.
fn dispatcher(prepared: &Prepared, runners: Vec<Box<dyn Runner>>) -> Result<Engine, Failure> {
    // A call computes what it needs at once.
    let whole = |setup| ModelSetup { min_batch: vec![1], max_rows: CALL, prefill_chunk: CALL, ..setup };
    let setups = prepared.setups(runners).into_iter().map(whole).collect();
    let routes: Vec<RouteSetup> = (0..prepared.config.routes.len()).map(|index| prepared.route(index)).collect();
    Engine::start(setups, routes).map_err(|e| Failure::input(format!("standard serving: {e}")))
}

/// Refuse a route whose policies ask for what standard serving cannot give, before its weights are loaded. What they
/// ask for only now and then may still show under load.
pub fn rehearse(prepared: &Prepared, route: &str) -> Result<(), Failure> {
    let rehearsed = |(model, info)| Box::new(Rehearsed::new(info, model)) as Box<dyn Runner>;
    let engine = dispatcher(prepared, (0..).zip(&prepared.infos).map(rehearsed).collect())?;
    let id = engine.find_route(route).ok_or_else(|| Failure::work("the route is not in the engine"))?;
    for seed in 0..REHEARSALS {
        let request = NewRequest {
            route: id,
            prompt: vec![0; REHEARSED],
            max_tokens: REHEARSED as u32,
            sampling: SamplingParams { seed, ignore_eos: true, ..SamplingParams::greedy() },
            return_signals: false,
            cache_salt: None,
        };
        let mut stream = engine.submit(request).map_err(Failure::work)?;
        while let Some(told) = stream.events.blocking_recv() {
            if let Event::Failed(error) = told.event {
                let why = match error {
                    RequestError::Model { message, .. } => message,
                    other => other.to_string(),
                };
                return Err(Failure::input(format!("route {route}: {why}; leave standard serving out for it")));
            }
        }
    }
    Ok(())
}
