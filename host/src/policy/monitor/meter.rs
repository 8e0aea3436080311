//! Calls of an instance, measured on the thread that makes them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenrouter_plugin_api::host::float_mode;

use super::{Hook, Monitor};
use crate::policy::{PolicyFailure, PolicyInstance, Survived};

/// So many steps in a row in which `route` takes more than ten times its budget are worth a line in the log.
pub const SLOW_STEPS: u32 = 16;

/// Something that the operator should know of a policy that goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub hook: Hook,
    pub message: String,
}

/// Counts that reach a power of ten are told: an event without end costs a line now and then.
pub fn worth_a_line(count: u64) -> bool {
    count > 0 && 10u64.pow(count.ilog10()) == count
}

/// The side of a [`Monitor`] that its model's thread holds.
pub struct Meter {
    pub monitor: Arc<Monitor>,
    /// Steps in a row in which `route` was much too slow.
    slow: u32,
    /// How often that came to [`SLOW_STEPS`].
    slow_rows: u64,
    float_modes: u64,
}

impl Meter {
    pub fn new(monitor: Arc<Monitor>) -> Self {
        Self { monitor, slow: 0, slow_rows: 0, float_modes: 0 }
    }

    pub fn at_step(&self, step: u64) {
        self.monitor.crumb.at_step(step);
    }

    /// Call `hook` by `body`, and note what is to be told.
    pub fn call<T>(
        &mut self,
        hook: Hook,
        policy: &mut dyn PolicyInstance,
        body: impl FnOnce(&mut dyn PolicyInstance) -> Result<T, PolicyFailure>,
        notes: &mut Vec<Note>,
    ) -> Result<T, PolicyFailure> {
        let float_before = float_mode::get();
        let began = Instant::now();
        let result = self.monitor.watch(hook, || body(policy));
        let took = began.elapsed();
        if float_mode::get() != float_before {
            // What other routes compute on this thread must not depend on this plugin.
            float_mode::set(float_before);
            self.float_mode_changed(hook, notes);
        }
        let sums = self.monitor.sums(hook);
        sums.took(took);
        sums.over_budget.add(u64::from(took > self.monitor.budget));
        sums.failures.add(u64::from(result.is_err()));
        if hook == Hook::Route {
            notes.extend(self.slow_note(took));
        }
        for Survived { unknown_destination, wrong_answer, message } in policy.survived() {
            self.monitor.count_wrong(hook, unknown_destination.into(), wrong_answer.into());
            self.monitor.sums(hook).restarts.add(1);
            notes.push(Note { hook, message });
        }
        result
    }

    /// Drop `policy`, in sight of the watchdog.
    pub fn drop_policy(&self, policy: Box<dyn PolicyInstance>) {
        self.monitor.watch(Hook::Drop, || drop(policy));
    }

    fn float_mode_changed(&mut self, hook: Hook, notes: &mut Vec<Note>) {
        self.monitor.count_wrong(hook, 0, 1);
        self.float_modes += 1;
        if worth_a_line(self.float_modes) {
            let message = format!(
                "the hook left rounding, or the treatment of tiny numbers, changed ({} times so far); it was changed \
                 back",
                self.float_modes
            );
            notes.push(Note { hook, message });
        }
    }

    fn slow_note(&mut self, took: Duration) -> Option<Note> {
        let budget = self.monitor.budget;
        self.slow = if took > budget.saturating_mul(10) { self.slow.saturating_add(1) } else { 0 };
        if self.slow != SLOW_STEPS {
            return None;
        }
        self.slow_rows += 1;
        worth_a_line(self.slow_rows).then(|| Note {
            hook: Hook::Route,
            message: format!(
                "the hook took more than ten times its budget in {SLOW_STEPS} steps in a row, just now {} µs \
                 (budget_us = {}); every request of its model waits for it",
                took.as_micros(),
                budget.as_micros()
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::monitor::{Monitors, Names};

    fn meter(budget_us: u64) -> Meter {
        let names = Names { route: "r".into(), model: "m".into(), plugin: "p".into() };
        Meter::new(Monitors::default().add(names, Duration::from_micros(budget_us)))
    }

    #[test]
    fn ever_fewer_lines() {
        let told: Vec<u64> = (0..=2000).filter(|count| worth_a_line(*count)).collect();
        assert_eq!(told, [1, 10, 100, 1000]);
    }

    #[test]
    fn a_row_of_slow_steps_is_told_once() {
        let mut meter = meter(5);
        let (slow, fair) = (Duration::from_micros(51), Duration::from_micros(50));
        let mut row = |steps: u32, took| (0..steps).filter_map(|_| meter.slow_note(took)).collect::<Vec<_>>();
        assert_eq!(row(SLOW_STEPS - 1, slow), []);
        assert_eq!(row(1, fair), []);
        assert_eq!(row(SLOW_STEPS - 1, slow), []);
        let told = row(1000, slow);
        assert_eq!(told.len(), 1);
        assert!(told[0].message.contains("just now 51 µs (budget_us = 5)"), "{}", told[0].message);
        // The second row is not told, the tenth is.
        let lines = (2..=10).map(|_| row(1, fair).len() + row(SLOW_STEPS, slow).len());
        assert_eq!(lines.collect::<Vec<_>>(), [0, 0, 0, 0, 0, 0, 0, 0, 1]);
    }
}
