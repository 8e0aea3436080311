//! How often fresh instances stand in for failed ones. Pure: the time is given.

use std::time::{Duration, Instant};

/// Most restarts within [`WINDOW`]; the next fault ends the policy at its model.
pub const MOST: usize = 3;
pub const WINDOW: Duration = Duration::from_secs(60);

/// The latest restarts, the oldest first.
#[derive(Debug, Default)]
pub struct Restarts([Option<Instant>; MOST]);

impl Restarts {
    /// Enter one at `now`. Its number among those of the window, or `None` if that has all it may have.
    pub fn enter(&mut self, now: Instant) -> Option<usize> {
        let recent = |at: &Option<Instant>| at.is_some_and(|at| now.saturating_duration_since(at) < WINDOW);
        if self.0.first().is_some_and(recent) {
            return None;
        }
        self.0.rotate_left(1);
        self.0[MOST - 1] = Some(now);
        Some(self.0.iter().filter(|at| recent(at)).count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_in_any_minute() {
        let start = Instant::now();
        let mut restarts = Restarts::default();
        let mut at = |seconds| restarts.enter(start + Duration::from_secs(seconds));
        assert_eq!([0, 20, 59].map(&mut at), [Some(1), Some(2), Some(3)]);
        assert_eq!(at(59), None);
        // The first is a minute ago.
        assert_eq!([60, 61].map(&mut at), [Some(3), None]);
        assert_eq!([80, 119, 120].map(&mut at), [Some(3), Some(3), Some(3)]);
        assert_eq!(at(1000), Some(1));
    }
}
