//! What a load came to. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::load::Answer;
use super::timed::Step;
use crate::subserver::Counters;

/// Gaps between steps from this length on are taken for a closed gate.
const LONGEST_GAP: Duration = Duration::from_millis(1);
/// How long after a step of another model what it sends may arrive.
const ARRIVAL_LAG: Duration = Duration::from_micros(100);

/// Two percentiles of a quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p99: f64,
}

/// One load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Requests under way at once.
    pub requests: usize,
    /// Requests in all.
    pub total: usize,
    /// From the first submission to the last token.
    pub seconds: f64,
    pub tokens: u64,
    /// All tokens by all seconds.
    pub tokens_per_second: f64,
    /// Without prefills and the tail: from the moment when each of the first `requests` requests has a
    /// token until the first of them ends. `None` where that is no time.
    pub decode_tokens_per_second: Option<f64>,
    /// From the submission to the first token.
    pub ttft_ms: Percentiles,
    /// From the first to the last token, by the tokens after the first. 0 where there are none.
    pub tpot_ms: Percentiles,
    pub handoffs: u64,
    pub models: Vec<ModelSummary>,
}

/// What one model did in a load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelSummary {
    pub name: String,
    /// Tokens that it wrote, and their share of all.
    pub tokens: u64,
    pub share: f64,
    pub steps: u64,
    /// Requests of a step, on average.
    pub mean_batch: f64,
    /// Rows of a step, on average.
    pub mean_rows: f64,
    /// Time of a step.
    pub step_ms: Percentiles,
    /// The same by the number of its requests, ascending.
    pub step_ms_by_batch: Vec<BatchSteps>,
    /// Share of the time in which a step was under way.
    pub busy: f64,
    /// Median and 90th percentile of the host time between steps: from the end of a step to the start of the
    /// next, where the next had all its work already. See [`host_gaps`]. `None` without any.
    pub gap_us: Option<[f64; 2]>,
    /// How many of the `steps - 1` gaps were such.
    pub gaps: u64,
    /// Tokens whose K/V requests came to need, and those of them whose K/V the prefix cache had.
    pub prefix_queried: u64,
    pub prefix_found: u64,
}

/// Steps with as many requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BatchSteps {
    pub batch: u32,
    pub steps: u64,
    #[serde(flatten)]
    pub ms: Percentiles,
}

/// The smallest value that at least this share of `sorted` does not exceed; 0 of nothing.
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn percentiles(values: impl Iterator<Item = f64>) -> Percentiles {
    let sorted = sorted(values);
    Percentiles { p50: percentile(&sorted, 0.5), p99: percentile(&sorted, 0.99) }
}

fn ms(duration: Duration) -> f64 {
    1e3 * duration.as_secs_f64()
}

impl Summary {
    /// `answers` in the order of their requests, each with at least one token; `steps` and `names` by model.
    pub fn new(requests: usize, answers: &[Answer], names: &[String], steps: &[Vec<Step>]) -> Self {
        let times = || answers.iter().flat_map(|answer| answer.tokens.iter().map(|(time, _)| *time));
        let start = answers.iter().map(|answer| answer.submitted).min();
        let elapsed = start.zip(times().max()).map_or(Duration::ZERO, |(start, end)| end - start);
        let tokens: u64 = answers.iter().map(|answer| answer.tokens.len() as u64).sum();
        let ends = || answers.iter().filter_map(|a| Some((a, a.tokens.first()?.0, a.tokens.last()?.0)));
        let written = |model: usize| {
            let tokens = answers.iter().flat_map(|answer| &answer.tokens);
            tokens.filter(|(_, writer)| writer.index() == model).count() as u64
        };
        let models = names.iter().zip(steps).enumerate();
        Self {
            requests,
            total: answers.len(),
            seconds: elapsed.as_secs_f64(),
            tokens,
            tokens_per_second: rate(tokens, elapsed),
            decode_tokens_per_second: decode_rate(&answers[..requests.min(answers.len())]),
            ttft_ms: percentiles(ends().map(|(answer, first, _)| ms(first - answer.submitted))),
            tpot_ms: percentiles(
                ends()
                    .filter(|(answer, ..)| answer.tokens.len() > 1)
                    .map(|(answer, first, last)| ms(last - first) / (answer.tokens.len() - 1) as f64),
            ),
            handoffs: answers.iter().map(|answer| u64::from(answer.handoffs)).sum(),
            models: models
                .map(|(model, (name, own))| {
                    let others = steps.iter().enumerate().filter(|(other, _)| *other != model);
                    let sent = others.flat_map(|(_, steps)| steps.iter().map(|step| step.end));
                    let mut arrivals: Vec<Instant> = sent.chain(answers.iter().map(|a| a.submitted)).collect();
                    arrivals.sort_unstable();
                    ModelSummary::new(name, (written(model), tokens), own, &host_gaps(own, &arrivals), elapsed)
                })
                .collect(),
        }
    }
}

fn rate(tokens: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

fn decode_rate(first: &[Answer]) -> Option<f64> {
    let start: Instant = first.iter().filter_map(|answer| Some(answer.tokens.first()?.0)).max()?;
    let end: Instant = first.iter().filter_map(|answer| Some(answer.tokens.last()?.0)).min()?;
    let within = first.iter().flat_map(|answer| &answer.tokens).filter(|(time, _)| *time > start && *time <= end);
    (end > start).then(|| rate(within.count() as u64, end - start))
}

/// Microseconds between steps, ascending, without the waits for work: of the gaps below 1 ms, those in which
/// nothing can have come in. Work comes from what a step leaves behind, or at the moments `arrivals`
/// (ascending): other models' steps end, or requests are submitted.
fn host_gaps(steps: &[Step], arrivals: &[Instant]) -> Vec<f64> {
    let came_in = |from: Instant, to: Instant| {
        let next = arrivals.partition_point(|time| *time + ARRIVAL_LAG < from);
        arrivals.get(next).is_some_and(|time| *time < to)
    };
    let gaps = steps.windows(2).filter(|pair| !came_in(pair[0].end, pair[1].start));
    let gaps = gaps.map(|pair| pair[1].start - pair[0].end).filter(|gap| *gap < LONGEST_GAP);
    sorted(gaps.map(|gap| 1e6 * gap.as_secs_f64()))
}

fn by_batch(steps: &[Step]) -> Vec<BatchSteps> {
    let mut times: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for step in steps {
        times.entry(step.sequences).or_default().push(ms(step.end - step.start));
    }
    let summed_up = |(batch, times): (u32, Vec<f64>)| BatchSteps {
        batch,
        steps: times.len() as u64,
        ms: percentiles(times.into_iter()),
    };
    times.into_iter().map(summed_up).collect()
}

impl ModelSummary {
    /// `tokens`: of this model and of all; `gaps` ascending.
    fn new(name: &str, (tokens, all): (u64, u64), steps: &[Step], gaps: &[f64], elapsed: Duration) -> Self {
        let count = steps.len().max(1) as f64;
        let mean = |of: fn(&Step) -> u32| steps.iter().map(|step| f64::from(of(step))).sum::<f64>() / count;
        let busy: Duration = steps.iter().map(|step| step.end - step.start).sum();
        Self {
            name: name.into(),
            tokens,
            share: tokens as f64 / all.max(1) as f64,
            steps: steps.len() as u64,
            mean_batch: mean(|step| step.sequences),
            mean_rows: mean(|step| step.rows),
            step_ms: percentiles(steps.iter().map(|step| ms(step.end - step.start))),
            step_ms_by_batch: by_batch(steps),
            busy: if elapsed.is_zero() { 0.0 } else { busy.as_secs_f64() / elapsed.as_secs_f64() },
            gap_us: (!gaps.is_empty()).then(|| [percentile(gaps, 0.5), percentile(gaps, 0.9)]),
            gaps: gaps.len() as u64,
            prefix_queried: 0,
            prefix_found: 0,
        }
    }

    /// Enter what the prefix cache did between two readings of the model's counters.
    pub fn count_cached(&mut self, before: &Counters, after: &Counters) {
        self.prefix_queried = after.prefix_queried - before.prefix_queried;
        self.prefix_found = after.prefix_found - before.prefix_found;
    }

    /// Share of the tokens looked up that were found; `None` if none was looked up.
    pub fn prefix_hit_rate(&self) -> Option<f64> {
        (self.prefix_queried > 0).then(|| self.prefix_found as f64 / self.prefix_queried as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::ModelId;

    #[test]
    fn what_is_summed_up() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        let answer = |submitted: u64, tokens: &[(u64, u32)]| Answer {
            submitted: at(submitted),
            tokens: tokens.iter().map(|&(time, model)| (at(time), ModelId(model))).collect(),
            handoffs: 2,
        };
        // Two under way, a third after the first has ended.
        let answers = [
            answer(0, &[(100, 0), (200, 1), (300, 0)]),
            answer(0, &[(150, 0), (250, 0), (350, 0)]),
            answer(300, &[(400, 1), (500, 0), (1000, 0)]),
        ];
        let step = |start: u64, end: u64, rows: u32, sequences: u32| {
            let micros = |n| zero + Duration::from_micros(n);
            Step { start: micros(start), end: micros(end), rows, sequences, sampled: sequences }
        };
        let steps = [
            vec![
                step(0, 100_000, 8, 1),
                step(100_010, 200_010, 2, 2),
                step(200_050, 300_050, 2, 2),
                step(302_000, 303_000, 1, 1),
            ],
            Vec::new(),
        ];
        let summary = Summary::new(2, &answers, &["a".into(), "b".into()], &steps);
        assert_eq!((summary.requests, summary.total, summary.tokens, summary.handoffs), (2, 3, 9, 6));
        assert_eq!((summary.seconds, summary.tokens_per_second), (1.0, 9.0));
        // From 150 ms to 300 ms: tokens at 200, 250 and 300.
        assert!((summary.decode_tokens_per_second.unwrap() - 20.0).abs() < 1e-9);
        assert_eq!(summary.ttft_ms, Percentiles { p50: 100.0, p99: 150.0 });
        assert_eq!(summary.tpot_ms, Percentiles { p50: 100.0, p99: 300.0 });
        let [a, b] = summary.models.as_slice() else { panic!() };
        assert_eq!((a.tokens, b.tokens, a.steps, b.steps), (7, 2, 4, 0));
        assert_eq!((a.mean_batch, a.mean_rows, a.gaps), (1.5, 3.25, 2));
        let gap = a.gap_us.unwrap();
        assert!((gap[0] - 10.0).abs() < 1e-6 && (gap[1] - 40.0).abs() < 1e-6, "{gap:?}");
        assert!((a.busy - 0.301).abs() < 1e-9 && b.busy == 0.0 && b.gap_us.is_none());
        assert_eq!(a.step_ms.p50, 100.0);
        let by: Vec<(u32, u64, f64)> = a.step_ms_by_batch.iter().map(|s| (s.batch, s.steps, s.ms.p99)).collect();
        assert_eq!(by, [(1, 2, 100.0), (2, 2, 100.0)]);
    }

    #[test]
    fn only_this_load_counts() {
        let mut model = ModelSummary::new("a", (0, 0), &[], &[], Duration::ZERO);
        assert_eq!(model.prefix_hit_rate(), None);
        let counters = |prefix_queried, prefix_found| Counters { prefix_queried, prefix_found, ..Counters::default() };
        model.count_cached(&counters(100, 90), &counters(300, 140));
        assert_eq!((model.prefix_queried, model.prefix_hit_rate()), (200, Some(0.25)));
    }

    #[test]
    fn waits_for_work_are_no_host_time() {
        let zero = Instant::now();
        let at = |micros: u64| zero + Duration::from_micros(micros);
        let step = |start, end| Step { start: at(start), end: at(end), rows: 1, sequences: 1, sampled: 1 };
        let steps = [step(0, 1000), step(1020, 2000), step(2500, 3000), step(3030, 4000), step(6000, 7000)];
        let gaps = |arrivals: &[u64]| {
            let arrivals: Vec<Instant> = arrivals.iter().map(|time| at(*time)).collect();
            host_gaps(&steps, &arrivals).into_iter().map(f64::round).collect::<Vec<_>>()
        };
        assert_eq!(gaps(&[]), [20.0, 30.0, 500.0]);
        // Within the third gap; long before the first, and while a step was under way.
        assert_eq!(gaps(&[500, 2480]), [20.0, 30.0]);
        // So shortly before the end of a step that what was sent may have come after it.
        assert_eq!(gaps(&[950, 2480]), [30.0]);
    }

    #[test]
    fn answers_of_one_token() {
        let now = Instant::now();
        let answer = Answer { submitted: now, tokens: vec![(now, ModelId(0))], handoffs: 0 };
        let summary = Summary::new(4, &[answer], &["a".into()], &[Vec::new()]);
        assert_eq!(
            (summary.decode_tokens_per_second, summary.tpot_ms.p99, summary.tokens_per_second),
            (None, 0.0, 0.0)
        );
    }
}
