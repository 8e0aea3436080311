//! Two models whose traffic changes, simulated: what the tuner follows.

use std::time::Duration;

use tokenrouter_batching::online::{Config, Online, Seen};
use tokenrouter_batching::search::{self, Options};
use tokenrouter_batching::simulation::{Observer, Simulation};
use tokenrouter_batching::{Model, Setting, System};

/// Some time with the same traffic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phase {
    /// Share of the small model's steps after which the large one goes on.
    pub p: f64,
    /// Requests under way.
    pub requests: usize,
}

/// Milliseconds of a phase, and of its start that does not count.
#[derive(Clone, Copy, Debug)]
pub struct Length {
    pub phase: f64,
    pub settling: f64,
}

/// What a phase came to once it had settled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    pub tokens_per_second: f64,
    /// 99th percentile of the milliseconds a token over chunks of 64 tokens of a request.
    pub p99_tpot_ms: f64,
    /// Thresholds at its end.
    pub min_batch: [u32; 2],
}

pub fn system(p: f64, stretch: [f64; 2]) -> System {
    let mut models = vec![Model::new("small", vec![6.0]), Model::new("large", vec![27.9, 28.1, 28.3, 28.5])];
    models.iter_mut().zip(stretch).for_each(|(model, stretch)| model.stretch = stretch);
    let routing = vec![vec![1.0 - p, p], vec![1.0, 0.0]];
    let commits = vec![vec![1.0, 0.0]; 2];
    System { models, routing, commits, sigma: Vec::new(), entry: 0 }.checked().unwrap()
}

/// `stretch`: what is assumed until it can be told.
pub fn config(stretch: [f64; 2]) -> Config {
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
    seen: Vec<Seen>,
    ended: Option<Ended>,
    counted: f64,
    /// By request: tokens and start of its present chunk.
    chunks: Vec<(f64, f64)>,
    /// Times per token since the phase settled, and those that the tuner has not been told.
    tpot: Vec<f64>,
    untold: Vec<f64>,
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
            self.untold.push(ms);
        }
    }
}

/// Who chooses thresholds.
#[derive(Clone, Debug)]
pub enum Control {
    Online(Box<Online>),
    Ladders(Vec<Vec<u32>>),
}

impl Control {
    pub fn online(config: Config) -> Self {
        Self::Online(Box::new(Online::new(config, Duration::ZERO).unwrap()))
    }

    pub fn eager() -> Self {
        Self::Ladders(vec![vec![1], vec![1]])
    }

    fn min_batch(&self, requests: usize) -> [u32; 2] {
        let ladders = match self {
            Self::Online(online) => online.ladders(),
            Self::Ladders(ladders) => ladders,
        };
        [0, 1].map(|model| *ladders[model].get(requests - 1).or(ladders[model].last()).unwrap())
    }
}

/// Go through `phases`.
pub fn run(phases: &[Phase], stretch: [f64; 2], length: Length, mut control: Control, seed: u64) -> Vec<Outcome> {
    let first = phases[0];
    let setting = Setting::new(vec![1; 2]);
    let mut simulation = Simulation::new(system(first.p, stretch), first.requests, setting, seed).unwrap();
    let mut plant = Plant {
        seen: vec![Seen::none(2); 2],
        ended: None,
        counted: 0.0,
        chunks: Vec::new(),
        tpot: Vec::new(),
        untold: Vec::new(),
    };
    let mut outcomes = Vec::new();
    for (index, phase) in (1..).zip(phases) {
        simulation.set_system(system(phase.p, stretch));
        simulation.set_requests(phase.requests);
        let end = f64::from(index) * length.phase;
        let (mut from, mut start) = (None, 0.0);
        while simulation.now() < end {
            let min_batch = control.min_batch(phase.requests);
            assert!(min_batch.iter().map(|b| b - 1).sum::<u32>() < phase.requests as u32, "{min_batch:?} locks up");
            simulation.set_setting(Setting::new(min_batch.to_vec()));
            simulation.advance(&mut plant).unwrap();
            plant.flush();
            if let Control::Online(online) = &mut control {
                plant.untold.drain(..).for_each(|ms| online.tpot(ms));
                online.active(simulation.requests());
                online.choose(Duration::from_secs_f64(simulation.now() / 1e3), &plant.seen);
            }
            if from.is_none() && simulation.now() > end - length.phase + length.settling {
                (from, start) = (Some(simulation.now()), plant.counted);
                plant.tpot.clear();
            }
        }
        let seconds = (simulation.now() - from.unwrap()) / 1e3;
        plant.tpot.sort_by(f64::total_cmp);
        outcomes.push(Outcome {
            tokens_per_second: (plant.counted - start) / seconds,
            p99_tpot_ms: plant.tpot[(0.99 * plant.tpot.len() as f64) as usize],
            min_batch: control.min_batch(phase.requests),
        });
    }
    outcomes
}

/// The best ladder for a share that stays, at the numbers of requests of `phases`.
pub fn best_ladder(p: f64, stretch: [f64; 2], phases: &[Phase]) -> Vec<Vec<u32>> {
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
