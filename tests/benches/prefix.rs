//! Time to the first token of a prompt whose beginning is in the prefix cache, against one that is not, on
//! the demo's large model and on a route.
//!
//! Needs the plugins: `cargo xtask build --release`, then `cargo bench -p tokenrouter-tests --bench prefix`.

#[allow(dead_code)] // What the tests alone use.
#[path = "../system/demo.rs"]
mod demo;

use std::time::Instant;

use demo::{Setup, engine, rstitch};
use tokenrouter::engine::Engine;
use tokenrouter::request::{Event, NewRequest, SamplingParams};

const ROUTES: [&str; 2] = ["large", "rstitch"];
/// Tokens that prompts have in common, and those of each prompt behind them. The demo's context is 2048.
const PREFIXES: [u32; 3] = [512, 1024, 1984];
const TAIL: u32 = 32;
const ROUNDS: u32 = 7;

/// Milliseconds to the first token, and the tokens that came from the cache.
fn first_token(engine: &Engine, route: &str, prefix: (u32, u32), tail: u32) -> (f64, u32) {
    let token = |seed: u32, i: u32| (seed.wrapping_mul(2_654_435_761).wrapping_add(i * 40_503) >> 7) % 2000;
    let (length, seed) = prefix;
    let prompt = (0..length).map(|i| token(seed, i)).chain((0..TAIL).map(|i| token(tail, i))).collect();
    let request = NewRequest {
        route: engine.find_route(route).expect("a route"),
        prompt,
        max_tokens: 1,
        sampling: SamplingParams { ignore_eos: true, ..SamplingParams::greedy() },
        return_signals: false,
        cache_salt: None,
    };
    let start = Instant::now();
    let mut stream = engine.submit(request).expect("accepted");
    let (mut cached, mut time) = (0, f64::NAN);
    loop {
        match stream.events.blocking_recv().map(|told| told.event) {
            Some(Event::PromptCached { tokens }) => cached = tokens,
            Some(Event::Committed { .. }) => time = 1e3 * start.elapsed().as_secs_f64(),
            Some(Event::Finished { .. }) => return (time, cached),
            other => panic!("{other:?}"),
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let engine = engine(&Setup { pages: 8192, ..Setup::default() }, &[rstitch("rstitch", 0.03)]);
    println!("time to first token, ms; medians of {ROUNDS} prompts of PREFIX + {TAIL} tokens, cold and warm in turn");
    println!("{:<8} {:>6} {:>9} {:>9} {:>7} {:>8}", "route", "prefix", "cold", "warm", "ratio", "cached");
    for (place, route) in (0u32..).zip(ROUTES) {
        for prefix in PREFIXES {
            let (mut cold, mut warm, mut cached) = (Vec::new(), Vec::new(), 0);
            for round in 0..=ROUNDS {
                // No prompt of another round or route begins like these two.
                let seed = 1 + place * 1000 + prefix + round * 10_000;
                let first = first_token(&engine, route, (prefix, seed), 2 * seed);
                let second = first_token(&engine, route, (prefix, seed), 2 * seed + 1);
                assert_eq!((first.1, second.1), (0, prefix), "tokens from the cache");
                // The first round warms up.
                if round > 0 {
                    cold.push(first.0);
                    warm.push(second.0);
                    cached = second.1;
                }
            }
            let (cold, warm) = (median(cold), median(warm));
            println!("{route:<8} {prefix:>6} {cold:>9.2} {warm:>9.2} {:>6.1}% {cached:>8}", 100.0 * warm / cold);
        }
    }
}
