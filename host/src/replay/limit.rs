//! A limit on the time that a hook takes.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, bounded};

use crate::policy::monitor::{Hung, Monitors, PERIOD, Watchdog};

/// As much as a program's first thread has.
const STACK: usize = 8 << 20;

/// Why work did not end.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    #[error(
        "hook `{}` of plugin `{}` at model `{}` did not come back within {limit} s; mend the loop, or give a slow plugin more \
         with --timeout",
        hung.hook.name(), hung.names.plugin, hung.names.model
    )]
    Hung { hung: Box<Hung>, limit: u64 },
    #[error("the thread that runs the plugin cannot be started: {0}")]
    Thread(std::io::Error),
}

/// Do `work` on a thread of its own, which is left behind when one of its hooks runs for `limit`, of a second or more.
pub fn within<T: Send + 'static>(
    limit: Duration,
    monitors: &Arc<Monitors>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, LimitError> {
    let (done, result) = bounded(1);
    // Whoever has left takes no answer.
    let body = move || drop(done.send(work()));
    let thread = std::thread::Builder::new().name("replay".into()).stack_size(STACK).spawn(body);
    let thread = thread.map_err(LimitError::Thread)?;
    let (zero, mut watchdog) = (Instant::now(), Watchdog::default());
    loop {
        match result.recv_timeout(PERIOD) {
            Ok(worked) => return Ok(worked),
            Err(RecvTimeoutError::Timeout) => {
                let hung = watchdog.look(&monitors.watched(), zero.elapsed()).hung;
                if let Some(hung) = hung.into_iter().find(|hung| hung.lasted >= limit) {
                    return Err(LimitError::Hung { hung: Box::new(hung), limit: limit.as_secs() });
                }
            }
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Err(panic) => resume_unwind(panic),
                Ok(()) => unreachable!("it answers before it ends"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::monitor::{Hook, Names};

    #[test]
    fn a_hook_that_hangs_is_left_behind() {
        let monitors = Arc::<Monitors>::default();
        assert_eq!(within(Duration::from_secs(1), &monitors, || 7).unwrap(), 7);
        let names = Names { route: "r".into(), model: "m".into(), plugin: "p".into() };
        let monitor = monitors.add_maker(names);
        let (release, held) = bounded::<()>(0);
        let hang = move || monitor.watch(Hook::Send, || held.recv().is_err());
        let error = within(Duration::from_secs(1), &monitors, hang).unwrap_err().to_string();
        assert!(
            error.starts_with("hook `send` of plugin `p` at model `m` did not come back within 1 s; mend"),
            "{error}"
        );
        drop(release);
    }
}
