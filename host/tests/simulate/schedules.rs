//! What the schedules come to where that is known.

use std::time::Duration;

use tokenrouter::simulation::plan::{Arrivals, Lengths};
use tokenrouter::subserver::gate::Schedule;

use super::{assert_close, closed, model, ms, r2r, summary};

fn rate(p: f64, requests: u32, schedule: Schedule, min_batch: [u32; 2]) -> f64 {
    summary(&closed(r2r(p, min_batch), requests, schedule)).steady_tokens_per_second
}

/// A round is one step of the small model with all requests, and one of the large model if any needs it.
#[test]
fn step_sync_goes_in_rounds() {
    for (p, requests) in [(0.35_f64, 1), (0.35, 4), (0.35, 16), (0.05, 8)] {
        let some = 1.0 - (1.0 - p).powi(requests as i32);
        let want = f64::from(requests) / (0.006 + 0.0279 * some);
        assert_close(rate(p, requests, Schedule::StepSync, [1, 1]), want, &format!("p {p}, N {requests}"));
    }
}

/// The large model starts when nothing is left at the small one: when all requests wait for it. The exact
/// chain gives this for a threshold of N.
#[test]
fn model_sync_runs_each_model_until_nothing_is_ready() {
    for (requests, want) in [(2, 110.3226938796), (8, 332.445060132), (16, 586.1765638089)] {
        assert_close(rate(0.35, requests, Schedule::ModelSync, [1, 1]), want, &format!("N {requests}"));
    }
}

/// Eager models take no notice of ladders; the chain gives this for thresholds of 1.
#[test]
fn eager_models_start_with_one_request() {
    assert_close(rate(0.35, 8, Schedule::Eager, [1, 8]), 369.2065628569, "N 8");
}

/// One model at a time in every schedule with turns, however many there are.
#[test]
fn models_that_take_turns_are_never_busy_together() {
    let thirds = [0.5, 0.3, 0.2];
    for schedule in [Schedule::ModelSync, Schedule::StepSync] {
        let models = [4.0, 9.0, 20.0].map(|step| model(&[step], 1, &thirds, &[1.0; 3])).to_vec();
        let summary = summary(&closed(models, 6, schedule));
        let busy: f64 = summary.models.iter().map(|model| model.busy).sum();
        assert!((0.999..1.0 + 1e-9).contains(&busy), "{schedule:?}: {busy}");
    }
}

/// The large model starts at the end of its longest wait, whatever the schedule would have it wait for.
#[test]
fn the_longest_wait_bounds_every_schedule() {
    for schedule in Schedule::ALL {
        let mut models = r2r(0.01, [1, 2]);
        models[1].waiting.max_wait = ms(10.0);
        let mut plan = closed(models, 4, schedule);
        plan.load.output = Lengths(2000, 2000);
        let summary = summary(&plan);
        // Small steps alone, and now and then a request that waits and goes through the large model.
        let worst = 4.0 * 2000.0 / (2000.0 * (0.006 + 4.0 * 0.01 * (0.01 + 0.006 + 0.0279)));
        assert!(summary.tokens_per_second > worst, "{schedule:?}: {} {worst}", summary.tokens_per_second);
    }
}

/// Messages between hosts take time, those within a host none.
#[test]
fn hand_offs_between_hosts_are_delayed() {
    let mut plan = closed(r2r(1.0, [1, 1]), 1, Schedule::Delayed);
    let near = summary(&plan);
    plan.delay = ms(2.0);
    assert_eq!(summary(&plan).tokens_per_second, near.tokens_per_second);
    plan.models[1].hosts = vec![1];
    assert_close(near.steady_tokens_per_second, 1.0 / 0.0339, "one host");
    assert_close(summary(&plan).steady_tokens_per_second, 1.0 / 0.0379, "two hosts");
}

/// A queue with one server that takes all who wait: the load decides, not the server.
#[test]
fn open_loads_come_at_their_own_pace() {
    let mut plan = closed(vec![model(&[1.0], 1, &[1.0], &[1.0])], 1, Schedule::Delayed);
    plan.load.output = Lengths(1, 1);
    plan.load.requests = 20_000;
    plan.load.arrivals = Arrivals::Poisson(100.0);
    let poisson = summary(&plan);
    assert_close(poisson.tokens_per_second, 100.0, "Poisson");
    // Mostly the server is idle: a step, and seldom a part of another before it.
    assert!(poisson.ttft_ms.p50 == 1.0 && (1.0..2.0).contains(&poisson.ttft_ms.p99), "{:?}", poisson.ttft_ms);
    plan.load.arrivals = Arrivals::Bursts { size: 10, every: Duration::from_millis(50) };
    let bursts = summary(&plan);
    assert_close(bursts.tokens_per_second, 200.0, "bursts");
    assert_close(bursts.models[0].mean_batch, 10.0, "bursts");
    assert_close(bursts.ttft_ms.p99, 1.0, "bursts");
}

/// The same seed gives the same history, another one another.
#[test]
fn simulations_can_be_repeated() {
    let mut plan = closed(r2r(0.35, [1, 3]), 6, Schedule::Delayed);
    let first = summary(&plan);
    assert_eq!(summary(&plan), first);
    plan.seed += 1;
    assert_ne!(summary(&plan), first);
}
