//! Faults that clients bring about as often as they like, since they choose the settings: not each of them is told.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::policy::monitor::Names;

/// Faults of one kind.
#[derive(Debug, Default)]
pub(super) struct Faults {
    told: Option<Instant>,
    untold: u64,
}

impl Faults {
    const EVERY: Duration = Duration::from_secs(10);

    /// Whether the fault of this moment is to be told; then with how many were not since the last one that was.
    pub fn tell(&mut self, now: Instant) -> Option<u64> {
        if self.told.is_some_and(|told| now.saturating_duration_since(told) < Self::EVERY) {
            self.untold += 1;
            return None;
        }
        self.told = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

/// What goes wrong at work in the variants of a route: all of them are one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AtWork {
    pub names: Names,
    pub hook: &'static str,
    /// The policy is not called again.
    pub fails: bool,
}

/// Nothing that was told is forgotten: operators choose the names.
#[derive(Debug, Default)]
pub(super) struct FaultsAtWork(Mutex<BTreeMap<AtWork, Faults>>);

impl FaultsAtWork {
    /// As [`Faults::tell`].
    pub fn tell(&self, what: AtWork, now: Instant) -> Option<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(what).or_default().tell(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_told_at_times() {
        let (mut faults, start) = (Faults::default(), Instant::now());
        let told = [0, 1, 9, 10, 11, 30].map(|second| faults.tell(start + Duration::from_secs(second)));
        assert_eq!(told, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
