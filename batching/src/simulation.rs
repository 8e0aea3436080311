//! A simulator of the same model as the chain: one request after the other, times as they are.
//!
//! It shares no code with the chain. Where the chain is too large it takes its place, with a standard error from
//! independent seeds.

use std::collections::VecDeque;

use crate::chain::Rates;
use crate::random::Random;
use crate::system::{Fault, Setting, System};

/// Steps that end within this share of a step's time end at the same moment: sums of times differ by rounding.
const TIE: f64 = 1e-9;

/// One model at work.
#[derive(Clone, Debug)]
struct Place {
    waiting: VecDeque<u32>,
    batch: Vec<u32>,
    /// Overlap time of the running step in all and what is left of it, in milliseconds.
    step: f64,
    left: f64,
    /// When it began, and how long other models have run since.
    began: f64,
    overlap: f64,
    /// By model: probabilities summed up to it.
    routes: Vec<f64>,
}

/// Told what happens, in the order of time.
pub trait Observer {
    /// A step of `model` with `batch` requests ended at `now` (milliseconds), `ms` after it began. Other models ran
    /// for `overlap_ms` of that.
    fn step(&mut self, _now: f64, _model: usize, _batch: usize, _ms: f64, _overlap_ms: f64) {}
    /// The step wrote `tokens` for `request`, which goes on at `to`.
    fn routed(&mut self, _now: f64, _request: u32, _from: usize, _to: usize, _tokens: f64) {}
}

impl Observer for () {}

/// Totals by model.
#[derive(Clone, Debug, PartialEq)]
struct Totals {
    ends: Vec<f64>,
    batches: Vec<f64>,
}

/// A system that runs.
#[derive(Clone, Debug)]
pub struct Simulation {
    system: System,
    setting: Setting,
    places: Vec<Place>,
    now: f64,
    /// Requests that are to leave when their step ends.
    leaving: usize,
    active: Vec<bool>,
    random: Random,
}

/// Nothing runs and nothing can start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the thresholds lock up: nothing runs and no model has enough requests")]
pub struct LockedUp;

impl Simulation {
    /// All requests wait at the entry of the checked `system`.
    pub fn new(system: System, requests: usize, setting: Setting, seed: u64) -> Result<Self, Fault> {
        system.check_setting(requests, &setting)?;
        let place = |row: &Vec<f64>| Place {
            waiting: VecDeque::new(),
            batch: Vec::new(),
            step: 0.0,
            left: 0.0,
            began: 0.0,
            overlap: 0.0,
            routes: summed(row),
        };
        let places = system.routing.iter().map(place).collect();
        let random = Random::new(seed);
        let mut simulation = Self { system, setting, places, now: 0.0, leaving: 0, active: Vec::new(), random };
        simulation.set_requests(requests);
        Ok(simulation)
    }

    /// Milliseconds since the start.
    pub fn now(&self) -> f64 {
        self.now
    }

    /// Requests under way, without those that leave.
    pub fn requests(&self) -> usize {
        self.active.iter().filter(|active| **active).count() - self.leaving
    }

    /// New requests wait at the entry; requests that are too many leave when their next step ends.
    pub fn set_requests(&mut self, requests: usize) {
        let now = self.requests();
        if requests <= now {
            self.leaving += now - requests;
            return;
        }
        let stay = self.leaving.min(requests - now);
        self.leaving -= stay;
        for _ in 0..requests - now - stay {
            let free = self.active.iter().position(|active| !active).unwrap_or(self.active.len());
            if free == self.active.len() {
                self.active.push(false);
            }
            self.active[free] = true;
            self.places[self.system.entry].waiting.push_back(free as u32);
        }
    }

    /// For steps that start from now on. The caller sees to it that nothing locks up.
    pub fn set_setting(&mut self, setting: Setting) {
        self.setting = setting;
    }

    /// Other step times, stretches or routes from now on, of as many models. Running steps keep their times.
    pub fn set_system(&mut self, system: System) {
        for (place, row) in self.places.iter_mut().zip(&system.routing) {
            place.routes = summed(row);
        }
        self.system = system;
    }

    fn launch(&mut self) {
        for model in (0..self.places.len()).rev() {
            let waiting = self.places[model].waiting.len();
            let hold = self.setting.hold_ms[model];
            let held = |(running, place): (usize, &Place)| {
                let work = place.left / self.system.models[running].stretch;
                hold > 0.0 && !place.batch.is_empty() && work <= hold * (1.0 + TIE)
            };
            let enough = waiting > 0 && waiting >= self.setting.min_batch[model] as usize;
            if !enough || !self.places[model].batch.is_empty() || self.places.iter().enumerate().any(held) {
                continue;
            }
            let of = &self.system.models[model];
            let batch = of.batch(waiting);
            let place = &mut self.places[model];
            place.batch.extend(place.waiting.drain(..batch));
            place.step = of.step(batch) * of.stretch;
            place.left = place.step;
            (place.began, place.overlap) = (self.now, 0.0);
        }
    }

    /// Start what can start and let time pass until the next steps end.
    pub fn advance(&mut self, observer: &mut impl Observer) -> Result<(), LockedUp> {
        self.launch();
        let running = || self.places.iter().enumerate().filter(|(_, place)| !place.batch.is_empty());
        let count = running().count();
        let passed = running().map(|(_, place)| place.left).fold(f64::INFINITY, f64::min);
        let alone = if count == 1 { running().map(|(model, _)| self.system.models[model].stretch).sum() } else { 1.0 };
        if count == 0 {
            return Err(LockedUp);
        }
        let time = passed / alone * self.system.sigma(count);
        self.now += time;
        for place in self.places.iter_mut().filter(|place| !place.batch.is_empty()) {
            place.left -= passed;
            place.overlap += if count > 1 { time } else { 0.0 };
        }
        for model in 0..self.places.len() {
            let place = &self.places[model];
            if !place.batch.is_empty() && place.left <= TIE * place.step {
                self.part(model, observer);
            }
        }
        Ok(())
    }

    /// End the step of `model`.
    fn part(&mut self, model: usize, observer: &mut impl Observer) {
        let place = &mut self.places[model];
        let batch = std::mem::take(&mut place.batch);
        observer.step(self.now, model, batch.len(), self.now - place.began, place.overlap);
        for &request in &batch {
            let draw = self.random.uniform();
            let routes = &self.places[model].routes;
            let to = routes.iter().position(|sum| draw < *sum).unwrap_or(routes.len() - 1);
            observer.routed(self.now, request, model, to, self.system.commits[model][to]);
            if self.leaving > 0 {
                self.leaving -= 1;
                self.active[request as usize] = false;
            } else {
                self.places[to].waiting.push_back(request);
            }
        }
        // The buffer is used again.
        let place = &mut self.places[model];
        place.batch = batch;
        place.batch.clear();
    }
}

fn summed(row: &[f64]) -> Vec<f64> {
    let last = row.iter().rposition(|p| *p > 0.0).unwrap_or(0);
    let mut sum = 0.0;
    row.iter()
        .enumerate()
        .map(|(model, p)| {
            sum += p;
            // The last model that can be drawn takes what rounding has left.
            if model >= last { 1.0 } else { sum }
        })
        .collect()
}

impl Observer for Totals {
    fn step(&mut self, _: f64, model: usize, batch: usize, _: f64, _: f64) {
        self.ends[model] += batch as f64;
        self.batches[model] += 1.0;
    }
}

/// How much to simulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Independent runs.
    pub runs: u64,
    /// Steps of a request in each run that count, after a tenth as many that do not.
    pub steps: u64,
    /// Run i takes seed + i.
    pub seed: u64,
}

/// Means over the runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    pub rates: Rates,
    /// Standard error of the throughput, in tokens a second.
    pub standard_error: f64,
}

/// Simulate a checked `system` with `requests` requests.
pub fn estimate(system: &System, requests: usize, setting: &Setting, effort: Effort) -> Result<Estimate, Fault> {
    let runs = (0..effort.runs.max(1)).map(|run| {
        let seed = effort.seed.wrapping_add(run);
        let mut simulation = Simulation::new(system.clone(), requests, setting.clone(), seed)?;
        let none = Totals { ends: vec![0.0; system.len()], batches: vec![0.0; system.len()] };
        let mut run = |steps: u64| {
            let (start, mut totals) = (simulation.now(), none.clone());
            // A setting that has been checked cannot lock up.
            while totals.ends.iter().sum::<f64>() < steps as f64 && simulation.advance(&mut totals).is_ok() {}
            Rates::new(system, simulation.now() - start, &totals.ends, &totals.batches)
        };
        run(effort.steps / 10);
        Ok(run(effort.steps))
    });
    let runs: Vec<Rates> = runs.collect::<Result<_, Fault>>()?;
    let count = runs.len() as f64;
    let mean = |of: &dyn Fn(&Rates) -> f64| runs.iter().map(of).sum::<f64>() / count;
    let throughput = mean(&|run| run.throughput);
    let squares: f64 = runs.iter().map(|run| (run.throughput - throughput).powi(2)).sum();
    let by_model = |of: &dyn Fn(&Rates, usize) -> f64| (0..system.len()).map(|m| mean(&|run| of(run, m))).collect();
    Ok(Estimate {
        rates: Rates {
            throughput,
            step_rate: by_model(&|run, model| run.step_rate[model]),
            mean_batch: by_model(&|run, model| run.mean_batch[model]),
        },
        standard_error: (squares / (count - 1.0).max(1.0) / count).sqrt(),
    })
}
