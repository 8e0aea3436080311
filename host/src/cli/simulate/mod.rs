//! `tokenrouter simulate`

mod args;
pub(crate) mod read;
mod report;
pub(crate) mod trace;

use std::io::{self, IsTerminal};
use std::path::Path;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub use args::Simulate;
use report::Run;

use super::output::{Failure, write_stdout};
use crate::simulation::plan::{Arrivals, Plan};
use crate::simulation::run::run as carry_out;
use crate::simulation::summary::Summary;

pub fn run(arguments: &Simulate) -> Result<(), Failure> {
    let base = load(&arguments.plan)?;
    let plans = plans(&base, arguments).map_err(Failure::input)?;
    let name = arguments.plan.display().to_string();
    for plan in &plans {
        plan.check().map_err(|e| Failure::input(format!("{name}: {e}")))?;
    }
    let runs = plans.iter().map(simulate).collect::<Result<Vec<Run>, Failure>>()?;
    write_stdout(&report::tables(&runs))?;
    if let Some(file) = &arguments.json {
        let seed = plans.first().map_or(0, |plan| plan.seed);
        write("--json", file, format!("{}\n", report::json(&name, seed, &runs)).as_bytes())?;
    }
    if let Some(file) = &arguments.csv {
        write("--csv", file, &report::csv(&runs).map_err(Failure::work)?)?;
    }
    Ok(())
}

/// Read a plan, and the trace that it names.
fn load(file: &Path) -> Result<Plan, Failure> {
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file).map_err(|e| Failure::input(format!("{name}: cannot be read: {e}")))?;
    let beside = file.parent().unwrap_or(Path::new("."));
    let read = |other: &str| std::fs::read_to_string(beside.join(other)).map_err(|e| format!("cannot be read: {e}"));
    read::plan(&text, &read).map_err(|fault| Failure::input(fault.in_file(&name)))
}

/// The plan with what the command line puts in its place, in all combinations.
fn plans(base: &Plan, arguments: &Simulate) -> Result<Vec<Plan>, String> {
    let traced = matches!(base.load.arrivals, Arrivals::Trace(_));
    let given = [("--concurrency", !arguments.concurrency.is_empty()), ("--requests", arguments.requests.is_some())];
    if let Some((flag, _)) = given.iter().find(|(_, given)| traced && *given) {
        return Err(format!("{flag}: the plan's requests are those of its trace; give other arrivals in the plan"));
    }
    let schedules = if arguments.schedules.is_empty() { vec![base.schedule] } else { arguments.schedules.clone() };
    let mut loads = vec![base.load.clone()];
    if !arguments.concurrency.is_empty() {
        let closed = |&under_way: &u32| {
            let mut load = base.load.clone();
            load.arrivals = Arrivals::Closed(under_way);
            load
        };
        loads = arguments.concurrency.iter().map(closed).collect();
    }
    loads.iter_mut().for_each(|load| load.requests = arguments.requests.unwrap_or(load.requests));
    let seed = arguments.seed.unwrap_or(base.seed);
    let of = |schedule| loads.iter().map(move |load| Plan { schedule, load: load.clone(), seed, ..base.clone() });
    Ok(schedules.into_iter().flat_map(of).collect())
}

fn simulate(plan: &Plan) -> Result<Run, Failure> {
    let total: u64 = plan.requests().iter().map(|asked| u64::from(asked.output)).sum();
    let bar = bar(plan, total);
    let start = Instant::now();
    let outcomes = carry_out(plan, &|tokens| bar.inc(tokens)).map_err(Failure::work)?;
    let seconds = start.elapsed().as_secs_f64();
    bar.finish_and_clear();
    tracing::info!("{total} tokens in {seconds:.2} s: {:.0} simulated tokens a second", total as f64 / seconds);
    let concurrency = match plan.load.arrivals {
        Arrivals::Closed(under_way) => Some(under_way),
        _ => None,
    };
    let summary = Summary::new(plan, concurrency, &outcomes);
    let mut fates: Vec<_> = outcomes.into_iter().flat_map(|outcome| outcome.fates).collect();
    fates.sort_by_key(|fate| fate.number);
    Ok(Run { summary, fates })
}

/// Tokens so far, on a terminal.
fn bar(plan: &Plan, total: u64) -> ProgressBar {
    let terminal = io::stderr().is_terminal();
    let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(total), target);
    if let Ok(style) = ProgressStyle::with_template("{prefix}  {bar:30}  {pos}/{len} tokens  {eta}") {
        bar.set_style(style);
    }
    bar.set_prefix(plan.schedule.name());
    bar
}

fn write(flag: &str, file: &Path, bytes: &[u8]) -> Result<(), Failure> {
    std::fs::write(file, bytes).map_err(|e| Failure::work(format!("{flag}: {} cannot be written: {e}", file.display())))
}
