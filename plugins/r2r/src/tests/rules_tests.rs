//! Each rule on hand-computed sequences. L: the large model writes; s: the small one does.

use crate::rules::{Row, Rule, State};

const NAN: f64 = f64::NAN;

fn row() -> Row {
    Row { score: NAN, aleatoric: NAN, epistemic: NAN, entropy: NAN, position: 9, seed: 0 }
}

/// The choices for a new request that sees `rows`.
fn choices(rule: Rule, rows: impl IntoIterator<Item = Row>) -> String {
    let mut state = State::default();
    rows.into_iter().map(|row| if rule.wants_large(&mut state, &row) { 'L' } else { 's' }).collect()
}

fn aleatoric<const N: usize>(values: [f64; N]) -> [Row; N] {
    values.map(|aleatoric| Row { aleatoric, ..row() })
}

fn score<const N: usize>(values: [f64; N]) -> [Row; N] {
    values.map(|score| Row { score, ..row() })
}

#[test]
fn score_reaches_its_threshold() {
    let rule = Rule::Score { threshold: 0.5, window: 1 };
    assert_eq!(choices(rule, score([0.5, 0.4999, 1.0, NAN, 0.0])), "LsLss");
    let first = Row { position: 0, ..score([0.4])[0] };
    assert_eq!(choices(rule, [first]), "s", "without a window the first position is judged");
}

#[test]
fn score_of_a_window_starts_behind_it() {
    let rule = Rule::Score { threshold: 0.5, window: 3 };
    let rows = [(0, 0.1), (1, 0.1), (2, 0.1), (2, 0.5), (1, NAN), (2, NAN)];
    assert_eq!(choices(rule, rows.map(|(position, score)| Row { position, score, ..row() })), "LLsLLs");
}

#[test]
fn every_given_measure_reaches_its_threshold() {
    let rule = Rule::Measures { aleatoric: Some(2.0), epistemic: Some(0.25), entropy: Some(0.5) };
    let all = Row { aleatoric: 2.0, epistemic: 0.25, entropy: 0.5, ..row() };
    let rows = [
        all,
        Row { aleatoric: 1.99, ..all },
        Row { epistemic: 0.24, ..all },
        Row { entropy: 0.49, ..all },
        Row { aleatoric: NAN, ..all },
        Row { epistemic: NAN, ..all },
        Row { entropy: NAN, ..all },
    ];
    assert_eq!(choices(rule, rows), "Lssssss");
    let rule = Rule::Measures { aleatoric: Some(2.0), epistemic: None, entropy: None };
    assert_eq!(choices(rule, aleatoric([1.9, 2.0, NAN])), "sLs", "the others are not read");
}

#[test]
fn momentum_has_a_bound_for_each_direction() {
    // Simple below 2. Halves keep the momentum exact.
    let rule = Rule::Momentum { aleatoric: 2.0, factor: 0.5, quick_to_ref: 0.1875, ref_to_quick: 0.75 };
    // Momentum: .5 .75 .875 | .4375 .21875 | .109375 | .5546875 .77734375
    let rows = aleatoric([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 1.0]);
    // 0.75 is not above ref_to_quick: the large model goes on.
    assert_eq!(choices(rule, rows), "LLsssLLs");
    // Momentum: .5 .75 .875 | NaN leaves it and stays | .4375 | .21875 | .109375
    assert_eq!(choices(rule, aleatoric([1.0, 1.0, 1.0, NAN, 2.0, 2.0, 2.0])), "LLssssL");
    // In the large model's turn a row without a signal stays too, and the turn goes on behind it.
    assert_eq!(choices(rule, aleatoric([1.0, NAN, 1.0, 1.0])), "LsLs");
}

#[test]
fn momentum_up_to_the_bound_calls_the_large_model() {
    let rule = Rule::Momentum { aleatoric: 2.0, factor: 0.5, quick_to_ref: 0.25, ref_to_quick: 0.25 };
    // Momentum: .5 .25 .125 .5625
    assert_eq!(choices(rule, aleatoric([0.0, 2.0, 2.0, 0.0])), "sLLs");
}

fn with_entropy(values: &[(f64, f64)]) -> Vec<Row> {
    values.iter().map(|&(aleatoric, entropy)| Row { aleatoric, entropy, ..row() }).collect()
}

#[test]
fn rolling_keeps_the_token_that_called() {
    let rule = Rule::Rolling { aleatoric: 2.0, entropy: 0.5, window: 2 };
    // A new request is the large model's: mean 2 (not below), (2 + 1) / 2, then small.
    // Hard token 4: mean starts with it: (4 + 0) / 2 = 2 goes on, (0 + 1) / 2 ends.
    let rows = [(2.0, 1.0), (1.0, 1.0), (4.0, 1.0), (0.0, 1.0), (1.0, 1.0), (1.0, 1.0)];
    assert_eq!(choices(rule, with_entropy(&rows)), "LsLLss");
}

#[test]
fn rolling_takes_low_entropy_for_simple() {
    let rule = Rule::Rolling { aleatoric: 2.0, entropy: 0.5, window: 2 };
    // Small from the first row on. Entropy 0.5 is not below its threshold.
    assert_eq!(choices(rule, with_entropy(&[(1.0, 0.0), (3.0, 0.4), (3.0, 0.5)])), "ssL");
    // In the large model's turn the entropy says nothing.
    assert_eq!(choices(rule, with_entropy(&[(3.0, 0.0), (0.0, 9.0)])), "Ls");
    assert_eq!(choices(rule, with_entropy(&[(3.0, NAN), (0.0, NAN)])), "Ls");
    // No signal: stay, and remember nothing of the row.
    assert_eq!(choices(rule, with_entropy(&[(1.0, 0.0), (3.0, NAN), (NAN, 1.0), (2.0, 0.5)])), "sssL");
    assert_eq!(choices(rule, with_entropy(&[(3.0, 1.0), (NAN, 1.0), (2.0, 1.0), (1.0, 1.0)])), "LsLs");
}

#[test]
fn duo_rolling_starts_its_mean_behind_the_token_that_called() {
    let rule = Rule::DuoRolling { aleatoric: 2.0, window: 2 };
    // 2 starts large (mean 2), 1: mean 1.5, small. 4 calls. 0 alone is below: small.
    assert_eq!(choices(rule, aleatoric([2.0, 1.0, 4.0, 0.0])), "LsLs");
    // 4 calls; then means 3, (3 + 1) / 2 = 2, (1 + 2) / 2.
    assert_eq!(choices(rule, aleatoric([1.0, 4.0, 3.0, 1.0, 2.0])), "sLLLs");
    assert_eq!(choices(rule, aleatoric([1.0, NAN, 2.0, NAN, 2.0, 1.9])), "ssLsLs");
}

#[test]
fn rolling_score_goes_back_by_the_mean() {
    let rule = Rule::RollingScore { threshold: 0.5, window: 3 };
    // .25 small; .75 calls; means .5, .375 -> small; .5 calls again.
    assert_eq!(choices(rule, score([0.25, 0.75, 0.25, 0.125, 0.5])), "sLLsL");
    // The mean is of three: (1 + 1 + .5) / 3, (1 + .5 + 0) / 3 = .5, (.5 + 0 + 0) / 3.
    assert_eq!(choices(rule, score([1.0, 1.0, 0.5, 0.0, 0.0])), "LLLLs");
    // After the return the window is empty: one low score is enough.
    assert_eq!(choices(rule, score([1.0, 0.0, 0.0, 0.5, 0.25])), "LLsLs");
    assert_eq!(choices(rule, score([NAN, 0.25, NAN, 0.75, NAN, 0.25, 0.0])), "sssLsLs");
}

#[test]
fn states_are_apart() {
    let rule = Rule::DuoRolling { aleatoric: 2.0, window: 2 };
    let (mut one, mut two) = (State::default(), State::default());
    let [low, high] = aleatoric([1.0, 3.0]);
    assert!(!rule.wants_large(&mut one, &low));
    assert!(rule.wants_large(&mut two, &high));
    assert_ne!(one, two);
    // (3 + 1) / 2 keeps the large model; the first request is still small.
    assert!(rule.wants_large(&mut two, &low));
    assert!(!rule.wants_large(&mut one, &low));
}
