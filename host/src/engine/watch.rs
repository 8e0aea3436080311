//! The watchdog's thread.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};

use super::StartError;
use crate::policy::monitor::{Hook, Hung, Look, Monitors, PERIOD, Watchdog};

/// Before the process ends itself: the log is written by another thread.
const LAST_LINE: Duration = Duration::from_millis(500);
/// How often it is asked whether a thread has ended.
const JOIN_PERIOD: Duration = Duration::from_millis(1);

/// Ends when it is dropped.
pub(super) struct Thread {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.stop = None;
        // It has nothing to say beyond what it logs.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

pub(super) fn start(monitors: Arc<Monitors>) -> Result<Thread, StartError> {
    let (stop, stopped) = bounded::<()>(0);
    let zero = Instant::now();
    let body = move || {
        let mut watchdog = Watchdog::default();
        while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
            let look = watchdog.look(&monitors.watched(), zero.elapsed());
            tell(&look);
            if let Some(hung) = monitors.fatal(&look.hung) {
                log_abort(hung);
                std::thread::sleep(LAST_LINE);
                // Not an orderly end, which would wait for the hook.
                std::process::abort();
            }
            monitors.set_hung(look.hung);
        }
    };
    let thread = std::thread::Builder::new().name("watchdog".into()).spawn(body);
    let thread = thread.map_err(|e| StartError::Watchdog { message: e.to_string() })?;
    Ok(Thread { stop: Some(stop), thread: Some(thread) })
}

fn tell(look: &Look) {
    // Whoever waits for an instance tells of it.
    let told = |hung: &&Hung| !matches!(hung.hook, Hook::Create | Hook::Variant);
    for Hung { names, hook, step, lasted } in look.began.iter().filter(told) {
        let (plugin, route, model) = (&names.plugin, &names.route, &names.model);
        if *hook == Hook::Drop {
            tracing::error!(
                plugin,
                route,
                model,
                "an instance does not come back from its drop; it and those to be dropped after it stay in memory. The \
                 server goes on, and its stop does not wait"
            );
            continue;
        }
        let (hook, seconds) = (hook.name(), lasted.as_secs_f64());
        tracing::error!(
            plugin,
            route,
            model,
            hook,
            step,
            seconds,
            "a hook does not come back; its model stands still until it does. A restart of the server is the only way to \
             end it"
        );
    }
    for Hung { names, hook, step, lasted } in look.ended.iter().filter(told) {
        let (plugin, route, model) = (&names.plugin, &names.route, &names.model);
        let (hook, seconds) = (hook.name(), lasted.as_secs_f64());
        tracing::warn!(plugin, route, model, hook, step, seconds, "the hook has come back");
    }
}

fn log_abort(Hung { names, hook, step, lasted }: &Hung) {
    let (plugin, route, model) = (&names.plugin, &names.route, &names.model);
    let (hook, seconds) = (hook.name(), lasted.as_secs_f64());
    tracing::error!(
        plugin,
        route,
        model,
        hook,
        step,
        seconds,
        "a hook has not come back for server.abort_on_hung_plugin_s; the process ends itself"
    );
}

/// What `thread` ends with; `None` if it panicked, or if it is `stuck`: then it is left behind.
pub(super) fn join<T>(thread: JoinHandle<T>, stuck: impl Fn() -> bool) -> Option<T> {
    while !thread.is_finished() {
        if stuck() {
            let name = thread.thread().name().unwrap_or("?");
            tracing::error!(thread = name, "a hook hangs in this thread; it is left behind");
            return None;
        }
        std::thread::sleep(JOIN_PERIOD);
    }
    thread.join().ok()
}
