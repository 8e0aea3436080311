//! Counters and histograms that are written without locks, and the text in which they are read.
//!
//! Whoever works writes its own numbers with plain atomic additions; a scrape reads them at any moment. They only
//! grow.

pub mod bounds;
pub mod text;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A number that grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }

    pub fn read(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Whole numbers by size. Times are in nanoseconds.
#[derive(Debug)]
pub struct Histogram {
    /// Upper bounds of the classes, ascending; one class more has all beyond.
    bounds: &'static [u64],
    classes: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Histogram {
    pub fn new(bounds: &'static [u64]) -> Self {
        let classes = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, classes, sum: AtomicU64::new(0) }
    }

    pub fn observe(&self, value: u64) {
        self.classes[self.bounds.partition_point(|bound| value > *bound)].fetch_add(1, Relaxed);
        self.sum.fetch_add(value, Relaxed);
    }

    pub fn observe_time(&self, time: Duration) {
        self.observe(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub fn read(&self) -> Distribution {
        let classes = self.classes.iter().map(|class| class.load(Relaxed)).collect();
        Distribution { bounds: self.bounds, classes, sum: self.sum.load(Relaxed) }
    }
}

/// A histogram at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distribution {
    pub bounds: &'static [u64],
    /// One more than `bounds`.
    pub classes: Vec<u64>,
    pub sum: u64,
}

impl Distribution {
    pub fn count(&self) -> u64 {
        self.classes.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_fall_into_classes_up_to_their_bounds() {
        let histogram = Histogram::new(&[10, 20]);
        [0, 10, 11, 20, 21, 900].into_iter().for_each(|value| histogram.observe(value));
        let read = histogram.read();
        assert_eq!((&read.classes[..], read.sum, read.count()), (&[2, 2, 2][..], 962, 6));
        histogram.observe_time(Duration::from_nanos(15));
        assert_eq!(histogram.read().classes, [2, 3, 2]);
    }
}
