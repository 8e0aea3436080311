//! What the calls of one hook of one instance came to.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Upper bounds of the time classes, in nanoseconds; one class more has all beyond.
pub const BOUNDS: [u64; 10] =
    [1_000, 10_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000];

/// A sum that one thread writes.
#[derive(Debug, Default)]
pub(super) struct Sum(AtomicU64);

impl Sum {
    pub fn add(&self, more: u64) {
        // No other thread writes: no locked instruction is needed.
        self.0.store(self.read().wrapping_add(more), Relaxed);
    }
    fn read(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

#[derive(Debug, Default)]
pub(super) struct HookSums {
    classes: [Sum; BOUNDS.len() + 1],
    nanos: Sum,
    pub over_budget: Sum,
    pub failures: Sum,
    pub restarts: Sum,
    pub unknown_destinations: Sum,
    pub wrong_answers: Sum,
}

impl HookSums {
    pub fn took(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.classes[BOUNDS.partition_point(|bound| nanos > *bound)].add(1);
        self.nanos.add(nanos);
    }

    pub fn read(&self) -> HookCounts {
        HookCounts {
            classes: self.classes.each_ref().map(Sum::read),
            time: Duration::from_nanos(self.nanos.read()),
            over_budget: self.over_budget.read(),
            failures: self.failures.read(),
            restarts: self.restarts.read(),
            unknown_destinations: self.unknown_destinations.read(),
            wrong_answers: self.wrong_answers.read(),
        }
    }
}

/// The sums at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HookCounts {
    /// Calls by the time they took, see [`BOUNDS`].
    pub classes: [u64; BOUNDS.len() + 1],
    /// Of all calls together.
    pub time: Duration,
    pub over_budget: u64,
    /// Calls that ended in an error.
    pub failures: u64,
    /// Fresh instances of a module.
    pub restarts: u64,
    /// Answers that name no model of the route.
    pub unknown_destinations: u64,
    /// Other answers without meaning.
    pub wrong_answers: u64,
}

impl HookCounts {
    pub fn calls(&self) -> u64 {
        self.classes.iter().sum()
    }
}

impl AddAssign for HookCounts {
    fn add_assign(&mut self, other: Self) {
        let Self { classes, time, over_budget, failures, restarts, unknown_destinations, wrong_answers } = other;
        self.classes.iter_mut().zip(classes).for_each(|(own, other)| *own += other);
        self.time += time;
        self.over_budget += over_budget;
        self.failures += failures;
        self.restarts += restarts;
        self.unknown_destinations += unknown_destinations;
        self.wrong_answers += wrong_answers;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_count_is_added() {
        let one = |n: u64| {
            let mut classes = [0; BOUNDS.len() + 1];
            (classes[0], classes[BOUNDS.len()]) = (n, 2 * n);
            let [over_budget, failures, restarts, unknown_destinations, wrong_answers] = [3, 4, 5, 6, 7].map(|k| k * n);
            let time = Duration::from_secs(n);
            HookCounts { classes, time, over_budget, failures, restarts, unknown_destinations, wrong_answers }
        };
        let mut sum = one(1);
        sum += one(10);
        assert_eq!(sum, one(11));
    }

    #[test]
    fn times_fall_into_classes_up_to_their_bounds() {
        let sums = HookSums::default();
        [0, 1_000, 1_001, 1_000_000_000, 1_000_000_001]
            .into_iter()
            .map(Duration::from_nanos)
            .for_each(|t| sums.took(t));
        let counts = sums.read();
        assert_eq!(counts.classes, [2, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!((counts.calls(), counts.time), (5, Duration::from_nanos(2_000_002_002)));
    }
}
