//! Results of simulations as tables, JSON and CSV. Pure.

use serde_json::{Value, json};

use super::super::plan::table;
use crate::simulation::run::Fate;
use crate::simulation::summary::{Spread, Summary, tpot_ms};

/// One simulation.
pub struct Run {
    pub summary: Summary,
    /// In the order of the plan's requests.
    pub fates: Vec<Fate>,
}

fn named(summary: &Summary) -> [String; 2] {
    [summary.schedule.into(), summary.concurrency.map_or("-".into(), |n| n.to_string())]
}

/// A line for each simulation, then one for each of its models.
pub fn tables(runs: &[Run]) -> String {
    let percentiles = ["p50", "p90", "p99"];
    let head = ["schedule", "N", "requests", "tokens/s", "steady"].into_iter();
    let heads: Vec<String> = head.map(String::from).collect();
    let spreads = ["TTFT", "TPOT", "E2E"].iter().flat_map(|what| {
        percentiles.iter().enumerate().map(move |(i, p)| if i == 0 { format!("{what} {p}") } else { p.to_string() })
    });
    let mut cells: Vec<String> = heads.into_iter().chain(spreads).collect();
    cells.push("handoffs".into());
    let mut loads = vec![row::<15>(cells)];
    let head = ["schedule", "N", "model", "instances", "steps", "batch", "rows", "busy", "handoffs", "retracted"];
    let mut models = vec![head.map(String::from)];
    let three = |Spread { p50, p90, p99 }: Spread, digits: usize| [p50, p90, p99].map(|x| format!("{x:.digits$}"));
    for Run { summary, .. } in runs {
        let [schedule, concurrency] = named(summary);
        let mut cells = vec![schedule.clone(), concurrency.clone(), summary.requests.to_string()];
        let rates = [summary.tokens_per_second, summary.steady_tokens_per_second];
        cells.extend(rates.map(|rate| format!("{rate:.1}")));
        cells.extend(three(summary.ttft_ms, 1));
        cells.extend(three(summary.tpot_ms, 2));
        cells.extend(three(summary.e2e_ms, 0));
        cells.push(summary.handoffs.to_string());
        loads.push(row(cells));
        for model in &summary.models {
            models.push([
                schedule.clone(),
                concurrency.clone(),
                model.name.clone(),
                model.instances.to_string(),
                model.steps.to_string(),
                format!("{:.2}", model.mean_batch),
                format!("{:.2}", model.mean_rows),
                format!("{:.1} %", 100.0 * model.busy),
                model.handoffs.to_string(),
                (model.retractions + model.preemptions).to_string(),
            ]);
        }
    }
    let mut text = format!("{}\n{}", table(&loads, 1), table(&models, 3));
    let forced: u64 = runs.iter().map(|run| run.summary.forced_stays).sum();
    if forced > 0 {
        text += &format!(
            "\n{forced} times a request had gone round so often without a token that the server made it stay for one.\n"
        );
    }
    text
}

/// Exactly `N` cells; those that lack are empty.
fn row<const N: usize>(cells: Vec<String>) -> [String; N] {
    let mut cells = cells.into_iter();
    std::array::from_fn(|_| cells.next().unwrap_or_default())
}

/// Everything that was found.
pub fn json(plan: &str, seed: u64, runs: &[Run]) -> Value {
    let summaries: Vec<Value> = runs.iter().map(|run| json!(run.summary)).collect();
    json!({ "version": env!("CARGO_PKG_VERSION"), "plan": plan, "seed": seed, "runs": summaries })
}

/// A line for each request of each simulation.
pub fn csv(runs: &[Run]) -> Result<Vec<u8>, csv::Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record([
        "schedule",
        "concurrency",
        "request",
        "submitted_ms",
        "prompt_tokens",
        "output_tokens",
        "ttft_ms",
        "tpot_ms",
        "e2e_ms",
        "handoffs",
    ])?;
    for run in runs {
        let [schedule, concurrency] = named(&run.summary);
        for fate in &run.fates {
            let ms = |time: std::time::Duration| format!("{:.6}", 1e3 * time.as_secs_f64());
            writer.write_record([
                &schedule,
                &concurrency,
                &fate.number.to_string(),
                &ms(fate.submitted),
                &fate.prompt.to_string(),
                &fate.tokens.to_string(),
                &ms(fate.first - fate.submitted),
                &tpot_ms(fate).map_or(String::new(), |tpot| format!("{tpot:.6}")),
                &ms(fate.end - fate.submitted),
                &fate.handoffs.to_string(),
            ])?;
        }
    }
    writer.into_inner().map_err(|e| e.into_error().into())
}
