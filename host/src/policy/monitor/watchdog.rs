//! Hooks that do not come back. Pure: the time is given.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Hook, Monitor, Names};

/// Time between two looks.
pub const PERIOD: Duration = Duration::from_millis(100);
/// What one look counts at most. After more the whole process stood still (SIGSTOP, a debugger), hooks and all.
const MOST_BETWEEN: Duration = PERIOD.saturating_mul(2);
/// A hook that runs for so long is told of.
pub const HUNG_AFTER: Duration = Duration::from_secs(1);

/// A hook that has not come back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hung {
    pub names: Names,
    pub hook: Hook,
    /// Of its model.
    pub step: u64,
    /// Since the watchdog first saw it, without times in which the process stood still.
    pub lasted: Duration,
}

impl Hung {
    /// What is told of it, a clause.
    pub fn not_back(&self) -> String {
        not_back(self.hook, &self.names.plugin, self.lasted)
    }
}

/// What is told of a hook that has not come back, a clause.
pub fn not_back(hook: Hook, plugin: &str, lasted: Duration) -> String {
    format!("hook `{}` of plugin `{plugin}` has not come back for {} s", hook.name(), lasted.as_secs())
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
pub struct Watchdog {
    seen: HashMap<u64, Seen>,
    last: Duration,
    /// The time that counts; `Seen::since` is on this clock.
    counted: Duration,
}

impl Watchdog {
    /// Look at all instances. `now` does not run backwards.
    pub fn look(&mut self, monitors: &[Arc<Monitor>], now: Duration) -> Look {
        self.counted += now.saturating_sub(self.last).min(MOST_BETWEEN);
        self.last = now;
        let mut look = Look::default();
        let mut seen = HashMap::new();
        for monitor in monitors {
            let Some((hook, call)) = monitor.crumb.inside() else { continue };
            let known = self.seen.remove(&monitor.id);
            let mut this = match known {
                Some(known) if known.call == call => known,
                other => {
                    look.ended.extend(other.and_then(|other| other.told));
                    Seen { call, since: self.counted, told: None }
                }
            };
            let lasted = self.counted.saturating_sub(this.since);
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
        look.ended.extend(self.seen.drain().filter_map(|(_, seen)| seen.told));
        self.seen = seen;
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

    /// Looks each [`PERIOD`] after `from`; the last one, at `to`.
    fn looks(watchdog: &mut Watchdog, monitors: &[Arc<Monitor>], from: u64, to: u64) -> Look {
        let period = PERIOD.as_millis() as u64;
        (from / period + 1..to.div_ceil(period)).for_each(|at| drop(watchdog.look(monitors, ms(at * period))));
        watchdog.look(monitors, ms(to))
    }

    #[test]
    fn a_pause_of_the_process_is_no_hang() {
        let monitors = [monitor(0)];
        let mut watchdog = Watchdog::default();
        monitors[0].crumb.enter(Hook::Route);
        watchdog.look(&monitors, ms(100));
        assert_eq!(watchdog.look(&monitors, ms(60_000)), Look::default());
        // It hangs all the same: 200 ms of the pause, and 800 since.
        assert_eq!(looks(&mut watchdog, &monitors, 60_000, 60_799), Look::default());
        assert_eq!(routes(&watchdog.look(&monitors, ms(60_800)).began), [("r0", 1000)]);
    }

    #[test]
    fn a_call_that_lasts_is_told_of_once_and_when_it_ends() {
        let monitors = [monitor(0), monitor(1)];
        let mut watchdog = Watchdog::default();
        monitors[1].crumb.at_step(42);
        monitors[1].crumb.enter(Hook::Send);
        assert_eq!(watchdog.look(&monitors, ms(100)), Look::default());
        assert_eq!(looks(&mut watchdog, &monitors, 100, 1099), Look::default());
        let look = watchdog.look(&monitors, ms(1100));
        assert_eq!((routes(&look.began), routes(&look.hung)), (vec![("r1", 1000)], vec![("r1", 1000)]));
        assert_eq!((look.began[0].hook, look.began[0].step), (Hook::Send, 42));
        let look = looks(&mut watchdog, &monitors, 1100, 5000);
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
        assert_eq!(looks(&mut watchdog, &monitors, 0, 1000).began.len(), 1);
        monitors[0].crumb.leave();
        monitors[0].crumb.enter(Hook::Finished);
        let look = watchdog.look(&monitors, ms(1100));
        assert_eq!((look.hung.len(), look.ended.len()), (0, 1));
        assert_eq!(routes(&looks(&mut watchdog, &monitors, 1100, 2100).began), [("r0", 1000)]);
        // An instance that goes away while it hangs has ended, too.
        assert_eq!(watchdog.look(&[], ms(2200)).ended.len(), 1);
    }
}
