//! Standard serving: a dispatcher outside the models' servers routes each token, one call a token.

use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::ask::{Answer, Ask, Reply, Until};
use super::in_process::InProcess;

/// As many engines over [`Remote`](super::remote::Remote) runners as requests may be under way: requests never
/// wait for each other but at the servers.
pub struct Dispatcher {
    idle: Mutex<Vec<InProcess>>,
}

impl Dispatcher {
    pub fn new(engines: Vec<InProcess>) -> Self {
        Self { idle: Mutex::new(engines) }
    }

    /// See [`InProcess::prepare`].
    pub fn prepare(&self, ask: &mut Ask) -> Result<(), String> {
        self.idle().first().map_or(Ok(()), |engine| engine.prepare(ask))
    }

    pub async fn answer(&self, ask: &Ask, told: &AtomicU64, until: Until) -> (Answer, Reply) {
        let engine = self.idle().pop();
        let Some(engine) = engine else {
            let failure = "more requests are under way than the dispatcher was made for";
            return (Answer::new(Instant::now()).failed(failure), Reply::default());
        };
        let answered = engine.answer(ask, told, until).await;
        self.idle().push(engine);
        answered
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<InProcess>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
