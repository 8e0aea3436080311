//! What the models do.

use std::collections::BTreeSet;

use crate::engine::Engine;
use crate::metrics::Histogram;
use crate::metrics::text::{Exposition, Unit};
use crate::request::ModelId;
use crate::runner::PAGE_TOKENS;
use crate::subserver::counts::StepCounts;
use crate::subserver::worker::Snapshot;

/// Kind, name, label of the model, meaning, and value.
type Value = (bool, &'static str, &'static str, &'static str, fn(&Snapshot) -> f64);

const OWN: &str = "model";
/// As vLLM names it.
const SHARED: &str = "model_name";

/// True: a counter, else a gauge.
const VALUES: [Value; 10] = [
    (false, "vllm:kv_cache_usage_perc", SHARED, "Share of the K/V pages that requests hold, 0 to 1.", |s| {
        s.pages_in_use as f64 / s.pages_total.max(1) as f64
    }),
    (true, "vllm:prefix_cache_queries_total", SHARED, "Tokens that were looked up in the prefix cache.", |s| {
        s.counters.prefix_queried as f64
    }),
    (true, "vllm:prefix_cache_hits_total", SHARED, "Tokens that were found in the prefix cache.", |s| {
        s.counters.prefix_found as f64
    }),
    (true, "vllm:num_preemptions_total", SHARED, "Requests at the model that lost their K/V to others.", |s| {
        s.counters.preemptions as f64
    }),
    (true, "tokenrouter_retractions_total", OWN, "Requests at other models that lost their K/V here.", |s| {
        s.counters.retractions as f64
    }),
    (true, "tokenrouter_cache_evictions_total", OWN, "Cached K/V pages given up because others were needed.", |s| {
        s.counters.prefix_evicted as f64
    }),
    (false, "tokenrouter_kv_pages", OWN, "K/V pages.", |s| s.pages_total as f64),
    (false, "tokenrouter_kv_pages_used", OWN, "K/V pages that requests hold.", |s| s.pages_in_use as f64),
    (false, "tokenrouter_kv_pages_cached", OWN, "K/V pages that no request holds, kept for one that may.", |s| {
        s.pages_cached as f64
    }),
    (false, "tokenrouter_model_requests", OWN, "Requests that are at the model now.", |s| s.ready as f64),
];

/// A histogram: its name, label of the model, meaning, unit and place.
type Family = (&'static str, &'static str, &'static str, Unit, fn(&StepCounts) -> &Histogram);

const HISTOGRAMS: [Family; 5] = [
    ("vllm:iteration_tokens_total", SHARED, "Rows of a step: tokens of prompts and of answers.", Unit::One, |c| {
        &c.rows
    }),
    ("tokenrouter_batch_requests", OWN, "Requests of a step.", Unit::One, |c| &c.requests),
    ("tokenrouter_step_seconds", OWN, "Time of a step with policies and hand-offs.", Unit::Time, |c| &c.time),
    ("tokenrouter_gate_wait_seconds", OWN, "Wait before a step while requests were ready.", Unit::Time, |c| {
        &c.gate_wait
    }),
    (
        "tokenrouter_handoff_seconds",
        OWN,
        "From the end of the step that hands over to the next step here.",
        Unit::Time,
        |c| &c.handoff,
    ),
];

pub fn write(out: &mut Exposition, engine: &Engine) {
    let models: Vec<(ModelId, &str)> =
        (0..).map(ModelId).zip(engine.models()).map(|(id, model)| (id, &model.name[..])).collect();
    let snapshots: Vec<Snapshot> = models.iter().map(|&(id, _)| engine.snapshot(id)).collect();
    for (counter, name, label, help, value) in VALUES {
        if counter {
            out.counter(name, help)
        } else {
            out.gauge(name, help)
        };
        for ((_, model), snapshot) in models.iter().zip(&snapshots) {
            out.sample(&[(label, model)], value(snapshot));
        }
    }
    out.gauge("vllm:cache_config_info", "1, with the number of K/V pages and the tokens of a page.");
    for ((_, model), info) in models.iter().zip(engine.models()) {
        let (size, pages) = (PAGE_TOKENS.to_string(), info.pages.to_string());
        out.sample(&[(SHARED, model), ("block_size", &size), ("num_gpu_blocks", &pages)], 1);
    }
    for (name, label, help, unit, histogram) in HISTOGRAMS {
        out.histogram(name, help);
        for &(id, model) in &models {
            out.distribution(&[(label, model)], &histogram(engine.step_counts(id)).read(), unit);
        }
    }
    let down: Vec<&str> = engine.down_models().map(|down| &down.model[..]).collect();
    out.gauge("tokenrouter_model_up", "0 where a model can compute nothing any more.");
    for (_, model) in &models {
        out.sample(&[(OWN, model)], u8::from(!down.contains(model)));
    }
    handoffs(out, engine, &models);
}

fn handoffs(out: &mut Exposition, engine: &Engine, models: &[(ModelId, &str)]) {
    let routes = engine.routes();
    let together = |members: &[(ModelId, String)]| -> Vec<_> {
        members.iter().flat_map(|(a, _)| members.iter().map(move |(b, _)| (*a, *b))).filter(|(a, b)| a != b).collect()
    };
    let mut pairs: BTreeSet<(ModelId, ModelId)> = routes.iter().flat_map(|route| together(&route.models)).collect();
    let sent: Vec<Vec<u64>> = models.iter().map(|&(id, _)| engine.observed(id).to).collect();
    // Those of routes that are gone.
    let counted = |from: usize| {
        (0..).zip(&sent[from]).filter(|(_, count)| **count > 0).map(move |(to, _)| (ModelId(from as u32), ModelId(to)))
    };
    pairs.extend((0..sent.len()).flat_map(counted));
    out.counter("tokenrouter_handoffs_total", "Requests that steps handed over, by the models from and to.");
    for (from, to) in pairs {
        let [from_name, to_name] = [from, to].map(|id| models.get(id.index()).map_or("", |(_, name)| name));
        let count = sent.get(from.index()).and_then(|sent| sent.get(to.index())).copied().unwrap_or(0);
        out.sample(&[("from", from_name), ("to", to_name)], count);
    }
}
