//! What the requests of a route come to, as their clients are told of it. Entered by those who deliver, not by the
//! models' threads.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::RouteInfo;
use crate::metrics::{Counter, Histogram, bounds};
use crate::request::{Committed, Event, FinishReason, ModelId, RequestError, RequestSpec};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By an end token, a stop token or a stop string, or because the form asked for was complete.
    Stop,
    Length,
    /// Its client left, or the server did.
    Abort,
    Error,
}

impl Ended {
    pub const ALL: [Self; 4] = [Self::Stop, Self::Length, Self::Abort, Self::Error];

    /// As vLLM names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }

    /// `None` for an event that is not the last.
    pub fn by(event: &Event) -> Option<Self> {
        match event {
            Event::PromptCached { .. } | Event::PromptScored { .. } | Event::Committed { .. } => None,
            Event::Finished { reason: FinishReason::Stop(_) | FinishReason::Complete, .. } => Some(Self::Stop),
            Event::Finished { reason: FinishReason::Length, .. } => Some(Self::Length),
            Event::Failed(RequestError::ShuttingDown) => Some(Self::Abort),
            Event::Failed(_) => Some(Self::Error),
        }
    }
}

/// What one model wrote for a route.
#[derive(Debug)]
pub struct Share {
    pub tokens: Counter,
    /// Tokens in a row.
    pub visits: Histogram,
}

/// Sums over all requests of a name since the start, whatever route had the name.
#[derive(Debug)]
pub struct RouteCounts {
    /// By [`Ended`].
    ended: [Counter; Ended::ALL.len()],
    /// Requests that failed because a model had no finite logits.
    pub corrupted: Counter,
    /// Of requests that got their first token.
    pub prompt_tokens: Counter,
    shares: Mutex<BTreeMap<ModelId, Arc<Share>>>,
    /// From the submission to the first token.
    pub first_token: Histogram,
    /// Between two deliveries of tokens.
    pub between: Histogram,
    /// From the submission to the first step.
    pub queue: Histogram,
    /// From the first step to the first token.
    pub prefill: Histogram,
    /// The rest are of requests that ended well. From the first token to the end:
    pub decode: Histogram,
    /// The same by tokens after the first.
    pub per_token: Histogram,
    pub whole: Histogram,
    pub prompt_length: Histogram,
    pub answer_length: Histogram,
}

impl Default for RouteCounts {
    fn default() -> Self {
        let request = || Histogram::new(&bounds::REQUEST);
        let tokens = || Histogram::new(&bounds::TOKENS);
        Self {
            ended: Default::default(),
            corrupted: Counter::default(),
            prompt_tokens: Counter::default(),
            shares: Mutex::default(),
            first_token: Histogram::new(&bounds::FIRST_TOKEN),
            between: Histogram::new(&bounds::BETWEEN),
            queue: request(),
            prefill: request(),
            decode: request(),
            per_token: Histogram::new(&bounds::BETWEEN),
            whole: request(),
            prompt_length: tokens(),
            answer_length: tokens(),
        }
    }
}

impl RouteCounts {
    pub fn ended(&self, how: Ended) -> u64 {
        self.ended[how as usize].read()
    }

    /// By model, for all models that routes of the name have had.
    pub fn shares(&self) -> BTreeMap<ModelId, Arc<Share>> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The shares of the models of a route, in its order.
    fn shares_of(&self, route: &RouteInfo) -> Vec<(ModelId, Arc<Share>)> {
        let share = || Arc::new(Share { tokens: Counter::default(), visits: Histogram::new(&bounds::VISIT) });
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        route.models.iter().map(|&(model, _)| (model, shares.entry(model).or_insert_with(share).clone())).collect()
    }
}

/// The counts of one route.
#[derive(Clone, Debug)]
pub(super) struct Counted {
    pub counts: Arc<RouteCounts>,
    shares: Vec<(ModelId, Arc<Share>)>,
}

impl Counted {
    pub fn new(counts: Arc<RouteCounts>, route: &RouteInfo) -> Self {
        Self { shares: counts.shares_of(route), counts }
    }

    fn share(&self, model: ModelId) -> Option<&Share> {
        self.shares.iter().find(|(of, _)| *of == model).map(|(_, share)| &**share)
    }
}

/// One request, as it is counted.
#[derive(Debug)]
pub(super) struct Progress {
    spec: Arc<RequestSpec>,
    submitted: Instant,
    /// Of the first and the last delivery of tokens.
    told: Option<(Instant, Instant)>,
    tokens: u64,
    /// Who wrote last, and how many tokens in a row.
    visit: Option<(ModelId, u64)>,
}

impl Progress {
    pub fn new(spec: Arc<RequestSpec>, submitted: Instant) -> Self {
        Self { spec, submitted, told: None, tokens: 0, visit: None }
    }

    /// Something was computed of it.
    pub fn has_begun(&self) -> bool {
        self.spec.began().is_some()
    }

    /// Tokens were committed at `at`; there is at least one.
    pub fn committed(&mut self, tokens: &[Committed], at: Instant, route: &Counted) {
        let counts = &route.counts;
        match &mut self.told {
            Some((_, last)) => {
                counts.between.observe_time(at.saturating_duration_since(*last));
                *last = at;
            }
            None => {
                let began = self.spec.began().unwrap_or(self.submitted);
                counts.queue.observe_time(began.saturating_duration_since(self.submitted));
                counts.prefill.observe_time(at.saturating_duration_since(began));
                counts.first_token.observe_time(at.saturating_duration_since(self.submitted));
                counts.prompt_tokens.add(self.spec.new.prompt.len() as u64);
                self.told = Some((at, at));
            }
        }
        self.tokens += tokens.len() as u64;
        for of_one in tokens.chunk_by(|a, b| a.model == b.model) {
            let (model, more) = (of_one[0].model, of_one.len() as u64);
            if let Some(share) = route.share(model) {
                share.tokens.add(more);
            }
            match &mut self.visit {
                Some((at, count)) if *at == model => *count += more,
                visit => {
                    let left = visit.replace((model, more));
                    count_visit(left, route);
                }
            }
        }
    }

    pub fn ended(self, how: Ended, at: Instant, route: &Counted) {
        let counts = &route.counts;
        counts.ended[how as usize].add(1);
        count_visit(self.visit, route);
        if !matches!(how, Ended::Stop | Ended::Length) {
            return;
        }
        counts.whole.observe_time(at.saturating_duration_since(self.submitted));
        counts.prompt_length.observe(self.spec.new.prompt.len() as u64);
        counts.answer_length.observe(self.tokens);
        if let Some((first, last)) = self.told {
            counts.decode.observe_time(at.saturating_duration_since(first));
            if let Some(after @ 1..) = self.tokens.checked_sub(1).and_then(|after| u32::try_from(after).ok()) {
                counts.per_token.observe_time(last.saturating_duration_since(first) / after);
            }
        }
    }
}

fn count_visit(visit: Option<(ModelId, u64)>, route: &Counted) {
    if let Some((model, tokens)) = visit
        && let Some(share) = route.share(model)
    {
        share.visits.observe(tokens);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::request::{NewRequest, RouteId, SamplingParams};

    fn token(model: u32) -> Committed {
        let model = ModelId(model);
        Committed {
            token: 0,
            model,
            eos: false,
            complete: false,
            logprob: 0.0,
            top_logprobs: Vec::new(),
            signals: None,
        }
    }

    fn tokens(models: &[u32]) -> Vec<Committed> {
        models.iter().map(|model| token(*model)).collect()
    }

    fn route() -> Counted {
        let mut info = RouteInfo::clone(&super::super::ServedRoute::unconnected(RouteId(0), "r"));
        info.models = [0, 1].map(|model| (ModelId(model), String::new())).to_vec();
        Counted::new(Arc::default(), &info)
    }

    fn spec() -> Arc<RequestSpec> {
        let new = NewRequest {
            route: RouteId(0),
            prompt: vec![1; 30],
            max_tokens: 9,
            sampling: SamplingParams::greedy(),
            return_signals: false,
            cache_salt: None,
        };
        Arc::new(RequestSpec::new(1, new))
    }

    #[test]
    fn a_request_is_counted_once() {
        let (route, spec, zero) = (route(), spec(), Instant::now());
        let at = |ms| zero + Duration::from_millis(ms);
        let mut progress = Progress::new(spec.clone(), zero);
        assert!(!progress.has_begun());
        spec.begin(at(3));
        spec.begin(at(50));
        assert!(progress.has_begun());
        progress.committed(&tokens(&[0]), at(10), &route);
        progress.committed(&tokens(&[0, 1, 1]), at(14), &route);
        progress.committed(&tokens(&[1, 0]), at(20), &route);
        progress.ended(Ended::Length, at(21), &route);
        let counts = &route.counts;
        let ms = |histogram: &Histogram| (histogram.read().count(), histogram.read().sum / 1_000_000);
        assert_eq!((ms(&counts.queue), ms(&counts.prefill), ms(&counts.first_token)), ((1, 3), (1, 7), (1, 10)));
        assert_eq!((ms(&counts.between), ms(&counts.decode), ms(&counts.whole)), ((2, 10), (1, 11), (1, 21)));
        assert_eq!(ms(&counts.per_token), (1, 2));
        assert_eq!((counts.prompt_tokens.read(), counts.answer_length.read().sum), (30, 6));
        let shares = counts.shares();
        let of = |model: u32| {
            let share = &shares[&ModelId(model)];
            (share.tokens.read(), share.visits.read().count(), share.visits.read().sum)
        };
        assert_eq!((of(0), of(1)), ((3, 2, 3), (3, 1, 3)));
        assert_eq!(Ended::ALL.map(|how| counts.ended(how)), [0, 1, 0, 0]);
    }

    #[test]
    fn one_that_is_broken_off_has_no_length() {
        let (route, zero) = (route(), Instant::now());
        Progress::new(spec(), zero).ended(Ended::Abort, zero, &route);
        let mut progress = Progress::new(spec(), zero);
        progress.committed(&tokens(&[1]), zero, &route);
        progress.ended(Ended::Error, zero, &route);
        assert_eq!(Ended::ALL.map(|how| route.counts.ended(how)), [0, 0, 1, 1]);
        assert_eq!((route.counts.whole.read().count(), route.counts.answer_length.read().count()), (0, 0));
        assert_eq!(route.counts.shares()[&ModelId(1)].visits.read().count(), 1);
    }
}
