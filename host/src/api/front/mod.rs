//! The door of the server: who comes in, how much of them, and in which order.

mod client;
mod cors;
mod counters;
mod deadline;
mod framing;
mod guard;
mod keys;
mod line;
mod listen;
mod seats;
mod slot;
mod tls;
mod watched;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::StatusCode;

use super::error::ApiError;
use super::state::AppState;
use crate::metrics::text::Exposition;
use counters::Counters;
use framing::HeadLimits;
use line::{Load, Room};

pub(super) use client::{CALLER, Caller, Client, Peer, caller};
pub use cors::Cors;
pub(super) use counters::Refusal;
pub(super) use deadline::{Deadline, over};
pub(super) use guard::{Ambiguous, guard};
pub(super) use keys::bearer;
pub use keys::{KeyRing, Keys};
pub(super) use line::Full;
pub use listen::{Listener, SocketError, Stream, UnixSocket};
pub(super) use seats::{NoSeat, Seats};
pub(super) use slot::{Slot, Waiting};
pub use tls::{Certificates, Tls, TlsError, TlsFiles};
pub(super) use watched::{Answering, Exchange, Patience, Watched};

/// How much is taken of clients, and for how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Open connections.
    pub connections: usize,
    pub connections_per_peer: Option<usize>,
    pub url_bytes: usize,
    pub headers: usize,
    pub header_bytes: usize,
    /// From the first byte of a request to the end of its headers, and for a TLS handshake.
    pub header_timeout: Duration,
    /// Between requests of one connection.
    pub idle_timeout: Duration,
    /// For a whole body.
    pub body_timeout: Duration,
    /// Without a byte taken by a client whose answer waits.
    pub write_timeout: Duration,
    /// From a request to the end of its answer.
    pub request_timeout: Option<Duration>,
    /// Answers of one client, under way and waiting.
    pub requests_per_client: Option<usize>,
    /// Requests that wait.
    pub queued_requests: usize,
    /// Tokens of their prompts.
    pub queued_tokens: Option<usize>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            connections_per_peer: None,
            url_bytes: 8192,
            headers: 128,
            header_bytes: 65_536,
            header_timeout: Duration::from_secs(30),
            // Clients keep connections for a minute or so, and would write into one that is being closed.
            idle_timeout: Duration::from_secs(120),
            body_timeout: Duration::from_secs(300),
            write_timeout: Duration::from_secs(60),
            request_timeout: None,
            requests_per_client: None,
            queued_requests: 1024,
            queued_tokens: None,
        }
    }
}

impl Limits {
    fn head(&self) -> HeadLimits {
        HeadLimits { url_bytes: self.url_bytes, headers: self.headers, header_bytes: self.header_bytes }
    }

    pub(super) fn patience(&self) -> Patience {
        Patience { head: self.header_timeout, write: self.write_timeout }
    }
}

/// Who may read `/metrics`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MetricsAccess {
    Open,
    /// Clients, where there are API keys.
    #[default]
    ApiKey,
    AdminKey,
}

/// The door.
#[derive(Default)]
pub struct Front {
    /// Without any, everyone may ask.
    pub keys: Arc<Keys>,
    pub metrics: MetricsAccess,
    pub cors: Option<Cors>,
    pub limits: Limits,
    pub(super) counters: Arc<Counters>,
    pub(super) seats: Arc<Seats>,
    /// Each made by the first who needs it: for answers, and for what comes before them.
    answers: OnceLock<Arc<Waiting>>,
    texts: OnceLock<Arc<Waiting>>,
    forms: OnceLock<Arc<Waiting>>,
}

impl Front {
    fn answers(&self, most: usize) -> &Arc<Waiting> {
        self.answers.get_or_init(|| {
            let limits = &self.limits;
            Arc::new(Waiting::new(Room {
                running: most,
                queued_requests: limits.queued_requests,
                queued_tokens: limits.queued_tokens,
                per_client: limits.requests_per_client,
            }))
        })
    }

    /// The line of texts that are read and written.
    pub(super) fn texts(&self) -> &Arc<Waiting> {
        self.texts.get_or_init(|| self.before_answers())
    }

    /// The line of forms that are compiled, which takes longer.
    pub(super) fn forms(&self) -> &Arc<Waiting> {
        self.forms.get_or_init(|| self.before_answers())
    }

    /// Half of the cores are left to answers under way.
    fn before_answers(&self) -> Arc<Waiting> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(Waiting::for_work(cores.div_ceil(2), self.limits.requests_per_client))
    }

    /// Count a refusal, and say why; `what` there is too much of.
    pub(super) fn refused(&self, full: Full, what: &str) -> ApiError {
        self.counters.add(if matches!(full, Full::Client(_)) { Refusal::ClientLimit } else { Refusal::QueueFull });
        refused(full, what)
    }

    pub(super) fn write_metrics(&self, out: &mut Exposition) {
        let queued = self.answers.get().map_or(0, |waiting| waiting.queued());
        self.counters.write(out, self.seats.taken(), queued);
    }
}

impl AppState {
    /// Wait for the turn of the request at hand. One slot for each answer, and when the answers have to be complete.
    pub(super) async fn enter(
        &self,
        answers: usize,
        prompt_tokens: usize,
    ) -> Result<(Vec<Slot>, Option<Deadline>), ApiError> {
        let front = &self.front;
        let client = caller().client;
        let mut deadline = self.deadline();
        let turn = front.answers(self.max_requests).enter(&client, Load { answers, prompt_tokens });
        let entered = tokio::select! {
            biased;
            entered = turn => entered,
            error = deadline::over(&mut deadline) => return Err(error),
            () = self.admissions.closed() => return Err(ApiError::shutting_down()),
        };
        entered.map(|slots| (slots, deadline)).map_err(|full| front.refused(full, "answers"))
    }

    /// Wait for the turn of work that comes before an answer, in the time of the answer; `what` it is.
    pub(super) async fn turn(&self, line: &Arc<Waiting>, what: &str) -> Result<Slot, ApiError> {
        let mut deadline = self.deadline();
        tokio::select! {
            biased;
            turn = line.turn() => turn.map_err(|full| self.front.refused(full, what)),
            error = deadline::over(&mut deadline) => Err(error),
            () = self.admissions.closed() => Err(ApiError::shutting_down()),
        }
    }

    /// Of the request at hand.
    fn deadline(&self) -> Option<Deadline> {
        let new = |timeout| Deadline::new(caller().arrived, timeout, self.front.counters.clone());
        self.front.limits.request_timeout.map(new)
    }
}

fn refused(full: Full, what: &str) -> ApiError {
    match full {
        Full::Client(has) => {
            let message = format!(
                "You have too many {what} under way or waiting: {has} (server.max_requests_per_client). Try again when one is over."
            );
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message)
        }
        Full::Requests(waiting) => {
            ApiError::overloaded(format!("{waiting} requests wait (server.max_queued_requests)"))
        }
        Full::Tokens(waiting) => {
            ApiError::overloaded(format!("prompts of {waiting} tokens wait (server.max_queued_tokens)"))
        }
    }
}
