//! What the models of an engine did in a load. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::ask::{Answer, ms};
use super::statistics::{Distribution, percentile, sorted};
use super::timed::{ModelLog, Step};

/// Gaps between steps from this length on are taken for a closed gate.
const LONGEST_GAP: Duration = Duration::from_millis(1);
/// How long after a step of another model what it sends may arrive.
const ARRIVAL_LAG: Duration = Duration::from_micros(100);

/// What one model did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModelSummary {
    pub name: String,
    /// Tokens that it wrote, and their share of all.
    pub tokens: u64,
    pub share: f64,
    pub steps: u64,
    /// Requests of a step, on average.
    pub mean_batch: f64,
    /// Requests of all steps, by those that were under way when each step began.
    pub fill: f64,
    /// Rows of a step, on average.
    pub mean_rows: f64,
    /// Time of a step.
    pub step_ms: Distribution,
    /// Steps without rows of prompts, by the number of requests in them, ascending.
    pub steps_by_batch: Vec<BatchSteps>,
    /// Share of the time in which a step was under way.
    pub busy: f64,
    /// Median and 90th percentile of the host time between steps: from the end of a step to the start of the
    /// next, where the next had all its work already. `None` without any.
    pub gap_us: Option<[f64; 2]>,
    /// How many of the `steps - 1` gaps were such.
    pub gaps: u64,
}

/// Steps with the same number of requests, none of them with rows of prompts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BatchSteps {
    pub requests: u32,
    pub steps: u64,
    pub mean_ms: f64,
    pub p50_ms: f64,
    /// Of those during which no other model computed: how many, and their mean time.
    pub alone: u64,
    pub alone_mean_ms: Option<f64>,
}

/// One summary a model. `names`, `logs`: by model.
pub fn summaries(names: &[String], logs: &[ModelLog], answers: &[Answer], elapsed: Duration) -> Vec<ModelSummary> {
    let begun = ascending(answers.iter().map(|answer| answer.submitted));
    let ended = ascending(answers.iter().map(|answer| answer.ended));
    let under_way = |step: &Step| {
        let before = |times: &[Instant]| times.partition_point(|time| *time <= step.start);
        (before(&begun) - before(&ended).min(before(&begun))) as u64
    };
    let completed = || answers.iter().filter(|answer| answer.failure.is_none());
    let all: u64 = completed().map(|answer| answer.tokens).sum();
    let summary = |(model, (name, log)): (usize, (&String, &ModelLog))| {
        let others: Vec<&[Step]> =
            logs.iter().enumerate().filter(|(o, _)| *o != model).map(|(_, l)| &*l.steps).collect();
        let sent = others.iter().flat_map(|steps| steps.iter().map(|step| step.end));
        let arrivals = ascending(sent.chain(begun.iter().copied()));
        let gaps = host_gaps(&log.steps, &arrivals);
        let tokens: u64 = completed().filter_map(|answer| answer.by_model.get(name)).sum();
        let steps = &log.steps;
        let mean = |of: fn(&Step) -> u32| Distribution::of(steps.iter().map(|step| f64::from(of(step)))).mean;
        let busy: Duration = steps.iter().map(|step| step.end - step.start).sum();
        let batched: u64 = steps.iter().map(|step| u64::from(step.sequences)).sum();
        let could: u64 = steps.iter().map(under_way).sum();
        ModelSummary {
            name: name.clone(),
            tokens,
            share: tokens as f64 / all.max(1) as f64,
            steps: steps.len() as u64,
            mean_batch: mean(|step| step.sequences),
            fill: batched as f64 / could.max(1) as f64,
            mean_rows: mean(|step| step.rows),
            step_ms: Distribution::of(steps.iter().map(|step| ms(step.end - step.start))),
            steps_by_batch: by_batch(steps, &others),
            busy: if elapsed.is_zero() { 0.0 } else { busy.as_secs_f64() / elapsed.as_secs_f64() },
            gap_us: (!gaps.is_empty()).then(|| [percentile(&gaps, 0.5), percentile(&gaps, 0.9)]),
            gaps: gaps.len() as u64,
        }
    };
    names.iter().zip(logs).enumerate().map(summary).collect()
}

fn ascending(times: impl Iterator<Item = Instant>) -> Vec<Instant> {
    let mut times: Vec<Instant> = times.collect();
    times.sort_unstable();
    times
}

/// `others`: steps of the other models, each in order.
fn by_batch(steps: &[Step], others: &[&[Step]]) -> Vec<BatchSteps> {
    let alone = |step: &Step| {
        others.iter().all(|other| {
            let next = other.partition_point(|other| other.end <= step.start);
            other.get(next).is_none_or(|other| other.start >= step.end)
        })
    };
    let mut batches: BTreeMap<u32, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
    for step in steps.iter().filter(|step| step.prompt_rows == 0) {
        let (all, undisturbed) = batches.entry(step.sequences).or_default();
        let time = ms(step.end - step.start);
        all.push(time);
        if alone(step) {
            undisturbed.push(time);
        }
    }
    let of = |(requests, (all, alone)): (u32, (Vec<f64>, Vec<f64>))| {
        let (steps, undisturbed) = (all.len() as u64, alone.len() as u64);
        let all = Distribution::of(all.into_iter());
        let alone_mean_ms = (undisturbed > 0).then(|| Distribution::of(alone.into_iter()).mean);
        BatchSteps { requests, steps, mean_ms: all.mean, p50_ms: all.p50, alone: undisturbed, alone_mean_ms }
    };
    batches.into_iter().map(of).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// From and to in µs.
    fn step(zero: Instant, from: u64, to: u64, rows: u32, sequences: u32) -> Step {
        let at = |micros| zero + Duration::from_micros(micros);
        Step { start: at(from), end: at(to), rows, prompt_rows: rows.saturating_sub(4), sequences, sampled: sequences }
    }

    #[test]
    fn what_a_model_did() {
        let zero = Instant::now();
        let at = |ms: u64| zero + Duration::from_millis(ms);
        let answer = |a: u64, b: u64| Answer {
            tokens: a + b,
            by_model: [("a".to_owned(), a), ("b".to_owned(), b)].into(),
            ended: at(1000),
            ..Answer::new(zero)
        };
        let a = ModelLog {
            steps: vec![
                step(zero, 0, 100_000, 8, 1),
                step(zero, 100_010, 200_010, 2, 2),
                step(zero, 200_050, 300_050, 2, 2),
                step(zero, 302_000, 303_000, 1, 1),
            ],
            ..ModelLog::default()
        };
        let b = ModelLog { steps: vec![step(zero, 150_000, 190_000, 1, 1)], ..ModelLog::default() };
        // The last one failed at 200 ms.
        let failed = Answer { failure: Some("x".into()), ended: at(200), ..answer(9, 9) };
        let answers = [answer(4, 2), answer(3, 0), failed];
        let names = ["a".into(), "b".into()];
        let [a, b] = &*summaries(&names, &[a, b], &answers, Duration::from_secs(1)) else { panic!() };
        assert_eq!((a.tokens, b.tokens, a.steps, b.steps), (7, 2, 4, 1));
        // Of 3 requests, and 2 from 200 ms on.
        assert_eq!((a.mean_batch, a.fill, a.mean_rows, a.gaps), (1.5, 0.6, 3.25, 2));
        let gap = a.gap_us.unwrap();
        assert!((gap[0] - 25.0).abs() < 1e-6 && (gap[1] - 37.0).abs() < 1e-6, "{gap:?}");
        assert!((a.busy - 0.301).abs() < 1e-9 && (b.busy - 0.04).abs() < 1e-9 && b.gap_us.is_none());
        assert_eq!(a.step_ms.p50, 100.0);
        // The first has rows of a prompt; in the second the other model computed.
        let [one, two] = &*a.steps_by_batch else { panic!("{:?}", a.steps_by_batch) };
        assert_eq!((one.requests, one.steps, one.mean_ms, one.alone), (1, 1, 1.0, 1));
        assert_eq!((two.requests, two.steps, two.p50_ms, two.alone, two.alone_mean_ms), (2, 2, 100.0, 1, Some(100.0)));
        assert_eq!((b.steps_by_batch[0].alone, b.steps_by_batch[0].alone_mean_ms), (0, None));
    }

    #[test]
    fn waits_for_work_are_no_host_time() {
        let zero = Instant::now();
        let at = |micros: u64| zero + Duration::from_micros(micros);
        let step = |from, to| step(zero, from, to, 1, 1);
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
}
