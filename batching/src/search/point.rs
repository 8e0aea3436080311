//! Rates of one setting, from a chain or a simulation.

use crate::chain::{self, ChainError, Limits, Rates};
use crate::simulation::{self, Effort};
use crate::system::{Fault, Setting, System};

use super::Options;

/// Chains of a search: their rates are off by less than 1e-6.
pub(super) const LIMITS: Limits =
    Limits { states: 250_000, transitions: 4_000_000, sweeps: 400, tolerance: 1e-9, tail: 1e-9, fold: true };
/// Chains of settings that are only compared with the best.
pub(super) const QUICK: Limits = Limits { states: 30_000, ..LIMITS };
/// In place of a chain: a standard error of about 0.05 %.
const LONG: Effort = Effort { runs: 8, steps: 500_000, seed: 1 };

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

pub(super) fn simulated(
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

/// `work` on every item, on up to `threads` threads.
pub(super) fn in_parallel<I: Sync, O: Send>(
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
