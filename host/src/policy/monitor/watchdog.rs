//! Hooks that do not come back. Pure: the time is given.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Hook, Monitor, Names};

/// A hook that runs for so long is told of.
pub const HUNG_AFTER: Duration = Duration::from_secs(1);

/// A hook that has not come back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hung {
    pub names: Names,
    pub hook: Hook,
    /// Of its model.
    pub step: u64,
    /// Since the watchdog first saw it.
    pub lasted: Duration,
}

/// What one look found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// All that hang.
    pub hung: Vec<Hung>,
    /// Those that did not hang at the last look.
    pub began: Vec<Hung>,
    /// Those that came back since.
    pub ended: Vec<Hung>,
}

#[derive(Debug)]
struct Seen {
    call: u64,
    since: Duration,
    told: Option<Hung>,
}

/// Remembers which call of each instance it saw, and since when.
#[derive(Debug, Default)]
pub struct Watchdog(HashMap<u64, Seen>);

impl Watchdog {
    /// Look at all instances. `now` does not run backwards.
    pub fn look(&mut self, monitors: &[Arc<Monitor>], now: Duration) -> Look {
        let mut look = Look::default();
        let mut seen = HashMap::new();
        for monitor in monitors {
            let Some((hook, call)) = monitor.crumb.inside() else { continue };
            let known = self.0.remove(&monitor.id);
            let mut this = match known {
                Some(known) if known.call == call => known,
                other => {
                    look.ended.extend(other.and_then(|other| other.told));
                    Seen { call, since: now, told: None }
                }
            };
            let lasted = now.saturating_sub(this.since);
            if lasted >= HUNG_AFTER {
                let hung = Hung { names: monitor.names.clone(), hook, step: monitor.crumb.step(), lasted };
                look.hung.push(hung.clone());
                if this.told.replace(hung.clone()).is_none() {
                    look.began.push(hung);
                }
            }
            seen.insert(monitor.id, this);
        }
        // Those left are outside their hooks by now, or gone.
        look.ended.extend(self.0.drain().filter_map(|(_, seen)| seen.told));
        self.0 = seen;
        look
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn monitor(id: u64) -> Arc<Monitor> {
        let names = Names { route: format!("r{id}"), model: "m".into(), plugin: "p".into() };
        Arc::new(Monitor::new(id, names, ms(1)))
    }

    fn routes(of: &[Hung]) -> Vec<(&str, u64)> {
        of.iter().map(|hung| (hung.names.route.as_str(), hung.lasted.as_millis() as u64)).collect()
    }

    #[test]
    fn a_call_that_lasts_is_told_of_once_and_when_it_ends() {
        let monitors = [monitor(0), monitor(1)];
        let mut watchdog = Watchdog::default();
        monitors[1].crumb.at_step(42);
        monitors[1].crumb.enter(Hook::Send);
        assert_eq!(watchdog.look(&monitors, ms(100)), Look::default());
        assert_eq!(watchdog.look(&monitors, ms(1099)), Look::default());
        let look = watchdog.look(&monitors, ms(1100));
        assert_eq!((routes(&look.began), routes(&look.hung)), (vec![("r1", 1000)], vec![("r1", 1000)]));
        assert_eq!((look.began[0].hook, look.began[0].step), (Hook::Send, 42));
        let look = watchdog.look(&monitors, ms(5000));
        assert_eq!((routes(&look.began), routes(&look.hung)), (vec![], vec![("r1", 4900)]));
        monitors[1].crumb.leave();
        let look = watchdog.look(&monitors, ms(5100));
        assert_eq!((routes(&look.ended), look.hung), (vec![("r1", 4900)], vec![]));
        assert_eq!(watchdog.look(&monitors, ms(9000)), Look::default());
    }

    #[test]
    fn many_short_calls_are_no_long_one() {
        let monitors = [monitor(0)];
        let mut watchdog = Watchdog::default();
        for at in 0..50 {
            // Whenever it looks, a hook runs, but never the same call twice.
            monitors[0].crumb.enter(Hook::Route);
            assert_eq!(watchdog.look(&monitors, ms(100 * at)), Look::default());
            monitors[0].crumb.leave();
        }
    }

    #[test]
    fn another_call_after_a_hang_begins_anew() {
        let monitors = [monitor(0)];
        let mut watchdog = Watchdog::default();
        monitors[0].crumb.enter(Hook::Route);
        watchdog.look(&monitors, ms(0));
        assert_eq!(watchdog.look(&monitors, ms(1000)).began.len(), 1);
        monitors[0].crumb.leave();
        monitors[0].crumb.enter(Hook::Finished);
        let look = watchdog.look(&monitors, ms(1100));
        assert_eq!((look.hung.len(), look.ended.len()), (0, 1));
        assert_eq!(routes(&watchdog.look(&monitors, ms(2100)).began), [("r0", 1000)]);
        // An instance that goes away while it hangs has ended, too.
        assert_eq!(watchdog.look(&[], ms(2200)).ended.len(), 1);
    }
}
