//! What requests came to, by the name that they asked for.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::engine::{Ended, Engine, RouteCounts};
use crate::metrics::Histogram;
use crate::metrics::text::{Exposition, Unit};

/// A histogram: its name, its meaning, its unit, and its place.
type Family = (&'static str, &'static str, Unit, fn(&RouteCounts) -> &Histogram);

const HISTOGRAMS: [Family; 9] = [
    ("vllm:time_to_first_token_seconds", "From the submission of a request to its first token.", Unit::Time, |c| {
        &c.first_token
    }),
    ("vllm:inter_token_latency_seconds", "Between two deliveries of tokens of a request.", Unit::Time, |c| &c.between),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time of a request's tokens after the first.",
        Unit::Time,
        |c| &c.per_token,
    ),
    ("vllm:e2e_request_latency_seconds", "From the submission of a request to its end.", Unit::Time, |c| &c.whole),
    ("vllm:request_queue_time_seconds", "From the submission of a request to its first step.", Unit::Time, |c| {
        &c.queue
    }),
    ("vllm:request_prefill_time_seconds", "From the first step of a request to its first token.", Unit::Time, |c| {
        &c.prefill
    }),
    ("vllm:request_decode_time_seconds", "From the first token of a request to its end.", Unit::Time, |c| &c.decode),
    ("vllm:request_prompt_tokens", "Tokens of the prompts of requests that ended well.", Unit::One, |c| {
        &c.prompt_length
    }),
    ("vllm:request_generation_tokens", "Tokens committed for requests that ended well.", Unit::One, |c| {
        &c.answer_length
    }),
];

pub fn write(out: &mut Exposition, engine: &Engine) {
    let all = engine.route_counts();
    let live = engine.running_and_waiting();
    let now = |name: &String| live.get(name).copied().unwrap_or_default();
    out.gauge("vllm:num_requests_running", "Live requests that a step has computed something of.");
    for name in all.keys() {
        out.sample(&[("model_name", name)], now(name).0);
    }
    out.gauge("vllm:num_requests_waiting", "Live requests that wait for their first step.");
    for name in all.keys() {
        out.sample(&[("model_name", name)], now(name).1);
    }
    finished(out, &all);
    for (name, help, unit, histogram) in HISTOGRAMS {
        out.histogram(name, help);
        for (route, counts) in &all {
            out.distribution(&[("model_name", route)], &histogram(counts).read(), unit);
        }
    }
    shares(out, engine, &all);
}

fn finished(out: &mut Exposition, all: &BTreeMap<String, Arc<RouteCounts>>) {
    out.counter("vllm:request_success_total", "Requests that are over, by how they ended.");
    for (route, counts) in all {
        for how in Ended::ALL {
            out.sample(&[("model_name", route), ("finished_reason", how.name())], counts.ended(how));
        }
    }
    out.counter("vllm:corrupted_requests_total", "Requests that failed because a model's logits were not finite.");
    for (route, counts) in all {
        out.sample(&[("model_name", route)], counts.corrupted.read());
    }
    out.counter("vllm:prompt_tokens_total", "Tokens of the prompts of requests that got a first token.");
    for (route, counts) in all {
        out.sample(&[("model_name", route)], counts.prompt_tokens.read());
    }
    out.counter("vllm:generation_tokens_total", "Tokens committed.");
    for (route, counts) in all {
        let tokens: u64 = counts.shares().values().map(|share| share.tokens.read()).sum();
        out.sample(&[("model_name", route)], tokens);
    }
}

/// What each model wrote for each route.
fn shares(out: &mut Exposition, engine: &Engine, all: &BTreeMap<String, Arc<RouteCounts>>) {
    let model = |id: crate::request::ModelId| engine.models().get(id.index()).map_or("", |model| &model.name);
    out.counter("tokenrouter_tokens_total", "Tokens committed, by the model that wrote them.");
    for (route, counts) in all {
        for (id, share) in counts.shares() {
            out.sample(&[("route", route), ("model", model(id))], share.tokens.read());
        }
    }
    out.histogram("tokenrouter_visit_tokens", "Tokens in a row from one model of a route.");
    for (route, counts) in all {
        for (id, share) in counts.shares() {
            out.distribution(&[("route", route), ("model", model(id))], &share.visits.read(), Unit::One);
        }
    }
}
