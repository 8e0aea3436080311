//! What the HTTP interface counts of itself.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::metrics::Counter;

/// Paths whose count is there before the first request.
const ANSWERS: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/generate"];

/// Path and status of an answer.
type Kind = (String, u16);

#[derive(Debug)]
pub struct ApiCounts {
    requests: Mutex<BTreeMap<Kind, u64>>,
    /// Requests whose client left before the answer was complete.
    pub client_aborts: Counter,
}

impl Default for ApiCounts {
    fn default() -> Self {
        let requests = Mutex::new(ANSWERS.map(|path| ((path.to_owned(), 200), 0)).into());
        Self { requests, client_aborts: Counter::default() }
    }
}

impl ApiCounts {
    /// An answer is over. `path` is a template and no words of the client's.
    pub(super) fn answered(&self, path: &str, status: u16) {
        *self.lock().entry((path.to_owned(), status)).or_default() += 1;
    }

    pub(super) fn requests(&self) -> BTreeMap<Kind, u64> {
        self.lock().clone()
    }

    /// The table is valid between any two operations, so a panic elsewhere cannot spoil it.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Kind, u64>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
