//! What a load came to. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::ask::{Answer, ms};
use super::flow::Flow;
use super::goodput::{Limit, is_good};
use super::load::{Carried, Pace};
use super::models::{self, ModelSummary};
use super::statistics::Distribution;
use super::timed::ModelLog;

/// Times to the first token, in ms, of prompts of which a prefix cache had less than half, and of the others.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ByCache {
    pub cold_requests: usize,
    pub cold: Distribution,
    pub warm_requests: usize,
    pub warm: Distribution,
    /// Median of the warm by that of the cold.
    pub ratio: f64,
}

impl ByCache {
    fn of(answers: &[&Answer]) -> Option<Self> {
        let times = |wanted: bool| -> Vec<f64> {
            let is_warm = |answer: &Answer| Some(2 * answer.cached_tokens? >= answer.prompt_tokens);
            let those = answers.iter().filter(|answer| is_warm(answer) == Some(wanted));
            those.filter_map(|answer| answer.times()).map(|times| times.ttft).collect()
        };
        let (cold, warm) = (times(false), times(true));
        let (cold_requests, warm_requests) = (cold.len(), warm.len());
        let [cold, warm] = [cold, warm].map(|times| Distribution::of(times.into_iter()));
        let ratio = warm.p50 / cold.p50;
        (cold_requests > 0 && warm_requests > 0).then_some(Self { cold_requests, cold, warm_requests, warm, ratio })
    }
}

/// One load. Tokens, rates and times are of the requests that did not fail.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    pub pace: Pace,
    pub completed: usize,
    pub failed: usize,
    /// Broken off when the time was over. Their tokens count, and their times as far as they are known.
    pub cut: usize,
    /// What the failed ones were told, and how often; the most frequent first.
    pub failures: Vec<(String, usize)>,
    /// From the start of the load to the end of the last request.
    pub seconds: f64,
    pub prompt_tokens: u64,
    /// Those of them that a prefix cache had. `None` where the server does not tell.
    pub cached_tokens: Option<u64>,
    pub tokens: u64,
    /// By all seconds.
    pub requests_per_second: f64,
    pub tokens_per_second: f64,
    /// Requests within all limits, a second. `None` without limits.
    pub goodput: Option<f64>,
    /// Of a closed load, without prefills and the tail: from the moment when each of the first requests that
    /// were under way together has a token until the first of them ends. `None` where that is no time, where
    /// it is not known with how many tokens a chunk came, and of an open load.
    pub decode_tokens_per_second: Option<f64>,
    /// From the submission to the first token.
    pub ttft_ms: Distribution,
    /// The same by what the prefix cache had. `None` unless there are requests of both kinds.
    pub by_cache: Option<ByCache>,
    /// From the first token to the end, by the tokens after the first.
    pub tpot_ms: Distribution,
    /// Between tokens, or chunks, that follow each other.
    pub itl_ms: Distribution,
    /// From the submission to the end.
    pub e2e_ms: Distribution,
    /// Of an open load: from the moment when a request was due to its submission.
    pub late_ms: Distribution,
    /// Requests under way, on average and at most.
    pub mean_under_way: f64,
    pub most_under_way: usize,
    /// `None` where the server does not tell.
    pub handoffs: Option<u64>,
    /// Tokens by model; empty where the server does not tell.
    pub by_model: BTreeMap<String, u64>,
    /// Of an engine in this process.
    pub models: Vec<ModelSummary>,
    /// Of one engine in this process.
    pub flow: Option<Flow>,
}

impl Summary {
    /// `names` and `logs` by model; empty for a server elsewhere.
    pub fn new(pace: Pace, carried: &Carried, limits: &[Limit], names: &[String], logs: &[ModelLog]) -> Self {
        let Carried { began, answers } = carried;
        let completed: Vec<&Answer> = answers.iter().filter(|answer| answer.failure.is_none()).collect();
        let times: Vec<_> = completed.iter().filter_map(|answer| answer.times()).collect();
        let end = answers.iter().map(|answer| answer.ended).max().unwrap_or(*began);
        let elapsed = end - *began;
        let cut = completed.iter().filter(|answer| answer.cut).count();
        let tokens = completed.iter().map(|answer| answer.tokens).sum();
        let ended = completed.iter().filter(|answer| !answer.cut).filter_map(|answer| answer.times());
        let good = ended.filter(|times| is_good(times, limits)).count() as u64;
        let gaps = completed.iter().flat_map(|answer| answer.arrivals.windows(2));
        let handoffs: Vec<u64> = completed.iter().filter_map(|answer| answer.handoffs).collect();
        let mut by_model: BTreeMap<String, u64> = BTreeMap::new();
        for (name, tokens) in completed.iter().flat_map(|answer| &answer.by_model) {
            *by_model.entry(name.clone()).or_default() += tokens;
        }
        // An answer that was broken off tells none.
        let told = (handoffs.len() == completed.len()).then(|| handoffs.iter().sum());
        let flow = logs.iter().any(|log| !log.visits.is_empty()).then(|| Flow::new(answers, logs));
        let (mean_under_way, most_under_way) = under_way(answers, elapsed);
        Self {
            pace,
            completed: completed.len() - cut,
            cut,
            failed: answers.len() - completed.len(),
            failures: failures(answers),
            seconds: elapsed.as_secs_f64(),
            cached_tokens: completed.iter().map(|answer| answer.cached_tokens).sum(),
            prompt_tokens: completed.iter().map(|answer| answer.prompt_tokens).sum(),
            tokens,
            requests_per_second: rate((completed.len() - cut) as u64, elapsed),
            tokens_per_second: rate(tokens, elapsed),
            goodput: (!limits.is_empty()).then(|| rate(good, elapsed)),
            decode_tokens_per_second: match pace {
                Pace::Closed { requests } => decode_rate(answers, requests as usize),
                Pace::Open { .. } => None,
            },
            ttft_ms: Distribution::of(times.iter().map(|times| times.ttft)),
            by_cache: ByCache::of(&completed),
            tpot_ms: Distribution::of(times.iter().filter_map(|times| times.tpot)),
            itl_ms: Distribution::of(gaps.map(|pair| ms(pair[1].0 - pair[0].0))),
            e2e_ms: Distribution::of(times.iter().filter_map(|times| times.e2e)),
            late_ms: match pace {
                Pace::Closed { .. } => Distribution::default(),
                Pace::Open { .. } => {
                    Distribution::of(answers.iter().map(|a| ms(a.submitted.saturating_duration_since(a.due))))
                }
            },
            mean_under_way,
            most_under_way,
            handoffs: told.or_else(|| flow.as_ref().map(Flow::handoffs)),
            by_model,
            models: models::summaries(names, logs, answers, elapsed),
            flow,
        }
    }

    /// Requests in all.
    pub fn total(&self) -> usize {
        self.completed + self.failed + self.cut
    }
}

fn rate(count: u64, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { count as f64 / time.as_secs_f64() }
}

fn failures(answers: &[Answer]) -> Vec<(String, usize)> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for failure in answers.iter().filter_map(|answer| answer.failure.as_deref()) {
        *counts.entry(failure).or_default() += 1;
    }
    let mut counts: Vec<(String, usize)> = counts.into_iter().map(|(failure, n)| (failure.into(), n)).collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts
}

/// Requests under way, on average over `elapsed` and at most.
fn under_way(answers: &[Answer], elapsed: Duration) -> (f64, usize) {
    let time: Duration = answers.iter().map(|answer| answer.ended - answer.submitted).sum();
    let begun = answers.iter().map(|answer| (answer.submitted, 1));
    // Who ends at a moment is gone when another begins.
    let ended = answers.iter().map(|answer| (answer.ended, -1));
    let mut changes: Vec<(Instant, i64)> = begun.chain(ended).collect();
    changes.sort_unstable();
    let (mut now, mut most) = (0, 0);
    for (_, change) in changes {
        now += change;
        most = most.max(now);
    }
    (if elapsed.is_zero() { 0.0 } else { time.as_secs_f64() / elapsed.as_secs_f64() }, most as usize)
}

fn decode_rate(answers: &[Answer], requests: usize) -> Option<f64> {
    let first: Vec<&Answer> = answers.iter().filter(|answer| answer.turn == 0).take(requests).collect();
    let counted = |answer: &Answer| answer.arrivals.iter().map(|(_, tokens)| tokens).sum::<u64>() == answer.tokens;
    if !first.iter().all(|answer| answer.failure.is_none() && counted(answer)) {
        return None;
    }
    let start = first.iter().filter_map(|answer| Some(answer.arrivals.first()?.0)).max()?;
    let end = first.iter().map(|answer| answer.ended).min()?;
    let arrivals = first.iter().flat_map(|answer| &answer.arrivals);
    let within = arrivals.filter(|(time, _)| *time > start && *time <= end).map(|(_, tokens)| tokens);
    (end > start).then(|| rate(within.sum(), end - start))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLOSED: Pace = Pace::Closed { requests: 2 };

    /// A request from `submitted` with a token at each of the times, in ms.
    fn answer(zero: Instant, submitted: u64, tokens: &[u64]) -> Answer {
        let at = |ms: u64| zero + Duration::from_millis(ms);
        Answer {
            ended: at(tokens[tokens.len() - 1]),
            prompt_tokens: 10,
            tokens: tokens.len() as u64,
            arrivals: tokens.iter().map(|time| (at(*time), 1)).collect(),
            by_model: [("a".to_owned(), tokens.len() as u64 - 1), ("b".to_owned(), 1)].into(),
            handoffs: Some(2),
            ..Answer::new(at(submitted))
        }
    }

    fn carried(began: Instant, answers: Vec<Answer>) -> Carried {
        Carried { began, answers }
    }

    #[test]
    fn what_is_summed_up() {
        let zero = Instant::now();
        // Two under way, a third after the first has ended.
        let answers = vec![
            answer(zero, 0, &[100, 200, 300]),
            answer(zero, 0, &[150, 250, 350]),
            answer(zero, 300, &[400, 500, 1000]),
        ];
        let limits = ["ttft:120".parse().unwrap(), "e2e:699".parse().unwrap()];
        let summary = Summary::new(CLOSED, &carried(zero, answers), &limits, &[], &[]);
        assert_eq!((summary.completed, summary.failed, summary.tokens, summary.prompt_tokens), (3, 0, 9, 30));
        assert_eq!((summary.seconds, summary.tokens_per_second, summary.requests_per_second), (1.0, 9.0, 3.0));
        // From 150 ms to 300 ms: tokens at 200, 250 and 300.
        assert!((summary.decode_tokens_per_second.unwrap() - 20.0).abs() < 1e-9);
        assert_eq!((summary.ttft_ms.p50, summary.ttft_ms.p90), (100.0, 140.0));
        assert_eq!((summary.tpot_ms.p50, summary.tpot_ms.mean), (100.0, 500.0 / 3.0));
        assert_eq!((summary.itl_ms.p50, summary.itl_ms.mean), (100.0, 1000.0 / 6.0));
        assert_eq!((summary.e2e_ms.p50, summary.goodput), (350.0, Some(1.0)));
        assert_eq!((summary.mean_under_way, summary.most_under_way), (1.35, 2));
        assert_eq!((summary.handoffs, summary.by_model["a"], summary.by_model["b"]), (Some(6), 6, 3));
        assert_eq!((summary.late_ms, summary.models.len(), summary.flow), (Distribution::default(), 0, None));
    }

    #[test]
    fn failures_are_counted_and_count_for_nothing_else() {
        let zero = Instant::now();
        let failed = |why: &str| answer(zero, 0, &[100]).failed(why);
        let answers = vec![failed("x"), answer(zero, 0, &[100, 200]), failed("y"), failed("y")];
        let summary = Summary::new(CLOSED, &carried(zero, answers), &[], &[], &[]);
        assert_eq!((summary.completed, summary.failed, summary.tokens, summary.total()), (1, 3, 2, 4));
        assert_eq!(summary.failures, [("y".to_owned(), 2), ("x".to_owned(), 1)]);
        assert_eq!((summary.decode_tokens_per_second, summary.goodput), (None, None));
        let none = Summary::new(CLOSED, &carried(zero, vec![failed("x")]), &[], &[], &[]);
        assert_eq!((none.completed, none.tokens_per_second, none.ttft_ms), (0, 0.0, Distribution::default()));
    }

    #[test]
    fn first_tokens_by_what_the_cache_had() {
        let zero = Instant::now();
        let answer = |cached, first| Answer { cached_tokens: cached, ..answer(zero, 0, &[first, 1000]) };
        let by_cache = |answers| Summary::new(CLOSED, &carried(zero, answers), &[], &[], &[]).by_cache;
        let seen =
            by_cache(vec![answer(Some(0), 100), answer(Some(4), 300), answer(Some(5), 20), answer(Some(10), 40)]);
        let seen = seen.unwrap();
        assert_eq!((seen.cold_requests, seen.cold.p50, seen.warm_requests, seen.warm.p50), (2, 200.0, 2, 30.0));
        assert_eq!(seen.ratio, 0.15);
        assert_eq!(by_cache(vec![answer(Some(0), 100), answer(Some(4), 300)]), None);
        assert_eq!(by_cache(vec![answer(None, 100), answer(Some(10), 300)]), None);
    }

    #[test]
    fn what_was_broken_off_counts_without_its_end() {
        let zero = Instant::now();
        let cut = Answer { cut: true, handoffs: None, ..answer(zero, 0, &[100, 200, 300, 400]) };
        let limits = ["ttft:1000".parse().unwrap()];
        let summary = Summary::new(CLOSED, &carried(zero, vec![cut, answer(zero, 0, &[100, 200])]), &limits, &[], &[]);
        assert_eq!((summary.completed, summary.cut, summary.failed, summary.total()), (1, 1, 0, 2));
        assert_eq!((summary.tokens, summary.tokens_per_second, summary.requests_per_second), (6, 15.0, 2.5));
        assert_eq!((summary.e2e_ms.p50, summary.ttft_ms.p50, summary.tpot_ms.p50), (200.0, 100.0, 100.0));
        assert_eq!((summary.goodput, summary.handoffs), (Some(2.5), None));
    }

    #[test]
    fn open_loads_are_late() {
        let zero = Instant::now();
        let due = Answer { due: zero, ..answer(zero, 40, &[100]) };
        let pace = Pace::Open { rate: 1.0, burstiness: 1.0, most: Some(1) };
        let summary = Summary::new(pace, &carried(zero, vec![due]), &[], &[], &[]);
        assert_eq!((summary.late_ms.p50, summary.ttft_ms.p50), (40.0, 60.0));
        assert_eq!((summary.decode_tokens_per_second, summary.tpot_ms), (None, Distribution::default()));
    }

    /// A chunk may hold several tokens; then it is not known when each came.
    #[test]
    fn chunks_are_no_tokens() {
        let zero = Instant::now();
        let chunks = || vec![answer(zero, 0, &[100, 200]), answer(zero, 0, &[100, 300])];
        let rate = |answers| Summary::new(CLOSED, &carried(zero, answers), &[], &[], &[]).decode_tokens_per_second;
        assert_eq!(rate(chunks()), Some(10.0));
        let more = chunks().into_iter().map(|answer| Answer { tokens: 5, ..answer }).collect();
        assert_eq!(rate(more), None);
    }
}
