//! The exact chain: throughput of a system under fixed thresholds.
//!
//! A state is what waits and what runs at each model, with the grains left of its step, after all starts
//! that were possible. From one state to the next the shortest running step ends; models that end at the same
//! moment end together. Their requests part by the routing matrix, each for itself, and every idle model with
//! enough requests starts all of them (or its largest batch). All requests wait at the entry at first, and
//! throughput is E[tokens] / E[time] over the stationary distribution.

mod layout;
mod numbers;
mod solve;
mod splits;
mod states;

use thiserror::Error;

use states::{Builder, States};

use crate::grid::{Grain, Grid};
use crate::system::{Fault, Setting, System};

/// Performance of a system under a setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    /// Tokens a second.
    pub throughput: f64,
    /// By model: requests a second whose step ends.
    pub step_rate: Vec<f64>,
    /// By model: requests of a batch, on average.
    pub mean_batch: Vec<f64>,
}

impl Rates {
    /// From totals by model over `ms` milliseconds. A model that ran no batch has a mean of 0.
    pub(crate) fn new(system: &System, ms: f64, ends: &[f64], batches: &[f64]) -> Self {
        let gains = (0..system.len()).map(|model| system.gain(model));
        Self {
            throughput: 1e3 * ends.iter().zip(gains).map(|(ends, gain)| ends * gain).sum::<f64>() / ms,
            step_rate: ends.iter().map(|ends| 1e3 * ends / ms).collect(),
            mean_batch: ends.iter().zip(batches).map(|(e, b)| if *b > 0.0 { e / b } else { 0.0 }).collect(),
        }
    }
}

/// The answer of the chain.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    pub rates: Rates,
    /// States, and transitions with a probability above 0.
    pub states: usize,
    pub transitions: usize,
    /// Gauss-Seidel sweeps.
    pub sweeps: usize,
}

/// How far to go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    pub states: usize,
    pub transitions: usize,
    pub sweeps: usize,
    /// Change of the distribution in a sweep (sum of absolute values) at which it counts as solved.
    pub tolerance: f64,
    /// Ways to part a batch that are no more probable than this are left out.
    pub tail: f64,
    /// Leave out states that are left in one way only. The same rates from fewer states.
    pub fold: bool,
}

impl Limits {
    /// Every state, to the last digit.
    pub const EXACT: Self =
        Self { states: 2_000_000, transitions: 50_000_000, sweeps: 20_000, tolerance: 1e-14, tail: 0.0, fold: false };
}

#[derive(Clone, Debug, PartialEq, Error)]
pub enum ChainError {
    #[error(transparent)]
    Fault(#[from] Fault),
    #[error("the chain has more than {0} states")]
    TooLarge(usize),
    #[error("the chain did not converge within {0} sweeps")]
    Slow(usize),
    /// Excluded by [`System::check_setting`].
    #[error("the chain has a state in which nothing runs")]
    Stuck,
}

/// Solve the chain of a checked `system` with `requests` requests.
pub fn solve(
    system: &System,
    requests: usize,
    setting: &Setting,
    grain: Grain,
    limits: Limits,
) -> Result<Solution, ChainError> {
    system.check_setting(requests, setting)?;
    let grid = Grid::new(system, requests, setting, grain)?;
    let states = match system.len() {
        1 => build::<1>(system, requests, setting, &grid, limits),
        2 => build::<2>(system, requests, setting, &grid, limits),
        3 => build::<3>(system, requests, setting, &grid, limits),
        4 => build::<4>(system, requests, setting, &grid, limits),
        5 => build::<5>(system, requests, setting, &grid, limits),
        6 => build::<6>(system, requests, setting, &grid, limits),
        _ => Err(ChainError::TooLarge(limits.states)),
    }?;
    let incoming = solve::Incoming::new(&states);
    let (weights, sweeps) =
        incoming.stationary(&states.groups, limits.tolerance, limits.sweeps).ok_or(ChainError::Slow(limits.sweeps))?;
    let mut sums = vec![0.0; 1 + 2 * system.len()];
    for (weight, rewards) in weights.iter().zip(states.rewards.chunks(sums.len())) {
        sums.iter_mut().zip(rewards).for_each(|(sum, reward)| *sum += weight * reward);
    }
    let (ends, batches) = sums[1..].split_at(system.len());
    Ok(Solution {
        rates: Rates::new(system, sums[0], ends, batches),
        states: states.count,
        transitions: states.targets.len(),
        sweeps,
    })
}

fn build<const M: usize>(
    system: &System,
    requests: usize,
    setting: &Setting,
    grid: &Grid,
    limits: Limits,
) -> Result<States, ChainError> {
    Builder::<M>::new(system, requests, setting, grid, limits)?.build(requests)
}
