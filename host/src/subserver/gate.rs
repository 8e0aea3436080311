//! The batch gate: when a model may start its next forward. Pure.

use std::time::Duration;

/// How the models of a server share the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// A model starts when as many requests are ready as its ladder asks for.
    #[default]
    Delayed,
    /// A model starts when one request is ready.
    Eager,
    /// One model at a time runs, until no request is ready there.
    ModelSync,
    /// One model at a time runs, for one step: a round of all models takes each request one token on.
    StepSync,
}

impl Schedule {
    pub const ALL: [Self; 4] = [Self::Delayed, Self::Eager, Self::ModelSync, Self::StepSync];

    /// Name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Delayed => "delayed",
            Self::Eager => "eager",
            Self::ModelSync => "model-sync",
            Self::StepSync => "step-sync",
        }
    }

    /// The schedule of this name; the error says which there are.
    pub fn parse(name: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|schedule| schedule.name() == name);
        known.ok_or_else(|| "must be \"delayed\", \"eager\", \"model-sync\" or \"step-sync\"".into())
    }
}

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

/// How many of `live` requests may wait at all models together for ever. As many as `live`, or more: without
/// being lowered the ladders can lock up.
pub fn may_wait(ladders: &[Vec<u32>], live: usize) -> u64 {
    ladders.iter().map(|ladder| u64::from(step(ladder, live).max(1) - 1)).sum()
}

/// Whether a ladder can lock up for some number of requests without being lowered: the first such N.
pub fn first_lockup(ladders: &[Vec<u32>]) -> Option<usize> {
    let longest = ladders.iter().map(Vec::len).max().unwrap_or(0);
    (1..=longest).find(|&n| may_wait(ladders, n) >= n as u64)
}

/// Whether a model may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    Open,
    /// Not before something arrives or the moment comes, if there is one.
    Closed(Option<Duration>),
}

/// What the gate of a model depends on at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Requests that could be in a forward.
    pub ready: usize,
    /// Requests that must be.
    pub threshold: u32,
    /// Whether the schedule lets this model run now.
    pub turn: bool,
    /// The end of what [`hold`] waits for.
    pub held_until: Option<Duration>,
    /// When it last became able to start something.
    pub waiting_since: Option<Duration>,
    /// Longest wait under any schedule.
    pub max_wait: Duration,
    pub now: Duration,
}

/// The gate of one model.
pub fn gate(look: &Look) -> Gate {
    if look.ready == 0 {
        return Gate::Closed(None);
    }
    let latest = look.waiting_since.map_or(look.now, |since| since.saturating_add(look.max_wait));
    if latest <= look.now {
        return Gate::Open;
    }
    if look.ready < look.threshold as usize || !look.turn {
        return Gate::Closed(Some(latest));
    }
    match look.held_until {
        Some(moment) if moment > look.now => Gate::Closed(Some(moment.min(latest))),
        _ => Gate::Open,
    }
}

/// A forward under way, as far as its model can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Underway {
    /// When it should end.
    pub ends: Duration,
    /// When it is so late that nobody waits for it any more.
    pub overdue: Duration,
}

/// Until when a model that holds for `hold` waits for peers that end within it. `None`: it need not wait.
pub fn hold(hold: Duration, peers: impl Iterator<Item = Underway>, now: Duration) -> Option<Duration> {
    let near = peers.filter(|peer| peer.ends <= now.saturating_add(hold) && peer.overdue > now);
    near.map(|peer| peer.overdue).max()
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

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn the_gate_waits_no_longer_than_asked() {
        let look = |ready, threshold, turn, held_until: Option<u64>, now| {
            let (held_until, waiting_since) = (held_until.map(ms), Some(ms(9)));
            gate(&Look { ready, threshold, turn, held_until, waiting_since, max_wait: ms(5), now: ms(now) })
        };
        assert_eq!(look(0, 1, true, None, 9), Gate::Closed(None));
        assert_eq!(look(2, 2, true, None, 9), Gate::Open);
        assert_eq!(look(1, 2, true, None, 10), Gate::Closed(Some(ms(14))));
        assert_eq!(look(2, 2, false, None, 10), Gate::Closed(Some(ms(14))));
        assert_eq!(look(2, 2, true, Some(12), 10), Gate::Closed(Some(ms(12))));
        assert_eq!(look(2, 2, true, Some(12), 12), Gate::Open);
        assert_eq!(look(2, 2, true, Some(20), 10), Gate::Closed(Some(ms(14))));
        assert_eq!(look(1, 2, false, Some(20), 14), Gate::Open);
    }

    #[test]
    fn a_hold_is_for_what_ends_soon() {
        let at = |ends, overdue| Underway { ends: ms(ends), overdue: ms(overdue) };
        let peers = [at(20, 22), at(14, 15)];
        let held = |hold_ms, now| hold(ms(hold_ms), peers.into_iter(), ms(now));
        assert_eq!(held(3, 10), None);
        assert_eq!(held(4, 10), Some(ms(15)));
        assert_eq!(held(10, 10), Some(ms(22)));
        assert_eq!((held(4, 15), held(5, 15), held(5, 21), held(5, 22)), (None, Some(ms(22)), Some(ms(22)), None));
    }

    #[test]
    fn schedules_have_names() {
        for schedule in Schedule::ALL {
            assert_eq!(Schedule::parse(schedule.name()), Ok(schedule));
        }
        assert!(Schedule::parse("lazy").is_err_and(|e| Schedule::ALL.iter().all(|s| e.contains(s.name()))));
    }
}
