//! Loads as JSON: by our names, and by those of vLLM's `bench serve`. Pure.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::load_args::LoadArgs;
use super::variant::Mode;
use crate::bench::load::Pace;
use crate::bench::statistics::Distribution;
use crate::bench::summary::Summary;
use crate::cli::plan::MemoryPlan;

/// A route in this process.
pub fn route(file: &Path, route: &str, mode: Mode, plan: &MemoryPlan) -> Value {
    let models = plan.models.iter().map(|model| {
        let (name, description, device) = (&model.name, &model.description, model.device.to_string());
        json!({"name": name, "description": description, "device": device, "kv_pages": model.pages})
    });
    let models: Vec<Value> = models.collect();
    json!({"config": file.display().to_string(), "route": route, "mode": mode.name(), "models": models})
}

/// A server elsewhere.
pub fn server(url: &str, model: &str) -> Value {
    json!({"url": url, "model": model})
}

/// Everything that was measured; `about`: the target.
pub fn results(about: Value, load: &LoadArgs, summaries: &[&Summary]) -> Value {
    let mut results = settings(load);
    merge(&mut results, about);
    results["loads"] = summaries.iter().map(|summary| one(summary)).collect();
    results
}

/// What all loads have in common.
pub fn settings(load: &LoadArgs) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "dataset": load.dataset.as_ref().map(|file| file.display().to_string()),
        "input_len": load.input_len.to_string(),
        "prefix_len": load.prefix_len,
        "prefixes": load.prefixes,
        "turns": load.turns,
        "output_len": load.output_len.map(|length| length.to_string()),
        "seed": load.seed,
    })
}

fn merge(into: &mut Value, from: Value) {
    if let (Value::Object(into), Value::Object(from)) = (into, from) {
        into.extend(from);
    }
}

/// One load.
pub fn one(summary: &Summary) -> Value {
    let requests = match summary.pace {
        Pace::Closed { requests } => Some(requests),
        Pace::Open { .. } => None,
    };
    let failures = summary.failures.iter().map(|(failure, count)| json!({"failure": failure, "requests": count}));
    let mut load = json!({
        "requests": requests,
        "total": summary.total(),
        "cut": summary.cut,
        "seconds": summary.seconds,
        "tokens": summary.tokens,
        "tokens_per_second": summary.tokens_per_second,
        "decode_tokens_per_second": summary.decode_tokens_per_second,
        "ttft_ms": summary.ttft_ms,
        "ttft_by_cache": summary.by_cache,
        "tpot_ms": summary.tpot_ms,
        "itl_ms": summary.itl_ms,
        "e2e_ms": summary.e2e_ms,
        "late_ms": summary.late_ms,
        "mean_under_way": summary.mean_under_way,
        "cached_prompt_tokens": summary.cached_tokens,
        "handoffs": summary.handoffs,
        "tokens_by_model": summary.by_model,
        "models": summary.models,
        "failures": failures.collect::<Vec<_>>(),
    });
    // Transitions, commits and waits, beside the others.
    merge(&mut load, json!(summary.flow));
    if let Some(flow) = &summary.flow {
        load["entry"] = json!((0..flow.begun.len()).rev().max_by_key(|model| flow.begun[*model]));
    }
    merge(&mut load, vllm(summary));
    load
}

/// What vLLM's `bench serve` writes, by its names.
fn vllm(summary: &Summary) -> Value {
    let (rate, burstiness, most) = match summary.pace {
        Pace::Closed { requests } => (f64::INFINITY, 1.0, Some(requests)),
        Pace::Open { rate, burstiness, most } => (rate, burstiness, most),
    };
    let all = summary.prompt_tokens + summary.tokens;
    // JSON has no infinity.
    let number = |value: f64| if value.is_finite() { json!(value) } else { json!("inf") };
    let mut result = json!({
        "num_prompts": summary.total(),
        "request_rate": number(rate),
        "burstiness": number(burstiness),
        "max_concurrency": most,
        "duration": summary.seconds,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.prompt_tokens,
        "total_output_tokens": summary.tokens,
        "request_throughput": summary.requests_per_second,
        "request_goodput": summary.goodput,
        "output_throughput": summary.tokens_per_second,
        "total_token_throughput": if summary.seconds > 0.0 { all as f64 / summary.seconds } else { 0.0 },
        "max_concurrent_requests": summary.most_under_way,
    });
    let times =
        [("ttft", summary.ttft_ms), ("tpot", summary.tpot_ms), ("itl", summary.itl_ms), ("e2el", summary.e2e_ms)];
    for (name, time) in times {
        merge(&mut result, Value::Object(vllm_times(name, time)));
    }
    result
}

fn vllm_times(name: &str, time: Distribution) -> Map<String, Value> {
    let Distribution { mean, std, p50, p90, p95, p99 } = time;
    let all = [("mean", mean), ("median", p50), ("std", std), ("p90", p90), ("p95", p95), ("p99", p99)];
    all.into_iter().map(|(which, ms)| (format!("{which}_{name}_ms"), ms.into())).collect()
}
