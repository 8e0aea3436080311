//! What JSON of a schema costs: tokens a second of the demo with and without, and the time of one mask.
//!
//! Needs the plugins: `cargo xtask build --release`, then `cargo bench -p tokenrouter-tests --bench structured`.

#[allow(dead_code)] // What the tests alone use.
#[path = "../system/demo.rs"]
mod demo;

use std::sync::Arc;
use std::time::Instant;

use demo::{Setup, answers, engine, pair, root};
use serde_json::json;
use tokenrouter::constraint::{Constraint, Form, Grammar, Rules, Vocabulary, allows, compile, mask_words};
use tokenrouter::engine::Engine;
use tokenrouter::request::{FinishReason, NewRequest, SamplingParams};
use tokenrouter::text::ModelText;

const ROUTES: [&str; 3] = ["small", "large", "random"];
const CONCURRENCY: [usize; 3] = [1, 4, 16];
const ROUNDS: usize = 7;
/// Of each answer, with and without a form.
const TOKENS: u32 = 150;

/// Objects with strings, numbers and choices, without an end within [`TOKENS`].
fn form() -> Form {
    let item = json!({"type": "object", "additionalProperties": false, "required": ["id", "name", "kind", "note"],
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 100_000},
        "name": {"type": "string", "minLength": 3, "maxLength": 20},
        "kind": {"enum": ["red", "green", "blue"]},
        "note": {"type": "string"},
    }});
    Form::JsonSchema(json!({"type": "array", "items": item, "minItems": 1000}).to_string())
}

fn vocabulary(tokens: &[Vec<u8>]) -> Vocabulary {
    Vocabulary::new(tokens.len(), |id| &tokens[id as usize]).expect("a vocabulary")
}

/// The demo's tokens; with `size`, so many made of pairs and triples of them besides.
fn tokens(text: &ModelText, size: usize) -> Vec<Vec<u8>> {
    let mut tokens: Vec<Vec<u8>> = (0..2045).map(|id| text.tokenizer.bytes(id).unwrap_or_default().to_vec()).collect();
    let parts = tokens.clone();
    let mut number = 0;
    while tokens.len() < size {
        let part = |step: usize| &parts[number * step % parts.len()];
        tokens.push([part(7).as_slice(), part(1031)].concat());
        number += 1;
    }
    tokens
}

/// Milliseconds to compile; microseconds to begin an answer, and of a mask along it: the median, and the longest.
fn masks(tokens: &[Vec<u8>]) -> (f64, [f64; 3]) {
    let vocabulary = vocabulary(tokens);
    let start = Instant::now();
    let grammar = compile(form(), &vocabulary).expect("compiles");
    let compiled = 1e3 * start.elapsed().as_secs_f64();
    let start = Instant::now();
    let mut matcher = grammar.matcher();
    let begun = 1e6 * start.elapsed().as_secs_f64();
    let mut words = vec![0; mask_words(tokens.len())];
    let rules = Rules { width: tokens.len(), ..Rules::default() };
    let mut times = Vec::new();
    for step in 0..400usize {
        let start = Instant::now();
        matcher.mask(&rules, &mut words).expect("it goes on");
        times.push(1e6 * start.elapsed().as_secs_f64());
        let allowed: Vec<u32> = (0..tokens.len() as u32).filter(|&token| allows(&words, token)).collect();
        matcher.advance(allowed[step * 7919 % allowed.len()]).expect("it is allowed");
    }
    times.sort_by(f64::total_cmp);
    (compiled, [begun, times[times.len() / 2], times[times.len() - 1]])
}

/// Tokens a second of `count` requests at once.
fn speed(engine: &Engine, route: &str, prompt: &[u32], count: usize, grammar: Option<&Arc<Grammar>>) -> f64 {
    let request = |seed| NewRequest {
        route: engine.find_route(route).expect("a route"),
        prompt: prompt.to_vec(),
        max_tokens: TOKENS,
        sampling: SamplingParams {
            seed,
            ignore_eos: true,
            constraint: grammar.map(|grammar| Constraint::new(Arc::clone(grammar))),
            ..SamplingParams::default()
        },
        return_signals: false,
        cache_salt: None,
    };
    let start = Instant::now();
    let answers = answers(engine, (0..count as u64).map(request).collect());
    assert!(answers.iter().all(|answer| answer.reason == FinishReason::Length), "an answer ended early");
    (count * TOKENS as usize) as f64 / start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let text = ModelText::load(&root().join("models/demo/small")).expect("the demo tokenizer");
    for size in [2045, 131_072] {
        let (compiled, [begun, middle, longest]) = masks(&tokens(&text, size));
        println!(
            "{size} tokens: compiled in {compiled:.1} ms, begun in {begun:.0} us; a mask takes {middle:.0} us, at most {longest:.0}"
        );
    }
    let vocabulary = Vocabulary::new(text.tokenizer.vocab_size(), |id| {
        if id < 2045 { text.tokenizer.bytes(id).unwrap_or_default() } else { &[] }
    });
    let grammar = Arc::new(compile(form(), &vocabulary.expect("a vocabulary")).expect("compiles"));
    let prompt = text.encode_chat("<|im_start|>user\nGive me some data.<|im_end|>\n<|im_start|>assistant\n");
    let prompt = prompt.expect("encodes");
    let random = pair("random", "random", json!({"probabilities": {"large": 0.5}}));
    let engine = engine(&Setup::default(), &[random]);
    println!("N answers of {TOKENS} tokens at once; medians of {ROUNDS} alternating rounds");
    println!("{:>3}  {:<8} {:>14} {:>18} {:>8}", "N", "route", "free tokens/s", "schema tokens/s", "cost");
    for concurrency in CONCURRENCY {
        for route in ROUTES {
            let mut speeds = [Vec::new(), Vec::new()];
            for round in 0..=ROUNDS {
                for (speeds, grammar) in speeds.iter_mut().zip([None, Some(&grammar)]) {
                    let speed = speed(&engine, route, &prompt, concurrency, grammar);
                    // The first round warms up.
                    if round > 0 {
                        speeds.push(speed);
                    }
                }
            }
            let [free, formed] = speeds.map(median);
            let cost = 100.0 * (1.0 - formed / free);
            println!("{concurrency:>3}  {route:<8} {free:>14.0} {formed:>18.0} {cost:>7.1}%");
        }
    }
}
