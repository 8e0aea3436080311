//! Prompts are scored completely and once, whatever becomes of their K/V.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokenrouter::request::{
    Event, FinishReason, ModelId, NewRequest, PromptLogprobs, RequestId, RequestSpec, RouteId, SamplingParams, Score,
};
use tokenrouter::runner::simulated::SimulatedRunner;
use tokenrouter::subserver::{Attachment, Effect, Limits, Message, SubServer};

use crate::script::Rng;
use crate::{OnError, VOCAB};

/// Scores of each request, by position, and how it ended.
#[derive(Default, Debug, PartialEq)]
struct Told {
    scores: BTreeMap<RequestId, BTreeMap<u32, Score>>,
    ended: BTreeMap<RequestId, FinishReason>,
    cached: BTreeMap<RequestId, u32>,
}

fn request(id: RequestId, prompt: &[u32], from: u32, max_tokens: u32) -> Message {
    let sampling = SamplingParams {
        ignore_eos: true,
        prompt_logprobs: Some(PromptLogprobs { from, top: 0 }),
        ..SamplingParams::greedy()
    };
    let (route, prompt) = (RouteId(0), prompt.to_vec());
    let new = NewRequest { route, prompt, max_tokens, sampling, return_signals: false, cache_salt: None };
    Message::Submit(Arc::new(RequestSpec::new(id, new)))
}

fn server(pages: u32, chunk: usize) -> SubServer {
    let attachment = Attachment::new("", None, vec![ModelId(0)], 0, OnError::FailRequest, &[]);
    let limits = Limits { max_rows: 64, prefill_chunk: chunk };
    SubServer::new(ModelId(0), Box::new(SimulatedRunner::new("m", 0, VOCAB, pages)), vec![Some(attachment)], limits)
}

fn step(server: &mut SubServer, told: &mut Told) {
    server.step();
    for effect in server.effects() {
        match effect {
            Effect::Event(id, Event::PromptScored { start, scores }) => {
                assert!(!told.ended.contains_key(&id));
                for (position, score) in (start..).zip(scores) {
                    let before = told.scores.entry(id).or_default().insert(position, score);
                    assert_eq!(before, None, "request {id}: position {position} is scored twice");
                }
            }
            Effect::Event(id, Event::PromptCached { tokens }) => drop(told.cached.insert(id, tokens)),
            Effect::Event(id, Event::Finished { reason, .. }) => drop(told.ended.insert(id, reason)),
            Effect::Event(id, Event::Failed(error)) => panic!("request {id}: {error}"),
            _ => {}
        }
    }
}

fn run(server: &mut SubServer, told: &mut Told) {
    while server.ready() > 0 {
        step(server, told);
    }
}

#[test]
fn preemption_neither_loses_nor_doubles_scores() {
    let (mut preemptions, mut found) = (0, 0);
    for seed in 0..200 {
        let mut rng = Rng(seed);
        let pages = 8 + rng.below(6) as u32;
        let mut crowded = server(pages, 1 + rng.below(40) as usize);
        let mut told = Told::default();
        let mut requests = Vec::new();
        for id in 1..=6 {
            // Beginnings are shared, so the cache has what the rows to be scored must not take from it.
            let (shared, own) = (rng.below(60) as u32, 2 + rng.below(40) as u32);
            let prompt: Vec<u32> =
                (0..shared).map(|i| 1 + i % 7).chain((0..own).map(|_| 1 + rng.below(9) as u32)).collect();
            let from = 1 + rng.below(prompt.len() as u64) as u32;
            let max_tokens = rng.below(20) as u32;
            requests.push((id, prompt.clone(), from, max_tokens));
            crowded.take(request(id, &prompt, from, max_tokens));
            for _ in 0..rng.below(4) {
                step(&mut crowded, &mut told);
            }
        }
        run(&mut crowded, &mut told);
        preemptions += crowded.counters().preemptions;
        found += told.cached.values().sum::<u32>();
        for (id, prompt, from, max_tokens) in requests {
            let mut alone = Told::default();
            let mut roomy = server(64, 64);
            roomy.take(request(id, &prompt, from, max_tokens));
            run(&mut roomy, &mut alone);
            let scores = told.scores.remove(&id).unwrap_or_default();
            assert_eq!(scores, alone.scores.remove(&id).unwrap_or_default(), "schedule {seed}, request {id}");
            assert!(scores.keys().copied().eq(from..prompt.len() as u32), "schedule {seed}, request {id}");
            assert_eq!(told.ended[&id], FinishReason::Length);
            assert!(told.cached.get(&id).is_none_or(|cached| *cached < from), "a row to be scored was skipped");
        }
        assert_eq!(crowded.pool().in_use(), 0);
    }
    assert!(preemptions > 50 && found > 1000, "the schedules test too little: {preemptions}, {found}");
}

#[test]
fn without_tokens_to_write_the_prompt_is_all() {
    let mut server = server(4, 16);
    let mut told = Told::default();
    // All pages of the pool, and none for a token to come.
    server.take(request(1, &[3; 64], 1, 0));
    run(&mut server, &mut told);
    assert_eq!((told.scores[&1].len(), told.ended[&1]), (63, FinishReason::Length));
    assert_eq!(server.counters().committed, 0);
}
