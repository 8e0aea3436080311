//! One line in the log and one count for each HTTP request, at its end. Neither has a word of prompts or answers.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};

use super::front::Client;
use super::http::random_id;
use super::state::AppState;
use super::traces::{Finished, Origin};
use super::visits::Visits;

const REQUEST_ID: &str = "x-request-id";
/// Longest id that is taken from a client.
const LONGEST_ID: usize = 128;
/// Characters of an unknown path in the log.
const LONGEST_PATH: usize = 200;
/// In place of the path where there is no such endpoint.
const NO_PATH: &str = "other";
/// The client left before its answer was complete.
pub(super) const CLIENT_LEFT: u16 = 499;
/// The server could not complete its answer, whatever status its head had.
const BROKEN: u16 = 500;
/// Paths of probes, which come all the time.
const PROBES: [&str; 6] = ["/health", "/health_generate", "/ping", "/ready", "/metrics", "/metrics/steps"];

tokio::task_local! {
    static CURRENT: Arc<Record>;
}

/// The code of an error, beside its response.
#[derive(Clone, Copy, Debug)]
pub struct ErrorCode(pub &'static str);

/// What is known of a request for an answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// `id` of the answer.
    pub answer: Option<String>,
    /// What the `model` field named.
    pub model: Option<String>,
    /// The policy of the route, if it is no bare model.
    pub policy: Option<String>,
    pub stream: bool,
    pub prompt_tokens: usize,
    pub cached_tokens: u64,
    pub completion_tokens: usize,
    pub tokens_by_model: BTreeMap<String, usize>,
    pub handoffs: u64,
    /// From the submission of the first choice to its first step.
    pub queue: Option<Duration>,
    /// When the first tokens came.
    pub first_token: Option<Instant>,
    /// In the order of their first appearance, each once.
    pub finish_reasons: Vec<&'static str>,
    pub error: Option<&'static str>,
    /// The server broke off a stream whose head was sent.
    pub broken: bool,
    pub client: Option<Client>,
    /// Where the request is traced.
    pub visits: Option<Visits>,
}

/// One HTTP request.
#[derive(Debug)]
pub struct Record {
    pub id: String,
    pub method: Method,
    /// A template, or what the client wrote.
    pub path: String,
    pub known_path: bool,
    pub began: Instant,
    /// If it is traced.
    pub trace: Option<Origin>,
    pub facts: Mutex<Facts>,
}

impl Record {
    /// That of the request whose handler runs now. `None` outside of handlers.
    pub fn current() -> Option<Arc<Self>> {
        CURRENT.try_with(Arc::clone).ok()
    }

    /// Enter what is known, if a handler runs.
    pub fn note(enter: impl FnOnce(&mut Facts)) {
        // Outside of a handler, as in tests of its parts, nobody asks.
        let _ = CURRENT.try_with(|record| enter(&mut record.facts()));
    }

    /// Each entry is whole by itself, so a panic elsewhere cannot spoil them.
    pub fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_probe(&self) -> bool {
        PROBES.contains(&self.path.as_str())
    }

    fn log(&self, status: u16, now: Instant, traced: bool) {
        let ms = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        let facts = self.facts();
        let first = facts.first_token.map(|first| ms(first.saturating_duration_since(self.began)));
        let total = ms(now.saturating_duration_since(self.began));
        macro_rules! line {
            ($level:ident, $($more:tt)*) => {
                tracing::$level!(
                    target: "tokenrouter::request",
                    request_id = self.id,
                    method = %self.method,
                    path = self.path,
                    status,
                    $($more)*
                    total_ms = total,
                    error = facts.error,
                    client = facts.client.as_ref().map(tracing::field::display),
                    trace_id = self.trace.as_ref().filter(|_| traced).map(Origin::trace_id),
                    "request"
                )
            };
        }
        if self.is_probe() {
            line!(debug,);
        } else if facts.prompt_tokens == 0 {
            line!(info, model = facts.model,);
        } else {
            line!(
                info,
                rid = facts.answer,
                model = facts.model,
                policy = facts.policy,
                stream = facts.stream,
                prompt_tokens = facts.prompt_tokens,
                cached = facts.cached_tokens,
                completion_tokens = facts.completion_tokens,
                tokens_by_model = ?facts.tokens_by_model,
                handoffs = facts.handoffs,
                finish_reason = facts.finish_reasons.join(","),
                queue_ms = facts.queue.map(ms),
                ttft_ms = first,
            );
        }
    }
}

/// The id that a client may give its request: printable, without spaces, and no longer than it need be.
fn usable(value: &HeaderValue) -> bool {
    (1..=LONGEST_ID).contains(&value.len()) && value.as_bytes().iter().all(u8::is_ascii_graphic)
}

/// Take `X-Request-Id`, or make one; echo it, and tell of the request at its end.
pub async fn every_request(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|value| usable(value)).and_then(|value| value.to_str().ok());
    let template = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let mut record = Record {
        id: given.map_or_else(|| random_id("req-"), str::to_owned),
        method: request.method().clone(),
        known_path: template.is_some(),
        path: template.unwrap_or_else(|| request.uri().path().chars().take(LONGEST_PATH).collect()),
        began: Instant::now(),
        trace: None,
        facts: Mutex::default(),
    };
    if let Some(traces) = state.traces.as_ref().filter(|_| !record.is_probe()) {
        record.trace = traces.begin(request.headers(), request.uri(), record.began);
    }
    let record = Arc::new(record);
    let mut end = End { record: record.clone(), state, status: CLIENT_LEFT, complete: false, broken: false };
    let mut response = CURRENT.scope(record.clone(), next.run(request)).await;
    if let Ok(id) = HeaderValue::from_str(&record.id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if let Some(ErrorCode(code)) = response.extensions().get() {
        record.facts().error = Some(code);
    }
    if let Some(client) = response.extensions().get::<Client>() {
        record.facts().client = Some(client.clone());
    }
    end.status = response.status().as_u16();
    // Nobody reads the body of an answer to HEAD.
    end.complete = record.method == Method::HEAD || response.body().is_end_stream();
    response.map(|body| Body::new(Told { body, end }))
}

/// By the status of the head: whoever asked may not, or asked for nothing that is here.
fn is_refusal(status: u16, admitted: bool) -> bool {
    matches!(status, 401 | 404 | 429) || (!admitted && (400..CLIENT_LEFT).contains(&status))
}

/// Tells of the request when dropped.
struct End {
    record: Arc<Record>,
    state: Arc<AppState>,
    status: u16,
    /// All of the answer was taken by the connection.
    complete: bool,
    /// The body came to an error.
    broken: bool,
}

impl Drop for End {
    fn drop(&mut self) {
        let Self { record, state, .. } = self;
        let status = match self.complete {
            // A handler or a body that panics drops this on its way.
            _ if self.broken || std::thread::panicking() => BROKEN,
            true => self.status,
            false => CLIENT_LEFT,
        };
        if status == CLIENT_LEFT {
            state.counts.client_aborts.add(1);
        }
        let counted = if record.facts().broken { BROKEN } else { status };
        state.counts.answered(if record.known_path { &record.path } else { NO_PATH }, counted);
        let ended = Instant::now();
        let refused = is_refusal(self.status, record.facts().client.is_some());
        let traces = state.traces.as_ref().zip(record.trace.as_ref());
        let traces = traces.filter(|(traces, origin)| !refused || traces.keeps_refused(origin));
        record.log(status, ended, traces.is_some());
        if let Some((traces, _)) = traces {
            traces.end(Finished { record: record.clone(), status, ended });
        }
    }
}

/// A body whose end is the end of its request.
struct Told {
    body: Body,
    end: End,
}

impl HttpBody for Told {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(cx));
        // A body of known length may not be asked for its end.
        self.end.complete = frame.is_none() || self.body.is_end_stream();
        self.end.broken |= matches!(frame, Some(Err(_)));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals() {
        for (status, admitted, refused) in [
            (401, false, true),
            (404, true, true),
            (429, true, true),
            (400, false, true),
            (400, true, false),
            (499, false, false),
            (200, false, false),
            (503, true, false),
        ] {
            assert_eq!(is_refusal(status, admitted), refused, "{status}, {admitted}");
        }
    }

    #[test]
    fn ids_are_printable_and_short() {
        let usable = |text: &str| HeaderValue::from_bytes(text.as_bytes()).is_ok_and(|value| usable(&value));
        for good in ["a", "req-1/~", &"x".repeat(128)] {
            assert!(usable(good), "{good}");
        }
        for bad in ["", "a b", "a\tb", "ü", &"x".repeat(129)] {
            assert!(!usable(bad), "{bad}");
        }
    }
}
