//! Throughput over the threshold of one model: as measured, and as the chain of the same loads predicts it. Pure.

use serde::Serialize;

use super::compare::Spread;
use crate::chart::{Line, Panel};

/// One threshold.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Threshold {
    pub min_batch: u32,
    /// Tokens a second over the rounds.
    pub measured: Spread,
    pub predicted: f64,
}

/// One number of requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Swept {
    pub requests: u32,
    /// From 1 on.
    pub thresholds: Vec<Threshold>,
    /// The threshold for which most is predicted, and the one with the highest median.
    pub chosen: u32,
    pub best: u32,
    /// What the chosen one loses against the best, by medians. Even where all thresholds are equal the best of several
    /// is better by chance.
    pub loss: f64,
    /// The same without that chance: against the best of the even rounds, in the odd rounds, and the other way about; mean
    /// of both. Each rate counts by the mean of its round. `None` with less than two rounds; below 0 where the
    /// choice is better.
    pub loss_across: Option<f64>,
    /// How far the rounds of one threshold are apart, from least to most by the median: the median over thresholds. A
    /// loss below it is chance.
    pub noise: f64,
    /// Mean and largest difference of measured medians from what is predicted, by what is predicted.
    pub mean_error: f64,
    pub largest_error: f64,
}

impl Swept {
    /// `measured` by threshold and round, `predicted` by threshold, both from a threshold of 1 on. `None` without any.
    pub fn new(requests: u32, measured: &[Vec<f64>], predicted: &[f64]) -> Option<Self> {
        let threshold = |(min_batch, (rates, &predicted)): (u32, (&Vec<f64>, &f64))| Threshold {
            min_batch,
            measured: Spread::of(rates.iter().copied()),
            predicted,
        };
        let thresholds: Vec<Threshold> = (1..).zip(measured.iter().zip(predicted)).map(threshold).collect();
        // Of equal ones the smallest.
        let most = |of: fn(&Threshold) -> f64| thresholds.iter().rev().max_by(|a, b| of(a).total_cmp(&of(b))).copied();
        let (chosen, best) = (most(|t| t.predicted)?, most(|t| t.measured.median)?);
        let errors = thresholds.iter().map(|t| (t.measured.median / t.predicted - 1.0).abs());
        Some(Self {
            requests,
            chosen: chosen.min_batch,
            best: best.min_batch,
            loss: 1.0 - chosen.measured.median / best.measured.median,
            loss_across: loss_across(measured, chosen.min_batch as usize - 1),
            noise: Spread::of(thresholds.iter().map(|t| (t.measured.most - t.measured.least) / t.measured.median))
                .median,
            mean_error: errors.clone().sum::<f64>() / thresholds.len() as f64,
            largest_error: errors.fold(0.0, f64::max),
            thresholds,
        })
    }

    /// Both lines, with marks at the chosen threshold and the best one. `model`: whose threshold it is.
    pub fn panel(&self, model: &str) -> Panel {
        let line = |name: &str, marked: u32, of: fn(&Threshold) -> f64| {
            let at = |t: &Threshold| (f64::from(t.min_batch), of(t));
            let marks = self.thresholds.iter().filter(|t| t.min_batch == marked).map(at).collect();
            Line { name: name.into(), points: self.thresholds.iter().map(at).collect(), marks }
        };
        Panel {
            title: format!("{} requests", self.requests),
            x: format!("min_batch of {model}"),
            y: "tokens/s".into(),
            lines: vec![
                line("predicted", self.chosen, |t| t.predicted),
                line("measured", self.best, |t| t.measured.median),
            ],
        }
    }
}

/// [`Swept::loss_across`] of the threshold at index `chosen`.
fn loss_across(measured: &[Vec<f64>], chosen: usize) -> Option<f64> {
    let rounds = measured.iter().map(Vec::len).min().filter(|&rounds| rounds >= 2)?;
    let of_round: Vec<f64> = (0..rounds).map(|round| measured.iter().map(|rates| rates[round]).sum()).collect();
    let mean = |threshold: usize, half: usize| {
        let rates = (half..rounds).step_by(2).map(|round| measured[threshold][round] / of_round[round]);
        rates.clone().sum::<f64>() / rates.count() as f64
    };
    let loss = |half: usize| {
        let best = (0..measured.len()).rev().max_by(|&a, &b| mean(a, half).total_cmp(&mean(b, half)))?;
        Some(1.0 - mean(chosen, 1 - half) / mean(best, 1 - half))
    };
    Some((loss(0)? + loss(1)?) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_threshold_and_what_it_loses() {
        let measured = [vec![100.0, 90.0, 110.0], vec![150.0, 160.0, 155.0], vec![160.0, 170.0, 165.0], vec![90.0]];
        let swept = Swept::new(4, &measured, &[100.0, 160.0, 150.0, 100.0]).unwrap();
        assert_eq!((swept.chosen, swept.best), (2, 3));
        assert!((swept.loss - (1.0 - 155.0 / 165.0)).abs() < 1e-12, "{swept:?}");
        // 20, 10, 10 and 0 apart.
        assert!((swept.noise - (10.0 / 155.0 + 10.0 / 165.0) / 2.0).abs() < 1e-12, "{swept:?}");
        assert!((swept.largest_error - 0.1).abs() < 1e-12 && swept.mean_error < 0.1, "{swept:?}");
        assert_eq!(swept.thresholds[0].measured, Spread { median: 100.0, least: 90.0, most: 110.0 });
        let panel = swept.panel("large");
        assert_eq!((panel.lines[0].marks[0], panel.lines[1].marks[0]), ((2.0, 160.0), (3.0, 165.0)));
        assert_eq!(swept.loss_across, None, "one threshold has one round");
        // Of equal ones the smallest; nothing of nothing.
        assert_eq!(
            Swept::new(2, &[vec![5.0], vec![5.0]], &[7.0, 7.0]).map(|s| (s.chosen, s.best, s.loss)),
            Some((1, 1, 0.0))
        );
        assert_eq!(Swept::new(2, &[], &[]), None);
    }

    #[test]
    fn the_best_of_one_half_is_compared_in_the_other() {
        // The first round is twice as fast for all. In even rounds the second is best, in odd ones the third.
        let measured =
            [vec![200.0, 100.0, 100.0, 100.0], vec![220.0, 90.0, 110.0, 90.0], vec![180.0, 110.0, 90.0, 110.0]];
        let near = |chosen: usize, loss: f64| {
            let got = loss_across(&measured, chosen).unwrap();
            assert!((got - loss).abs() < 1e-12, "{got} instead of {loss}");
        };
        near(0, 1.0 - 100.0 / 90.0);
        near(1, (0.0 + 1.0 - 110.0 / 90.0) / 2.0);
        // A true difference stays.
        let measured = [vec![100.0, 200.0], vec![110.0, 220.0]];
        assert!((loss_across(&measured, 0).unwrap() - (1.0 - 100.0 / 110.0)).abs() < 1e-12);
        assert_eq!(loss_across(&[vec![1.0], vec![2.0]], 0), None);
        assert_eq!(loss_across(&[], 0), None);
    }
}
