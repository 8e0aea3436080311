//! The prefix cache changes what is computed, and nothing else.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tokenrouter::request::{Event, ModelId, NewRequest, RequestId, RequestSpec, RouteId, SamplingParams};
use tokenrouter::runner::simulated::SimulatedRunner;
use tokenrouter::runner::{ModelInfo, RowBatch, RowOutputs, Runner, RunnerError};
use tokenrouter::subserver::observe::{Evaluation, Observer, Wanted};
use tokenrouter::subserver::resolve::resolve;
use tokenrouter::subserver::{Attachment, Effect, Limits, Message, SubServer};
use tokenrouter_plugin_api::{Decision, SignalSet};

use crate::shadow::Shadow;
use crate::{Fault, OnError, SCHEDULES, VOCAB, world};

/// How a world's caches are set up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cache {
    /// With pools of random sizes.
    Drawn,
    Off,
    /// Pools that no world fills.
    Roomy,
    /// Pools that the largest request fills: always full, and what is kept has to go for the next request.
    Tiny,
}

impl Cache {
    /// Pages of a pool; `drawn` by chance, of which the largest request needs `largest`.
    pub fn pages(self, drawn: usize, largest: usize) -> usize {
        match self {
            Self::Drawn | Self::Off => drawn,
            Self::Roomy => 16 * largest,
            Self::Tiny => largest,
        }
    }
}

/// An evaluation: position, model, candidate, draft, decision, signals.
type Seen = (u32, ModelId, u32, Option<u32>, Option<Decision>, Vec<f32>);

/// Keeps the evaluations of each request in order.
#[derive(Default)]
pub struct Watch(Mutex<BTreeMap<RequestId, Vec<Seen>>>);

impl Watch {
    fn take(&self) -> BTreeMap<RequestId, Vec<Seen>> {
        std::mem::take(&mut self.0.lock().expect("not poisoned"))
    }
}

impl Observer for Watch {
    fn wanted(&self) -> Wanted {
        Wanted { scalars: SignalSet::ALL, top_k: 0, hidden: false }
    }
    fn evaluated(&self, e: &Evaluation<'_>) {
        let signals = e.named_signals().into_iter().map(|(_, value)| value).collect();
        let seen = (e.position, e.model, e.candidate, e.draft, e.decision, signals);
        self.0.lock().expect("not poisoned").entry(e.request).or_default().push(seen);
    }
    fn submitted(&self, _: RequestId, _: &NewRequest) {}
    fn event(&self, _: RequestId, _: &Event) {}
    fn cancelled(&self, _: RequestId) {}
}

/// Texts are compared with the oracle's in any case. What each model saw, and what its policy answered, must
/// be the same too; of a request that is cancelled, as far as it went.
#[test]
fn no_evaluation_depends_on_the_cache() {
    let (mut found, mut evicted, mut evaluations) = (BTreeMap::new(), BTreeMap::new(), 0);
    for seed in 0..SCHEDULES / 6 {
        let mut expected: Option<BTreeMap<RequestId, Vec<Seen>>> = None;
        for cache in [Cache::Off, Cache::Drawn, Cache::Roomy, Cache::Tiny] {
            let watch = Arc::new(Watch::default());
            let counts = match world(seed, resolve, Fault::None, cache, Some(watch.clone())) {
                Ok(counts) => counts,
                Err(broken) => panic!("schedule {seed}, {cache:?}: breaks invariant {broken}"),
            };
            *found.entry(format!("{cache:?}")).or_insert(0) += counts.found;
            *evicted.entry(format!("{cache:?}")).or_insert(0) += counts.evicted;
            let seen = watch.take();
            evaluations += seen.values().map(Vec::len).sum::<usize>();
            let Some(expected) = &expected else {
                expected = Some(seen);
                continue;
            };
            for (id, seen) in &seen {
                let Some(expected) = expected.get(id) else { continue };
                let both = seen.len().min(expected.len());
                assert_eq!(seen[..both], expected[..both], "schedule {seed}, {cache:?}, request {id}");
            }
        }
    }
    println!("{evaluations} evaluations; tokens found: {found:?}; pages evicted: {evicted:?}");
    assert_eq!((found["Off"], evicted["Off"], evicted["Roomy"]), (0, 0, 0));
    for cache in ["Drawn", "Roomy", "Tiny"] {
        assert!(found[cache] > SCHEDULES, "{cache}: the schedules test too little");
    }
    assert!(evicted["Tiny"] > SCHEDULES / 6, "the schedules test too little");
}

const PAGES: u32 = 64;

/// Models alone, each with a runner that may break.
struct Alone {
    server: SubServer,
    next: RequestId,
}

/// Gives logits that are not finite, once.
struct Spoilt {
    inner: Shadow,
    at: Option<usize>,
}

impl Runner for Spoilt {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }
    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        let mut outputs = self.inner.forward(batch)?;
        let spoilt = |at: usize| batch.sequences.iter().any(|rows| rows.sampled > 0 && rows.end == at);
        if self.at.is_some_and(spoilt) {
            self.at = None;
            outputs.samples.iter_mut().for_each(|sample| sample.finite = false);
        }
        Ok(outputs)
    }
}

impl Alone {
    fn new(pages: u32, chunk: usize) -> Self {
        Self::spoilt(pages, chunk, None)
    }

    /// `at`: length of the sequence whose next token cannot be sampled, the first time.
    fn spoilt(pages: u32, chunk: usize, at: Option<usize>) -> Self {
        let inner = Shadow::new(SimulatedRunner::new("m", 0, VOCAB, pages));
        let attachment = Attachment::new("", None, vec![ModelId(0)], 0, OnError::FailRequest, &[]);
        let limits = Limits { max_rows: 256, prefill_chunk: chunk };
        let server = SubServer::new(ModelId(0), Box::new(Spoilt { inner, at }), vec![Some(attachment)], limits);
        Self { server, next: 1 }
    }

    fn submit(&mut self, prompt: &[u32], max_tokens: u32, salt: Option<&str>) -> RequestId {
        let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::greedy() };
        let (prompt, cache_salt) = (prompt.to_vec(), salt.map(Into::into));
        let new = NewRequest { route: RouteId(0), prompt, max_tokens, sampling, return_signals: false, cache_salt };
        self.server.take(Message::Submit(Arc::new(RequestSpec::new(self.next, new))));
        self.next += 1;
        self.next - 1
    }

    /// Step until nothing is left. Rows of each step, tokens of each request, and what came from the cache.
    fn run(&mut self) -> Ran {
        let mut ran = Ran::default();
        while self.server.ready() > 0 {
            ran.rows.push(self.server.step().rows);
            assert_eq!(self.server.pages_held(), self.server.pool().in_use());
            for effect in self.server.effects() {
                match effect {
                    Effect::Event(id, Event::Committed { tokens, .. }) => {
                        ran.tokens.entry(id).or_default().extend(tokens.iter().map(|t| t.token));
                    }
                    Effect::Event(id, Event::PromptCached { tokens }) => {
                        assert_eq!(ran.cached.insert(id, tokens), None, "said twice");
                        assert!(!ran.tokens.contains_key(&id), "said after a token");
                    }
                    Effect::Event(id, Event::Failed(_)) => ran.failed.push(id),
                    _ => {}
                }
            }
        }
        assert_eq!(self.server.pool().in_use(), 0);
        ran
    }

    /// Answer one prompt: its text, the rows computed and the tokens from the cache.
    fn answer(&mut self, prompt: &[u32], max_tokens: u32, salt: Option<&str>) -> (Vec<u32>, usize, u32) {
        let id = self.submit(prompt, max_tokens, salt);
        let mut ran = self.run();
        let cached = ran.cached.get(&id).copied().unwrap_or(0);
        (ran.tokens.remove(&id).unwrap_or_default(), ran.rows.iter().sum(), cached)
    }
}

#[derive(Default)]
struct Ran {
    rows: Vec<usize>,
    tokens: BTreeMap<RequestId, Vec<u32>>,
    cached: BTreeMap<RequestId, u32>,
    failed: Vec<RequestId>,
}

fn prompt(length: u32, of: u32) -> Vec<u32> {
    (0..length).map(|i| (i * i + of) % VOCAB).collect()
}

#[test]
fn whole_pages_are_found_and_the_last_position_is_computed() {
    for (length, cached) in [(16, 0), (17, 16), (96, 80), (97, 96), (100, 96)] {
        let (mut alone, prompt) = (Alone::new(PAGES, 256), prompt(length, 1));
        let cold = alone.answer(&prompt, 1, None);
        let warm = alone.answer(&prompt, 1, None);
        assert_eq!((cold.1, cold.2), (length as usize, 0));
        assert_eq!(warm, (cold.0, (length - cached) as usize, cached));
        let counters = alone.server.counters();
        assert_eq!(counters.prefix_found, u64::from(cached));
        // A prompt that fills no page has nothing to look up.
        assert_eq!(counters.prefix_queried, if length > 16 { 2 * u64::from(length) } else { 0 });
    }
}

#[test]
fn a_session_goes_on_where_it_ended() {
    let mut alone = Alone::new(PAGES, 8);
    let (mut text, mut known) = (prompt(20, 3), 0);
    for turn in 0..5 {
        let (answer, rows, cached) = alone.answer(&text, 40, None);
        // Of the last answer the last token has no K/V.
        assert_eq!((cached, turn == 0), (known / 16 * 16, cached == 0), "turn {turn}");
        assert_eq!(rows, text.len() - cached as usize + 39);
        text.extend(answer);
        known = text.len() as u32 - 1;
        text.extend(prompt(21, turn));
    }
}

#[test]
fn one_prompt_at_the_same_time_is_computed_as_far_as_it_is_not_there_yet() {
    // In one chunk nothing can be shared before both have computed it; then they hold the same pages.
    let mut alone = Alone::new(PAGES, 256);
    let prompt = prompt(100, 2);
    let ids = [(); 2].map(|()| alone.submit(&prompt, 3, None));
    let ran = alone.run();
    assert_eq!((ran.rows[0], ran.cached.len()), (200, 0));
    assert_eq!(ran.tokens[&ids[0]], ran.tokens[&ids[1]]);
    assert_eq!(alone.server.pool().cached(), 6);
    // What one has computed in earlier chunks, a younger one takes over; then both go on side by side.
    let mut alone = Alone::new(PAGES, 32);
    let first = alone.submit(&prompt, 3, None);
    alone.server.step();
    let second = alone.submit(&prompt, 3, None);
    let ran = alone.run();
    assert_eq!((ran.cached[&second], ran.tokens[&first] == ran.tokens[&second]), (32, true));
    assert_eq!(ran.rows, [64, 64, 8, 2, 2]);
}

#[test]
fn salts_keep_requests_apart() {
    let (mut alone, prompt) = (Alone::new(PAGES, 256), prompt(50, 4));
    let cached = [None, Some("a"), Some("b"), Some("a"), None].map(|salt| alone.answer(&prompt, 1, salt).2);
    assert_eq!(cached, [0, 0, 0, 48, 48]);
}

#[test]
fn what_may_be_spoilt_is_not_found() {
    let (mut alone, prompt) = (Alone::spoilt(PAGES, 16, Some(52)), prompt(50, 5));
    let first = alone.submit(&prompt, 5, None);
    assert_eq!(alone.run().failed, [first]);
    assert_eq!((alone.server.pool().cached(), alone.answer(&prompt, 5, None).2), (0, 0));
    assert_eq!(alone.answer(&prompt, 5, None).2, 48);
}

#[test]
fn a_preempted_request_finds_what_nobody_needed_meanwhile() {
    // 5 pages: the older request takes one of the younger's as it grows, and leaves it the others.
    let mut alone = Alone::new(5, 64);
    let old = alone.submit(&prompt(30, 6), 8, None);
    let young = alone.submit(&prompt(40, 7), 8, None);
    let ran = alone.run();
    let counters = alone.server.counters();
    assert_eq!((ran.tokens[&old].len(), ran.tokens[&young].len()), (8, 8));
    assert!(counters.preemptions > 0 && counters.prefix_found > 0, "{counters:?}");
    // Its prompt was computed here, so none of it counts as cached.
    assert!(ran.cached.is_empty());
}

#[test]
fn a_cache_that_is_off_keeps_nothing() {
    let mut alone = Alone::new(PAGES, 256);
    alone.server = alone.server.with_prefix_cache(false);
    let prompt = prompt(100, 8);
    for _ in 0..2 {
        assert_eq!((alone.answer(&prompt, 4, None).1, alone.server.pool().cached()), (103, 0));
    }
    let counters = alone.server.counters();
    assert_eq!((counters.prefix_queried, counters.prefix_found), (0, 0));
}
