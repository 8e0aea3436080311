//! The chain of delayed batching that loads describe, and what it promises. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tokenrouter_batching::online::{self, Steps};
use tokenrouter_batching::search::{self, Options};
use tokenrouter_batching::system::interpolate;
use tokenrouter_batching::{Fault, Model, Setting, System};

use super::ask::ms;
use super::summary::Summary;
use super::timed::{ModelLog, Step};
use crate::subserver::coordinator::Ladders;

/// Steps of a batch size below which its time is not taken.
const THIN: f64 = 3.0;

/// A load with the steps of its models.
pub type Seen<'a> = (&'a Summary, &'a [ModelLog]);

/// Why loads describe no chain.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unknown {
    #[error("{model} ran too few steps; give longer answers or more requests")]
    Steps { model: String },
    #[error(transparent)]
    System(#[from] Fault),
}

/// Steps by batch size.
#[derive(Default)]
struct Sizes(BTreeMap<usize, Steps>);

/// Models, routes and commits of all `loads` together. A step takes its time without prompts and the median gap that
/// the host leaves behind it. `entry`: who gets new requests.
pub fn system(loads: &[Seen<'_>], entry: usize) -> Result<System, Unknown> {
    let Some((first, _)) = loads.first() else { return Err(Fault::NoModels.into()) };
    let count = first.models.len();
    let mut models = Vec::with_capacity(count);
    for (index, model) in first.models.iter().enumerate() {
        let mut sizes = Sizes::default();
        loads.iter().for_each(|(_, logs)| sizes.enter(logs, index));
        // Where it cannot be told times and stretch together are right.
        let stretch = online::stretch(sizes.known().map(|(_, sums)| sums)).unwrap_or(1.0);
        let gaps = loads.iter().filter_map(|(summary, _)| summary.models.get(index)?.gap_us).map(|[median, _]| median);
        let gaps: Vec<f64> = gaps.collect();
        let gap = if gaps.is_empty() { 0.0 } else { gaps.iter().sum::<f64>() / gaps.len() as f64 / 1e3 };
        let known: Vec<(usize, f64)> = sizes.work(stretch).map(|(batch, ms)| (batch, ms + gap)).collect();
        if known.is_empty() {
            return Err(Unknown::Steps { model: model.name.clone() });
        }
        models.push(Model { stretch, ..Model::new(model.name.clone(), interpolate(&known)) });
    }
    let sum = |of: fn(&super::flow::Flow) -> &Vec<Vec<u64>>, i: usize, j: usize| {
        let flows = loads.iter().filter_map(|(summary, _)| summary.flow.as_ref());
        flows.filter_map(|flow| of(flow).get(i)?.get(j)).sum::<u64>() as f64
    };
    let matrix = |cell: &dyn Fn(usize, usize) -> f64| -> Vec<Vec<f64>> {
        (0..count).map(|i| (0..count).map(|j| cell(i, j)).collect()).collect()
    };
    let moves = matrix(&|i, j| sum(|flow| &flow.transitions, i, j));
    let all: Vec<f64> = moves.iter().map(|row| row.iter().sum()).collect();
    if let Some(model) = all.iter().position(|all| *all == 0.0) {
        return Err(Unknown::Steps { model: models[model].name.clone() });
    }
    let routing = matrix(&|i, j| moves[i][j] / all[i]);
    let commits = matrix(&|i, j| match moves[i][j] {
        0.0 => 0.0,
        moves => sum(|flow| &flow.commits, i, j) / moves,
    });
    Ok(System { models, routing, commits, sigma: Vec::new(), entry }.checked()?)
}

impl Sizes {
    /// The steps of `model` without rows of prompts.
    fn enter(&mut self, logs: &[ModelLog], model: usize) {
        let Some(own) = logs.get(model) else { return };
        let others = logs.iter().enumerate().filter(|(other, _)| *other != model).map(|(_, log)| &*log.steps);
        let busy = union(others);
        for step in own.steps.iter().filter(|step| step.prompt_rows == 0) {
            let one = Steps::one(ms(step.end - step.start), ms(overlap(step, &busy)));
            self.0.entry(step.sequences as usize).or_default().add(&one, 1.0);
        }
    }

    fn known(&self) -> impl Iterator<Item = (usize, &Steps)> {
        self.0.iter().filter(|(_, sums)| sums.steps >= THIN).map(|(batch, sums)| (*batch, sums))
    }

    /// Mean milliseconds of undisturbed work by batch size.
    fn work(&self, stretch: f64) -> impl Iterator<Item = (usize, f64)> {
        self.known().map(move |(batch, sums)| (batch, (sums.alone + sums.overlap / stretch) / sums.steps))
    }
}

/// When any of the models computed: intervals that do not touch, ascending.
fn union<'a>(models: impl Iterator<Item = &'a [Step]>) -> Vec<(Instant, Instant)> {
    let mut all: Vec<(Instant, Instant)> = models.flatten().map(|step| (step.start, step.end)).collect();
    all.sort_unstable();
    let mut union: Vec<(Instant, Instant)> = Vec::with_capacity(all.len());
    for (start, end) in all {
        match union.last_mut() {
            Some((_, last)) if start <= *last => *last = end.max(*last),
            _ => union.push((start, end)),
        }
    }
    union
}

fn overlap(step: &Step, busy: &[(Instant, Instant)]) -> Duration {
    let first = busy.partition_point(|(_, end)| *end <= step.start);
    let during = busy[first..].iter().take_while(|(start, _)| *start < step.end);
    during.map(|(start, end)| (*end).min(step.end) - (*start).max(step.start)).sum()
}

/// The ladders with the highest throughput: tuned at each of `requests` (ascending), and between them as at the next
/// smaller one.
pub fn ladders(system: &System, requests: &[u32], options: &Options) -> Result<Ladders, Fault> {
    let steps = search::ladder(system, requests.iter().map(|n| *n as usize), options)?;
    let most = requests.last().copied().unwrap_or(1) as usize;
    let at = |n: usize, model: usize| {
        let step = steps.iter().rev().find(|(requests, _)| *requests <= n);
        step.map_or(1, |(_, point)| point.setting.min_batch[model])
    };
    Ok((0..system.len()).map(|model| (1..=most).map(|n| at(n, model)).collect()).collect())
}

/// Tokens a second over the thresholds of `model`, from 1 to `requests`; all others start at once.
pub fn over_thresholds(system: &System, model: usize, requests: u32, options: &Options) -> Result<Vec<f64>, Fault> {
    let eager = Setting::new(vec![1; system.len()]);
    let points = search::profile(system, requests as usize, &eager, model, options)?;
    Ok(points.into_iter().map(|point| point.rates.throughput).collect())
}

#[cfg(test)]
mod tests {
    use super::super::flow::Flow;
    use super::super::load::{Carried, Pace};
    use super::super::timed::Visit;
    use super::*;

    /// Steps from, to in µs with their requests.
    fn log(zero: Instant, steps: impl Iterator<Item = (u64, u64, u32)>) -> ModelLog {
        let at = |us| zero + Duration::from_micros(us);
        let step = |(from, to, sequences)| Step {
            start: at(from),
            end: at(to),
            rows: sequences,
            prompt_rows: 0,
            sequences,
            sampled: sequences,
        };
        ModelLog {
            steps: steps.map(step).collect(),
            visits: vec![Visit { request: 9, step: 0, position: 0, draft: false }],
        }
    }

    fn summary(zero: Instant, logs: &[ModelLog], flow: Flow) -> Summary {
        let carried = Carried { began: zero, answers: Vec::new() };
        let names = ["s".to_owned(), "l".to_owned()];
        Summary {
            flow: Some(flow),
            ..Summary::new(Pace::Closed { requests: 4 }, &carried, &[], &names[..logs.len()], logs)
        }
    }

    fn flow() -> Flow {
        let (transitions, commits) = (vec![vec![60, 40], vec![40, 0]], vec![vec![60, 0], vec![80, 0]]);
        Flow { transitions, commits, ..Flow::default() }
    }

    /// The small model has 6 ms of work a step, of which more and more lies beside the large one's, at 3 times the time.
    #[test]
    fn a_load_describes_its_chain() {
        let zero = Instant::now();
        let period = 100_000;
        let beside = |i: u64| 1000 * (i % 5);
        let small = log(zero, (0..40).map(|i| (i * period, i * period + 6000 + 2 * beside(i), 2)));
        // It computes from the small step's start on, for three times what the small one gets done meanwhile.
        let large = log(zero, (0..40).filter(|i| i % 5 > 0).map(|i| (i * period, i * period + 3 * beside(i), 3)));
        let logs = [small, large];
        let summary = summary(zero, &logs, flow());
        let system = system(&[(&summary, &logs)], 0).unwrap();
        let [small, large] = system.models.as_slice() else { panic!("{system:?}") };
        assert!((small.stretch - 3.0).abs() < 1e-6 && (small.step(2) - 6.0).abs() < 1e-6, "{system:?}");
        assert_eq!((small.step(1), large.step_ms.len()), (small.step(2), 3));
        assert_eq!((&system.routing[0], &system.routing[1]), (&vec![0.6, 0.4], &vec![1.0, 0.0]));
        assert_eq!(system.commits, [[1.0, 0.0], [2.0, 0.0]]);
        let ladders = ladders(&system, &[1, 4], &Options::default()).unwrap();
        assert_eq!((ladders.len(), ladders[1].len(), ladders[1][0]), (2, 4, 1));
        assert_eq!(ladders[1][..3], [1, 1, 1]);
        let rates = over_thresholds(&system, 1, 4, &Options::default()).unwrap();
        assert!(rates.len() == 4 && rates.iter().all(|rate| *rate > 0.0), "{rates:?}");
    }

    #[test]
    fn too_little_is_said() {
        let zero = Instant::now();
        let logs = [log(zero, (0..9).map(|i| (i * 10, i * 10 + 5, 1))), log(zero, std::iter::empty())];
        let summary = summary(zero, &logs, flow());
        let unknown = system(&[(&summary, &logs)], 0).unwrap_err();
        assert_eq!(unknown.to_string(), "l ran too few steps; give longer answers or more requests");
        assert!(system(&[], 0).is_err());
    }
}
