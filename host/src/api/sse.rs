//! Server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use hyper::body::Frame;
use serde_json::Value;
use tokio::time::{Instant, Sleep};

use super::choice::{ChoiceError, Piece};
use super::error::{ApiError, MODEL_DOWN};
use super::run::Run;

/// Writes the events of one endpoint.
pub trait Encoder: Send + Unpin + 'static {
    /// Before anything was generated.
    fn open(&mut self) -> Vec<Value>;
    fn piece(&mut self, choice: usize, piece: Piece) -> Vec<Value>;
    /// After the last choice has ended well.
    fn close(&mut self) -> Vec<Value>;
}

/// A response that streams `run`. It ends with `[DONE]`, after an error too. Dropping it cancels the run.
pub fn respond(run: Run, encoder: impl Encoder, keep_alive: Duration) -> Response {
    run.streams();
    let mut stream = EventStream {
        open: run.choices,
        run: Some(run),
        encoder,
        frames: VecDeque::new(),
        silence: Box::pin(tokio::time::sleep(keep_alive)),
        keep_alive,
    };
    let first = stream.encoder.open();
    stream.push(first);
    let mut response = Response::new(Body::new(stream));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct EventStream<E> {
    /// `None` after the last event.
    run: Option<Run>,
    /// Choices that have not ended.
    open: usize,
    encoder: E,
    frames: VecDeque<Bytes>,
    silence: Pin<Box<Sleep>>,
    keep_alive: Duration,
}

impl<E: Encoder> EventStream<E> {
    fn push(&mut self, events: Vec<Value>) {
        let text: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
        if !text.is_empty() {
            self.frames.push_back(text.into());
        }
    }

    fn end(&mut self) {
        self.run = None;
        self.frames.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
    }

    fn take(&mut self, choice: usize, piece: Piece) {
        self.open -= usize::from(piece.end.is_some());
        let events = self.encoder.piece(choice, piece);
        self.push(events);
        if self.open == 0 {
            let events = self.encoder.close();
            self.push(events);
            self.end();
        }
    }

    fn fail(&mut self, error: ChoiceError) {
        let error = ApiError::from(error);
        // The engine's line about a model that is down stands for all its requests.
        if error.code != MODEL_DOWN {
            tracing::error!(error = %error.message, "a stream failed");
        }
        if let Some(run) = &self.run {
            run.failed(&error);
        }
        self.push(vec![error.body()]);
        self.end();
    }
}

impl<E: Encoder> HttpBody for EventStream<E> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        loop {
            if let Some(frame) = this.frames.pop_front() {
                this.silence.as_mut().reset(Instant::now() + this.keep_alive);
                return Poll::Ready(Some(Ok(Frame::data(frame))));
            }
            let Some(run) = &mut this.run else { return Poll::Ready(None) };
            match run.poll_piece(cx) {
                Poll::Ready(Some((choice, Ok(piece)))) => this.take(choice, piece),
                Poll::Ready(Some((_, Err(error)))) => this.fail(error),
                Poll::Ready(None) => this.fail(ChoiceError::Lost),
                Poll::Pending => {
                    std::task::ready!(this.silence.as_mut().poll(cx));
                    this.frames.push_back(Bytes::from_static(b": keep-alive\n\n"));
                }
            }
        }
    }
}
