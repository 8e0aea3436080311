//! What the server sees of policies at work: the hook that runs just now, how long hooks take, and what goes
//! wrong in them.
//!
//! Each instance has a [`Monitor`]. Its model's thread alone writes there, by relaxed stores, and after it the thread
//! that drops the instance; others read at any time.

mod counts;
mod crumb;
mod meter;
mod watchdog;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use counts::HookSums;
pub use counts::{BOUNDS, HookCounts};
use crumb::Breadcrumb;
pub use meter::{Meter, Note, SLOW_STEPS, worth_a_line};
pub use watchdog::{HUNG_AFTER, Hung, Look, PERIOD, Watchdog, not_back};

/// Wall time of a call if a route says nothing.
pub const DEFAULT_BUDGET: Duration = Duration::from_micros(200);

/// What a policy does on the server's threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    Entry,
    Route,
    Send,
    Receive,
    Finished,
    /// The instance is made for a change of routes. No model waits for it, and nothing is counted.
    Create,
    /// The same for settings of a request: whoever chooses them must not end the process.
    Variant,
    /// The instance is dropped. No request waits for it, and nothing is counted.
    Drop,
}

impl Hook {
    /// Those that run while requests are served.
    pub const ALL: [Self; 5] = [Self::Entry, Self::Route, Self::Send, Self::Receive, Self::Finished];

    /// Whether the model stands still until it comes back.
    pub fn holds_model(self) -> bool {
        Self::ALL.contains(&self)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Entry => "entry",
            Self::Route => "route",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Finished => "finished",
            Self::Create | Self::Variant => "create",
            Self::Drop => "drop",
        }
    }
}

/// Whose hooks are watched.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Names {
    pub route: String,
    pub model: String,
    pub plugin: String,
}

/// One policy instance as others see it.
#[derive(Debug)]
pub struct Monitor {
    /// Of no other monitor of the registry, at any time.
    id: u64,
    pub names: Names,
    /// Wall time that a call may take.
    pub budget: Duration,
    crumb: Breadcrumb,
    sums: Arc<Sums>,
}

/// By hook.
type Sums = [HookSums; Hook::Drop as usize + 1];

impl Monitor {
    fn new(id: u64, names: Names, budget: Duration) -> Self {
        let crumb = Breadcrumb::new(&names);
        Self { id, names, budget, crumb, sums: Default::default() }
    }

    fn sums(&self, hook: Hook) -> &HookSums {
        &self.sums[hook as usize]
    }

    /// Do `body`, which calls `hook`, in sight of the watchdog.
    pub fn watch<T>(&self, hook: Hook, body: impl FnOnce() -> T) -> T {
        self.crumb.enter(hook);
        let done = body();
        self.crumb.leave();
        done
    }

    /// An answer of `hook` that no request can follow.
    pub fn count_failure(&self, hook: Hook) {
        self.sums(hook).failures.add(1);
    }

    /// Answers of `hook` that were not taken: those that name no model of the route, and others.
    pub fn count_wrong(&self, hook: Hook, unknown_destinations: u64, others: u64) {
        self.sums(hook).unknown_destinations.add(unknown_destinations);
        self.sums(hook).wrong_answers.add(others);
    }
}

/// Counts of each of [`Hook::ALL`].
pub type ByHook = [HookCounts; Hook::ALL.len()];

fn add(sum: &mut ByHook, sums: &Sums) {
    sum.iter_mut().zip(Hook::ALL).for_each(|(sum, hook)| *sum += sums[hook as usize].read());
}

/// An instance, and what it has counted.
#[derive(Debug)]
struct Listed {
    monitor: Weak<Monitor>,
    names: Names,
    sums: Arc<Sums>,
}

/// Nobody counts for an instance that is gone, and nothing that was counted is forgotten: operators choose the names.
#[derive(Debug, Default)]
struct All {
    listed: Vec<Listed>,
    gone: BTreeMap<Names, ByHook>,
}

impl All {
    fn settle(&mut self) {
        let Self { listed, gone } = self;
        listed.retain(|Listed { monitor, names, sums }| {
            let lives = monitor.strong_count() > 0;
            if !lives {
                add(gone.entry(names.clone()).or_default(), sums);
            }
            lives
        });
    }
}

/// The policy instances of a server.
#[derive(Debug, Default)]
pub struct Monitors {
    all: Mutex<All>,
    /// Instances that are being made.
    makers: Mutex<Vec<Weak<Monitor>>>,
    next_id: AtomicU64,
    /// As of the watchdog's last look.
    hung: Mutex<Vec<Hung>>,
    /// In milliseconds; 0 for never.
    abort_after: AtomicU64,
}

impl Monitors {
    /// A monitor that is listed until the last reference to it goes.
    pub fn add(&self, names: Names, budget: Duration) -> Arc<Monitor> {
        let monitor = Arc::new(self.monitor(names, budget));
        let mut all = self.all();
        all.settle();
        let Monitor { names, sums, .. } = &*monitor;
        all.listed.push(Listed { monitor: Arc::downgrade(&monitor), names: names.clone(), sums: sums.clone() });
        monitor
    }

    /// A monitor of an instance that is being made: the watchdog sees it, and nothing counts it.
    pub fn add_maker(&self, names: Names) -> Arc<Monitor> {
        let monitor = Arc::new(self.monitor(names, DEFAULT_BUDGET));
        let mut makers = self.makers.lock().unwrap_or_else(PoisonError::into_inner);
        makers.retain(|known| known.strong_count() > 0);
        makers.push(Arc::downgrade(&monitor));
        monitor
    }

    fn monitor(&self, names: Names, budget: Duration) -> Monitor {
        Monitor::new(self.next_id.fetch_add(1, Relaxed), names, budget)
    }

    /// Each change of it is whole, so a panic elsewhere cannot spoil it.
    fn all(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What all instances with the same names have counted since the start, those that are gone included.
    pub fn counts(&self) -> BTreeMap<Names, ByHook> {
        let mut all = self.all();
        all.settle();
        let mut counts = all.gone.clone();
        all.listed.iter().for_each(|Listed { names, sums, .. }| add(counts.entry(names.clone()).or_default(), sums));
        counts
    }

    /// Those that live, in the order in which they were made.
    pub fn list(&self) -> Vec<Arc<Monitor>> {
        self.all().listed.iter().filter_map(|listed| listed.monitor.upgrade()).collect()
    }

    /// Those that live or are being made.
    pub fn watched(&self) -> Vec<Arc<Monitor>> {
        let makers = self.makers.lock().unwrap_or_else(PoisonError::into_inner);
        let makers: Vec<_> = makers.iter().filter_map(Weak::upgrade).collect();
        self.list().into_iter().chain(makers).collect()
    }

    /// Hooks that did not come back in time and have not yet.
    pub fn hung(&self) -> Vec<Hung> {
        self.hung.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set_hung(&self, hung: Vec<Hung>) {
        *self.hung.lock().unwrap_or_else(PoisonError::into_inner) = hung;
    }

    /// End the process when a hook has run for so long.
    pub fn abort_after(&self, limit: Duration) {
        self.abort_after.store((limit.as_millis() as u64).max(1), Relaxed);
    }

    /// Of `hung`, one that ran for longer than the process may live with. No other request waits for a drop, or for
    /// settings that a request has brought.
    pub fn fatal<'a>(&self, hung: &'a [Hung]) -> Option<&'a Hung> {
        let limit = self.abort_after.load(Relaxed);
        let too_long = |hung: &Hung| {
            !matches!(hung.hook, Hook::Drop | Hook::Variant) && hung.lasted >= Duration::from_millis(limit)
        };
        hung.iter().find(|hung| limit > 0 && too_long(hung))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(route: &str) -> Names {
        Names { route: route.into(), model: "m".into(), plugin: "p".into() }
    }

    #[test]
    fn instances_are_listed_while_they_live() {
        let monitors = Monitors::default();
        let (one, two) = (monitors.add(names("a"), DEFAULT_BUDGET), monitors.add(names("b"), DEFAULT_BUDGET));
        let listed = || monitors.list().iter().map(|m| m.names.route.clone()).collect::<Vec<_>>();
        assert_eq!((listed(), one.id == two.id), (vec!["a".to_owned(), "b".to_owned()], false));
        drop(one);
        assert_eq!(listed(), ["b"]);
        monitors.add(names("c"), DEFAULT_BUDGET);
        assert_eq!(monitors.all().listed.len(), 2, "dead entries go when another comes");
        let making = monitors.add_maker(names("d"));
        let watched = || monitors.watched().iter().map(|m| m.names.route.clone()).collect::<Vec<_>>();
        assert_eq!((listed(), watched()), (vec!["b".to_owned()], vec!["b".to_owned(), "d".to_owned()]));
        drop(making);
        assert_eq!(watched(), ["b"]);
    }

    #[test]
    fn what_was_counted_stays() {
        let monitors = Monitors::default();
        let failures = || monitors.counts()[&names("a")][Hook::Send as usize].failures;
        let [one, two] = [(); 2].map(|()| monitors.add(names("a"), DEFAULT_BUDGET));
        one.count_failure(Hook::Send);
        two.count_failure(Hook::Send);
        assert_eq!(failures(), 2);
        drop(one);
        assert_eq!((failures(), failures()), (2, 2));
        two.count_failure(Hook::Send);
        drop(two);
        let three = monitors.add(names("a"), DEFAULT_BUDGET);
        three.count_failure(Hook::Send);
        assert_eq!((failures(), monitors.counts().len()), (4, 1));
    }

    #[test]
    fn only_a_limit_makes_a_hang_fatal() {
        let hung = |ms| Hung { names: names("r"), hook: Hook::Route, step: 3, lasted: Duration::from_millis(ms) };
        let monitors = Monitors::default();
        let long = [hung(1000), hung(100_000)];
        assert_eq!(monitors.fatal(&long), None);
        monitors.abort_after(Duration::from_secs(5));
        assert_eq!((monitors.fatal(&long), monitors.fatal(&long[..1])), (Some(&long[1]), None));
        assert_eq!(monitors.fatal(&[Hung { hook: Hook::Drop, ..hung(100_000) }]), None);
        assert_eq!(monitors.fatal(&[Hung { hook: Hook::Variant, ..hung(100_000) }]), None);
        let making = [Hung { hook: Hook::Create, ..hung(100_000) }];
        assert_eq!(monitors.fatal(&making), Some(&making[0]));
    }
}
