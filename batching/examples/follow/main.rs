//! Thresholds that follow traffic that changes, against fixed ones: tables, and a picture for each.
//!
//! `cargo run --release -p tokenrouter-batching --example follow -- DIRECTORY [SEEDS]`

#![allow(clippy::unwrap_used)] // It stops at what it cannot do.

mod plant;
mod plot;

use std::path::Path;

use plant::{Control, Length, Outcome, Phase, best_ladder, config};
use tokenrouter_batching::online::Config;

const PHASES: [(f64, usize); 12] = [
    (0.05, 16),
    (0.4, 16),
    (0.15, 32),
    (0.4, 4),
    (0.05, 2),
    (0.15, 8),
    (0.4, 32),
    (0.05, 32),
    (0.15, 2),
    (0.4, 8),
    (0.05, 4),
    (0.15, 16),
];
const SHARES: [f64; 3] = [0.05, 0.15, 0.4];
const LENGTH: Length = Length { phase: 60_000.0, settling: 10_000.0 };

/// Means over the seeds, by phase. Thresholds are those of the first one.
fn means(phases: &[Phase], stretch: [f64; 2], control: &Control, seeds: u64) -> Vec<Outcome> {
    let runs: Vec<Vec<Outcome>> = std::thread::scope(|scope| {
        let runs: Vec<_> = (0..seeds)
            .map(|seed| scope.spawn(move || plant::run(phases, stretch, LENGTH, control.clone(), seed)))
            .collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    let mean =
        |phase: usize, of: fn(&Outcome) -> f64| runs.iter().map(|run| of(&run[phase])).sum::<f64>() / runs.len() as f64;
    let phase = |index: usize| Outcome {
        tokens_per_second: mean(index, |outcome| outcome.tokens_per_second),
        p99_tpot_ms: mean(index, |outcome| outcome.p99_tpot_ms),
        min_batch: runs[0][index].min_batch,
    };
    (0..phases.len()).map(phase).collect()
}

fn total(run: &[Outcome]) -> f64 {
    run.iter().map(|outcome| outcome.tokens_per_second).sum::<f64>() / run.len() as f64
}

/// One true stretch: what is fixed, and the tuner under several assumptions.
fn study(stretch: f64, seeds: u64, directory: &Path) {
    let means = |phases: &[Phase], stretches, control: &Control| means(phases, stretches, control, seeds);
    let phases = PHASES.map(|(p, requests)| Phase { p, requests });
    let stretches = [stretch; 2];
    let eager = means(&phases, stretches, &Control::eager());
    let ladders = SHARES.map(|p| means(&phases, stretches, &Control::Ladders(best_ladder(p, stretches, &phases))));
    let own = |phase: &Phase| SHARES.iter().position(|p| *p == phase.p).unwrap();
    let best: Vec<Outcome> = phases.iter().enumerate().map(|(index, phase)| ladders[own(phase)][index]).collect();
    let (share, single) = SHARES.iter().zip(&ladders).max_by(|a, b| total(a.1).total_cmp(&total(b.1))).unwrap();
    let assumed = |assumed: f64| means(&phases, stretches, &Control::online(config([assumed; 2])));
    let (right, wrong) = (assumed(stretch), assumed(if stretch == 1.0 { 1.3 } else { 1.0 }));
    // Below what the fastest thresholds take.
    let limit = 0.98 * right.iter().map(|outcome| outcome.p99_tpot_ms).fold(0.0, f64::max);
    let limited = Config { p99_tpot_ms: Some(limit), ..config([stretch; 2]) };
    let limited = means(&phases, stretches, &Control::online(limited));

    println!("\nstretch {stretch}: tokens a second; P99 milliseconds a token behind the slash\n");
    println!(
        "| p | N | eager | one ladder (p = {share}) | ladder of the phase | online | assumed wrongly | limit {limit:.1} ms | min_batch |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let cell = |outcome: &Outcome| format!("{:.0} / {:.1}", outcome.tokens_per_second, outcome.p99_tpot_ms);
    for (index, Phase { p, requests }) in phases.iter().enumerate() {
        let runs = [&eager, single, &best, &right, &wrong, &limited].map(|run| cell(&run[index])).join(" | ");
        println!("| {p} | {requests} | {runs} | {:?}, best {:?} |", right[index].min_batch, best[index].min_batch);
    }
    let totals = [&eager, single, &best, &right, &wrong, &limited].map(|run| format!("{:.1}", total(run))).join(" | ");
    println!("| all | | {totals} | |");
    let worst = |run: &[Outcome], than: &[Outcome]| {
        let ratio = run.iter().zip(than).map(|(a, b)| a.tokens_per_second / b.tokens_per_second);
        100.0 * (ratio.fold(f64::INFINITY, f64::min) - 1.0)
    };
    for (name, run) in [("online", &right), ("assumed wrongly", &wrong), ("limited", &limited)] {
        let (eager, best) = (worst(run, &eager), worst(run, &best));
        println!("{name}: worst phase {eager:+.2} % to eager, {best:+.2} % to the ladder of the phase");
    }
    let over = |run: &[Outcome]| run.iter().filter(|outcome| outcome.p99_tpot_ms > limit).count();
    println!("phases over the limit: eager {}, online {}, limited {}", over(&eager), over(&right), over(&limited));

    let series = [("eager", &eager), ("one ladder", single), ("ladder of the phase", &best), ("online", &right)];
    let bars: Vec<plot::Series> = series
        .iter()
        .map(|(name, run)| plot::Series {
            name,
            values: run.iter().zip(&eager).map(|(a, b)| a.tokens_per_second / b.tokens_per_second).collect(),
        })
        .collect();
    let labels: Vec<String> = phases.iter().map(|phase| format!("p {}, N {}", phase.p, phase.requests)).collect();
    let title = format!("tokens a second by those of eager, stretch {stretch}");
    std::fs::write(directory.join(format!("follow-{stretch:.1}.svg")), plot::bars(&title, &labels, &bars)).unwrap();
}

fn main() {
    let directory = std::env::args().nth(1).unwrap_or_else(|| ".".into());
    let seeds = std::env::args().nth(2).map_or(8, |seeds| seeds.parse().unwrap());
    for stretch in [1.0, 1.3] {
        study(stretch, seeds, Path::new(&directory));
    }
}
