//! The online tuner on traffic that changes, with the simulator as the plant.

#![allow(clippy::unwrap_used)] // Helpers of tests.

#[path = "../examples/follow/plant.rs"]
mod plant;

use std::time::Duration;

use plant::{Control, Length, Outcome, Phase, best_ladder, config};
use proptest::prelude::*;
use tokenrouter_batching::online::{Config, Online, Reason, Seen};
use tokenrouter_batching::system::most_waiting;

fn run(phases: &[Phase], stretch: [f64; 2], control: Control) -> Vec<Outcome> {
    plant::run(phases, stretch, Length { phase: 40_000.0, settling: 10_000.0 }, control, 11)
}

#[test]
fn follows_traffic_that_changes() {
    let phases =
        [(0.05, 16), (0.4, 16), (0.15, 32), (0.4, 4), (0.05, 2), (0.15, 8)].map(|(p, requests)| Phase { p, requests });
    let shares = [0.05, 0.15, 0.4];
    // Assumed are 1 and 1.
    for stretch in [[1.0, 1.0], [1.6, 1.15]] {
        let online = run(&phases, stretch, Control::online(config([1.0, 1.0])));
        let eager = run(&phases, stretch, Control::eager());
        let ladder = |p: &f64| run(&phases, stretch, Control::Ladders(best_ladder(*p, stretch, &phases)));
        let fixed: Vec<Vec<Outcome>> = shares.iter().map(ladder).collect();
        for (index, phase) in phases.iter().enumerate() {
            let own = shares.iter().position(|p| *p == phase.p).unwrap();
            let [ours, best, eager] = [&online, &fixed[own], &eager].map(|run| run[index].tokens_per_second);
            let what = format!("{stretch:?}, p {}, N {}: {ours}, best {best}, eager {eager}", phase.p, phase.requests);
            assert!(ours > 0.97 * best && ours > 0.99 * eager, "{what}");
        }
        let total = |run: &[Outcome]| run.iter().map(|outcome| outcome.tokens_per_second).sum::<f64>();
        for run in fixed.iter().chain([&eager]) {
            assert!(total(&online) > total(run), "{stretch:?}: {} {}", total(&online), total(run));
        }
    }
}

/// Here a threshold of 2 is a little faster, and single tokens wait for longer.
#[test]
fn keeps_a_limit_on_the_time_per_token() {
    let phases = [Phase { p: 0.15, requests: 2 }; 2];
    let stretch = [1.3, 1.3];
    let length = Length { phase: 200_000.0, settling: 20_000.0 };
    let p99 = |control| plant::run(&phases, stretch, length, control, 11)[1].p99_tpot_ms;
    let (free, eager) = (p99(Control::online(config(stretch))), p99(Control::eager()));
    let limit = (free + eager) / 2.0;
    let limited = p99(Control::online(Config { p99_tpot_ms: Some(limit), ..config(stretch) }));
    assert!(limited <= limit && limit < free, "{limited} for {limit}, free {free}");
}

#[test]
fn little_is_known_at_first_and_after_silence() {
    let configured = vec![vec![1], vec![1, 2]];
    let config = Config { ladders: configured.clone(), ..config([1.0, 1.0]) };
    let mut online = Online::new(config, Duration::ZERO).unwrap();
    let at = Duration::from_secs;
    let mut seen = vec![Seen::none(2); 2];
    online.active(8);
    seen[0].step(6.0, 0.0, &[1, 1], 1.0);
    assert_eq!(online.choose(at(1), &seen), None);
    assert_eq!(online.choose(at(3), &seen), None);
    assert_eq!(online.ladders(), configured);
    for _ in 0..200 {
        seen[0].step(6.0, 0.0, &[3, 2], 3.0);
        seen[1].step(28.0, 0.0, &[2, 0], 2.0);
    }
    online.active(8);
    let choice = online.choose(at(6), &seen).unwrap();
    assert!(matches!(choice.reason, Reason::Tuned { requests: 8, .. }), "{choice:?}");
    assert!(choice.ladders[1][7] > 2, "{choice:?}");
    // The same again is no reason to change.
    for _ in 0..200 {
        seen[0].step(6.0, 0.0, &[3, 2], 3.0);
        seen[1].step(28.0, 0.0, &[2, 0], 2.0);
    }
    online.active(8);
    assert_eq!(online.choose(at(9), &seen), None);
    let mut after = (5..20).filter_map(|turn| online.choose(at(3 * turn), &seen));
    let choice = after.next().unwrap();
    assert_eq!((choice.reason, choice.ladders), (Reason::Thin, configured));
    assert_eq!(after.next(), None);
}

#[test]
fn missed_first_tokens_take_thresholds_back() {
    let config = Config { p99_ttft_ms: Some(100.0), ..config([1.0, 1.0]) };
    let mut online = Online::new(config, Duration::ZERO).unwrap();
    let (mut largest, mut seen) = (Vec::new(), vec![Seen::none(2); 2]);
    for turn in 1..=12 {
        for _ in 0..200 {
            seen[0].step(6.0, 0.0, &[3, 2], 3.0);
            seen[1].step(28.0, 0.0, &[2, 0], 2.0);
        }
        online.active(6);
        online.ttft(if (3..8).contains(&turn) { 150.0 } else { 50.0 });
        online.choose(Duration::from_secs(2 * turn), &seen);
        largest.push(online.ladders()[1].iter().copied().max().unwrap());
    }
    assert!(largest[1] > 2 && largest[6] == 1 && largest[11] > 1, "{largest:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(6) })]

    #[test]
    fn no_choice_locks_up(
        steps in prop::collection::vec((0usize..3, 1u32..5, 1u32..5, 1u32..5, 1.0f64..40.0, 0.0f64..1.0), 60..120),
        requests in 1usize..7,
        configured in 1u32..4,
    ) {
        let config = Config {
            names: ["a", "b", "c"].map(String::from).to_vec(),
            ladders: vec![vec![1], vec![1], vec![1, configured.min(2)]],
            stretch: vec![1.0; 3],
            ..config([1.0; 2])
        };
        let mut online = Online::new(config, Duration::ZERO).unwrap();
        let mut seen = vec![Seen::none(3); 3];
        for (turn, steps) in steps.chunks(60).enumerate() {
            for &(model, a, b, c, ms, overlap) in steps {
                for extra in 0..12 {
                    seen[(model + extra) % 3].step(ms, overlap * ms, &[a, b, c], 1.0);
                }
            }
            online.active(requests);
            online.choose(Duration::from_secs(2 * (turn as u64 + 1)), &seen);
            for n in 1..=2 * requests {
                let at = |ladder: &Vec<u32>| ladder.get(n - 1).or(ladder.last()).copied().unwrap();
                let min_batch: Vec<u32> = online.ladders().iter().map(at).collect();
                prop_assert!(min_batch.iter().all(|b| *b >= 1) && most_waiting(&min_batch) < n as u64, "{n}: {min_batch:?}");
            }
        }
    }
}
