//! Which requests for answers are taken, and when the last of them is over.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use tokio::sync::watch;

use super::error::ApiError;
use super::http::read_body;
use super::reader::Fields;
use super::state::AppState;

/// Counts the answers under way. One lock holds both values, so that nothing is admitted once an end
/// without open answers was seen.
#[derive(Clone, Debug)]
pub struct Admissions(watch::Sender<Doors>);

#[derive(Clone, Copy, Debug, Default)]
struct Doors {
    closed: bool,
    open: usize,
}

impl Default for Admissions {
    fn default() -> Self {
        Self(watch::Sender::new(Doors::default()))
    }
}

impl Admissions {
    fn admit(&self) -> Result<Admitted, ApiError> {
        let admit = |doors: &mut Doors| {
            doors.open += usize::from(!doors.closed);
            !doors.closed
        };
        match self.0.send_if_modified(admit) {
            true => Ok(Admitted(self.clone())),
            false => Err(ApiError::shutting_down()),
        }
    }

    /// Admit nothing more.
    pub fn close(&self) {
        self.0.send_modify(|doors| doors.closed = true);
    }

    pub fn is_closed(&self) -> bool {
        self.0.borrow().closed
    }

    /// Wait until nothing is admitted any more.
    pub async fn closed(&self) {
        // The sender lives in `self`, so the channel cannot close.
        let _ = self.0.subscribe().wait_for(|doors| doors.closed).await;
    }

    /// Wait until nothing is admitted any more and every answer was handed to its connection or given up.
    pub async fn over(&self) {
        // The sender lives in `self`, so the channel cannot close.
        let _ = self.0.subscribe().wait_for(|doors| doors.closed && doors.open == 0).await;
    }
}

/// An answer under way, until dropped.
#[derive(Debug)]
struct Admitted(Admissions);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.0.send_modify(|doors| doors.open -= 1);
    }
}

/// Read a request for an answer and, if it is admitted, let `handle` answer it. A request that has not
/// come in completely is not admitted, so nobody waits for its client.
pub async fn answer<F>(
    state: Arc<AppState>,
    request: Request,
    handle: impl FnOnce(Arc<AppState>, Fields) -> F,
) -> Result<Response, ApiError>
where
    F: Future<Output = Result<Response, ApiError>>,
{
    let body = read_body(request, state.max_body_bytes, state.front.limits.body_timeout).await?;
    let admitted = state.admissions.admit()?;
    let fields = fields(&state, body).await?;
    let response = handle(state, fields).await?;
    Ok(response.map(|body| holding(body, admitted)))
}

/// Longer bodies are read in the caller's turn, apart from the threads that serve connections. In bytes.
const LONG_BODY: usize = 256 << 10;

/// The fields of a request's body.
pub(super) async fn fields(state: &AppState, body: Bytes) -> Result<Fields, ApiError> {
    if body.len() <= LONG_BODY {
        return Fields::parse(&body);
    }
    state.work(move || Fields::parse(&body)).await
}

/// `body`, with something that is dropped when its connection has taken all of it, or goes.
pub(super) fn holding(body: Body, held: impl Send + Unpin + 'static) -> Body {
    Body::new(Holding { body, _held: held })
}

struct Holding<T> {
    body: Body,
    _held: T,
}

impl<T: Unpin> HttpBody for Holding<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
