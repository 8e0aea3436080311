//! The way to the best setting.

use std::collections::HashMap;

use crate::chain::ChainError;
use crate::simulation::{self, Effort};
use crate::system::{Fault, Setting, System, check_requests, most_waiting};

use super::Options;
use super::point::{LIMITS, Method, Point, evaluate, in_parallel, simulated};

/// On the coarse grid and on the way up: standard errors of about 0.5 and 0.2 %.
const COARSE: Effort = Effort { runs: 1, steps: 40_000, seed: 1 };
const CLIMB: Effort = Effort { runs: 1, steps: 200_000, seed: 1 };
/// How many of the coarse grid are compared again.
const FIRST: usize = 8;
/// How far a hint may be below the best of the coarse grid.
const NEAR: f64 = 0.01;
/// What a simulation must gain to be believed.
const GAIN: f64 = 5e-4;
/// Settings whose chains are within this of each other are equal; the smaller thresholds are taken.
const LEVEL: f64 = 1e-6;
/// Holds that are tried, by the model's own step.
const HOLDS: [f64; 12] = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0];

/// A place in the search: thresholds, then numbers of holds.
pub(super) type Coordinates = Vec<u32>;

pub(super) struct Search<'a> {
    system: &'a System,
    requests: usize,
    options: &'a Options,
    /// By model: the holds that are tried, in ascending order.
    holds: Vec<Vec<f64>>,
    known: HashMap<Coordinates, Point>,
    /// Why a chain could not be solved. All that follows is simulated.
    unsolved: Option<ChainError>,
}

impl<'a> Search<'a> {
    pub fn new(system: &'a System, requests: usize, options: &'a Options) -> Result<Self, Fault> {
        check_requests(requests)?;
        for (field, given) in [("min_batch", options.fixed.len()), ("hold", options.holds.len())] {
            if given != 0 && given != system.len() {
                return Err(Fault::Count { field, given, wanted: system.len() });
            }
        }
        let tried = |model: usize| {
            let step = system.models[model].step(1);
            let others = system.models.iter().enumerate().filter(|(other, _)| *other != model);
            let longest = others.flat_map(|(_, m)| &m.step_ms).copied().fold(0.0, f64::max);
            let mut tried: Vec<f64> = HOLDS.iter().map(|hold| hold * step).filter(|hold| *hold < longest).collect();
            // Until no other runs.
            tried.push(longest);
            tried
        };
        let holds = (0..system.len()).map(|model| match options.holds.get(model) {
            None => vec![0.0],
            Some(Some(hold)) => vec![*hold],
            Some(None) => tried(model),
        });
        let holds = holds.collect();
        let search = Self { system, requests, options, holds, known: HashMap::new(), unsolved: None };
        system.check_setting(requests, &search.setting(&search.lowest()))?;
        Ok(search)
    }

    pub fn no_setting(&self) -> Fault {
        Fault::Concurrency(self.requests)
    }

    /// The lowest thresholds allowed, without holds.
    fn lowest(&self) -> Coordinates {
        let fixed = (0..self.system.len()).map(|model| self.options.fixed.get(model).copied().flatten().unwrap_or(1));
        fixed.chain(self.holds.iter().map(|_| 0)).collect()
    }

    pub fn setting(&self, at: &[u32]) -> Setting {
        let (min_batch, holds) = at.split_at(self.system.len());
        let hold_ms = holds.iter().zip(&self.holds).map(|(&number, tried)| tried[number as usize]).collect();
        Setting { min_batch: min_batch.to_vec(), hold_ms }
    }

    pub fn coordinates(&self, hint: &Setting) -> Option<Coordinates> {
        let number = |(hold, tried): (&f64, &Vec<f64>)| Some(tried.iter().position(|tried| tried == hold)? as u32);
        let holds: Option<Vec<u32>> = hint.hold_ms.iter().zip(&self.holds).map(number).collect();
        Some([&hint.min_batch[..], &holds?].concat()).filter(|at| self.allows(at))
    }

    fn allows(&self, at: &[u32]) -> bool {
        let (min_batch, holds) = at.split_at(self.system.len());
        let fixed =
            |(model, b): (usize, &u32)| self.options.fixed.get(model).copied().flatten().is_none_or(|f| f == *b);
        min_batch.iter().all(|b| *b >= 1)
            && most_waiting(min_batch) < self.requests as u64
            && min_batch.iter().enumerate().all(fixed)
            && holds.iter().zip(&self.holds).all(|(number, tried)| (*number as usize) < tried.len())
    }

    /// What is reached from `at` when one coordinate moves by `step`, or two of them do.
    fn near(&self, at: &[u32], step: u32, pairs: bool) -> Vec<Coordinates> {
        let moved = |at: &[u32], coordinate: usize, by: i64| {
            let mut next = at.to_vec();
            // Holds are few: they move one by one.
            let by = if coordinate < self.system.len() { by * i64::from(step) } else { by };
            next[coordinate] = u32::try_from(i64::from(next[coordinate]) + by).ok()?;
            Some(next)
        };
        let mut near = Vec::new();
        for first in 0..at.len() {
            for by in [1, -1] {
                let Some(next) = moved(at, first, by) else { continue };
                if pairs {
                    let others = (first + 1..at.len()).flat_map(|second| [(second, 1), (second, -1)]);
                    near.extend(others.filter_map(|(second, by)| moved(&next, second, by)));
                } else {
                    near.push(next);
                }
            }
        }
        near.retain(|next| self.allows(next));
        near
    }

    /// Thresholds all over what is allowed, with no holds and the longest ones: by eighths of the requests, or coarser for many models.
    fn grid(&self) -> Vec<Coordinates> {
        let parts = match self.system.len() {
            ..=3 => 8,
            4 => 4,
            _ => 2,
        };
        let mut grid = vec![self.lowest()];
        for model in (0..self.system.len()).filter(|model| self.options.fixed.get(*model).copied().flatten().is_none())
        {
            let more = |at: &Coordinates, part: u32| {
                let mut at = at.clone();
                at[model] += self.requests as u32 * part / parts;
                at
            };
            grid = grid.iter().flat_map(|at| (0..=parts).map(move |part| more(at, part))).collect();
            grid.retain(|at| self.allows(at));
        }
        grid.dedup();
        // Holds pay in full or not at all where overlap costs much.
        for (model, tried) in self.holds.iter().enumerate().filter(|(_, tried)| tried.len() > 1) {
            let longest = |at: &Coordinates| {
                let mut at = at.clone();
                at[self.system.len() + model] = tried.len() as u32 - 1;
                at
            };
            grid = grid.iter().flat_map(|at| [at.clone(), longest(at)]).collect();
        }
        grid
    }

    /// Near the top, by simulations. A `hint` that is as good as the grid is taken as it is.
    pub fn sketch(&self, hint: Option<Coordinates>) -> Result<Coordinates, Fault> {
        let score = |effort: Effort| {
            move |at: &Coordinates| {
                let effort = self.options.effort(effort);
                let estimate = simulation::estimate(self.system, self.requests, &self.setting(at), effort)?;
                Ok(estimate.rates.throughput)
            }
        };
        let grid: Vec<Coordinates> = self.grid().into_iter().chain(hint.clone()).collect();
        let scores = in_parallel(self.options.threads, &grid, score(COARSE))?;
        let highest = scores.iter().copied().fold(0.0, f64::max);
        if let Some(hint) = hint.filter(|_| scores.last().is_some_and(|score| *score >= highest * (1.0 - NEAR))) {
            return Ok(hint);
        }
        let mut ranked: Vec<(f64, Coordinates)> = scores.into_iter().zip(grid).collect();
        ranked.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let first: Vec<Coordinates> = ranked.into_iter().take(FIRST).map(|(_, at)| at).collect();
        let scores = in_parallel(self.options.threads, &first, score(CLIMB))?;
        let Some(mut at) = first.iter().zip(&scores).max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(at, _)| at.clone())
        else {
            return Err(self.no_setting());
        };
        let mut seen: HashMap<Coordinates, f64> = first.into_iter().zip(scores).collect();
        let mut step = (self.requests as u32 / 16).max(1).next_power_of_two();
        loop {
            let before = at.clone();
            for pairs in [false, true] {
                let near = self.near(&before, step, pairs);
                let new: Vec<Coordinates> = near.iter().filter(|next| !seen.contains_key(*next)).cloned().collect();
                let scores = in_parallel(self.options.threads, &new, score(CLIMB))?;
                seen.extend(new.into_iter().zip(scores));
                for next in near {
                    if seen.get(&next) > seen.get(&at).map(|top| top * (1.0 + GAIN)).as_ref() {
                        at = next;
                    }
                }
                if at != before {
                    break;
                }
            }
            if at == before {
                if step == 1 {
                    break;
                }
                step /= 2;
            }
        }
        // Down to where a threshold begins to count: below it nothing at all changes.
        let top = seen.get(&at).copied();
        for model in (0..self.system.len()).filter(|model| self.options.fixed.get(*model).copied().flatten().is_none())
        {
            let (mut low, mut high) = (1, at[model]);
            while low < high {
                at[model] = if low == 1 { 1 } else { (low + high) / 2 };
                if Some(score(CLIMB)(&at)?) == top {
                    high = at[model];
                } else {
                    low = at[model] + 1;
                }
            }
            at[model] = high;
        }
        Ok(at)
    }

    /// To the top from `at`: by single coordinates, then by pairs of them, and on in a direction that was good.
    pub fn climb(&mut self, mut at: Coordinates) -> Result<Point, Fault> {
        self.learn(std::slice::from_ref(&at))?;
        let mut ahead: Option<Coordinates> = None;
        loop {
            let mut near = [self.near(&at, 1, false), self.near(&at, 1, true)].concat();
            if let Some(first) = ahead.and_then(|ahead| near.iter().position(|next| *next == ahead)) {
                near[..=first].rotate_right(1);
            }
            let mut better = None;
            for some in near.chunks(self.options.threads.max(1)) {
                self.learn(some)?;
                better = some.iter().find(|next| self.is_better(next, &at)).cloned();
                if better.is_some() {
                    break;
                }
            }
            let Some(next) = better else { return self.known.remove(&at).ok_or_else(|| self.no_setting()) };
            let on = at.iter().zip(&next).map(|(before, now)| (2 * now).checked_sub(*before)).collect();
            (ahead, at) = (on, next);
        }
    }

    fn is_better(&self, one: &Coordinates, other: &Coordinates) -> bool {
        let (Some(a), Some(b)) = (self.known.get(one), self.known.get(other)) else { return false };
        let exact = |point: &Point| matches!(point.method, Method::Chain { .. });
        let gain = if exact(a) && exact(b) { LEVEL } else { GAIN };
        let (a, b) = (a.rates.throughput, b.rates.throughput);
        a > b * (1.0 + gain) || (gain == LEVEL && a >= b * (1.0 - gain) && one < other)
    }

    /// Find the rates of `settings` that are not known yet.
    fn learn(&mut self, settings: &[Coordinates]) -> Result<(), Fault> {
        let settings: Vec<Coordinates> = settings.iter().filter(|at| !self.known.contains_key(*at)).cloned().collect();
        let points = in_parallel(self.options.threads, &settings, |at| match &self.unsolved {
            Some(reason) => simulated(self.system, self.requests, self.setting(at), self.options, reason.clone()),
            None => evaluate(self.system, self.requests, &self.setting(at), self.options, LIMITS),
        })?;
        for (at, point) in settings.into_iter().zip(points) {
            if let Method::Simulation { reason, .. } = &point.method {
                self.unsolved = Some(reason.clone());
            }
            self.known.insert(at, point);
        }
        Ok(())
    }
}
