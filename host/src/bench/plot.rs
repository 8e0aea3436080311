//! Loads as an SVG picture: throughput, latencies, and how full the batches were.

use std::error::Error;
use std::time::{Duration, Instant};

use super::ask::Answer;
use super::load::{Carried, Pace};
use super::models::ModelSummary;
use super::statistics::sorted;
use super::summary::Summary;
use super::timed::{ModelLog, Step};
use crate::chart::{self, Line, Panel};

const SIZE: (u32, u32) = (1200, 1200);
/// Points of a curve, at most.
const POINTS: usize = 400;
/// Parts into which a load is cut to show its batches over time.
const WINDOWS: u32 = 100;

/// One load.
pub struct Plotted<'a> {
    pub summary: &'a Summary,
    pub carried: &'a Carried,
}

/// Output tokens a second over the loads; distributions of TTFT, TPOT, ITL and E2E, a line for each load; and
/// for the last load the requests in a step over time, a line for each model. `names` and `logs` by model; empty for
/// a server elsewhere.
pub fn svg(title: &str, loads: &[Plotted<'_>], logs: &[ModelLog]) -> Result<String, Box<dyn Error>> {
    chart::svg(title, SIZE, (3, 2), &panels(loads, logs))
}

fn panels(loads: &[Plotted<'_>], logs: &[ModelLog]) -> Vec<Panel> {
    let closed = loads.iter().all(|load| matches!(load.summary.pace, Pace::Closed { .. }));
    let at = |pace: Pace| match pace {
        Pace::Closed { requests } => f64::from(requests),
        Pace::Open { rate, .. } => rate,
    };
    // An infinite rate has no place on an axis.
    let finite = loads.iter().map(|load| load.summary).filter(|summary| at(summary.pace).is_finite());
    let mut throughput: Vec<(f64, f64)> = finite.map(|s| (at(s.pace), s.tokens_per_second)).collect();
    throughput.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut panels = vec![Panel {
        title: "Output tokens a second".into(),
        x: if closed { "requests under way" } else { "requests a second, offered" }.into(),
        y: "tokens/s".into(),
        lines: vec![Line { name: String::new(), marks: throughput.clone(), points: throughput }],
    }];
    let line = |name: String, points| Line { name, points, marks: Vec::new() };
    let distribution = |title: &str, of: fn(&Answer) -> Vec<f64>| Panel {
        title: title.into(),
        x: "ms".into(),
        y: "share".into(),
        lines: loads.iter().map(|load| line(load.summary.pace.to_string(), cdf(&load.carried.answers, of))).collect(),
    };
    panels.push(distribution("Time to first token", |a| a.times().map(|times| times.ttft).into_iter().collect()));
    panels
        .push(distribution("Time per output token", |a| a.times().and_then(|times| times.tpot).into_iter().collect()));
    panels.push(distribution("Between tokens", |a| {
        a.arrivals.windows(2).map(|pair| super::ask::ms(pair[1].0 - pair[0].0)).collect()
    }));
    panels.push(distribution("End to end", |a| a.times().and_then(|times| times.e2e).into_iter().collect()));
    if let Some(last) = loads.last().filter(|last| !last.summary.models.is_empty()) {
        let steps =
            |(model, log): (&ModelSummary, &ModelLog)| line(model.name.clone(), fill(&log.steps, last.carried.began));
        panels.push(Panel {
            title: "Requests in a step".into(),
            x: format!("s, load of {}", last.summary.pace),
            y: "requests".into(),
            lines: last.summary.models.iter().zip(logs).map(steps).collect(),
        });
    }
    panels
}

/// Cumulative distribution over the answers that did not fail.
fn cdf(answers: &[Answer], of: fn(&Answer) -> Vec<f64>) -> Vec<(f64, f64)> {
    let values = sorted(answers.iter().filter(|answer| answer.failure.is_none()).flat_map(of));
    let count = values.len();
    let every = count.div_ceil(POINTS).max(1);
    let kept = values.iter().enumerate().filter(|(place, _)| place % every == 0 || place + 1 == count);
    kept.map(|(place, value)| (*value, (place + 1) as f64 / count as f64)).collect()
}

/// Mean requests of the steps that began in each window, in seconds from `began`.
fn fill(steps: &[Step], began: Instant) -> Vec<(f64, f64)> {
    let Some(end) = steps.last().map(|step| step.end) else { return Vec::new() };
    let width = ((end - began) / WINDOWS).max(Duration::from_micros(1));
    let window = |step: &Step| step.start.saturating_duration_since(began).as_nanos() / width.as_nanos();
    let mean = |steps: &[Step]| {
        let middle = (window(&steps[0]) as f64 + 0.5) * width.as_secs_f64();
        (middle, steps.iter().map(|step| f64::from(step.sequences)).sum::<f64>() / steps.len() as f64)
    };
    steps.chunk_by(|a, b| window(a) == window(b)).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(zero: Instant, ms: u64) -> Instant {
        zero + Duration::from_millis(ms)
    }

    fn carried(zero: Instant) -> Carried {
        let answer = |first: u64| Answer {
            tokens: 2,
            arrivals: vec![(at(zero, first), 1), (at(zero, 100), 1)],
            ended: at(zero, 100),
            ..Answer::new(zero)
        };
        Carried { began: zero, answers: vec![answer(10), answer(30), answer(20).failed("x")] }
    }

    fn step(zero: Instant, start: u64, sequences: u32) -> Step {
        Step { start: at(zero, start), end: at(zero, start + 1), rows: 1, prompt_rows: 0, sequences, sampled: 1 }
    }

    #[test]
    fn distributions() {
        let zero = Instant::now();
        let points = cdf(&carried(zero).answers, |a| a.times().map(|times| times.ttft).into_iter().collect());
        assert_eq!(points, [(10.0, 0.5), (30.0, 1.0)]);
        let many: Vec<Answer> = (0..5000).map(|_| carried(zero).answers[0].clone()).collect();
        let points = cdf(&many, |a| a.times().and_then(|times| times.e2e).into_iter().collect());
        assert!(points.len() <= POINTS + 1 && points.last() == Some(&(100.0, 1.0)));
    }

    #[test]
    fn batches_over_time() {
        let zero = Instant::now();
        let steps = [step(zero, 0, 1), step(zero, 1, 3), step(zero, 500, 4), step(zero, 999, 2)];
        let fill = fill(&steps, zero);
        assert_eq!(fill.iter().map(|point| point.1).collect::<Vec<_>>(), [2.0, 4.0, 2.0]);
        assert!((fill[0].0 - 0.005).abs() < 1e-9 && (fill[2].0 - 0.995).abs() < 1e-9, "{fill:?}");
    }

    #[test]
    fn a_picture_has_its_panels() {
        let zero = Instant::now();
        let carried = carried(zero);
        let logs = [ModelLog { steps: vec![step(zero, 0, 2), step(zero, 50, 1)], ..ModelLog::default() }];
        let names = ["small".into()];
        let summary = |requests| Summary::new(Pace::Closed { requests }, &carried, &[], &names, &logs);
        let (one, two) = (summary(1), summary(2));
        let loads = [&one, &two].map(|summary| Plotted { summary, carried: &carried });
        let whole = svg("t <1>", &loads, &logs).unwrap();
        assert!(whole.starts_with("<svg") && whole.trim_end().ends_with("</svg>") && whole.contains("t &lt;1&gt;"));
        for part in
            ["Output tokens a second", "Time to first token", "Requests in a step", "small", "requests under way"]
        {
            assert!(whole.contains(part), "{part}: {whole}");
        }
        let open =
            Summary::new(Pace::Open { rate: f64::INFINITY, burstiness: 1.0, most: None }, &carried, &[], &[], &[]);
        let elsewhere = svg("t", &[Plotted { summary: &open, carried: &carried }], &[]).unwrap();
        assert!(!elsewhere.contains("Requests in a step") && elsewhere.contains("requests a second, offered"));
        assert!(svg("t", &[], &[]).is_ok());
    }
}
