//! The demo models: greedy answers, logits, and the signals of recorded routed answers.

use serde::Deserialize;
use tokenrouter::request::TokenId;
use tokenrouter::runner::SignalRequest;
use tokenrouter_plugin_api::SignalSet;

use crate::support::{Sequence, demo, fixtures, forward, load};

/// The token of `small-collm` that is a signal, not a word.
const DEFER: TokenId = 2048;
const PAGES: u32 = 64;

#[derive(Deserialize)]
struct ModelGolden {
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Prompt {
    prompt_ids: Vec<TokenId>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    token: TokenId,
    top5: Vec<(TokenId, f32)>,
    defer_logit: Option<f32>,
}

/// All prompts of a model in one batch.
fn greedy(name: &str) {
    let text = std::fs::read_to_string(fixtures().join(format!("models/{name}.json"))).unwrap();
    let golden: ModelGolden = serde_json::from_str(&text).unwrap();
    let mut runner = load(&demo(name), PAGES);
    let collm = name == "small-collm";
    let signals =
        SignalRequest { top_k: 5, token_logits: if collm { vec![DEFER] } else { vec![] }, ..SignalRequest::default() };
    let mut sequences: Vec<Sequence> = Vec::new();
    for (prompt, first) in golden.prompts.iter().zip(0..) {
        let mut sequence = Sequence::new(&prompt.prompt_ids, 256, first, 4);
        sequence.masked = if collm { vec![DEFER] } else { vec![] };
        sequences.push(sequence);
    }
    for step in 0..32 {
        let rows = sequences.iter().map(|s| s.rows(s.tokens.len(), 1)).collect();
        let out = forward(&mut runner, rows, &signals);
        for (i, sequence) in sequences.iter_mut().enumerate() {
            let want = &golden.prompts[i].steps[step];
            assert_eq!(out.samples[i].token, want.token, "{name}, prompt {i}, step {step}");
            let ids: Vec<TokenId> = want.top5.iter().map(|(id, _)| *id).collect();
            assert_eq!(out.signals.topk_ids[i * 5..][..5], ids, "{name}, prompt {i}, step {step}");
            let mut pairs: Vec<(f32, f32)> =
                want.top5.iter().zip(&out.signals.topk_values[i * 5..]).map(|((_, w), g)| (*w, *g)).collect();
            if let Some(defer) = want.defer_logit {
                pairs.push((defer, out.signals.token_logits[i]));
            }
            for (want, got) in pairs {
                assert!((want - got).abs() < 1e-3, "{name}, prompt {i}, step {step}: {got}, not {want}");
            }
            sequence.done = sequence.tokens.len();
            sequence.tokens.push(want.token);
        }
    }
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
