//! Summaries of many numbers. Pure.

use serde::Serialize;

/// Mean, standard deviation and percentiles of a quantity; zeros of nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distribution {
    pub mean: f64,
    pub std: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
}

impl Distribution {
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let sorted = sorted(values);
        if sorted.is_empty() {
            return Self::default();
        }
        let count = sorted.len() as f64;
        let mean = sorted.iter().sum::<f64>() / count;
        let [p50, p90, p95, p99] = [0.5, 0.9, 0.95, 0.99].map(|share| percentile(&sorted, share));
        let std = (sorted.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count).sqrt();
        Self { mean, std, p50, p90, p95, p99 }
    }
}

pub fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The percentile of `sorted` at `share`, linear between neighbours as numpy's, so that others' numbers can be
/// compared; 0 of nothing.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = share * last as f64;
    let below = place as usize;
    let (low, high) = (sorted[below], sorted[(below + 1).min(last)]);
    low + (high - low) * (place - below as f64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Expected values are numpy's.
    #[test]
    fn known_values() {
        let of = |values: &[f64]| Distribution::of(values.iter().copied());
        let four = of(&[40.0, 10.0, 30.0, 20.0]);
        assert_eq!((four.mean, four.p50), (25.0, 25.0));
        for (seen, numpy) in [(four.p90, 37.0), (four.p95, 38.5), (four.p99, 39.7), (four.std, 11.180_339_887_498_949)]
        {
            assert!((seen - numpy).abs() < 1e-12, "{seen} {numpy}");
        }
        assert_eq!(of(&[]), Distribution::default());
        assert_eq!((of(&[3.0]).p50, of(&[3.0]).p99, of(&[3.0]).std), (3.0, 3.0, 0.0));
    }

    proptest! {
        #[test]
        fn percentiles_are_ordered_and_within(values in proptest::collection::vec(-1e6..1e6f64, 1..50)) {
            let sorted = sorted(values.iter().copied());
            let d = Distribution::of(values.iter().copied());
            let steps = [sorted[0], d.p50, d.p90, d.p95, d.p99, sorted[sorted.len() - 1]];
            prop_assert!(steps.is_sorted(), "{:?}", steps);
        }
    }
}
