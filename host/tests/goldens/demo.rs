//! The demo models: greedy answers, logits, and the signals of recorded routed answers.

use serde::Deserialize;
use tokenrouter::request::TokenId;
use tokenrouter::runner::SignalRequest;
use tokenrouter_plugin_api::SignalSet;

use crate::support::{DEFER, Sequence, assert_greedy, demo, fixtures, forward, load};

const PAGES: u32 = 64;

fn greedy(name: &str) {
    assert_greedy(&mut load(&demo(name), PAGES), name);
}

#[test]
fn small() {
    greedy("small");
}

#[test]
fn medium() {
    greedy("medium");
}

#[test]
fn large() {
    greedy("large");
}

#[test]
fn small_collm() {
    greedy("small-collm");
}

#[derive(Deserialize)]
struct Trace {
    prompt_ids: Vec<TokenId>,
    token_ids: Vec<TokenId>,
    steps: Vec<TraceStep>,
}

#[derive(Deserialize)]
struct TraceStep {
    evaluations: Vec<Evaluation>,
}

#[derive(Deserialize)]
struct Evaluation {
    model: String,
    candidate: TokenId,
    entropy_nats: f32,
    entropy_norm: f32,
    top1_prob: f32,
    margin: f32,
}

/// Feed each model the committed tokens and compare wherever the reference evaluated it.
fn signals_of(algorithm: &str, count: usize) {
    let names = ["small", "medium", "large", "small-collm"];
    let mut runners: Vec<_> = names.iter().map(|name| load(&demo(name), PAGES)).collect();
    let request = SignalRequest { scalars: SignalSet::ALL, ..SignalRequest::default() };
    let mut compared = 0;
    for number in 1..=count {
        let text = std::fs::read_to_string(fixtures().join(format!("traces/{algorithm}-{number}.json"))).unwrap();
        let trace: Trace = serde_json::from_str(&text).unwrap();
        let mut tokens = trace.prompt_ids.clone();
        tokens.extend(&trace.token_ids);
        let prompt = trace.prompt_ids.len();
        for (name, runner) in names.iter().zip(&mut runners) {
            let mut sequence = Sequence::new(&tokens, tokens.len(), 0, 1);
            sequence.prompt_len = prompt;
            sequence.masked = if *name == "small-collm" { vec![DEFER] } else { vec![] };
            let end = tokens.len() - 1;
            // The rows whose next token is an answer token, all in one extend.
            let out = forward(runner, vec![sequence.rows(end, trace.steps.len())], &request);
            for (i, step) in trace.steps.iter().enumerate() {
                for e in step.evaluations.iter().filter(|e| e.model == *name) {
                    let s = &out.signals;
                    assert_eq!(out.samples[i].token, e.candidate, "{algorithm}-{number}, step {i}, {name}");
                    for (what, got, want) in [
                        ("entropy", s.entropy[i], e.entropy_nats),
                        ("entropy_norm", s.entropy_norm[i], e.entropy_norm),
                        ("top1_prob", s.top1_prob[i], e.top1_prob),
                        ("margin", s.margin[i], e.margin),
                        ("candidate_prob", s.candidate_prob[i], e.top1_prob),
                    ] {
                        assert!(
                            (got - want).abs() < 1e-4,
                            "{algorithm}-{number}, step {i}, {name}: {what} {got}, not {want}"
                        );
                    }
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 50, "{algorithm}: only {compared} evaluations");
}

#[test]
fn signals_of_rstitch() {
    signals_of("rstitch", 4);
}

#[test]
fn signals_of_collm() {
    signals_of("collm", 3);
}

#[test]
fn signals_of_me() {
    signals_of("me", 3);
}
