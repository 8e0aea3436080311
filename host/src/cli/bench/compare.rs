//! The same loads on several ways to serve, in turns: A B A B …

use std::io::Write;

use serde_json::{Value, json};
use tokenrouter_batching::search::Options;

use super::args::Bench;
use super::engines::Held;
use super::files::write_json;
use super::json;
use super::load::Measured;
use super::load_args::LoadArgs;
use super::running::{ROUND, Running};
use super::variant::Variant;
use crate::bench::compare::{COMPARED, Compared, compare};
use crate::bench::predicted::{self, Seen};
use crate::bench::summary::Summary;
use crate::bench::workload::Workload;
use crate::cli::build::Prepared;
use crate::cli::output::{Failure, write_stdout};
use crate::cli::plan::table;
use crate::subserver::coordinator::Ladders;
use crate::subserver::gate::Schedule;

const ROUNDS: u32 = 3;
/// Of tuning between two runs.
const HASTE: u64 = 4;

/// A variant and what its loads came to: by round, then by load.
struct Runs<'a> {
    variant: &'a Variant,
    about: Value,
    /// Of the last round; `None` where they follow the traffic.
    ladders: Option<Ladders>,
    /// Why it was not measured.
    missing: Option<Failure>,
    rounds: Vec<Vec<Summary>>,
}

impl Runs<'_> {
    /// One load in all rounds.
    fn load(&self, load: usize) -> Vec<&Summary> {
        self.rounds.iter().filter_map(|loads| loads.get(load)).collect()
    }
}

pub fn run(arguments: &Bench, route: &str, workload: &Workload, variants: &[Variant]) -> Result<(), Failure> {
    let load = &arguments.load;
    // What is wrong with any of them shows before the first is loaded.
    let prepared: Vec<Prepared> = variants.iter().map(|variant| variant.prepare(route)).collect::<Result<_, _>>()?;
    if load.requests.is_empty() && variants.iter().any(|variant| variant.tuned) {
        return Err(Failure::input(
            "--ablation: min_batch cannot be tuned without --requests; give the configuration's models min_batch",
        ));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::work)?;
    let runs = |variant| Runs { variant, about: Value::Null, ladders: None, missing: None, rounds: Vec::new() };
    let mut runs: Vec<Runs<'_>> = variants.iter().map(runs).collect();
    let mut held: Option<Held<'_>> = None;
    let mut before: Vec<Measured> = Vec::new();
    let rounds = load.rounds.unwrap_or(ROUNDS);
    for round in 0..rounds {
        for (runs, prepared) in runs.iter_mut().zip(&prepared) {
            if runs.variant.tuned {
                match tuned(load, prepared, &before) {
                    Ok(ladders) => runs.ladders = Some(ladders),
                    // What was measured before is not lost.
                    Err(failure) => {
                        runs.missing = Some(failure);
                        continue;
                    }
                }
            } else if prepared.config.batching.online.is_none() {
                runs.ladders = Some(prepared.config.models.iter().map(|model| model.min_batch.clone()).collect());
            }
            let weights = Held::of(prepared, held.take())?;
            let running = Running::in_process(load, workload.clone(), runs.variant, route, weights)?;
            if let Some(ladders) = runs.ladders.as_ref().filter(|_| runs.variant.tuned) {
                running.set_ladders(ladders.clone())?;
            }
            let what = format!("round {} of {rounds}, {}: ", round + 1, runs.variant.name);
            before = runtime.block_on(running.measure(u64::from(round) * ROUND, &what))?;
            runs.about = running.about.clone();
            held = Some(running.stop()?);
            tell(&what, &before);
            runs.rounds.push(before.iter().map(|measured| measured.summary.clone()).collect());
        }
    }
    write_stdout(&(report(&runs) + &notes(&runs)))?;
    if let Some(file) = &arguments.json {
        write_json("--json", file, &results(arguments, route, &runs))?;
    }
    let all = || runs.iter().flat_map(|runs| runs.rounds.iter().flatten());
    let (failed, total) = all().fold((0, 0), |(failed, total), run| (failed + run.failed, total + run.total()));
    if let Some((failure, _)) = all().find_map(|run| run.failures.first()) {
        return Err(Failure::work(format!("{failed} of {total} requests failed: {failure}")));
    }
    runs.into_iter().find_map(|runs| runs.missing).map_or(Ok(()), Err)
}

/// Where a run of minutes is.
fn tell(what: &str, measured: &[Measured]) {
    for Measured { summary, .. } in measured {
        // Who does not read it misses nothing that the table lacks.
        let _ = writeln!(
            std::io::stderr(),
            "{what}{} requests: {:.1} tokens/s in {:.1} s",
            summary.pace,
            summary.tokens_per_second,
            summary.seconds
        );
    }
}

/// Ladders for the loads, from what they came to without.
fn tuned(load: &LoadArgs, prepared: &Prepared, before: &[Measured]) -> Result<Ladders, Failure> {
    let mut requests = load.requests.clone();
    requests.sort_unstable();
    requests.dedup();
    let seen: Vec<Seen<'_>> = before.iter().map(|measured| (&measured.summary, &*measured.logs)).collect();
    let entry = prepared.config.routes.first().map_or(0, |route| route.models[route.entry].0);
    let fault = |error: &dyn std::fmt::Display| Failure::work(format!("min_batch cannot be tuned: {error}"));
    let system = predicted::system(&seen, entry).map_err(|e| fault(&e))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let options = Options { threads, haste: HASTE, ..Options::default() };
    predicted::ladders(&system, &requests, &options).map_err(|e| fault(&e))
}

/// Whose ladders were used, and what was broken off.
fn notes(runs: &[Runs<'_>]) -> String {
    let mut text = String::new();
    for own in runs.iter().filter(|own| own.variant.schedule == Some(Schedule::Delayed)) {
        let source = if own.variant.tuned { "tuned from the row before it" } else { "that of the configuration" };
        text += &format!("{}: min_batch is {source}\n", own.variant.name);
        let names = own.about["models"].as_array().into_iter().flatten().filter_map(|model| model["name"].as_str());
        for (name, ladder) in names.zip(own.ladders.iter().flatten()) {
            text += &format!("  {name} {ladder:?}\n");
        }
    }
    for own in runs {
        let cut: Vec<&Summary> = own.rounds.iter().flatten().filter(|summary| summary.cut > 0).collect();
        if let Some(first) = cut.first() {
            let (count, all) = (cut.len(), own.rounds.iter().flatten().count());
            let name = &own.variant.name;
            text +=
                &format!("{name}: {count} of {all} loads were broken off, the first after {:.1} s\n", first.seconds);
        }
    }
    if text.is_empty() { text } else { format!("\n{text}") }
}

/// By load, then by variant.
fn compared<'a>(runs: &'a [Runs<'a>]) -> impl Iterator<Item = Vec<(&'a Runs<'a>, [Compared; COMPARED.len()])>> {
    let loads = runs.first().and_then(|first| first.rounds.first()).map_or(0, Vec::len);
    (0..loads).map(move |load| {
        let first = runs.first().map(|first| first.load(load)).unwrap_or_default();
        runs.iter().filter(|own| !own.rounds.is_empty()).map(|own| (own, compare(&own.load(load), &first))).collect()
    })
}

fn report(runs: &[Runs<'_>]) -> String {
    // The JSON has all that is compared.
    let head = ["load", "variant", "tokens/s", "ratio", "from", "to", "TTFT ms", "ratio", "TPOT ms", "ratio"];
    let mut rows = vec![head.map(String::from)];
    for (load, variants) in compared(runs).enumerate() {
        for (own, [rate, ttft, tpot, _]) in variants {
            let pace = own.load(load).first().map(|summary| summary.pace.to_string()).unwrap_or_default();
            // Nothing has a ratio where the first variant has no such time.
            let ratio = |ratio: f64| if ratio > 0.0 { format!("{ratio:.3}") } else { "-".into() };
            rows.push([
                pace,
                own.variant.name.clone(),
                format!("{:.1}", rate.value.median),
                ratio(rate.to_first.median),
                ratio(rate.to_first.least),
                ratio(rate.to_first.most),
                format!("{:.1}", ttft.value.median),
                ratio(ttft.to_first.median),
                format!("{:.2}", tpot.value.median),
                ratio(tpot.to_first.median),
            ]);
        }
    }
    table(&rows, 2)
}

fn results(arguments: &Bench, route: &str, runs: &[Runs<'_>]) -> Value {
    let named = |compared: [Compared; COMPARED.len()]| -> Value {
        COMPARED.iter().zip(compared).map(|((name, _), compared)| ((*name).to_owned(), json!(compared))).collect()
    };
    let mut by_variant: Vec<Vec<Value>> = vec![Vec::new(); runs.len()];
    for load in compared(runs) {
        for (own, compared) in load {
            let at = runs.iter().position(|runs| std::ptr::eq(runs, own)).unwrap_or_default();
            by_variant[at].push(named(compared));
        }
    }
    let variants = runs.iter().zip(by_variant).map(|(own, compared)| {
        let rounds = own.rounds.iter().map(|loads| loads.iter().map(json::one).collect::<Value>());
        json!({
            "name": own.variant.name,
            "mode": own.variant.mode.name(),
            "target": own.about,
            "min_batch": own.ladders,
            "compared": compared,
            "rounds": rounds.collect::<Vec<_>>(),
        })
    });
    let mut results = json::settings(&arguments.load);
    results["route"] = route.into();
    results["variants"] = variants.collect();
    results
}
