//! Plugins that take long to be made: an operator who waits is told for what.

use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};

use crate::policy::monitor::Names;

/// How long something has lasted when it is told of: ever more rarely.
fn moments() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(Duration::from_secs(10)), |last| last.checked_mul(6))
}

/// Tell at each of `moments` until nobody is left who could send.
fn watch(ended: &Receiver<()>, moments: impl IntoIterator<Item = Duration>, mut tell: impl FnMut(Duration)) {
    let mut lasted = Duration::ZERO;
    for moment in moments {
        if ended.recv_timeout(moment.saturating_sub(lasted)) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        lasted = moment;
        tell(lasted);
    }
}

/// Make a policy by `work`, and say so in the log while that lasts long.
pub(super) fn told_of<T>(Names { route, model, plugin }: Names, work: impl FnOnce() -> T) -> T {
    let (_at_work, ended) = bounded::<()>(0);
    let body = move || {
        watch(&ended, moments(), |lasted| {
            let seconds = lasted.as_secs();
            tracing::warn!(
                plugin,
                route,
                model,
                seconds,
                "the plugin has not come back from `create` or `requirements`; the start, or the reload, waits for it"
            );
        });
    };
    // Where no thread can be had nothing is told.
    let _ = std::thread::Builder::new().name("patience".into()).spawn(body);
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_until_the_work_ends() {
        let first: Vec<u64> = moments().take(3).map(|moment| moment.as_secs()).collect();
        assert_eq!(first, [10, 60, 360]);
        let (at_work, ended) = bounded(0);
        let moments = [1, 2].map(Duration::from_nanos);
        let mut told = Vec::new();
        watch(&ended, moments, |lasted| told.push(lasted));
        assert_eq!(told, moments);
        drop(at_work);
        watch(&ended, moments, |lasted| panic!("{lasted:?}"));
    }
}
