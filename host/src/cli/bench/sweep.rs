//! `--sweep MODEL`: throughput over the threshold of a model, measured and predicted.

use serde_json::{Value, json};
use tokenrouter_batching::search::Options;

use super::args::Bench;
use super::engines::Held;
use super::files::{write, write_json};
use super::json;
use super::load::Measured;
use super::running::{ROUND, Running};
use super::variant::{Mode, Variant};
use crate::bench::predicted::{self, Seen};
use crate::bench::sweep::Swept;
use crate::bench::workload::Workload;
use crate::chart::{self, Panel};
use crate::cli::output::{Failure, write_stdout};
use crate::cli::plan::table;
use crate::plain::suggestion;
use crate::subserver::gate::Schedule;

const ROUNDS: u32 = 3;
/// Of a panel of the plot.
const SIZE: (u32, u32) = (480, 400);

pub fn run(arguments: &Bench, route: &str, workload: &Workload, model: &str) -> Result<(), Failure> {
    let load = &arguments.load;
    let Some(file) = &load.config else { return Err(Failure::input("--sweep is for a route of a configuration")) };
    let variant = Variant::new(file, Mode::Routed);
    let mut prepared = variant.prepare(route)?;
    // The thresholds that are measured must stay.
    prepared.config.batching.online = None;
    let config = &prepared.config;
    let names: Vec<&str> = config.models.iter().map(|model| model.name.as_str()).collect();
    let index = names.iter().position(|name| *name == model).ok_or_else(|| {
        Failure::input(format!("--sweep {model}: no model of the route: {}", suggestion(model, names.iter().copied())))
    })?;
    let schedule = config.batching.schedule;
    if schedule != Schedule::Delayed {
        let message = format!("--sweep: the schedule {} uses no min_batch; set it to \"delayed\"", schedule.name());
        return Err(Failure::input(message));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::work)?;
    let running = Running::in_process(load, workload.clone(), &variant, route, Held::of(&prepared, None)?)?;
    let entry = config.routes.first().map_or(0, |route| route.models[route.entry].0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let options = Options { threads, ..Options::default() };
    runtime.block_on(running.warm_up(0))?;
    let mut swept = Vec::new();
    for &requests in &load.requests {
        let measured = measure(arguments, &runtime, &running, (requests, index, names.len()))?;
        let loads: Vec<Seen<'_>> = measured.iter().flatten().map(|load| (&load.summary, &*load.logs)).collect();
        let fault = |error: &dyn std::fmt::Display| Failure::work(format!("{requests} requests: {error}"));
        let system = predicted::system(&loads, entry).map_err(|e| fault(&e))?;
        let predicted = predicted::over_thresholds(&system, index, requests, &options).map_err(|e| fault(&e))?;
        let rates = measured.iter().map(|rounds| rounds.iter().map(rate).collect::<Result<Vec<f64>, Failure>>());
        let rates: Vec<Vec<f64>> = rates.collect::<Result<_, _>>()?;
        let one = Swept::new(requests, &rates, &predicted).ok_or_else(|| fault(&"nothing was measured"))?;
        swept.push((one, described(&system)));
    }
    write_stdout(&report(&swept))?;
    if let Some(file) = &load.plot {
        let panels: Vec<Panel> = swept.iter().map(|(swept, _)| swept.panel(model)).collect();
        let columns = panels.len().clamp(1, 3);
        let rows = panels.len().div_ceil(columns);
        let size = (SIZE.0 * columns as u32, SIZE.1 * rows as u32);
        let title = format!("{route}: throughput over min_batch of {model}");
        write("--plot", file, chart::svg(&title, size, (rows, columns), &panels).map_err(Failure::work)?)?;
    }
    if let Some(file) = &arguments.json {
        let mut results = json::settings(load);
        results["target"] = running.about.clone();
        results["sweep"] = model.into();
        let one = |(swept, system): &(Swept, Value)| json!({"swept": swept, "system": system});
        results["loads"] = swept.iter().map(one).collect();
        write_json("--json", file, &results)?;
    }
    Ok(())
}

/// By threshold and round. Every threshold has the same requests in a round, and rounds go up and down in turns.
fn measure(
    arguments: &Bench,
    runtime: &tokio::runtime::Runtime,
    running: &Running<'_>,
    (requests, model, models): (u32, usize, usize),
) -> Result<Vec<Vec<Measured>>, Failure> {
    let rounds = arguments.load.rounds.unwrap_or(ROUNDS);
    let mut all: Vec<Vec<Measured>> = (0..requests).map(|_| Vec::new()).collect();
    for round in 0..rounds {
        let mut order: Vec<u32> = (1..=requests).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for threshold in order {
            // At the end of a load fewer requests are under way than are waited for.
            let ladder = |of: usize| (1..=requests).map(|n| if of == model { threshold.min(n) } else { 1 }).collect();
            running.set_ladders((0..models).map(ladder).collect())?;
            let what = format!("round {} of {rounds}, min_batch {threshold}: ", round + 1);
            let measured = runtime.block_on(running.closed(requests, u64::from(round) * ROUND, &what))?;
            if let Some((failure, _)) = measured.summary.failures.first() {
                return Err(Failure::work(format!("{what}a request failed: {failure}")));
            }
            all[threshold as usize - 1].push(measured);
        }
        eprint(&format!("round {} of {rounds}: {requests} requests\n", round + 1));
    }
    Ok(all)
}

/// Where a run of minutes is. Who does not read it misses nothing that the table lacks.
fn eprint(text: &str) {
    let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
}

/// The chain knows no beginning and no end.
fn rate(measured: &Measured) -> Result<f64, Failure> {
    measured.summary.decode_tokens_per_second.ok_or_else(|| {
        Failure::work(
            "--sweep: a request ended before another had its first token, so that there is no steady state; give \
             longer answers (--output-len)",
        )
    })
}

fn described(system: &tokenrouter_batching::System) -> Value {
    let model = |model: &tokenrouter_batching::Model| json!({"name": model.name, "step_ms": model.step_ms, "stretch": model.stretch});
    let models: Vec<Value> = system.models.iter().map(model).collect();
    json!({"models": models, "routes": system.routing, "tokens": system.commits})
}

fn report(swept: &[(Swept, Value)]) -> String {
    let head = ["requests", "min_batch", "measured", "from", "to", "predicted", "ratio"].map(String::from);
    let mut rows = vec![head];
    for (swept, _) in swept {
        rows.extend(swept.thresholds.iter().map(|threshold| {
            let [median, least, most, predicted] =
                [threshold.measured.median, threshold.measured.least, threshold.measured.most, threshold.predicted]
                    .map(|rate| format!("{rate:.1}"));
            let ratio = format!("{:.3}", threshold.measured.median / threshold.predicted);
            [swept.requests.to_string(), threshold.min_batch.to_string(), median, least, most, predicted, ratio]
        }));
    }
    let told = swept.iter().map(|(swept, _)| {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        format!(
            "{} requests: predicted best {}, measured best {}, lost by the choice {}, rounds are {} apart\n{}  measured \
             differs from predicted by {} (most {})\n",
            swept.requests,
            swept.chosen,
            swept.best,
            percent(swept.loss),
            percent(swept.noise),
            swept.loss_across.map_or_else(String::new, |loss| format!(
                "  lost against the best of the other half of the rounds: {}\n",
                percent(loss)
            )),
            percent(swept.mean_error),
            percent(swept.largest_error)
        )
    });
    format!("{}\n{}", table(&rows, 0), told.collect::<String>())
}
