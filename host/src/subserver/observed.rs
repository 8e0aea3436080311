//! What the models' threads see of their own steps, for those who choose thresholds.
//!
//! Each model's numbers are written by its own thread alone; others read them at any time. They only
//! grow, so that a window is the difference of two readings.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Batch sizes that are told apart; larger ones count as this.
pub const SIZES: usize = 64;

/// Steps and their time together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    pub steps: u64,
    pub time: Duration,
}

/// Steps of one batch size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfSize {
    /// Steps during which no other model ran.
    pub alone: Steps,
    /// All others.
    pub shared: Steps,
    /// By model: for how long it ran during the shared steps.
    pub overlap: Vec<Duration>,
}

/// What one model has done since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Steps without prompt rows, by the requests in them less one; the last stands for all beyond.
    pub sizes: Vec<OfSize>,
    /// Steps that computed rows of a prompt.
    pub prompts: Steps,
    /// Requests that a step evaluated.
    pub evaluated: u64,
    /// By model: how many of them were handed to it.
    pub to: Vec<u64>,
}

/// A sum that one thread adds to.
#[derive(Debug, Default)]
struct Sum(AtomicU64);

impl Sum {
    fn add(&self, more: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(more), Relaxed);
    }
    fn read(&self) -> u64 {
        self.0.load(Relaxed)
    }
    fn time(&self) -> Duration {
        Duration::from_nanos(self.read())
    }
}

#[derive(Debug, Default)]
struct StepSums {
    steps: Sum,
    nanos: Sum,
}

impl StepSums {
    fn add(&self, nanos: u64) {
        self.steps.add(1);
        self.nanos.add(nanos);
    }
    fn read(&self) -> Steps {
        Steps { steps: self.steps.read(), time: self.nanos.time() }
    }
}

#[derive(Debug)]
struct SizeSums {
    alone: StepSums,
    shared: StepSums,
    overlap: Vec<Sum>,
}

/// Where one model's thread enters its steps.
#[derive(Debug)]
pub struct Observations {
    sizes: Vec<SizeSums>,
    prompts: StepSums,
    evaluated: Sum,
    to: Vec<Sum>,
}

impl Observations {
    pub fn new(models: usize) -> Self {
        let sums = || (0..models).map(|_| Sum::default()).collect::<Vec<_>>();
        let size = || SizeSums { alone: StepSums::default(), shared: StepSums::default(), overlap: sums() };
        Self {
            sizes: (0..SIZES).map(|_| size()).collect(),
            prompts: StepSums::default(),
            evaluated: Sum::default(),
            to: sums(),
        }
    }

    /// A step of `requests` requests without prompt rows. `overlap`: nanoseconds that each model ran meanwhile.
    pub fn step(&self, requests: u64, nanos: u64, overlap: impl Iterator<Item = u64>) {
        let Some(size) = self.sizes.get((requests.max(1) as usize).min(SIZES) - 1) else { return };
        let mut shared = false;
        for (sum, nanos) in size.overlap.iter().zip(overlap).filter(|(_, nanos)| *nanos > 0) {
            sum.add(nanos);
            shared = true;
        }
        if shared { size.shared.add(nanos) } else { size.alone.add(nanos) }
    }

    /// A step with rows of a prompt.
    pub fn prompt_step(&self, nanos: u64) {
        self.prompts.add(nanos);
    }

    /// A step has evaluated so many requests.
    pub fn evaluated(&self, requests: u64) {
        self.evaluated.add(requests);
    }

    /// A step has handed a request to `model`.
    pub fn handed_to(&self, model: usize) {
        if let Some(sum) = self.to.get(model) {
            sum.add(1);
        }
    }

    pub fn read(&self) -> Observed {
        let size = |size: &SizeSums| OfSize {
            alone: size.alone.read(),
            shared: size.shared.read(),
            overlap: size.overlap.iter().map(Sum::time).collect(),
        };
        Observed {
            sizes: self.sizes.iter().map(size).collect(),
            prompts: self.prompts.read(),
            evaluated: self.evaluated.read(),
            to: self.to.iter().map(Sum::read).collect(),
        }
    }
}

/// For how long a model has run, readable at any moment by one load.
///
/// Twice a number of nanoseconds, plus one while it runs; to that number the present is then to be added.
#[derive(Debug, Default)]
pub struct BusyClock(AtomicI64);

impl BusyClock {
    /// It runs from `now` on. Called by the model's own thread.
    pub fn start(&self, now: i64) {
        let total = self.0.load(Relaxed) >> 1;
        self.0.store((total - now) << 1 | 1, Relaxed);
    }

    /// It runs no longer.
    pub fn stop(&self, now: i64) {
        let total = (self.0.load(Relaxed) >> 1) + now;
        self.0.store(total << 1, Relaxed);
    }

    /// Nanoseconds until `now`.
    pub fn read(&self, now: i64) -> i64 {
        let word = self.0.load(Relaxed);
        (word >> 1) + if word & 1 == 1 { now } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_is_known_while_it_grows() {
        let clock = BusyClock::default();
        assert_eq!(clock.read(50), 0);
        clock.start(100);
        assert_eq!((clock.read(100), clock.read(130)), (0, 30));
        clock.stop(140);
        assert_eq!((clock.read(140), clock.read(900)), (40, 40));
        clock.start(1000);
        assert_eq!(clock.read(1001), 41);
    }

    #[test]
    fn steps_are_told_apart() {
        let observations = Observations::new(2);
        observations.step(1, 10, [0, 0].into_iter());
        observations.step(1, 30, [0, 20].into_iter());
        observations.step(1, 12, [0, 0].into_iter());
        observations.step(900, 5, [0, 5].into_iter());
        observations.prompt_step(70);
        observations.evaluated(4);
        observations.handed_to(1);
        let read = observations.read();
        let steps = |steps, nanos| Steps { steps, time: Duration::from_nanos(nanos) };
        assert_eq!((read.sizes[0].alone, read.sizes[0].shared), (steps(2, 22), steps(1, 30)));
        assert_eq!(read.sizes[0].overlap, [0, 20].map(Duration::from_nanos));
        assert_eq!((read.sizes[SIZES - 1].shared, read.sizes[1].alone), (steps(1, 5), steps(0, 0)));
        assert_eq!((read.prompts, read.evaluated, read.to), (steps(1, 70), 4, vec![0, 1]));
    }
}
