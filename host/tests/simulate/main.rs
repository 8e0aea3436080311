//! Simulations against what is known exactly, and the command as its users meet it.

#![allow(clippy::unwrap_used)] // Helpers of tests.

mod chain;
mod command;
mod schedules;

use std::time::Duration;

use tokenrouter::runner::simulated::Latency;
use tokenrouter::simulation::plan::{Arrivals, Lengths, Plan, PlannedLoad, PlannedModel};
use tokenrouter::simulation::run::run;
use tokenrouter::simulation::summary::Summary;
use tokenrouter::subserver::coordinator::Waiting;
use tokenrouter::subserver::gate::Schedule;

/// Committed tokens of a simulation that is compared with exact numbers.
const TOKENS: u32 = 60_000;

fn ms(ms: f64) -> Duration {
    Duration::from_secs_f64(ms / 1000.0)
}

/// A model on the common host that waits for nothing but its gate.
fn model(step_ms: &[f64], min_batch: u32, routing: &[f64], commit: &[f64]) -> PlannedModel {
    let points = (1..).zip(step_ms).map(|(size, &time)| (size, ms(time))).collect();
    PlannedModel {
        name: String::new(),
        hosts: vec![0],
        latency: Latency::new(points, Duration::ZERO).unwrap(),
        waiting: Waiting { min_batch: vec![min_batch], max_wait: Duration::from_secs(3600), hold: Duration::ZERO },
        stretch: Vec::new(),
        kv_tokens: None,
        max_rows: 1 << 30,
        prefill_chunk: 1 << 30,
        routing: routing.to_vec(),
        commit: commit.to_vec(),
    }
}

/// `under_way` requests for ever, as far as the measured part goes: four rounds of them.
fn closed(models: Vec<PlannedModel>, under_way: u32, schedule: Schedule) -> Plan {
    let requests = 4 * under_way;
    let output = TOKENS / requests;
    let load = PlannedLoad {
        requests,
        arrivals: Arrivals::Closed(under_way),
        prompt: Lengths(1, 1),
        output: Lengths(output, output),
    };
    Plan { models, entry: 0, schedule, delay: Duration::ZERO, load, seed: 7 }
}

fn summary(plan: &Plan) -> Summary {
    Summary::new(plan, None, &run(plan, &|_| {}).unwrap())
}

/// The published R2R numbers: small 6 ms, large 27.9 ms, and `p` of the tokens go to the large one.
fn r2r(p: f64, min_batch: [u32; 2]) -> Vec<PlannedModel> {
    vec![
        model(&[6.0], min_batch[0], &[1.0 - p, p], &[1.0, 0.0]),
        model(&[27.9], min_batch[1], &[1.0, 0.0], &[1.0, 1.0]),
    ]
}

#[track_caller]
fn assert_close(got: f64, want: f64, what: &str) {
    assert_within(0.02, got, want, what);
}

#[track_caller]
fn assert_within(share: f64, got: f64, want: f64, what: &str) {
    assert!((got / want - 1.0).abs() < share, "{what}: {got}, not {want}");
}
