//! When an answer has to be complete.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::time::{Instant, Sleep};

use super::counters::{Counters, Refusal};
use crate::api::error::ApiError;

pub struct Deadline {
    over: Pin<Box<Sleep>>,
    timeout: Duration,
    counters: Arc<Counters>,
}

impl Deadline {
    pub(super) fn new(arrived: Instant, timeout: Duration, counters: Arc<Counters>) -> Self {
        Self { over: Box::pin(tokio::time::sleep_until(arrived + timeout)), timeout, counters }
    }

    pub fn at(&self) -> Instant {
        self.over.deadline()
    }

    /// Ready once it has passed, with what the client is told.
    pub fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<ApiError> {
        std::task::ready!(self.over.as_mut().poll(cx));
        self.counters.add(Refusal::Deadline);
        let seconds = self.timeout.as_secs_f64();
        let message = format!("The answer was not complete after {seconds} s (server.request_timeout_s).");
        Poll::Ready(ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message))
    }
}

/// Never over where there is none.
pub async fn over(deadline: &mut Option<Deadline>) -> ApiError {
    match deadline {
        Some(deadline) => std::future::poll_fn(|cx| deadline.poll_over(cx)).await,
        None => std::future::pending().await,
    }
}
