//! Making policies: an operator who waits is told for what, and a reload does not wait for ever.

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};

use crate::policy::PolicyFactory;
use crate::policy::monitor::{Hook, Monitors, Names};

/// How long something has lasted when it is told of: ever more rarely.
fn moments() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(Duration::from_secs(10)), |last| last.checked_mul(6))
}

/// Wait at most for `limit`, and tell at each of `moments` before it.
fn wait<T>(
    made: &Receiver<T>,
    limit: Option<Duration>,
    moments: impl IntoIterator<Item = Duration>,
    mut tell: impl FnMut(Duration),
) -> Result<T, RecvTimeoutError> {
    let mut lasted = Duration::ZERO;
    for moment in moments.into_iter().take_while(|moment| limit.is_none_or(|limit| *moment < limit)) {
        match made.recv_timeout(moment.saturating_sub(lasted)) {
            Err(RecvTimeoutError::Timeout) => {
                lasted = moment;
                tell(lasted);
            }
            other => return other,
        }
    }
    match limit {
        Some(limit) => made.recv_timeout(limit.saturating_sub(lasted)),
        None => made.recv().map_err(|_| RecvTimeoutError::Disconnected),
    }
}

/// What an instance is made of: whether a second one would hang where the first one did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Made {
    /// Digest of its file, or its name.
    plugin: String,
    settings: String,
}

impl Made {
    pub fn of(policy: &dyn PolicyFactory, settings: &str) -> Self {
        let plugin = policy.file().map_or(policy.name(), |file| file.sha256);
        Self { plugin: plugin.to_owned(), settings: settings.to_owned() }
    }
}

/// A thread that nobody waits for any more.
#[derive(Debug)]
struct Left {
    made: Made,
    names: Names,
    since: Instant,
    at_work: Weak<()>,
}

/// Why there is no policy.
pub(super) enum NotMade {
    /// `create` of this plugin has not come back for so long.
    Hung(Names, Duration),
    NoThread(std::io::Error),
}

/// Where policies are made, and how long is waited for them. Clones share those that are left behind.
#[derive(Clone, Debug, Default)]
pub struct Makers {
    pub(super) monitors: Arc<Monitors>,
    /// For ever if it is `None`.
    pub(super) limit: Option<Duration>,
    left: Arc<Mutex<Vec<Left>>>,
    /// They make what requests choose.
    of_requests: bool,
}

/// As much as a program's first thread has: a plugin may count on it.
const STACK: usize = 8 << 20;

impl Makers {
    /// Those of an engine at work, whose watchdog sees them.
    pub(super) fn watched(monitors: Arc<Monitors>, limit: Duration) -> Self {
        Self { monitors, limit: Some(limit), left: Arc::default(), of_requests: false }
    }

    /// The same for settings of requests: one that hangs does not end the process.
    pub(super) fn for_requests(&self) -> Self {
        Self { of_requests: true, ..self.clone() }
    }

    /// Make a policy by `work`, on a thread of its own.
    pub(super) fn make<T: Send + 'static>(
        &self,
        names: &Names,
        made: Made,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NotMade> {
        if let Some((names, lasted)) = self.hung(&made) {
            return Err(NotMade::Hung(names, lasted));
        }
        let since = Instant::now();
        let (at_work, (done, result)) = (Arc::new(()), bounded(1));
        let alive = Arc::downgrade(&at_work);
        let monitor = self.monitors.add_maker(names.clone());
        let hook = if self.of_requests { Hook::Variant } else { Hook::Create };
        let body = move || {
            let policy = monitor.watch(hook, work);
            // From here on others may try.
            drop((monitor, at_work));
            // Where nobody waits it is dropped, on this thread.
            if let Err(unwanted) = done.send(policy) {
                tracing::warn!("`create` of a plugin has come back after what needed it was given up");
                drop(unwanted);
            }
        };
        let thread = std::thread::Builder::new().name("create".into()).stack_size(STACK).spawn(body);
        let thread = thread.map_err(NotMade::NoThread)?;
        let tell = |lasted: Duration| {
            let (Names { route, model, plugin }, seconds) = (names, lasted.as_secs());
            tracing::warn!(
                plugin,
                route,
                model,
                seconds,
                "the plugin has not come back from `create` or `requirements`; the start, the reload or the request waits for it"
            );
        };
        match wait(&result, self.limit, moments(), tell) {
            Ok(policy) => Ok(policy),
            Err(RecvTimeoutError::Timeout) => {
                let left = Left { made, names: names.clone(), since, at_work: alive };
                self.left().push(left);
                Err(NotMade::Hung(names.clone(), since.elapsed()))
            }
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Err(panic) => resume_unwind(panic),
                Ok(()) => unreachable!("it sends before it ends"),
            },
        }
    }

    /// The longest-lived one that was left behind and is of the same plugin, whatever its settings.
    pub(super) fn left_of(&self, policy: &dyn PolicyFactory) -> Option<Names> {
        let plugin = Made::of(policy, "").plugin;
        let mut left = self.left();
        left.retain(|left| left.at_work.strong_count() > 0);
        left.iter().find(|left| left.made.plugin == plugin).map(|left| left.names.clone())
    }

    /// One that was left behind and is made of the same.
    fn hung(&self, made: &Made) -> Option<(Names, Duration)> {
        let mut left = self.left();
        left.retain(|left| left.at_work.strong_count() > 0);
        left.iter().find(|left| left.made == *made).map(|left| (left.names.clone(), left.since.elapsed()))
    }

    /// Entries come and go whole, so a panic elsewhere cannot spoil it.
    fn left(&self) -> std::sync::MutexGuard<'_, Vec<Left>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_until_the_work_ends_or_the_limit_comes() {
        let first: Vec<u64> = moments().take(3).map(|moment| moment.as_secs()).collect();
        assert_eq!(first, [10, 60, 360]);
        let (done, made) = bounded(1);
        let [one, two, three] = [1, 2, 3].map(Duration::from_nanos);
        let mut told = Vec::new();
        let waited = wait(&made, Some(three), [one, two, three], |lasted| told.push(lasted));
        assert_eq!((waited, told), (Err(RecvTimeoutError::Timeout), vec![one, two]));
        let silent = |lasted| panic!("{lasted:?}");
        done.send(7).unwrap();
        assert_eq!(wait(&made, None, [one], silent), Ok(7));
        drop(done);
        assert_eq!(wait(&made, None, [one], silent), Err(RecvTimeoutError::Disconnected));
    }
}
