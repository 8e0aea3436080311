//! The online tuner on traffic that changes, with the simulator as the plant.

#![allow(clippy::unwrap_used)] // Helpers of tests.

#[path = "../examples/follow/plant.rs"]
mod plant;

use std::time::Duration;

use plant::{Control, Length, Outcome, Phase, best_ladder, config};
use proptest::prelude::*;
use tokenrouter_batching::Fault;
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

/// `steps` of one request each at every model in an interval, by model with where they go and what one takes.
fn interval(seen: &mut [Seen], steps: &[(&[u32], f64)]) {
    for (seen, (routed, ms)) in seen.iter_mut().zip(steps) {
        for (to, count) in routed.iter().enumerate() {
            let mut one = vec![0; routed.len()];
            one[to] = 1;
            (0..*count).for_each(|_| seen.step(*ms, 0.0, &one, 1.0));
        }
    }
}

/// Two requests, p = 0.05: the large model has some 60 requests in the window.
#[test]
fn few_requests_at_one_model_are_not_too_few() {
    let config = Config { ladders: vec![vec![1], vec![1, 2]], ..config([1.0, 1.0]) };
    let mut online = Online::new(config, Duration::ZERO).unwrap();
    let mut seen = vec![Seen::none(2); 2];
    let mut choices = Vec::new();
    for turn in 1..=30 {
        let there = [20, 28, 24][turn as usize % 3];
        interval(&mut seen, &[(&[480 - there, there], 6.0), (&[there, 0], 27.9)]);
        online.active(2);
        choices.extend(online.choose(Duration::from_secs(2 * turn), &seen));
        assert!(!online.thin(), "interval {turn}");
    }
    assert!(online.estimate().is_some_and(|(members, _)| members == [0, 1]), "{:?}", online.estimate());
    assert!(choices.len() <= 2 && choices.iter().all(|choice| choice.reason != Reason::Thin), "{choices:?}");
}

#[test]
fn a_rare_third_model_changes_nothing_for_the_others() {
    let configured = vec![vec![1], vec![1, 2], vec![1]];
    let names = ["s", "l", "xl"].map(String::from).to_vec();
    let config = Config { names, ladders: configured.clone(), stretch: vec![1.0; 3], ..config([1.0; 2]) };
    let mut online = Online::new(config, Duration::ZERO).unwrap();
    let mut seen = vec![Seen::none(3); 3];
    let (mut choices, mut joined) = (Vec::new(), None);
    for turn in 1..=40 {
        // A weight of about 100 with the past.
        let rare = [30, 50, 38, 42][turn as usize % 4];
        interval(&mut seen, &[(&[1600 - rare, 400, rare], 6.0), (&[400, 0, 0], 27.9), (&[rare, 0, 0], 60.0)]);
        online.active(6);
        choices.extend(online.choose(Duration::from_secs(2 * turn), &seen));
        let (members, _) = online.estimate().unwrap();
        assert!(members.starts_with(&[0, 1]) && (joined.is_none() || members.len() == 3), "interval {turn}");
        joined = joined.or((members.len() == 3).then_some(turn));
    }
    assert!(joined.is_some_and(|turn| turn > 1), "{joined:?}");
    assert!(choices.len() <= 3 && choices.iter().all(|choice| choice.reason != Reason::Thin), "{choices:?}");
    assert!(online.ladders()[1].len() == 6 && online.ladders()[1] != configured[1], "{:?}", online.ladders());
}

/// A bare model has requests that began long ago and have not ended.
#[test]
fn requests_outside_are_left_out_and_come_back_when_they_end() {
    let names = ["s", "l", "bare"].map(String::from).to_vec();
    let config = Config { names, ladders: vec![vec![1]; 3], stretch: vec![1.0; 3], ..config([1.0; 2]) };
    let mut online = Online::new(config, Duration::ZERO).unwrap();
    let mut seen = vec![Seen::none(3); 3];
    for (turn, members) in (1..).zip([&[0, 1][..], &[0, 1], &[0, 1, 2], &[0, 1, 2]]) {
        interval(&mut seen, &[(&[300, 100, 0], 6.0), (&[100, 0, 0], 27.9), (&[0, 0, 100], 20.0)]);
        seen[0].begun += 1.0;
        seen[0].ended += 1.0;
        if turn == 3 {
            seen[2].begun += 1.0;
            seen[2].ended += 1.0;
        }
        online.active(4);
        online.choose(Duration::from_secs(2 * turn), &seen);
        assert_eq!((online.estimate().unwrap().0, online.fault()), (members, None), "interval {turn}");
        assert!(members.len() == 3 || online.ladders()[2] == [1], "{:?}", online.ladders());
    }
}

#[test]
fn what_describes_no_system_is_told_and_is_not_too_little() {
    let mut online = Online::new(config([1.0, 1.0]), Duration::ZERO).unwrap();
    let mut seen = vec![Seen::none(2); 2];
    let mut turn = |turn: u64, ms: f64| {
        interval(&mut seen, &[(&[300, 200], 6.0), (&[200, 0], ms)]);
        online.active(8);
        let choice = online.choose(Duration::from_secs(2 * turn), &seen);
        (choice, online.thin(), online.fault().cloned(), online.ladders().to_vec())
    };
    let (choice, .., tuned) = turn(1, 28.0);
    assert!(choice.is_some_and(|choice| choice.ladders == tuned) && tuned[1].len() == 8);
    let (choice, thin, fault, ladders) = turn(2, 1e9);
    assert!(matches!(fault, Some(Fault::Ratio { .. })), "{fault:?}");
    assert_eq!((choice, thin, ladders), (None, false, tuned));
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
