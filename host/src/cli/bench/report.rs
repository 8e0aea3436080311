//! The tables and the JSON of a load. Pure.

use serde_json::{Value, json};

use super::super::plan::table;
use super::args::Bench;
use crate::bench::summary::{Percentiles, Summary};
use crate::runner::ModelInfo;

/// A row for each number of requests, then one for each of its models.
pub fn tables(summaries: &[Summary]) -> String {
    let head = ["requests", "of", "tokens/s", "decode", "TTFT p50", "p99", "TPOT p50", "p99 ms", "handoffs"];
    let mut loads = vec![head.map(String::from)];
    let head = [
        "requests", "model", "tokens", "steps", "batch", "rows", "step p50", "p99 ms", "busy", "gap p50", "p90 µs",
        "cached",
    ];
    let mut models = vec![head.map(String::from)];
    let two =
        |Percentiles { p50, p99 }: Percentiles, digits: usize| [p50, p99].map(|number| format!("{number:.digits$}"));
    for summary in summaries {
        let ([ttft, ttft_99], [tpot, tpot_99]) = (two(summary.ttft_ms, 1), two(summary.tpot_ms, 2));
        loads.push([
            summary.requests.to_string(),
            summary.total.to_string(),
            format!("{:.1}", summary.tokens_per_second),
            summary.decode_tokens_per_second.map_or("-".into(), |rate| format!("{rate:.1}")),
            ttft,
            ttft_99,
            tpot,
            tpot_99,
            summary.handoffs.to_string(),
        ]);
        for model in &summary.models {
            let [step, step_99] = two(model.step_ms, 3);
            let [gap, gap_90] =
                model.gap_us.map_or(["-", "-"].map(String::from), |gaps| gaps.map(|gap| format!("{gap:.1}")));
            models.push([
                summary.requests.to_string(),
                model.name.clone(),
                format!("{:.1} %", 100.0 * model.share),
                model.steps.to_string(),
                format!("{:.2}", model.mean_batch),
                format!("{:.2}", model.mean_rows),
                step,
                step_99,
                format!("{:.1} %", 100.0 * model.busy),
                gap,
                gap_90,
                model.prefix_hit_rate().map_or("-".into(), |rate| format!("{:.1} %", 100.0 * rate)),
            ]);
        }
    }
    format!("{}\n{}", table(&loads, 0), table(&models, 2))
}

/// How a load was made.
pub struct Meta<'a> {
    pub arguments: &'a Bench,
    pub output_len: u32,
    /// By model: its device.
    pub places: &'a [String],
}

/// Everything that was measured.
pub fn json(meta: &Meta<'_>, models: &[ModelInfo], summaries: &[Summary]) -> Value {
    let arguments = meta.arguments;
    let models = models.iter().zip(meta.places).map(|(model, device)| {
        json!({"name": model.name, "description": model.description, "device": device, "kv_pages": model.pages})
    });
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "config": arguments.config.as_ref().map(|file| file.display().to_string()),
        "route": arguments.route,
        "input_len": arguments.input_len,
        "output_len": meta.output_len,
        "seed": arguments.seed,
        "models": models.collect::<Vec<_>>(),
        "loads": summaries,
    })
}
