//! The invariants of request life, over random schedules on simulated runners: batches, page pools
//! that are too small, chunked prefill, gates under every schedule, cancels, rollbacks, verification,
//! budgets, lost state, and messages that come late, twice, out of order or only after a loss.
//!
//! Every text is compared with [`script::oracle`], which decodes one request alone without batches,
//! pages or messages.

#![allow(clippy::expect_used)]

mod mortal;
mod prefix;
mod reload;
mod scores;
mod script;
mod shadow;
mod waits;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mortal::Mortal;
use prefix::{Cache, Watch};
use script::{Rng, Script, oracle};
use shadow::Shadow;
use tokenrouter::engine::OnError;
use tokenrouter::policy::{Linked, PolicyFactory};
use tokenrouter::request::{
    ModelDown, ModelId, NewRequest, RequestError, RequestId, RequestSpec, RouteId, SamplingParams,
};
use tokenrouter::runner::PAGE_TOKENS;
use tokenrouter::runner::simulated::{Latency, SimulatedRunner};
use tokenrouter::simulation::{Ending, Ledgers, Network, SimulatedModel, World};
use tokenrouter::subserver::coordinator::Waiting;
use tokenrouter::subserver::gate::Schedule;
use tokenrouter::subserver::resolve::{Next, Outcome, Resolve, Situation, resolve};
use tokenrouter::subserver::{Attachment, Limits, SubServer, pages_for};
use tokenrouter_plugin_api::{Context, Decision, ModelDescription, NoServices};
use waits::Waits;

const SCHEDULES: u64 = 12_000;
const VOCAB: u32 = 40;
const FOR_EVER: Duration = Duration::from_secs(3600);

/// A route: its models in the policy's order, the entry among them, and the script's key.
struct Route {
    models: Vec<ModelId>,
    entry: usize,
    key: Option<u64>,
    /// The policy panics now and then, and this follows.
    faulty: Option<OnError>,
}

fn attachment(route: &Route, model: ModelId) -> Option<Attachment> {
    let own = route.models.iter().position(|&m| m == model)?;
    let policy = route.key.map(|key| {
        let models: Vec<_> =
            route.models.iter().map(|m| ModelDescription { name: m.0.to_string(), role: String::new() }).collect();
        let context = Context {
            route: "",
            model: own as u32,
            models: &models,
            entry: route.entry as u32,
            vocab_size: VOCAB,
            eos: &[0],
            services: &NoServices,
        };
        let settings = if route.faulty.is_some() { format!("{key} faulty") } else { key.to_string() };
        Linked::<Script>::default().create(&context, &settings).expect("a key")
    });
    let on_error = route.faulty.unwrap_or(OnError::FailRequest);
    Some(Attachment::new("", policy, route.models.clone(), own as u32, on_error, &[]))
}

fn random_routes(rng: &mut Rng, models: usize, faults: bool) -> Vec<Route> {
    let alone = (0..models).map(|m| Route { models: vec![ModelId(m as u32)], entry: 0, key: None, faulty: None });
    let routed = (0..1 + rng.below(3)).map(|_| {
        let mut order: Vec<_> = (0..models as u32).map(ModelId).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i as u64 + 1) as usize);
        }
        order.truncate(2 + rng.below(models as u64 - 1) as usize);
        let entry = rng.below(order.len() as u64) as usize;
        let on_error = [OnError::StayLocal, OnError::FailRequest, OnError::DisableRoute][rng.below(3) as usize];
        Route { entry, models: order, key: Some(rng.next()), faulty: faults.then_some(on_error) }
    });
    let routed: Vec<_> = routed.collect();
    routed.into_iter().chain(alone).collect()
}

fn random_ladder(rng: &mut Rng) -> Vec<u32> {
    (0..1 + rng.below(4)).map(|_| 1 + rng.below(4) as u32).collect()
}

fn micros(n: u64) -> Duration {
    Duration::from_micros(n)
}

/// What goes wrong in a world besides its network.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// Policies panic now and then.
    Policies,
    /// The runner of one model is lost after some forwards.
    Runner,
}

/// One random world. `Err` says which invariant broke.
fn schedule(seed: u64, resolve: Resolve) -> Result<Counts, String> {
    world(seed, resolve, Fault::None, Cache::Drawn, None)
}

/// Prompts begin alike now and then, and some go on where an earlier answer ended.
fn random_specs(rng: &mut Rng, routes: &[Route]) -> Vec<Arc<RequestSpec>> {
    fn text(rng: &mut Rng, most: u64) -> Vec<u32> {
        (0..rng.below(most)).map(|_| 1 + rng.below(u64::from(VOCAB) - 1) as u32).collect()
    }
    // In the second one page follows another with the same tokens.
    let documents =
        [text(rng, 64), text(rng, 64).iter().copied().cycle().take(PAGE_TOKENS).collect::<Vec<_>>().repeat(4)];
    let mut specs: Vec<Arc<RequestSpec>> = Vec::new();
    for id in 1..=1 + rng.below(6) {
        let mut prompt = match rng.below(4) {
            0 => documents[rng.below(2) as usize].clone(),
            1 if !specs.is_empty() => {
                let earlier = &specs[rng.below(specs.len() as u64) as usize].new;
                let Route { models, entry, key, .. } = &routes[earlier.route.index()];
                let answer = oracle(earlier, models, *entry, *key, VOCAB).0;
                earlier.prompt.iter().copied().chain(answer.into_iter().map(|(token, _)| token)).take(80).collect()
            }
            _ => Vec::new(),
        };
        prompt.extend(text(rng, if prompt.is_empty() { 40 } else { 8 }));
        prompt.push(1);
        let sampling = SamplingParams { seed: rng.next(), ignore_eos: rng.chance(0.3), ..SamplingParams::greedy() };
        let route = RouteId(rng.below(routes.len() as u64) as u32);
        let max_tokens = 1 + rng.below(24) as u32;
        let cache_salt = rng.chance(0.2).then(|| "pepper".into());
        let new = NewRequest { route, prompt, max_tokens, sampling, return_signals: false, cache_salt };
        specs.push(Arc::new(RequestSpec::new(id, new)));
    }
    specs
}

fn name(model: ModelId) -> String {
    format!("m{}", model.0)
}

/// The end token of a model: they differ, and the model that wrote a token decides.
fn eos(model: ModelId) -> u32 {
    model.0 % 3
}

fn world(seed: u64, resolve: Resolve, fault: Fault, cache: Cache, watch: Option<Arc<Watch>>) -> Result<Counts, String> {
    let mut rng = Rng(seed);
    let models = 3 + rng.below(2) as usize;
    let routes = random_routes(&mut rng, models, fault == Fault::Policies);
    let specs = random_specs(&mut rng, &routes);
    // Admission: each request fits an empty pool. Often that is all that fits.
    let largest = specs.iter().map(|s| pages_for(s.new.prompt.len() + s.new.max_tokens as usize)).max().unwrap_or(1);
    let victim = (fault == Fault::Runner).then(|| ModelId(rng.below(models as u64) as u32));
    let life = if victim.is_some() { rng.below(30) } else { 0 };
    let beyond = Arc::new(AtomicU64::new(0));
    let schedule = Schedule::ALL[rng.below(4) as usize];
    let one_host = rng.chance(0.5);
    let simulated = (0..models as u32).map(ModelId).map(|id| {
        let pages = largest + rng.below(1 + 2 * largest as u64) as usize;
        let limits = Limits { max_rows: 1 + rng.below(40) as usize, prefill_chunk: 1 + rng.below(24) as usize };
        let pages = cache.pages(pages, largest) as u32;
        let inner = Shadow::new(SimulatedRunner::new(&name(id), id.0, VOCAB, pages).ending_with(vec![eos(id)]));
        let life = if victim == Some(id) { life } else { u64::MAX };
        let runner = Mortal { inner, life, beyond: beyond.clone() };
        let attachments = routes.iter().map(|route| attachment(route, id)).collect();
        let server = SubServer::new(id, Box::new(runner), attachments, limits).with_resolve(resolve);
        SimulatedModel {
            server: server.with_prefix_cache(cache != Cache::Off).observed(watch.clone().map(|watch| watch as _)),
            latency: Latency::constant(micros(1 + rng.below(300))),
            waiting: Waiting {
                min_batch: random_ladder(&mut rng),
                // With the longest wait nothing but the gates themselves must not lock up: see `ended_at` below.
                max_wait: if rng.chance(0.5) { FOR_EVER } else { micros(rng.below(500)) },
                hold: if rng.chance(0.5) { Duration::ZERO } else { micros(rng.below(400)) },
            },
            host: if one_host { 0 } else { id.index() },
            stretch: (0..rng.below(3)).map(|_| 1.0 + 2.0 * rng.unit()).collect(),
        }
    });
    let simulated: Vec<_> = simulated.collect();
    let mut waits = Waits::new(simulated.iter().map(|model| model.waiting.max_wait));
    let network = Network {
        delay: (Duration::ZERO, micros(rng.below(400))),
        within_hosts: rng.chance(0.8),
        duplicate: rng.unit() * 0.5,
        lose: rng.unit() * 0.4,
        resend: micros(1 + rng.below(500)),
    };
    let shapes = routes.iter().map(|r| (r.models[r.entry], r.models.clone())).collect();
    let mut world = World::new(simulated, shapes, (schedule, network), rng.next(), Ledgers::default());
    let mut cancelled: Vec<RequestId> = Vec::new();
    for spec in &specs {
        let at = micros(rng.below(1500));
        world.submit(at, spec.clone());
        if rng.chance(0.2) {
            world.cancel(at + micros(rng.below(4000)), spec.id);
            cancelled.push(spec.id);
        }
        if rng.chance(0.2) {
            let model = ModelId(rng.below(models as u64) as u32);
            world.lose_state(at + micros(rng.below(3000)), model, spec.id);
        }
    }
    let mut turns = 0;
    while world.advance() {
        turns += 1;
        if turns > 200_000 {
            return Err("7: no end in sight".into());
        }
        waits.look(&world)?;
        if rng.chance(0.02) {
            world.set_ladders((0..models).map(|_| random_ladder(&mut rng)).collect()).expect("a ladder for each");
        }
        for server in world.servers() {
            if server.pages_held() != server.pool().in_use() {
                return Err(format!("3: {} pages in use, {} held", server.pool().in_use(), server.pages_held()));
            }
        }
        if turns % 8 == 0
            && let Some(spec) = specs.iter().find(|s| world.servers().filter(|m| m.owns(s.id)).count() > 1)
        {
            return Err(format!("2: request {} has two owners", spec.id));
        }
    }
    // A runner that is lost is not asked again, and its model goes down once.
    let lost: Vec<ModelId> = victim.into_iter().filter(|_| beyond.load(Ordering::Relaxed) > 0).collect();
    if beyond.load(Ordering::Relaxed) != lost.len() as u64 || world.down != lost {
        return Err(format!("7: {beyond:?} forwards of a lost runner; down: {:?}", world.down));
    }
    let mut counts = Counts { lost: lost.len() as u64, ..Counts::default() };
    for server in world.servers() {
        if (server.pool().in_use(), server.replicas(), server.ready(), server.open_slots()) != (0, 0, 0, 0) {
            return Err("3: something is left over".into());
        }
        let c = server.counters();
        counts.handoffs += c.handoffs;
        counts.retractions += c.retractions;
        counts.preemptions += c.preemptions;
        counts.stale += c.stale_messages;
        counts.resent += c.resent;
        counts.found += c.prefix_found;
        counts.evicted += c.prefix_evicted;
        if c.prefix_found > c.prefix_queried {
            return Err(format!("{} tokens found of {}", c.prefix_found, c.prefix_queried));
        }
    }
    for spec in &specs {
        let client = &world.audience.0[&spec.id];
        let route = &routes[spec.new.route.index()];
        if client.ended_at >= FOR_EVER {
            return Err(format!("7: request {} waited at a gate for ever", spec.id));
        }
        let got: Vec<_> = client.ledger.tokens().iter().map(|t| (t.token, t.model)).collect();
        if let Some(error) = &client.contradiction {
            return Err(format!("1: {error}"));
        }
        if client.late > 0 {
            return Err(format!("1: {} events after the last", client.late));
        }
        if client.ledger.has_gap() && client.ending != Some(Ending::Cancelled) {
            return Err("1: a gap in the ledger".into());
        }
        if let Some(on_error) = route.faulty {
            match &client.ending {
                Some(Ending::Finished(_)) => {}
                Some(Ending::Failed(RequestError::Policy { .. })) if on_error == OnError::FailRequest => {
                    counts.failed += 1
                }
                Some(Ending::Cancelled) if cancelled.contains(&spec.id) => {}
                other => return Err(format!("7: after a panic ended by {other:?} ({on_error:?})")),
            }
            counts.tokens += got.len() as u64;
            continue;
        }
        let (want, reason) = oracle(&spec.new, &route.models, route.entry, route.key, VOCAB);
        match &client.ending {
            None => return Err(format!("7: request {} never ended", spec.id)),
            Some(Ending::Cancelled) if cancelled.contains(&spec.id) => {
                if !want.starts_with(&got) {
                    return Err(format!("6: {got:?} does not begin {want:?}"));
                }
            }
            Some(Ending::Finished(got_reason)) if *got_reason == reason => {
                if got != want {
                    return Err(format!("6: request {} of {:?}: {got:?}, not {want:?}", spec.id, route.models));
                }
            }
            Some(Ending::Failed(RequestError::ModelDown(ModelDown { model, .. })))
                if lost.iter().any(|lost| *model == name(*lost) && route.models.contains(lost)) =>
            {
                if !want.starts_with(&got) {
                    return Err(format!("6: {got:?} does not begin {want:?}"));
                }
                counts.failed += 1;
            }
            other => return Err(format!("6: ended by {other:?}, not {reason:?}")),
        }
        counts.tokens += got.len() as u64;
    }
    Ok(counts)
}

/// What the schedules met, so that a generator that meets nothing is noticed.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    tokens: u64,
    handoffs: u64,
    retractions: u64,
    preemptions: u64,
    stale: u64,
    resent: u64,
    /// Tokens found in prefix caches, and pages evicted from them.
    found: u64,
    evicted: u64,
    failed: u64,
    /// Runners.
    lost: u64,
}

#[test]
fn invariants_hold_over_random_schedules() {
    let mut all = Counts::default();
    for seed in 0..SCHEDULES {
        match schedule(seed, resolve) {
            Ok(counts) => {
                all.tokens += counts.tokens;
                all.handoffs += counts.handoffs;
                all.retractions += counts.retractions;
                all.preemptions += counts.preemptions;
                all.stale += counts.stale;
                all.resent += counts.resent;
                all.found += counts.found;
                all.evicted += counts.evicted;
            }
            Err(broken) => panic!("schedule {seed} breaks invariant {broken}"),
        }
    }
    println!("{SCHEDULES} schedules: {all:?}");
    for (what, count) in [
        ("hand-offs", all.handoffs),
        ("retractions", all.retractions),
        ("preemptions", all.preemptions),
        ("stale messages", all.stale),
        ("lost states", all.resent),
        ("tokens from caches", all.found),
        ("evictions", all.evicted),
    ] {
        assert!(count > SCHEDULES / 50, "only {count} {what}: the schedules test too little");
    }
}

/// One more request can lower another model's threshold: that model must notice.
#[test]
fn a_new_request_opens_other_gates() {
    let routes = [0, 1].map(|m| Route { models: vec![ModelId(m)], entry: 0, key: None, faulty: None });
    let ladders = [vec![1, 1, 3], vec![1, 2, 1]];
    let models = ladders.into_iter().zip([0, 1].map(ModelId)).map(|(min_batch, id)| {
        let attachments = routes.iter().map(|route| attachment(route, id)).collect();
        let limits = Limits { max_rows: 64, prefill_chunk: 64 };
        let server = SubServer::new(id, Box::new(SimulatedRunner::new("sim", id.0, VOCAB, 64)), attachments, limits);
        let waiting = Waiting { min_batch, max_wait: FOR_EVER, hold: Duration::ZERO };
        SimulatedModel { server, latency: Latency::constant(micros(10_000)), waiting, host: 0, stretch: Vec::new() }
    });
    let shapes = routes.iter().map(|r| (r.models[0], r.models.clone())).collect();
    let mut world = World::new(models.collect(), shapes, (Schedule::Delayed, Network::PERFECT), 0, Ledgers::default());
    // Model 0 is busy with the first; the second waits at model 1 for company; the third comes to model 0.
    for (id, route, at) in [(1, 0, 0), (2, 1, 1), (3, 0, 2)] {
        let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::greedy() };
        let new = NewRequest {
            route: RouteId(route),
            prompt: vec![1],
            max_tokens: 5,
            sampling,
            return_signals: false,
            cache_salt: None,
        };
        world.submit(micros(at), Arc::new(RequestSpec::new(id, new)));
    }
    while world.advance() {}
    for (id, client) in &world.audience.0 {
        assert!(client.ended_at < FOR_EVER, "request {id} waited for ever");
        assert_eq!(client.ledger.tokens().len(), 5);
    }
}

#[test]
fn panicking_policies_lose_nothing() {
    // Thousands of panics are expected; their messages say nothing.
    std::panic::set_hook(Box::new(|_| {}));
    let mut all = Counts::default();
    let broken = (0..SCHEDULES / 4).find_map(|seed| match world(seed, resolve, Fault::Policies, Cache::Drawn, None) {
        Ok(counts) => {
            all.failed += counts.failed;
            all.tokens += counts.tokens;
            None
        }
        Err(broken) => Some((seed, broken)),
    });
    drop(std::panic::take_hook());
    assert_eq!(broken, None);
    assert!(all.failed > 100 && all.tokens > 10_000, "the schedules test too little: {all:?}");
}

/// Whoever is at a model that goes down, or comes to it, fails; all others are answered as ever.
#[test]
fn a_lost_runner_costs_its_own_requests_only() {
    let mut all = Counts::default();
    for seed in 0..SCHEDULES / 2 {
        match world(seed, resolve, Fault::Runner, Cache::Drawn, None) {
            Ok(counts) => {
                all.lost += counts.lost;
                all.failed += counts.failed;
                all.handoffs += counts.handoffs;
            }
            Err(broken) => panic!("schedule {seed} breaks invariant {broken}"),
        }
    }
    println!("{all:?}");
    assert!(all.lost > SCHEDULES / 8 && all.failed > all.lost, "the schedules test too little: {all:?}");
}

/// Broken copies of the resolve step. Each must be noticed within a few schedules.
fn first_break(resolve: Resolve) -> Option<u64> {
    (0..500).find(|&seed| schedule(seed, resolve).is_err())
}

#[test]
fn a_resolve_that_keeps_dropped_candidates_is_noticed() {
    fn broken(s: &Situation<'_>, d: &[Decision]) -> Outcome {
        let mut outcome = resolve(s, d);
        if matches!(outcome.next, Next::To(_)) {
            outcome.commit.extend(outcome.candidate.take());
        }
        outcome
    }
    assert!(first_break(broken).is_some());
}

#[test]
fn a_resolve_that_accepts_one_draft_too_many_is_noticed() {
    fn broken(s: &Situation<'_>, d: &[Decision]) -> Outcome {
        let mut outcome = resolve(s, d);
        if s.verify && outcome.commit.len() < s.provisional.len() && outcome.next == Next::Stay {
            outcome.commit.insert(0, s.provisional[0].clone());
        }
        outcome
    }
    assert!(first_break(broken).is_some());
}

#[test]
fn a_resolve_that_commits_drafts_at_once_is_noticed() {
    fn broken(s: &Situation<'_>, d: &[Decision]) -> Outcome {
        let mut outcome = resolve(s, d);
        let drafts = std::mem::take(&mut outcome.provisional);
        outcome.commit.extend(drafts);
        outcome
    }
    assert!(first_break(broken).is_some());
}

#[test]
fn a_resolve_that_forgets_budgets_is_noticed() {
    fn broken(s: &Situation<'_>, d: &[Decision]) -> Outcome {
        resolve(&Situation { budget: None, ..*s }, d)
    }
    assert!(first_break(broken).is_some());
}
