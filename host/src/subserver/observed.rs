//! What the models' threads see of their own steps, for those who choose thresholds.
//!
//! Each model's numbers are written by its own thread alone; others read them at any time. They only
//! grow, so that a window is the difference of two readings.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokenrouter_batching::online::Steps;

use super::Counters;

/// Batch sizes that are told apart, as many as ladders are searched for; larger ones count as this.
pub const SIZES: usize = tokenrouter_batching::online::MOST;

/// What one model has done since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observed {
    /// Steps without prompt rows, by the requests in them less one; the last stands for all beyond.
    pub sizes: Vec<Steps>,
    /// Steps that computed rows of a prompt, and their time.
    pub prompts: u64,
    pub prompt_time: Duration,
    /// By model: requests that were handed to it after a step.
    pub to: Vec<u64>,
    /// New requests that came.
    pub begun: u64,
    /// As of its last step: requests in all steps together, those that were evaluated, tokens committed, and
    /// requests that ended well.
    pub batched: u64,
    pub evaluated: u64,
    pub committed: u64,
    pub finished: u64,
}

/// A sum that one thread writes.
#[derive(Debug, Default)]
struct Sum(AtomicU64);

impl Sum {
    fn add(&self, more: u64) {
        self.set(self.read().wrapping_add(more));
    }
    fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }
    fn read(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// The same of fractions.
#[derive(Debug, Default)]
struct Real(AtomicU64);

impl Real {
    fn add(&self, more: f64) {
        self.0.store((self.read() + more).to_bits(), Relaxed);
    }
    fn read(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }
}

#[derive(Debug, Default)]
struct SizeSums {
    steps: Real,
    overlap: Real,
    alone: Real,
    shares: Real,
    share_squares: Real,
    rates: Real,
    products: Real,
}

/// Where one model's thread enters its steps.
#[derive(Debug)]
pub struct Observations {
    sizes: Vec<SizeSums>,
    prompts: Sum,
    prompt_nanos: Sum,
    to: Vec<Sum>,
    begun: Sum,
    batched: Sum,
    evaluated: Sum,
    committed: Sum,
    finished: Sum,
}

impl Observations {
    pub fn new(models: usize) -> Self {
        Self {
            sizes: (0..SIZES).map(|_| SizeSums::default()).collect(),
            prompts: Sum::default(),
            prompt_nanos: Sum::default(),
            to: (0..models).map(|_| Sum::default()).collect(),
            begun: Sum::default(),
            batched: Sum::default(),
            evaluated: Sum::default(),
            committed: Sum::default(),
            finished: Sum::default(),
        }
    }

    /// A step of `requests` requests without prompt rows. `others`: nanoseconds that each other model ran meanwhile.
    pub fn step(&self, requests: u64, nanos: u64, others: impl Iterator<Item = u64>) {
        let Some(size) = self.sizes.get((requests.max(1) as usize).min(SIZES) - 1) else { return };
        let ms = |nanos: f64| nanos / 1e6;
        let all = nanos as f64;
        // When each of several others ran is not known: as if at random.
        let alone = others.filter(|_| nanos > 0).fold(all, |alone, ran| alone * (1.0 - (ran as f64 / all).min(1.0)));
        let one = Steps::one(ms(all), ms(all - alone));
        size.steps.add(one.steps);
        size.overlap.add(one.overlap);
        size.alone.add(one.alone);
        size.shares.add(one.shares);
        size.share_squares.add(one.share_squares);
        size.rates.add(one.rates);
        size.products.add(one.products);
    }

    /// A step with rows of a prompt.
    pub fn prompt_step(&self, nanos: u64) {
        self.prompts.add(1);
        self.prompt_nanos.add(nanos);
    }

    /// A step has handed a request to `model`.
    pub fn handed_to(&self, model: usize) {
        if let Some(sum) = self.to.get(model) {
            sum.add(1);
        }
    }

    /// A new request has come.
    pub fn begun(&self) {
        self.begun.add(1);
    }

    /// What the model has counted until now.
    pub fn counted(&self, counters: &Counters) {
        self.batched.set(counters.batched);
        self.evaluated.set(counters.evaluated);
        self.committed.set(counters.committed);
        self.finished.set(counters.finished);
    }

    pub fn read(&self) -> Observed {
        let size = |size: &SizeSums| Steps {
            steps: size.steps.read(),
            overlap: size.overlap.read(),
            alone: size.alone.read(),
            shares: size.shares.read(),
            share_squares: size.share_squares.read(),
            rates: size.rates.read(),
            products: size.products.read(),
        };
        Observed {
            sizes: self.sizes.iter().map(size).collect(),
            prompts: self.prompts.read(),
            prompt_time: Duration::from_nanos(self.prompt_nanos.read()),
            to: self.to.iter().map(Sum::read).collect(),
            begun: self.begun.read(),
            batched: self.batched.read(),
            evaluated: self.evaluated.read(),
            committed: self.committed.read(),
            finished: self.finished.read(),
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
        let observations = Observations::new(3);
        let ms = 1_000_000;
        observations.step(1, 10 * ms, [0, 0].into_iter());
        observations.step(1, 30 * ms, [0, 20 * ms].into_iter());
        // Half of the time each, so together three quarters; a clock that was read late has no effect.
        observations.step(2, 8 * ms, [4 * ms, 4 * ms].into_iter());
        observations.step(900, 5 * ms, [0, 6 * ms].into_iter());
        observations.step(3, 0, [0, 0].into_iter());
        observations.prompt_step(70);
        observations.handed_to(1);
        observations.begun();
        observations.counted(&Counters { batched: 7, evaluated: 6, committed: 5, finished: 4, ..Counters::default() });
        let read = observations.read();
        let mut two = Steps::one(10.0, 0.0);
        two.add(&Steps::one(30.0, 20.0), 1.0);
        assert_eq!(read.sizes[0], two);
        assert_eq!((read.sizes[1].overlap, read.sizes[1].alone), (6.0, 2.0));
        assert_eq!((read.sizes[SIZES - 1].overlap, read.sizes[SIZES - 1].alone), (5.0, 0.0));
        assert!(read.sizes[2].rates.is_finite(), "{:?}", read.sizes[2]);
        assert_eq!((read.prompts, read.prompt_time.as_nanos(), read.to, read.begun), (1, 70, vec![0, 1, 0], 1));
        assert_eq!((read.batched, read.evaluated, read.committed, read.finished), (7, 6, 5, 4));
    }
}
