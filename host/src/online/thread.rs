//! The thread that tunes, beside the models' threads.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, TryRecvError, bounded};
use tokenrouter_batching::Fault;

use super::{Change, Reading, Status, Tuner};
use crate::subserver::coordinator::{LadderError, Ladders};

/// A search is followed by a rest of this many times its own length, so that it takes a core for a fifth of the time
/// at most.
const REST: u32 = 4;

/// What is tuned.
pub trait Source: Send + 'static {
    /// Called once an interval.
    fn read(&self) -> Reading;
    fn set_ladders(&self, ladders: Ladders) -> Result<(), LadderError>;
}

/// A tuner at work. When it is dropped the thread changes nothing any more, and ends after the search under way;
/// nobody waits for that.
#[derive(Debug)]
pub struct Thread {
    status: Arc<Mutex<Status>>,
    _stop: Sender<()>,
}

/// What the thread tells; a panic is told as well.
struct Told(Arc<Mutex<Status>>);

impl Told {
    /// Nothing is left half done in it, so a panic elsewhere cannot spoil it.
    fn status(&self) -> MutexGuard<'_, Status> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.status().ended = true;
            tracing::error!("the tuner has broken off; min_batch stays as it is until the server is started again");
        }
    }
}

impl Thread {
    pub fn start(mut tuner: Tuner, interval: Duration, source: impl Source) -> io::Result<Self> {
        let status = Arc::new(Mutex::new(tuner.status()));
        let told = Told(status.clone());
        let (stop, stopped) = bounded::<()>(0);
        let body = move || {
            // As a whole, so that it goes with this thread.
            let told = told;
            let zero = Instant::now();
            let mut pause = interval;
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(pause) {
                let reading = source.read();
                let start = Instant::now();
                let change = tuner.turn(start - zero, reading);
                let took = start.elapsed();
                pause = interval.max(took * REST);
                if stopped.try_recv() == Err(TryRecvError::Disconnected) {
                    return;
                }
                let before = tell(&mut told.status(), tuner.status(), &change, took);
                let (now, change) = (told.status().fault.clone(), change.unwrap_or_default());
                if let Some(fault) = now.filter(|fault| before.as_ref() != Some(fault)) {
                    tracing::warn!("min_batch is not tuned: {fault}");
                }
                if let Some(Change { ladders, line }) = change {
                    match source.set_ladders(ladders) {
                        Ok(()) => line.into_iter().for_each(|line| tracing::info!("{line}")),
                        Err(error) => tracing::error!("ladders were not replaced: {error}"),
                    }
                }
            }
        };
        std::thread::Builder::new().name("tuner".into()).spawn(body)?;
        Ok(Self { status, _stop: stop })
    }

    /// As of the last interval.
    pub fn status(&self) -> Status {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Enter `now`, after a turn that took so long. The fault of before.
fn tell(status: &mut Status, now: Status, change: &Result<Option<Change>, Fault>, took: Duration) -> Option<String> {
    let search_seconds = took.as_secs_f64();
    let longest_search_seconds = status.longest_search_seconds.max(search_seconds);
    let fault = change.as_ref().err().map(Fault::to_string).or(now.fault);
    std::mem::replace(status, Status { fault, search_seconds, longest_search_seconds, ..now }).fault
}

#[cfg(test)]
mod tests {
    use super::super::Settings;
    use super::*;

    struct Broken;

    impl Source for Broken {
        fn read(&self) -> Reading {
            panic!("a test")
        }
        fn set_ladders(&self, _: Ladders) -> Result<(), LadderError> {
            Ok(())
        }
    }

    #[test]
    fn a_tuner_that_breaks_off_is_told() {
        let settings = Settings { interval: Duration::from_millis(1), p99_tpot_ms: None, p99_ttft_ms: None };
        let tuner = Tuner::new(vec!["m".into()], 0, vec![vec![1]], settings).unwrap();
        let thread = Thread::start(tuner, settings.interval, Broken).unwrap();
        while !thread.status().ended {
            std::thread::yield_now();
        }
    }

    #[test]
    fn faults_are_of_the_last_turn() {
        let (mut status, took) = (Status::default(), Duration::from_secs(2));
        let now = || Status { changes: 3, ..Status::default() };
        assert_eq!(tell(&mut status, now(), &Err(Fault::NoModels), took), None);
        assert_eq!((status.fault.clone(), status.changes), (Some(Fault::NoModels.to_string()), 3));
        assert_eq!(tell(&mut status, now(), &Ok(None), Duration::ZERO), Some(Fault::NoModels.to_string()));
        assert_eq!((status.fault, status.longest_search_seconds), (None, 2.0));
    }
}
