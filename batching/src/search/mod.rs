//! The best thresholds, and holds where they are asked for.
//!
//! Throughput over thresholds has plateaus (with a saturated model its threshold is never what it waits for) and
//! ridges along the border beyond which the system locks up. So short simulations over a coarse grid of all
//! thresholds come first, then a climb over longer ones whose steps halve, then one over exact chains by single
//! requests. Where chains are too large the last climb is over long simulations, all with the same seeds,
//! and the answer says so.

mod climb;
mod point;

use crate::chain::Limits;
use crate::grid::Grain;
use crate::simulation::Effort;
use crate::system::{Fault, Setting, System, most_waiting};

use climb::Search;
pub use point::{Method, Point, evaluate};
use point::{QUICK, in_parallel};

/// Settings within this of each other are equal; the first in lexicographic order is taken.
const EQUAL: f64 = 1e-10;

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
