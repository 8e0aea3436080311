//! The tuner on the real schedulers in virtual time: routes and requests under way change.

use std::collections::HashMap;
use std::sync::Arc;

use proptest::prelude::*;
use tokenrouter_batching::online::Steps;
use tokenrouter_batching::search::{self, Options};
use tokenrouter_batching::{Model, System};

use super::*;
use crate::engine::OnError;
use crate::request::{Event, ModelId, NewRequest, RequestId, RequestSpec, RouteId, SamplingParams};
use crate::runner::simulated::Latency;
use crate::simulation::chance::{Blank, Chance};
use crate::simulation::{Audience, Network, SimulatedModel, World};
use crate::subserver::coordinator::Waiting;
use crate::subserver::gate::{Schedule, may_wait};
use crate::subserver::{Attachment, Limits, SubServer};

/// Milliseconds of a step of each model.
const TIMES: [f64; 2] = [6.0, 27.9];
/// By route: share of the first model's steps after which the second one goes on.
const SHARES: [f64; 3] = [0.05, 0.15, 0.4];
const TOKENS: u32 = 100;
const PHASE: f64 = 40.0;
const SETTLING: f64 = 10.0;

#[derive(Clone, Copy)]
struct Phase {
    route: usize,
    requests: usize,
}

fn ms(ms: f64) -> Duration {
    Duration::from_secs_f64(ms / 1e3)
}

fn settings() -> Settings {
    Settings { interval: Duration::from_secs(2), p99_tpot_ms: None, p99_ttft_ms: None }
}

/// Clients that ask again when they have been answered.
#[derive(Default)]
struct Clients {
    tokens: u64,
    ended: usize,
    /// By request: tokens and start of the present chunk.
    chunks: HashMap<RequestId, (u64, Duration)>,
    tpot: Vec<f64>,
}

impl Audience for Clients {
    fn submitted(&mut self, _: Duration, _: RequestId) {}
    fn cancelled(&mut self, _: Duration, _: RequestId) {}
    fn hear(&mut self, now: Duration, id: RequestId, event: Event) {
        match event {
            Event::Committed { tokens, .. } => {
                self.tokens += tokens.len() as u64;
                let (count, since) = self.chunks.entry(id).or_insert((0, now));
                *count += tokens.len() as u64;
                if *count >= 64 {
                    self.tpot.push(1e3 * (now - *since).as_secs_f64() / *count as f64);
                    (*count, *since) = (0, now);
                }
            }
            Event::Finished { .. } => {
                self.chunks.remove(&id);
                self.ended += 1;
            }
            other => panic!("{other:?}"),
        }
    }
}

fn world(stretch: [f64; 2], ladders: &Ladders) -> World<Clients> {
    let members = || [0, 1].map(ModelId).to_vec();
    let model = |index: usize| {
        let attach = |(route, p): (usize, &f64)| {
            let (routing, commit) = if index == 0 { ([1.0 - p, *p], [1.0, 0.0]) } else { ([1.0, 0.0], [1.0, 1.0]) };
            let policy = Chance::new(index, &routing, &commit, 7 + 2 * route as u64 + index as u64);
            Some(Attachment::new("", Some(Box::new(policy)), members(), index as u32, OnError::default(), &[]))
        };
        let attachments = SHARES.iter().enumerate().map(attach).collect();
        let runner = Blank::new(["small", "large"][index], 100_000);
        let limits = Limits { max_rows: 4096, prefill_chunk: 4096 };
        SimulatedModel {
            server: SubServer::new(ModelId(index as u32), Box::new(runner), attachments, limits)
                .with_prefix_cache(false),
            latency: Latency::constant(ms(TIMES[index])),
            waiting: Waiting {
                min_batch: ladders[index].clone(),
                max_wait: Duration::from_secs(3600),
                hold: Duration::ZERO,
            },
            host: 0,
            stretch: vec![stretch[index]],
        }
    };
    let routes = SHARES.map(|_| (ModelId(0), members()));
    let models = (0..2).map(model).collect();
    World::new(models, routes.to_vec(), (Schedule::Delayed, Network::PERFECT), 3, Clients::default())
}

fn spec(id: RequestId, route: usize) -> Arc<RequestSpec> {
    let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::greedy() };
    let (route, prompt, max_tokens) = (RouteId(route as u32), vec![0], TOKENS);
    let new = NewRequest { route, prompt, max_tokens, sampling, return_signals: false, cache_salt: None };
    Arc::new(RequestSpec::new(id, new))
}

/// Tokens a second of each phase once it has settled.
fn run(phases: &[Phase], stretch: [f64; 2], ladders: &Ladders, mut tuner: Option<Tuner>) -> Vec<f64> {
    let mut world = world(stretch, ladders);
    let (mut next, mut under_way, mut turn) = (0, 0, settings().interval);
    let mut rates = Vec::new();
    for (index, phase) in (1..).zip(phases) {
        let end = Duration::from_secs_f64(f64::from(index) * PHASE);
        let start = end - Duration::from_secs_f64(PHASE - SETTLING);
        let mut counted = None;
        while world.now() < end {
            under_way -= std::mem::take(&mut world.audience.ended);
            while under_way < phase.requests {
                (next, under_way) = (next + 1, under_way + 1);
                world.submit(world.now(), spec(next, phase.route));
            }
            assert!(world.advance());
            if world.now() >= turn {
                turn += settings().interval;
                let mut reading = world.reading();
                reading.times.tpot = std::mem::take(&mut world.audience.tpot);
                let change = tuner.as_mut().and_then(|tuner| tuner.turn(world.now(), reading).unwrap());
                if let Some(change) = change {
                    world.set_ladders(change.ladders).unwrap();
                }
            }
            if counted.is_none() && world.now() >= start {
                counted = Some((world.audience.tokens, world.now()));
            }
        }
        let (before, from) = counted.unwrap();
        rates.push((world.audience.tokens - before) as f64 / (world.now() - from).as_secs_f64());
    }
    rates
}

/// The best ladder of a route, at the numbers of requests of `phases`.
fn best_ladders(route: usize, stretch: [f64; 2], phases: &[Phase]) -> Ladders {
    let p = SHARES[route];
    let model = |index: usize| {
        let times = Model::new(["s", "l"][index], vec![TIMES[index]]);
        Model { stretch: stretch[index], ..times }
    };
    let (routing, commits) = (vec![vec![1.0 - p, p], vec![1.0, 0.0]], vec![vec![1.0, 0.0]; 2]);
    let system = System { models: vec![model(0), model(1)], routing, commits, sigma: vec![], entry: 0 };
    let system = system.checked().unwrap();
    let options = Options { haste: 8, ..Options::default() };
    let mut ladders = vec![vec![1; 32]; 2];
    for phase in phases {
        let best = search::best(&system, phase.requests, &options, None).unwrap();
        ladders.iter_mut().zip(best.setting.min_batch).for_each(|(ladder, b)| ladder[phase.requests - 1] = b);
    }
    ladders
}

fn tuner(ladders: &Ladders) -> Tuner {
    Tuner::new(["small", "large"].map(String::from).to_vec(), 0, ladders.clone(), settings()).unwrap()
}

/// Assumed is that models do not slow each other down.
#[test]
fn a_server_follows_its_traffic() {
    let phases = [(0, 16), (2, 16), (1, 32), (2, 4)].map(|(route, requests)| Phase { route, requests });
    let eager = vec![vec![1], vec![1]];
    for stretch in [[1.0, 1.0], [1.3, 1.3]] {
        let ours = run(&phases, stretch, &eager, Some(tuner(&eager)));
        let fixed: Vec<Ladders> = (0..3).map(|route| best_ladders(route, stretch, &phases)).collect();
        let fixed: Vec<Vec<f64>> = fixed.iter().map(|ladders| run(&phases, stretch, ladders, None)).collect();
        let eager = run(&phases, stretch, &eager, None);
        for (index, phase) in phases.iter().enumerate() {
            let (ours, best, eager) = (ours[index], fixed[phase.route][index], eager[index]);
            let what = format!("{stretch:?}, phase {index}, N {}: {ours}, best {best}, eager {eager}", phase.requests);
            assert!(ours > 0.97 * best && ours > 0.99 * eager, "{what}");
        }
        let total = |rates: &[f64]| rates.iter().sum::<f64>();
        for other in fixed.iter().chain([&eager]) {
            assert!(total(&ours) > total(other), "{stretch:?}: {ours:?} {other:?}");
        }
    }
}

#[test]
fn the_line_tells_of_what_has_changed() {
    let ladders = |large: &[u32]| vec![vec![1], large.to_vec()];
    let (tuner, thin) = (tuner(&ladders(&[1])), Reason::Thin);
    let line = |live| tuner.line(&ladders(&[1, 2, 2, 2]), &ladders(&[1, 2, 3, 4]), live, &thin);
    assert_eq!(
        line(4).unwrap(),
        "min_batch of small, large for 4 requests: 1, 2 -> 1, 4 (too little was seen: as configured)"
    );
    assert_eq!(
        line(1).unwrap(),
        "min_batch of small, large for 3 requests: 1, 2 -> 1, 3; the same for 1, as now (too little was seen: as \
         configured)"
    );
    // Ladders of other lengths with the same thresholds.
    assert_eq!(tuner.line(&ladders(&[1, 2, 2]), &ladders(&[1, 2]), 2, &thin), None);
}

/// The next turn starts from those in force.
#[test]
fn ladders_that_were_not_put_in_force_are_chosen_again() {
    let eager = vec![vec![1], vec![1]];
    let mut tuner = tuner(&eager);
    let mut observed = vec![Observed { to: vec![0; 2], ..Observed::default() }; 2];
    let mut turn = |turn: u32, there: u64, ladders: &Ladders| {
        for (seen, (evaluated, to)) in observed.iter_mut().zip([(1000, 1), (there, 0)]) {
            seen.evaluated += evaluated;
            seen.committed += evaluated;
            seen.to[to] += there;
            seen.sizes.resize(1, Steps::default());
            (0..200).for_each(|_| seen.sizes[0].add(&Steps::one(TIMES[1 - to], 0.0), 1.0));
        }
        let reading = Reading {
            observed: observed.clone(),
            live: 8,
            most_live: 8,
            ladders: ladders.clone(),
            times: Times::default(),
        };
        tuner.turn(settings().interval * turn, reading)
    };
    let first = turn(1, 350, &eager).unwrap().unwrap();
    assert_ne!(first.ladders, eager);
    let second = turn(2, 100, &eager).unwrap().unwrap();
    let line = second.line.unwrap();
    assert!(line.contains(": 1, 1 -> "), "{line}");
    assert!(matches!(turn(3, 100, &vec![vec![1]]), Err(Fault::Count { given: 1, wanted: 2, .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    /// Whatever is observed, not even lowering is needed.
    #[test]
    fn no_observation_locks_up(
        turns in prop::collection::vec(
            (prop::collection::vec((400u64..2000, 0.2f64..1.0, 0.0f64..1.0, 0usize..6, 1.0f64..50.0, 0.0f64..1.0), 3), 0usize..12),
            1..4,
        ),
        configured in 1u32..3,
    ) {
        let names = ["a", "b", "c"].map(String::from).to_vec();
        let ladders = vec![vec![1], vec![1, configured], vec![1]];
        let mut tuner = Tuner::new(names, 0, ladders.clone(), settings()).unwrap();
        let mut in_force = ladders;
        let mut observed = vec![Observed { to: vec![0; 3], sizes: vec![Steps::default(); 64], ..Observed::default() }; 3];
        for (turn, (models, most_live)) in (1..).zip(turns) {
            for (model, (evaluated, there, ended, size, time, overlap)) in models.into_iter().enumerate() {
                let seen = &mut observed[model];
                seen.evaluated += evaluated;
                seen.committed += evaluated;
                seen.to[(model + 1) % 3] += (evaluated as f64 * there / 2.0) as u64;
                seen.finished += (evaluated as f64 * ended / 4.0) as u64;
                seen.begun += 1;
                (0..evaluated / 10).for_each(|_| seen.sizes[size].add(&Steps::one(time, time * overlap), 1.0));
            }
            let ladders = in_force.clone();
            let reading =
                Reading { observed: observed.clone(), live: most_live, most_live, ladders, times: Times::default() };
            let change = tuner.turn(settings().interval * turn, reading).unwrap();
            prop_assert!(!tuner.status().thin);
            if let Some(change) = change {
                prop_assert!(change.ladders.iter().flatten().all(|b| *b >= 1));
                in_force = change.ladders;
            }
            for n in 1..300 {
                prop_assert!(may_wait(&in_force, n) < n as u64, "{n}: {in_force:?}");
            }
        }
    }
}
