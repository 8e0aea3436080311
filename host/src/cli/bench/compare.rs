//! The same loads on several ways to serve, in turns: A B A B …

use serde_json::{Value, json};

use super::args::Bench;
use super::engines::Held;
use super::files::write_json;
use super::json;
use super::running::Running;
use super::variant::Variant;
use crate::bench::compare::{COMPARED, Compared, compare};
use crate::bench::summary::Summary;
use crate::bench::workload::Workload;
use crate::cli::build::Prepared;
use crate::cli::output::{Failure, write_stdout};
use crate::cli::plan::table;

const ROUNDS: u32 = 3;
/// Requests of one round do not come again in another.
const ROUND: u64 = 1 << 24;

/// A variant and what its loads came to: by round, then by load.
struct Runs<'a> {
    variant: &'a Variant,
    about: Value,
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
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::work)?;
    let runs = |variant| Runs { variant, about: Value::Null, rounds: Vec::new() };
    let mut runs: Vec<Runs<'_>> = variants.iter().map(runs).collect();
    let mut held: Option<Held<'_>> = None;
    for round in 0..load.rounds.unwrap_or(ROUNDS) {
        for (runs, prepared) in runs.iter_mut().zip(&prepared) {
            let weights = Held::of(prepared, held.take())?;
            let running = Running::in_process(load, workload.clone(), runs.variant, route, weights)?;
            let measured = runtime.block_on(running.measure(u64::from(round) * ROUND))?;
            runs.about = running.about.clone();
            held = Some(running.stop()?);
            runs.rounds.push(measured.into_iter().map(|measured| measured.summary).collect());
        }
    }
    write_stdout(&report(&runs))?;
    if let Some(file) = &arguments.json {
        write_json("--json", file, &results(arguments, route, &runs))?;
    }
    let all = || runs.iter().flat_map(|runs| runs.rounds.iter().flatten());
    let (failed, total) = all().fold((0, 0), |(failed, total), run| (failed + run.failed, total + run.total()));
    match all().find_map(|run| run.failures.first()) {
        Some((failure, _)) => Err(Failure::work(format!("{failed} of {total} requests failed: {failure}"))),
        None => Ok(()),
    }
}

/// By load, then by variant.
fn compared<'a>(runs: &'a [Runs<'a>]) -> impl Iterator<Item = Vec<(&'a Runs<'a>, [Compared; COMPARED.len()])>> {
    let loads = runs.first().and_then(|first| first.rounds.first()).map_or(0, Vec::len);
    (0..loads).map(move |load| {
        let first = runs.first().map(|first| first.load(load)).unwrap_or_default();
        runs.iter().map(|own| (own, compare(&own.load(load), &first))).collect()
    })
}

fn report(runs: &[Runs<'_>]) -> String {
    let head = [
        "load", "variant", "tokens/s", "ratio", "from", "to", "TTFT ms", "ratio", "TPOT ms", "ratio", "E2E ms", "ratio",
    ];
    let mut rows = vec![head.map(String::from)];
    for (load, variants) in compared(runs).enumerate() {
        for (own, [rate, ttft, tpot, e2e]) in variants {
            let pace = own.load(load).first().map(|summary| summary.pace.to_string()).unwrap_or_default();
            let ratio = |ratio: f64| format!("{ratio:.3}");
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
                format!("{:.1}", e2e.value.median),
                ratio(e2e.to_first.median),
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
        for (variant, (_, compared)) in by_variant.iter_mut().zip(load) {
            variant.push(named(compared));
        }
    }
    let variants = runs.iter().zip(by_variant).map(|(own, compared)| {
        let rounds = own.rounds.iter().map(|loads| loads.iter().map(json::one).collect::<Value>());
        json!({
            "name": own.variant.name,
            "mode": own.variant.mode.name(),
            "target": own.about,
            "compared": compared,
            "rounds": rounds.collect::<Vec<_>>(),
        })
    });
    let mut results = json::settings(&arguments.load);
    results["route"] = route.into();
    results["variants"] = variants.collect();
    results
}
