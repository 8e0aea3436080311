//! The thread that tunes, beside the models' threads.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, Sender, TryRecvError, bounded};

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

impl Thread {
    pub fn start(mut tuner: Tuner, interval: Duration, source: impl Source) -> io::Result<Self> {
        let status = Arc::new(Mutex::new(tuner.status()));
        let told = status.clone();
        let (stop, stopped) = bounded::<()>(0);
        let body = move || {
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
                {
                    let mut status = told.lock().unwrap_or_else(PoisonError::into_inner);
                    let longest = status.longest_search_seconds.max(took.as_secs_f64());
                    *status = tuner.status();
                    (status.search_seconds, status.longest_search_seconds) = (took.as_secs_f64(), longest);
                }
                if let Some(Change { ladders, line }) = change {
                    match source.set_ladders(ladders) {
                        Ok(()) => tracing::info!("{line}"),
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
