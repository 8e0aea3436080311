//! Runs of several variants against those of the first. Pure.

use serde::Serialize;

use super::statistics::{percentile, sorted};
use super::summary::Summary;

/// Median and ends of the values of all rounds; zeros of nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let sorted = sorted(values);
        Self { median: percentile(&sorted, 0.5), least: percentile(&sorted, 0.0), most: percentile(&sorted, 1.0) }
    }
}

/// A number of a load, with its name.
pub type Quantity = (&'static str, fn(&Summary) -> f64);

/// What is compared of a load: tokens a second, and mean times in ms.
pub const COMPARED: [Quantity; 4] = [
    ("tokens_per_second", |summary| summary.tokens_per_second),
    ("ttft_ms", |summary| summary.ttft_ms.mean),
    ("tpot_ms", |summary| summary.tpot_ms.mean),
    ("e2e_ms", |summary| summary.e2e_ms.mean),
];

/// One quantity of one load of a variant, and its ratio to the first variant's in the same round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Compared {
    pub value: Spread,
    pub to_first: Spread,
}

/// By quantity of [`COMPARED`]. `runs`, `first`: the same load of both, by round.
pub fn compare(runs: &[&Summary], first: &[&Summary]) -> [Compared; COMPARED.len()] {
    COMPARED.map(|(_, of)| {
        // A variant in which everything failed has no times.
        let ratio = |(own, first): (&&Summary, &&Summary)| Some(of(own) / of(first)).filter(|ratio| ratio.is_finite());
        Compared {
            value: Spread::of(runs.iter().map(|run| of(run))),
            to_first: Spread::of(runs.iter().zip(first).filter_map(ratio)),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::ask::Answer;
    use super::super::load::{Carried, Pace};
    use super::*;

    fn summary(tokens: u64, ms: u64) -> Summary {
        let zero = Instant::now();
        let end = zero + Duration::from_millis(ms);
        let answer = Answer { tokens, arrivals: vec![(end, tokens)], ended: end, ..Answer::new(zero) };
        Summary::new(Pace::Closed { requests: 1 }, &Carried { began: zero, answers: vec![answer] }, &[], &[], &[])
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        let (a, b) = ([100, 200, 400].map(|ms| summary(10, ms)), [50, 50, 400].map(|ms| summary(10, ms)));
        let (a, b): (Vec<&Summary>, Vec<&Summary>) = (a.iter().collect(), b.iter().collect());
        let [rate, ttft, tpot, _] = compare(&b, &a);
        assert_eq!(rate.value, Spread { median: 200.0, least: 25.0, most: 200.0 });
        assert_eq!(rate.to_first, Spread { median: 2.0, least: 1.0, most: 4.0 });
        assert_eq!(ttft.to_first, Spread { median: 0.5, least: 0.25, most: 1.0 });
        // No answer has a second token at another time than the first.
        assert_eq!((tpot.value, tpot.to_first), (Spread::default(), Spread::default()));
        assert_eq!(compare(&a, &a)[0].to_first, Spread { median: 1.0, least: 1.0, most: 1.0 });
    }
}
