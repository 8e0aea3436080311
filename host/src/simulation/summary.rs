//! What a simulation came to. Pure.

use std::time::Duration;

use serde::Serialize;

use super::plan::Plan;
use super::run::{Fate, Outcome, Work};
use crate::bench::statistics::percentile;

/// Three percentiles of a quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

/// One simulation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    pub schedule: &'static str,
    /// Requests under way at once, in a closed loop.
    pub concurrency: Option<u32>,
    pub requests: usize,
    /// From the first submission to the last token.
    pub seconds: f64,
    pub tokens: u64,
    /// All tokens by all seconds.
    pub tokens_per_second: f64,
    /// Between the first tenth of all tokens and the last.
    pub steady_tokens_per_second: f64,
    /// From the submission to the first token.
    pub ttft_ms: Spread,
    /// From the first to the last token, by the tokens after the first.
    pub tpot_ms: Spread,
    /// From the submission to the last token.
    pub e2e_ms: Spread,
    pub handoffs: u64,
    /// Times that a request had gone round without a token so often that it stayed for one.
    pub forced_stays: u64,
    pub models: Vec<ModelSummary>,
}

/// What the instances of one model did together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelSummary {
    pub name: String,
    pub instances: usize,
    pub steps: u64,
    /// Requests of a step, on average.
    pub mean_batch: f64,
    /// Rows of a step, on average.
    pub mean_rows: f64,
    /// Share of the time in which a step was under way, on average over the instances.
    pub busy: f64,
    /// Hand-offs from it.
    pub handoffs: u64,
    /// K/V taken back from pending and from running requests.
    pub retractions: u64,
    pub preemptions: u64,
}

fn ms(duration: Duration) -> f64 {
    1e3 * duration.as_secs_f64()
}

fn spread(values: impl Iterator<Item = f64>) -> Spread {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    Spread { p50: percentile(&sorted, 0.5), p90: percentile(&sorted, 0.9), p99: percentile(&sorted, 0.99) }
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

/// From the first to the last token, by the tokens after the first; `None` of one token.
pub fn tpot_ms(fate: &Fate) -> Option<f64> {
    (fate.tokens > 1).then(|| ms(fate.end - fate.first) / f64::from(fate.tokens - 1))
}

impl Summary {
    /// `concurrency` in a closed loop.
    pub fn new(plan: &Plan, concurrency: Option<u32>, outcomes: &[Outcome]) -> Self {
        let fates = || outcomes.iter().flat_map(|outcome| &outcome.fates);
        let first = fates().map(|fate| fate.submitted).min().unwrap_or_default();
        let last = fates().map(|fate| fate.end).max().unwrap_or_default();
        let seconds = last.saturating_sub(first).as_secs_f64();
        let tokens: u64 = fates().map(|fate| u64::from(fate.tokens)).sum();
        let works = || outcomes.iter().flat_map(|outcome| &outcome.works);
        let models = plan.models.iter().enumerate().map(|(index, model)| {
            let own = || works().filter(move |work| work.model == index);
            let sum = |of: fn(&Work) -> u64| own().map(of).sum::<u64>();
            let (steps, instances) = (sum(|work| work.counters.steps), model.hosts.len());
            let busy: f64 = own().map(|work| work.busy.as_secs_f64()).sum();
            ModelSummary {
                name: model.name.clone(),
                instances,
                steps,
                mean_batch: ratio(sum(|work| work.counters.batched) as f64, steps as f64),
                mean_rows: ratio(sum(|work| work.counters.rows) as f64, steps as f64),
                busy: ratio(busy, seconds * instances as f64),
                handoffs: sum(|work| work.counters.handoffs),
                retractions: sum(|work| work.counters.retractions),
                preemptions: sum(|work| work.counters.preemptions),
            }
        });
        Self {
            schedule: plan.schedule.name(),
            concurrency,
            requests: fates().count(),
            seconds,
            tokens,
            tokens_per_second: ratio(tokens as f64, seconds),
            steady_tokens_per_second: outcomes.iter().map(|outcome| outcome.steady).sum(),
            ttft_ms: spread(fates().map(|fate| ms(fate.first - fate.submitted))),
            tpot_ms: spread(fates().filter_map(tpot_ms)),
            e2e_ms: spread(fates().map(|fate| ms(fate.end - fate.submitted))),
            handoffs: fates().map(|fate| u64::from(fate.handoffs)).sum(),
            forced_stays: works().map(|work| work.counters.invalid_decisions).sum(),
            models: models.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::{model, plan};
    use super::super::plan::{Arrivals, Lengths};
    use super::*;
    use crate::subserver::Counters;

    #[test]
    fn what_is_summed_up() {
        let at = Duration::from_millis;
        let fate = |number, tokens, [submitted, first, end]: [u64; 3]| Fate {
            number,
            prompt: 1,
            tokens,
            handoffs: 3,
            submitted: at(submitted),
            first: at(first),
            end: at(end),
        };
        let work = |busy, steps| Work {
            model: 0,
            host: 0,
            busy: at(busy),
            counters: Counters { steps, batched: 3 * steps, rows: 4 * steps, handoffs: 5, ..Counters::default() },
        };
        let outcome = |fates, works| Outcome { fates, works, steady: 7.0 };
        let outcomes = [
            outcome(vec![fate(0, 11, [0, 100, 600])], vec![work(500, 4)]),
            outcome(vec![fate(1, 1, [500, 700, 700]), fate(2, 5, [0, 50, 1000])], vec![work(1000, 2)]),
        ];
        let mut plan = plan(vec![model("m", 1, &[1.0], &[1.0])], Arrivals::Closed(2), 3, Lengths(1, 11));
        plan.models[0].hosts = vec![0, 1];
        let summary = Summary::new(&plan, Some(2), &outcomes);
        assert_eq!((summary.requests, summary.tokens, summary.handoffs), (3, 17, 9));
        assert_eq!((summary.tokens_per_second, summary.steady_tokens_per_second), (17.0, 14.0));
        for (seen, expected) in [(summary.ttft_ms, [100.0, 180.0, 198.0]), (summary.tpot_ms, [143.75, 218.75, 235.625])]
        {
            for (seen, expected) in [seen.p50, seen.p90, seen.p99].into_iter().zip(expected) {
                assert!((seen - expected).abs() < 1e-9, "{seen} {expected}");
            }
        }
        assert_eq!(summary.e2e_ms.p50, 600.0);
        let [model] = &summary.models[..] else { panic!() };
        assert_eq!((model.instances, model.steps, model.mean_batch, model.mean_rows), (2, 6, 3.0, 4.0));
        assert_eq!((model.busy, model.handoffs), (0.75, 10));
    }
}
