//! Chain, simulator and search against each other.

#![allow(clippy::unwrap_used)] // Helpers of tests.

use tokenrouter_batching::chain::{ChainError, Limits, solve};
use tokenrouter_batching::search::{self, Method, Options};
use tokenrouter_batching::simulation::{self, Effort, Simulation};
use tokenrouter_batching::{Grain, Model, Setting, System};

/// Two models: a step of the first leads to the second with `p`, one of the second stays with `stay`.
fn pair(times: [Vec<f64>; 2], p: f64, stay: f64) -> System {
    let [small, large] = times;
    System {
        models: vec![Model::new("small", small), Model::new("large", large)],
        routing: vec![vec![1.0 - p, p], vec![1.0 - stay, stay]],
        commits: vec![vec![1.0, 0.0], vec![1.0, 1.0]],
        sigma: Vec::new(),
        entry: 0,
    }
}

fn three() -> System {
    let model = |name: &str, ms: f64| Model::new(name, vec![ms]);
    System {
        models: vec![model("a", 6.0), model("b", 12.0), model("c", 27.9)],
        routing: vec![vec![0.5, 0.3, 0.2]; 3],
        commits: vec![vec![1.0; 3]; 3],
        sigma: Vec::new(),
        entry: 0,
    }
}

/// Throughput of the chain, and how far from it the simulator is, in standard errors and relatively.
fn compared(system: System, requests: usize, setting: &Setting) -> (f64, f64, f64) {
    let system = system.checked().unwrap();
    let exact = solve(&system, requests, setting, Grain::Auto, Limits::EXACT).unwrap();
    let folded = Limits { fold: true, tail: 1e-9, ..Limits::EXACT };
    let folded = solve(&system, requests, setting, Grain::Auto, folded).unwrap();
    let (a, b) = (exact.rates.throughput, folded.rates.throughput);
    assert!((a / b - 1.0).abs() < 1e-7 && folded.states <= exact.states, "folding: {a} {b}");
    let effort = Effort { runs: 10, steps: 60_000, seed: 7 };
    let simulated = simulation::estimate(&system, requests, setting, effort).unwrap();
    let off = simulated.rates.throughput - a;
    (a, off / simulated.standard_error, off / a)
}

#[test]
fn chain_and_simulator_agree() {
    let scalar = || pair([vec![6.0], vec![27.9]], 0.35, 0.0);
    let stretched = |small: f64, large: f64| {
        let mut system = scalar();
        system.models[0].stretch = small;
        system.models[1].stretch = large;
        system
    };
    let held = |hold: f64| Setting { min_batch: vec![1, 3], hold_ms: vec![hold, 0.0] };
    let mut capped = scalar();
    capped.models[1].max_batch = Some(2);
    let mut dilated = three();
    dilated.sigma = vec![1.0, 1.0, 1.2, 1.5];
    dilated.models[2].stretch = 1.25;
    for (what, system, requests, setting) in [
        ("scalars", scalar(), 8, Setting::new(vec![1, 5])),
        ("unequal stretch", stretched(3.4, 1.1), 8, Setting::new(vec![1, 5])),
        ("unequal stretch, eager", stretched(2.5, 1.0), 4, Setting::new(vec![1, 1])),
        ("hold under stretch", stretched(2.0, 1.1), 8, held(4.5)),
        ("one at a time", stretched(3.4, 1.1), 8, held(1e6)),
        ("largest batch", capped, 8, Setting::new(vec![2, 2])),
        ("large stays", pair([vec![2.0], vec![9.0]], 0.1, 0.6), 6, Setting::new(vec![2, 3])),
        ("three, sigma and stretch", dilated, 4, Setting::new(vec![1, 2, 2])),
    ] {
        let (throughput, errors, _) = compared(system, requests, &setting);
        assert!(errors.abs() < 4.5, "{what}: {throughput}, {errors} standard errors");
    }
}

#[test]
fn times_that_share_no_grain_are_within_a_thousandth() {
    let table = |base: f64, slope: f64| {
        (0..8).map(|b| base * (1.0 + slope * f64::from(b) + 0.003 * f64::from(b * b % 5))).collect()
    };
    for (p, rho, setting) in [(0.12, 3.6, [1, 5]), (0.16, 4.9, [1, 1]), (0.35, 17.3, [1, 6])] {
        let system = pair([table(1.0, 0.031), table(rho, 0.017)], p, 0.0);
        let (throughput, errors, relative) = compared(system, 8, &Setting::new(setting.to_vec()));
        assert!(relative.abs() < 1e-3 + 4.0 * relative.abs() / errors.abs(), "{throughput}: {relative}, {errors}");
    }
}

#[test]
fn the_search_finds_the_best_of_all() {
    let limits = Limits { fold: true, tolerance: 1e-11, ..Limits::EXACT };
    for (p, rho, stay, stretch) in [
        (0.35, 4.65, 0.0, 1.0),
        (0.1, 3.0, 0.0, 1.5),
        (0.4, 14.0, 0.3, 1.0),
        (0.05, 2.0, 0.5, 3.0),
        (0.2, 9.0, 0.0, 1.0),
    ] {
        let mut system = pair([vec![1.0], vec![rho]], p, stay);
        system.models[0].stretch = stretch;
        let system = system.checked().unwrap();
        let (all, _, _) = search::all(&system, 9, &Options::default(), limits).unwrap();
        let best = search::best(&system, 9, &Options::default(), None).unwrap();
        let loss = 1.0 - best.rates.throughput / all.rates.throughput;
        assert!(loss < 1e-3, "p={p} rho={rho}: {:?}, not {:?}", best.setting, all.setting);
    }
}

#[test]
fn ladders_of_the_r2r_example() {
    let system = pair([vec![6.0], vec![27.9]], 0.35, 0.0).checked().unwrap();
    let options = Options { fixed: vec![Some(1), None], ..Options::default() };
    let ladder = search::ladder(&system, 1..=16, &options).unwrap();
    let large: Vec<u32> = ladder.iter().map(|(_, point)| point.setting.min_batch[1]).collect();
    assert_eq!(large, [1, 2, 2, 3, 4, 4, 5, 5, 6, 7, 7, 8, 9, 9, 10, 10]);
    assert!(ladder.iter().all(|(_, point)| matches!(point.method, Method::Chain { .. })));
}

#[test]
fn plateaus_do_not_hold_the_search() {
    // A saturated large model: no threshold of it below about 30 changes anything.
    let mut system = pair([vec![1.0], vec![17.3]], 0.1, 0.0);
    system.models.iter_mut().for_each(|model| model.stretch = 1.3);
    let best = search::best(&system.checked().unwrap(), 64, &Options::default(), None).unwrap();
    assert!(best.rates.throughput > 15_800.0, "{:?}", best.setting);
}

#[test]
fn holds_are_chosen_where_overlap_costs() {
    let mut system = pair([vec![6.0], vec![27.9]], 0.35, 0.0);
    system.models.iter_mut().for_each(|model| model.stretch = 1.3);
    let system = system.checked().unwrap();
    let fixed = vec![Some(1), None];
    let options = Options { fixed, holds: vec![None, Some(0.0)], ..Options::default() };
    let best = search::best(&system, 16, &options, None).unwrap();
    // 676 without a hold, 744 with one model at a time.
    assert!(best.rates.throughput > 743.0 && best.setting.hold_ms[0] > 20.0, "{best:?}");
    // Thresholds of both models that leave no request over do the same.
    let free = search::best(&system, 16, &Options::default(), None).unwrap();
    assert!(free.rates.throughput > 743.0 && free.setting.min_batch == [5, 12], "{free:?}");
}

#[test]
fn chains_that_are_too_large_are_simulated_and_say_so() {
    let best =
        search::best(&three().checked().unwrap(), 12, &Options { haste: 10, ..Options::default() }, None).unwrap();
    let Method::Simulation { standard_error, reason } = &best.method else { panic!("{best:?}") };
    assert!(matches!(reason, ChainError::TooLarge(_)) && *standard_error < 3e-3 * best.rates.throughput);
}

#[test]
fn what_locks_up_is_refused_or_told() {
    let system = pair([vec![1.0], vec![2.0]], 0.3, 0.0).checked().unwrap();
    let locking = Setting::new(vec![2, 3]);
    assert!(search::rates(&system, 3, &locking, &Options::default()).is_err());
    assert!(Simulation::new(system.clone(), 3, locking.clone(), 1).is_err());
    let fixed = Options { fixed: vec![Some(2), Some(3)], ..Options::default() };
    assert!(search::best(&system, 3, &fixed, None).unwrap_err().to_string().contains("locks up"));
    let mut simulation = Simulation::new(system, 4, locking, 1).unwrap();
    simulation.set_requests(1);
    assert!((0..10_000).any(|_| simulation.advance(&mut ()).is_err()));
}
