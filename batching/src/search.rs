//! The best thresholds, and holds where they are asked for.
//!
//! Throughput over thresholds has plateaus (with a saturated model its threshold is never what it waits for) and
//! ridges along the border beyond which the system locks up. So short simulations over a coarse grid of all
//! thresholds come first, then a climb over longer ones whose steps halve, then one over exact chains by single
//! requests. Where chains are too large the last climb is over long simulations, all with the same seeds,
//! and the answer says so.

use std::collections::HashMap;

use crate::chain::{self, ChainError, Limits, Rates};
use crate::grid::Grain;
use crate::simulation::{self, Effort};
use crate::system::{Fault, Setting, System, check_requests, most_waiting};

/// Chains of a search: their rates are off by less than 1e-6.
const LIMITS: Limits =
    Limits { states: 250_000, transitions: 4_000_000, sweeps: 400, tolerance: 1e-9, tail: 1e-9, fold: true };
/// Chains of settings that are only compared with the best.
const QUICK: Limits = Limits { states: 30_000, ..LIMITS };
/// On the coarse grid, on the way up, and in place of a chain: standard errors of about 0.5, 0.2 and 0.05 %.
const COARSE: Effort = Effort { runs: 1, steps: 40_000, seed: 1 };
const CLIMB: Effort = Effort { runs: 1, steps: 200_000, seed: 1 };
const LONG: Effort = Effort { runs: 8, steps: 500_000, seed: 1 };
/// How many of the coarse grid are compared again.
const FIRST: usize = 8;
/// How far a hint may be below the best of the coarse grid.
const NEAR: f64 = 0.01;
/// What a simulation must gain to be believed.
const GAIN: f64 = 5e-4;
/// Settings within this of each other are equal; the smaller thresholds are taken. Among all settings, and in a
/// climb, whose chains are less exact.
const EQUAL: f64 = 1e-10;
const LEVEL: f64 = 1e-6;
/// Holds that are tried, by the model's own step.
const HOLDS: [f64; 12] = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0];

/// Where rates come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Method {
    Chain {
        states: usize,
    },
    /// The chain could not be solved, for the reason given.
    Simulation {
        standard_error: f64,
        reason: ChainError,
    },
}

/// A setting and its rates.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    pub setting: Setting,
    pub rates: Rates,
    pub method: Method,
}

/// What may be chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// By model: a threshold that is given. Empty = all are free.
    pub fixed: Vec<Option<u32>>,
    /// By model: a hold that is given, in milliseconds; `None` = to be chosen. Empty = no holds.
    pub holds: Vec<Option<f64>>,
    pub grain: Grain,
    /// Settings that are tried at once.
    pub threads: usize,
    /// Divides the effort of simulations and the size of chains, from 1: what is lost is a few tenths of a percent.
    pub haste: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { fixed: Vec::new(), holds: Vec::new(), grain: Grain::Auto, threads: 1, haste: 1 }
    }
}

impl Options {
    fn limits(&self, limits: Limits) -> Limits {
        let haste = self.haste.max(1) as usize;
        Limits { states: limits.states / haste, transitions: limits.transitions / haste, ..limits }
    }

    fn effort(&self, effort: Effort) -> Effort {
        Effort { steps: effort.steps / self.haste.max(1), ..effort }
    }
}

/// Rates of one setting: by the chain, or by simulation where it cannot be solved.
pub fn evaluate(
    system: &System,
    requests: usize,
    setting: &Setting,
    options: &Options,
    limits: Limits,
) -> Result<Point, Fault> {
    let setting = setting.clone();
    match chain::solve(system, requests, &setting, options.grain, options.limits(limits)) {
        Ok(solution) => Ok(Point { setting, rates: solution.rates, method: Method::Chain { states: solution.states } }),
        Err(ChainError::Fault(fault)) => Err(fault),
        Err(reason) => simulated(system, requests, setting, options, reason),
    }
}

fn simulated(
    system: &System,
    requests: usize,
    setting: Setting,
    options: &Options,
    reason: ChainError,
) -> Result<Point, Fault> {
    let simulation::Estimate { rates, standard_error } =
        simulation::estimate(system, requests, &setting, options.effort(LONG))?;
    Ok(Point { setting, rates, method: Method::Simulation { standard_error, reason } })
}

/// A place in the search: thresholds, then numbers of holds.
type Coordinates = Vec<u32>;

struct Search<'a> {
    system: &'a System,
    requests: usize,
    options: &'a Options,
    /// By model: the holds that are tried, in ascending order.
    holds: Vec<Vec<f64>>,
    known: HashMap<Coordinates, Point>,
    /// Why a chain could not be solved. All that follows is simulated.
    unsolved: Option<ChainError>,
}

/// The best setting for `requests` requests of a checked `system`. `hint`: one that is near it.
pub fn best(system: &System, requests: usize, options: &Options, hint: Option<&Setting>) -> Result<Point, Fault> {
    let mut search = Search::new(system, requests, options)?;
    let start = search.sketch(hint.and_then(|hint| search.coordinates(hint)))?;
    search.climb(start)
}

/// The best setting for each number of requests, in ascending order.
pub fn ladder(
    system: &System,
    requests: impl IntoIterator<Item = usize>,
    options: &Options,
) -> Result<Vec<(usize, Point)>, Fault> {
    let mut steps: Vec<(usize, Point)> = Vec::new();
    for n in requests {
        let hint = steps.last().filter(|(before, _)| before + 1 == n).map(|(_, point)| &point.setting);
        let point = best(system, n, options, hint)?;
        steps.push((n, point));
    }
    Ok(steps)
}

/// Every setting whose thresholds are allowed, in lexicographic order, with the holds of `options` (0 where they
/// are to be chosen): the best one, its lead over the second by its own throughput, and how many there are.
pub fn all(
    system: &System,
    requests: usize,
    options: &Options,
    limits: Limits,
) -> Result<(Point, Option<f64>, usize), Fault> {
    let search = Search::new(system, requests, options)?;
    let mut feasible = vec![Vec::new()];
    for model in 0..system.len() {
        let range = match options.fixed.get(model).copied().flatten() {
            Some(fixed) => fixed..=fixed,
            None => 1..=requests as u32,
        };
        let longer = |start: Vec<u32>| range.clone().map(move |b| [&start[..], &[b]].concat());
        feasible = feasible.into_iter().flat_map(longer).filter(|b| most_waiting(b) < requests as u64).collect();
    }
    let settings = feasible.iter().map(|b| search.setting(&[&b[..], &vec![0; system.len()]].concat()));
    let settings: Vec<Setting> = settings.collect();
    let points = in_parallel(options.threads, &settings, |s| evaluate(system, requests, s, options, limits))?;
    let count = points.len();
    let mut points = points.into_iter();
    let Some(mut best) = points.next() else { return Err(search.no_setting()) };
    let mut second: Option<f64> = None;
    for point in points {
        let (new, old) = (point.rates.throughput, best.rates.throughput);
        let beaten = if new > old * (1.0 + EQUAL) { std::mem::replace(&mut best, point).rates.throughput } else { new };
        second = Some(second.map_or(beaten, |second| second.max(beaten)));
    }
    let lead = second.map(|second| 1.0 - second / best.rates.throughput);
    Ok((best, lead, count))
}

/// Rates of a setting to compare with; simulated earlier than those of the best.
pub fn rates(system: &System, requests: usize, setting: &Setting, options: &Options) -> Result<Point, Fault> {
    evaluate(system, requests, setting, options, QUICK)
}

/// Throughput over the thresholds of `model`, all else as in `setting`: those that do not lock up.
pub fn profile(
    system: &System,
    requests: usize,
    setting: &Setting,
    model: usize,
    options: &Options,
) -> Result<Vec<Point>, Fault> {
    let with = |b: u32| {
        let mut setting = setting.clone();
        setting.min_batch[model] = b;
        setting
    };
    let settings: Vec<Setting> =
        (1..=requests as u32).map(with).filter(|setting| most_waiting(&setting.min_batch) < requests as u64).collect();
    in_parallel(options.threads, &settings, |setting| rates(system, requests, setting, options))
}

impl<'a> Search<'a> {
    fn new(system: &'a System, requests: usize, options: &'a Options) -> Result<Self, Fault> {
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

    fn no_setting(&self) -> Fault {
        Fault::Concurrency(self.requests)
    }

    /// The lowest thresholds allowed, without holds.
    fn lowest(&self) -> Coordinates {
        let fixed = (0..self.system.len()).map(|model| self.options.fixed.get(model).copied().flatten().unwrap_or(1));
        fixed.chain(self.holds.iter().map(|_| 0)).collect()
    }

    fn setting(&self, at: &[u32]) -> Setting {
        let (min_batch, holds) = at.split_at(self.system.len());
        let hold_ms = holds.iter().zip(&self.holds).map(|(&number, tried)| tried[number as usize]).collect();
        Setting { min_batch: min_batch.to_vec(), hold_ms }
    }

    fn coordinates(&self, hint: &Setting) -> Option<Coordinates> {
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
    fn sketch(&self, hint: Option<Coordinates>) -> Result<Coordinates, Fault> {
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
    fn climb(&mut self, mut at: Coordinates) -> Result<Point, Fault> {
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

/// `work` on every item, on up to `threads` threads.
fn in_parallel<I: Sync, O: Send>(
    threads: usize,
    items: &[I],
    work: impl Fn(&I) -> Result<O, Fault> + Sync,
) -> Result<Vec<O>, Fault> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let one = || {
        let mut done = Vec::new();
        while let Some((index, item)) = {
            let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            items.get(index).map(|item| (index, item))
        } {
            done.push((index, work(item)));
        }
        done
    };
    let mut done = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(items.len())).map(|_| scope.spawn(one)).collect();
        let mut done = one();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}
