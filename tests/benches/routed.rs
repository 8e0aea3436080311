//! Tokens a second of the routed demo against its large model alone, in one run.
//!
//! Needs the plugins: `cargo xtask build --release`, then `cargo bench -p tokenrouter-tests`.

#[allow(dead_code)] // What the tests alone use.
#[path = "../system/demo.rs"]
mod demo;

use std::time::{Duration, Instant};

use demo::{Setup, answers, engine, me, root, rstitch};
use serde_json::{Value, json};
use tokenrouter::engine::Engine;
use tokenrouter::request::{FinishReason, NewRequest, SamplingParams};
use tokenrouter::text::ModelText;

const ROUTES: [&str; 5] = ["large", "rstitch", "me", "medium", "small"];
const CONCURRENCY: [usize; 3] = [1, 4, 16];
const ROUNDS: usize = 5;

/// Prompts of the evaluation set.
fn prompts(count: usize) -> Vec<Vec<u32>> {
    let directory = root().join("models/demo/small");
    let text = ModelText::load(&directory).expect("the demo tokenizer");
    let questions = std::fs::read_to_string(root().join("models/demo/eval.jsonl")).expect("the evaluation set");
    let prompt = |line: &str| {
        let question: Value = serde_json::from_str(line).expect("JSON");
        let question = question["question"].as_str().expect("a question");
        let chat = format!("<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n");
        text.encode_chat(&chat).expect("encodes")
    };
    questions.lines().take(count).map(prompt).collect()
}

/// Tokens a second of `count` requests at once.
fn speed(engine: &Engine, route: &str, prompts: &[Vec<u32>]) -> (f64, usize) {
    let request = |prompt: &Vec<u32>| NewRequest {
        route: engine.find_route(route).expect("a route"),
        prompt: prompt.clone(),
        max_tokens: 300,
        sampling: SamplingParams::greedy(),
        return_signals: false,
        cache_salt: None,
    };
    let start = Instant::now();
    let answers = answers(engine, prompts.iter().map(request).collect());
    assert!(answers.iter().all(|a| matches!(a.reason, FinishReason::Stop(_))), "an answer was cut off");
    let tokens: usize = answers.iter().map(|a| a.tokens.len()).sum();
    let by_large = answers.iter().flat_map(|a| &a.tokens).filter(|t| t.model.index() == 2).count();
    (tokens as f64 / start.elapsed().as_secs_f64(), 100 * by_large / tokens)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let weights = json!({"weights": {"small": 0.5, "medium": 0.3, "large": 0.2}});
    let engine = engine(&Setup::default(), &[rstitch("rstitch", 0.03), me("me", weights)]);
    println!("greedy answers to the first N problems at once; medians of {ROUNDS} alternating rounds");
    println!("{:>3}  {:<8} {:>10} {:>15} {:>16}", "N", "route", "tokens/s", "to large alone", "tokens by large");
    for concurrency in CONCURRENCY {
        let prompts = prompts(concurrency);
        let mut speeds = vec![Vec::new(); ROUTES.len()];
        let mut shares = [0; ROUTES.len()];
        for round in 0..=ROUNDS {
            for (i, route) in ROUTES.iter().enumerate() {
                let (speed, share) = speed(&engine, route, &prompts);
                // The first round warms up.
                if round > 0 {
                    speeds[i].push(speed);
                }
                shares[i] = share;
            }
        }
        let medians: Vec<f64> = speeds.into_iter().map(median).collect();
        for (i, route) in ROUTES.iter().enumerate() {
            let ratio = medians[i] / medians[0];
            println!("{concurrency:>3}  {route:<8} {:>10.0} {ratio:>14.2}x {:>15}%", medians[i], shares[i]);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
