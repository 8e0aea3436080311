//! The batch gate (delayed batching). Pure.

use std::time::Duration;

/// For each model, the requests that must be ready before it starts a forward while `live` requests
/// are unfinished: its ladder's entry, lowered so far that the models cannot lock up.
///
/// All models wait for ever only if each has fewer than B_i requests; as every request is somewhere,
/// that needs N <= sum(B_i - 1). Hence sum(B_i - 1) < N. The largest thresholds are lowered first.
pub fn thresholds(ladders: &[Vec<u32>], live: usize) -> Vec<u32> {
    let mut b: Vec<u32> = ladders.iter().map(|ladder| step(ladder, live).max(1)).collect();
    // How many requests may wait at all models together.
    let room = (live as u64).saturating_sub(1);
    let waiting = |cap: u32| b.iter().map(|&b| u64::from(b.min(cap) - 1)).sum::<u64>();
    let largest = b.iter().copied().max().unwrap_or(1);
    if waiting(largest) <= room {
        return b;
    }
    // The highest cap that fits; what is left of the room goes to the first models above it.
    let (mut fits, mut fails) = (1, largest);
    while fails - fits > 1 {
        let middle = fits + (fails - fits) / 2;
        if waiting(middle) <= room { fits = middle } else { fails = middle }
    }
    let mut rest = room - waiting(fits);
    for b in b.iter_mut().filter(|b| **b > fits) {
        *b = fits + u32::from(rest > 0);
        rest = rest.saturating_sub(1);
    }
    b
}

/// The entry of a ladder for `live` requests; beyond its end the last one.
fn step(ladder: &[u32], live: usize) -> u32 {
    let last = ladder.len().saturating_sub(1);
    ladder.get(live.saturating_sub(1).min(last)).copied().unwrap_or(1)
}

/// Whether a ladder can lock up for some number of requests without being lowered: the first such N.
pub fn first_lockup(ladders: &[Vec<u32>]) -> Option<usize> {
    let longest = ladders.iter().map(Vec::len).max().unwrap_or(0);
    (1..=longest).find(|&n| ladders.iter().map(|l| u64::from(step(l, n).max(1) - 1)).sum::<u64>() >= n as u64)
}

/// Whether a model may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    Open,
    /// Not before something arrives or the moment comes, if there is one.
    Closed(Option<Duration>),
}

/// The gate of one model. `waiting_since`: when it last became able to start something.
pub fn gate(ready: usize, threshold: u32, waiting_since: Option<Duration>, max_wait: Duration, now: Duration) -> Gate {
    if ready == 0 {
        return Gate::Closed(None);
    }
    if ready >= threshold as usize {
        return Gate::Open;
    }
    match waiting_since.map(|since| since + max_wait) {
        Some(moment) if moment > now => Gate::Closed(Some(moment)),
        _ => Gate::Open,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ladders_are_indexed_and_clamped() {
        let ladders = [vec![1], vec![1, 2, 2, 3]];
        let at = |n| thresholds(&ladders, n);
        assert_eq!(
            [at(0), at(1), at(2), at(3), at(4), at(99)],
            [[1, 1], [1, 1], [1, 2], [1, 2], [1, 3], [1, 3]].map(Vec::from)
        );
    }

    #[test]
    fn thresholds_never_lock_up() {
        for a in 1..6 {
            for b in 1..6 {
                for c in 1..6 {
                    for n in 1..20 {
                        let t = thresholds(&[vec![a], vec![b], vec![c]], n);
                        assert!(t.iter().map(|b| b - 1).sum::<u32>() < n as u32, "{t:?} {n}");
                        let free = (a + b + c - 3) < n as u32;
                        assert_eq!(t == [a, b, c], free, "lowered without need, or not: {t:?} of {a} {b} {c} at {n}");
                    }
                }
            }
        }
    }

    #[test]
    fn lowering_takes_from_the_largest_first() {
        assert_eq!(thresholds(&[vec![9], vec![2], vec![9]], 10), [5, 2, 5]);
        assert_eq!(thresholds(&[vec![9], vec![2], vec![9]], 11), [6, 2, 5]);
        assert_eq!(thresholds(&[vec![u32::MAX], vec![u32::MAX]], 3), [2, 2]);
    }

    #[test]
    fn lockups_are_found() {
        assert_eq!(first_lockup(&[vec![1], vec![1, 2, 2, 3]]), None);
        assert_eq!(first_lockup(&[vec![2], vec![2]]), Some(1));
        assert_eq!(first_lockup(&[vec![1, 2, 2], vec![1, 1, 3]]), Some(3));
    }

    #[test]
    fn the_gate_waits_no_longer_than_asked() {
        let ms = Duration::from_millis;
        assert_eq!(gate(0, 1, None, ms(5), ms(9)), Gate::Closed(None));
        assert_eq!(gate(2, 2, Some(ms(9)), ms(5), ms(9)), Gate::Open);
        assert_eq!(gate(1, 2, Some(ms(9)), ms(5), ms(10)), Gate::Closed(Some(ms(14))));
        assert_eq!(gate(1, 2, Some(ms(9)), ms(5), ms(14)), Gate::Open);
    }
}
