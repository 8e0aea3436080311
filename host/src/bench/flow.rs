//! How requests move between models: transitions, commits, and the waits on the way. Pure.

use std::collections::HashMap;
use std::time::Instant;

use serde::Serialize;

use super::ask::{Answer, ms};
use super::statistics::Distribution;
use super::timed::ModelLog;
use crate::request::RequestId;

/// What the steps of a load did with its requests; answers that failed are left out. Models are in the order of
/// the report. Every step that samples a token for a request is one transition, or the request's last.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Flow {
    /// `transitions[i][j]`: steps of model i after which model j computed the request next.
    pub transitions: Vec<Vec<u64>>,
    /// Tokens committed by those steps, or by what follows before the next step (verification). By
    /// `transitions` they are the commits of a transition.
    pub commits: Vec<Vec<u64>>,
    /// By model: requests whose first step it was.
    pub begun: Vec<u64>,
    /// Steps that were their requests' last, and the tokens that they committed.
    pub last_steps: Vec<u64>,
    pub last_commits: Vec<u64>,
    /// From the submission to the start of the step that sampled the first candidate.
    pub queue_ms: Distribution,
    /// From the end of a step after which another model went on to the start of that model's step.
    pub handoff_ms: Distribution,
}

/// A visit with its model and the times of its step.
#[derive(Clone, Copy)]
struct At {
    model: usize,
    start: Instant,
    end: Instant,
    position: u32,
    draft: bool,
}

impl Flow {
    /// `logs` by model.
    pub fn new(answers: &[Answer], logs: &[ModelLog]) -> Self {
        let mut paths = paths(logs);
        let models = logs.len();
        let mut flow = Self {
            transitions: vec![vec![0; models]; models],
            commits: vec![vec![0; models]; models],
            begun: vec![0; models],
            last_steps: vec![0; models],
            last_commits: vec![0; models],
            ..Self::default()
        };
        let (mut queue, mut handoff) = (Vec::new(), Vec::new());
        for answer in answers.iter().filter(|answer| answer.failure.is_none()) {
            let Some(mut path) = answer.id.and_then(|id| paths.remove(&id)) else { continue };
            // A request is in one step at a time.
            path.sort_by_key(|at| at.start);
            let bases = bases(&path);
            queue.extend(path.first().map(|first| ms(first.start.saturating_duration_since(answer.submitted))));
            if let Some(first) = path.first() {
                flow.begun[first.model] += 1;
            }
            for (pair, base) in path.windows(2).zip(bases.windows(2)) {
                let (from, to) = (pair[0].model, pair[1].model);
                flow.transitions[from][to] += 1;
                flow.commits[from][to] += u64::from(base[1].saturating_sub(base[0]));
                if from != to {
                    handoff.push(ms(pair[1].start.saturating_duration_since(pair[0].end)));
                }
            }
            if let (Some(last), Some(base)) = (path.last(), bases.last()) {
                flow.last_steps[last.model] += 1;
                flow.last_commits[last.model] += answer.tokens.saturating_sub(u64::from(*base));
            }
        }
        flow.queue_ms = Distribution::of(queue.into_iter());
        flow.handoff_ms = Distribution::of(handoff.into_iter());
        flow
    }
}

impl Flow {
    /// Steps after which another model went on.
    pub fn handoffs(&self) -> u64 {
        let rows = self.transitions.iter().enumerate();
        rows.flat_map(|(from, row)| row.iter().enumerate().filter(move |(to, _)| *to != from)).map(|(_, n)| n).sum()
    }
}

fn paths(logs: &[ModelLog]) -> HashMap<RequestId, Vec<At>> {
    let mut paths: HashMap<RequestId, Vec<At>> = HashMap::new();
    for (model, log) in logs.iter().enumerate() {
        for visit in &log.visits {
            let Some(step) = log.steps.get(visit.step) else { continue };
            let at = At { model, start: step.start, end: step.end, position: visit.position, draft: visit.draft };
            paths.entry(visit.request).or_default().push(at);
        }
    }
    paths
}

/// Tokens committed before each step: its position, but for the provisional tokens of the drafts before it.
fn bases(path: &[At]) -> Vec<u32> {
    let mut bases: Vec<u32> = Vec::with_capacity(path.len());
    let mut drafted = false;
    for at in path {
        let base = bases.last().filter(|_| drafted).copied().unwrap_or(at.position);
        bases.push(base);
        drafted = at.draft;
    }
    bases
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::timed::{Step, Visit};
    use super::*;

    /// Steps of 2 ms, each of request 1: (start in ms, position, draft).
    fn log(zero: Instant, visits: &[(u64, u32, bool)]) -> ModelLog {
        let at = |ms| zero + Duration::from_millis(ms);
        let step =
            |start| Step { start: at(start), end: at(start + 2), rows: 1, prompt_rows: 0, sequences: 1, sampled: 1 };
        ModelLog {
            steps: visits.iter().map(|(start, ..)| step(*start)).collect(),
            visits: (visits.iter().enumerate())
                .map(|(step, &(_, position, draft))| Visit { request: 1, step, position, draft })
                .collect(),
        }
    }

    fn answer(zero: Instant, tokens: u64) -> Answer {
        Answer { id: Some(1), tokens, ..Answer::new(zero) }
    }

    #[test]
    fn a_dropped_candidate_commits_nothing() {
        let zero = Instant::now();
        // a a a->b b->a a: the third candidate is dropped, b writes it.
        let logs =
            [log(zero, &[(3, 0, false), (5, 1, false), (7, 2, false), (20, 3, false)]), log(zero, &[(10, 2, false)])];
        let flow = Flow::new(&[answer(zero, 4)], &logs);
        assert_eq!(flow.transitions, [[2, 1], [1, 0]]);
        assert_eq!(flow.commits, [[2, 0], [1, 0]]);
        assert_eq!((flow.handoffs(), &flow.begun[..]), (2, &[1, 0][..]));
        assert_eq!((flow.last_steps.as_slice(), flow.last_commits.as_slice()), (&[1, 0][..], &[1, 0][..]));
        assert_eq!((flow.queue_ms.mean, flow.handoff_ms.p50), (3.0, (1.0 + 8.0) / 2.0));
    }

    #[test]
    fn drafts_are_committed_by_who_verifies_them() {
        let zero = Instant::now();
        // a drafts two tokens and hands over with a third; b lets two stand and writes another.
        let logs =
            [log(zero, &[(0, 0, true), (2, 1, true), (4, 2, false), (10, 3, false)]), log(zero, &[(7, 0, false)])];
        let flow = Flow::new(&[answer(zero, 4)], &logs);
        assert_eq!((flow.transitions, flow.commits), (vec![vec![2, 1], vec![1, 0]], vec![vec![0, 0], vec![3, 0]]));
        assert_eq!(flow.last_commits, [1, 0]);
    }

    #[test]
    fn failed_answers_are_left_out() {
        let zero = Instant::now();
        let logs = [log(zero, &[(0, 0, false), (2, 1, false)])];
        let flow = Flow::new(&[answer(zero, 2).failed("x")], &logs);
        assert_eq!((flow.transitions, flow.last_steps, flow.queue_ms.mean), (vec![vec![0]], vec![0], 0.0));
    }
}
