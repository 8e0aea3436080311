//! The online tuner on traffic that changes, with the simulator as the plant.

#![allow(clippy::unwrap_used)] // Helpers of tests.

use std::time::Duration;

use proptest::prelude::*;
use tokenrouter_batching::online::{Config, Online, Reason, Seen};
use tokenrouter_batching::search::{self, Options};
use tokenrouter_batching::simulation::{Observer, Simulation};
use tokenrouter_batching::system::most_waiting;
use tokenrouter_batching::{Model, Setting, System};

/// Milliseconds of a phase, and of its start that does not count.
const PHASE: f64 = 40_000.0;
const SETTLING: f64 = 10_000.0;

#[derive(Clone, Copy)]
struct Phase {
    p: f64,
    requests: usize,
}

fn system(p: f64, stretch: [f64; 2]) -> System {
    let mut models = vec![Model::new("small", vec![6.0]), Model::new("large", vec![27.9, 28.1, 28.3, 28.5])];
    models.iter_mut().zip(stretch).for_each(|(model, stretch)| model.stretch = stretch);
    let routing = vec![vec![1.0 - p, p], vec![1.0, 0.0]];
    let commits = vec![vec![1.0, 0.0]; 2];
    System { models, routing, commits, sigma: Vec::new(), entry: 0 }.checked().unwrap()
}

fn config(stretch: [f64; 2]) -> Config {
    Config {
        names: vec!["small".into(), "large".into()],
        entry: 0,
        ladders: vec![vec![1], vec![1]],
        stretch: stretch.to_vec(),
        interval: Duration::from_secs(2),
        p99_tpot_ms: None,
        p99_ttft_ms: None,
    }
}

/// A step that ended, until all its requests are routed.
struct Ended {
    model: usize,
    ms: f64,
    overlap_ms: f64,
    routed: Vec<u32>,
    tokens: f64,
}

/// Passes on what the server would.
struct Plant {
    online: Option<Online>,
    seen: Vec<Seen>,
    ended: Option<Ended>,
    counted: f64,
    /// By request: tokens and start of its present chunk.
    chunks: Vec<(f64, f64)>,
    tpot: Vec<f64>,
}

impl Plant {
    fn flush(&mut self) {
        if let Some(step) = self.ended.take() {
            self.seen[step.model].step(step.ms, step.overlap_ms, &step.routed, step.tokens);
        }
    }
}

impl Observer for Plant {
    fn step(&mut self, _: f64, model: usize, _: usize, ms: f64, overlap_ms: f64) {
        self.flush();
        self.ended = Some(Ended { model, ms, overlap_ms, routed: vec![0; 2], tokens: 0.0 });
    }

    fn routed(&mut self, now: f64, request: u32, _: usize, to: usize, tokens: f64) {
        if let Some(ended) = &mut self.ended {
            ended.routed[to] += 1;
            ended.tokens += tokens;
        }
        self.counted += tokens;
        let index = request as usize;
        self.chunks.resize(self.chunks.len().max(index + 1), (0.0, now));
        self.chunks[index].0 += tokens;
        if self.chunks[index].0 >= 64.0 {
            let ms = (now - self.chunks[index].1) / self.chunks[index].0;
            self.chunks[index] = (0.0, now);
            self.tpot.push(ms);
            if let Some(online) = &mut self.online {
                online.tpot(ms);
            }
        }
    }
}

/// Tokens a second and the 99th percentile of the time per token of each phase once it has settled.
fn run(phases: &[Phase], stretch: [f64; 2], online: Option<Online>, fixed: &[Vec<u32>]) -> Vec<(f64, f64)> {
    let first = phases[0];
    let setting = Setting::new(vec![1; 2]);
    let mut simulation = Simulation::new(system(first.p, stretch), first.requests, setting, 11).unwrap();
    let mut plant =
        Plant { online, seen: vec![Seen::none(2); 2], ended: None, counted: 0.0, chunks: Vec::new(), tpot: Vec::new() };
    let mut results = Vec::new();
    for (index, phase) in phases.iter().enumerate() {
        simulation.set_system(system(phase.p, stretch));
        simulation.set_requests(phase.requests);
        let end = (index + 1) as f64 * PHASE;
        let (mut from, mut start) = (None, 0.0);
        while simulation.now() < end {
            let ladders = plant.online.as_ref().map_or(fixed, Online::ladders);
            let at = |ladder: &Vec<u32>| ladder.get(phase.requests - 1).or(ladder.last()).copied().unwrap();
            let min_batch: Vec<u32> = ladders.iter().map(at).collect();
            assert!(most_waiting(&min_batch) < phase.requests as u64);
            simulation.set_setting(Setting::new(min_batch));
            simulation.advance(&mut plant).unwrap();
            plant.flush();
            if let Some(online) = &mut plant.online {
                online.active(simulation.requests());
                online.choose(Duration::from_secs_f64(simulation.now() / 1e3), &plant.seen);
            }
            if from.is_none() && simulation.now() > end - PHASE + SETTLING {
                (from, start) = (Some(simulation.now()), plant.counted);
                plant.tpot.clear();
            }
        }
        let seconds = (simulation.now() - from.unwrap()) / 1e3;
        plant.tpot.sort_by(f64::total_cmp);
        let p99 = plant.tpot[(0.99 * plant.tpot.len() as f64) as usize];
        results.push(((plant.counted - start) / seconds, p99));
    }
    results
}

/// The best ladder for a share that stays, at the numbers of requests of `phases`.
fn best_ladder(p: f64, stretch: [f64; 2], phases: &[Phase]) -> Vec<Vec<u32>> {
    let options = Options { haste: 4, ..Options::default() };
    let mut ladders = vec![vec![1; 32]; 2];
    for phase in phases {
        let best = search::best(&system(p, stretch), phase.requests, &options, None).unwrap();
        for (ladder, b) in ladders.iter_mut().zip(best.setting.min_batch) {
            ladder[phase.requests - 1] = b;
        }
    }
    ladders
}

#[test]
fn follows_traffic_that_changes() {
    let phases =
        [(0.05, 16), (0.4, 16), (0.15, 32), (0.4, 4), (0.05, 2), (0.15, 8)].map(|(p, requests)| Phase { p, requests });
    let shares = [0.05, 0.15, 0.4];
    // Assumed are 1 and 1.
    for stretch in [[1.0, 1.0], [1.6, 1.15]] {
        let online = Online::new(config([1.0, 1.0]), Duration::ZERO).unwrap();
        let online = run(&phases, stretch, Some(online), &[]);
        let eager = run(&phases, stretch, None, &[vec![1], vec![1]]);
        let fixed: Vec<Vec<(f64, f64)>> =
            shares.iter().map(|&p| run(&phases, stretch, None, &best_ladder(p, stretch, &phases))).collect();
        for (index, phase) in phases.iter().enumerate() {
            let own = shares.iter().position(|p| *p == phase.p).unwrap();
            let (ours, best, eager) = (online[index].0, fixed[own][index].0, eager[index].0);
            let what = format!("{stretch:?}, p {}, N {}: {ours}, best {best}, eager {eager}", phase.p, phase.requests);
            assert!(ours > 0.97 * best && ours > 0.985 * eager, "{what}");
        }
        let total = |run: &[(f64, f64)]| run.iter().map(|(rate, _)| rate).sum::<f64>();
        for run in fixed.iter().chain([&eager]) {
            assert!(total(&online) > total(run), "{stretch:?}: {} {}", total(&online), total(run));
        }
    }
}

#[test]
fn keeps_a_limit_on_the_time_per_token() {
    let phases = [Phase { p: 0.35, requests: 8 }; 2];
    let stretch = [1.0, 1.0];
    let free = run(&phases, stretch, Some(Online::new(config(stretch), Duration::ZERO).unwrap()), &[]);
    let eager = run(&phases, stretch, None, &[vec![1], vec![1]]);
    let (low, high) = (free[1].1.min(eager[1].1), free[1].1.max(eager[1].1));
    assert!(high > 1.02 * low, "{low} {high}: nothing to choose");
    let limit = (low + high) / 2.0;
    let config = Config { p99_tpot_ms: Some(limit), ..config(stretch) };
    let limited = run(&phases, stretch, Some(Online::new(config, Duration::ZERO).unwrap()), &[]);
    assert!(limited[1].1 <= limit, "{} for {limit}", limited[1].1);
}

#[test]
fn little_is_known_at_first_and_after_silence() {
    let configured = vec![vec![1], vec![1, 2]];
    let config = Config { ladders: configured.clone(), ..config([1.0, 1.0]) };
    let mut online = Online::new(config, Duration::ZERO).unwrap();
    let at = Duration::from_secs;
    let mut seen = vec![Seen::none(2); 2];
    online.active(8);
    seen[0].step(6.0, 0.0, &[1, 1], 1.0);
    assert_eq!(online.choose(at(1), &seen), None);
    assert_eq!(online.choose(at(3), &seen), None);
    assert_eq!(online.ladders(), configured);
    for _ in 0..200 {
        seen[0].step(6.0, 0.0, &[3, 2], 3.0);
        seen[1].step(28.0, 0.0, &[2, 0], 2.0);
    }
    online.active(8);
    let choice = online.choose(at(6), &seen).unwrap();
    assert!(matches!(choice.reason, Reason::Tuned { requests: 8, .. }), "{choice:?}");
    assert!(choice.ladders[1][7] > 2, "{choice:?}");
    // The same again is no reason to change.
    for _ in 0..200 {
        seen[0].step(6.0, 0.0, &[3, 2], 3.0);
        seen[1].step(28.0, 0.0, &[2, 0], 2.0);
    }
    online.active(8);
    assert_eq!(online.choose(at(9), &seen), None);
    let mut after = (5..20).filter_map(|turn| online.choose(at(3 * turn), &seen));
    let choice = after.next().unwrap();
    assert_eq!((choice.reason, choice.ladders), (Reason::Thin, configured));
    assert_eq!(after.next(), None);
}

#[test]
fn missed_first_tokens_take_thresholds_back() {
    let config = Config { p99_ttft_ms: Some(100.0), ..config([1.0, 1.0]) };
    let mut online = Online::new(config, Duration::ZERO).unwrap();
    let (mut largest, mut seen) = (Vec::new(), vec![Seen::none(2); 2]);
    for turn in 1..=12 {
        for _ in 0..200 {
            seen[0].step(6.0, 0.0, &[3, 2], 3.0);
            seen[1].step(28.0, 0.0, &[2, 0], 2.0);
        }
        online.active(6);
        online.ttft(if (3..8).contains(&turn) { 150.0 } else { 50.0 });
        online.choose(Duration::from_secs(2 * turn), &seen);
        largest.push(online.ladders()[1].iter().copied().max().unwrap());
    }
    assert!(largest[1] > 2 && largest[6] == 1 && largest[11] > 1, "{largest:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(6) })]

    #[test]
    fn no_choice_locks_up(
        steps in prop::collection::vec((0usize..3, 1u32..5, 1u32..5, 1u32..5, 1.0f64..40.0, 0.0f64..1.0), 60..120),
        requests in 1usize..7,
        configured in 1u32..4,
    ) {
        let config = Config {
            names: ["a", "b", "c"].map(String::from).to_vec(),
            ladders: vec![vec![1], vec![1], vec![1, configured.min(2)]],
            stretch: vec![1.0; 3],
            ..config([1.0; 2])
        };
        let mut online = Online::new(config, Duration::ZERO).unwrap();
        let mut seen = vec![Seen::none(3); 3];
        for (turn, steps) in steps.chunks(60).enumerate() {
            for &(model, a, b, c, ms, overlap) in steps {
                for extra in 0..12 {
                    seen[(model + extra) % 3].step(ms, overlap * ms, &[a, b, c], 1.0);
                }
            }
            online.active(requests);
            online.choose(Duration::from_secs(2 * (turn as u64 + 1)), &seen);
            for n in 1..=2 * requests {
                let at = |ladder: &Vec<u32>| ladder.get(n - 1).or(ladder.last()).copied().unwrap();
                let min_batch: Vec<u32> = online.ladders().iter().map(at).collect();
                prop_assert!(min_batch.iter().all(|b| *b >= 1) && most_waiting(&min_batch) < n as u64, "{n}: {min_batch:?}");
            }
        }
    }
}
