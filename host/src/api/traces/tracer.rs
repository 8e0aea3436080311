//! Which requests are traced, and under which parent.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::http::{HeaderMap, Uri};
use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{SpanContext, SpanKind, TraceContextExt, TraceFlags};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, Sampler, SamplingDecision, ShouldSample};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::queue::Queue;
use super::sender::Sender;
use super::{Finished, TraceSettings};
use crate::metrics::text::Exposition;

/// Spans that wait or are being sent. One takes less than 100 bytes here.
const MOST_SPANS: usize = 16_384;
/// Spans of one message to the collector.
const BATCH: usize = 2048;
/// Characters of a path in a span.
const LONGEST_PATH: usize = 200;

/// Traces requests, until dropped.
pub struct Traces {
    sampler: Sampler,
    queue: Arc<Queue<Finished>>,
    /// Tells the sender that nothing more comes.
    last: watch::Sender<bool>,
    sender: Mutex<Option<JoinHandle<()>>>,
}

/// A request that is traced.
#[derive(Clone, Debug)]
pub struct Origin {
    /// Of its span.
    pub context: SpanContext,
    /// The client's span; invalid where there is none.
    pub parent: SpanContext,
    /// One moment, by both clocks.
    pub at: Instant,
    pub wall: SystemTime,
    pub path: String,
}

impl Traces {
    /// Within a runtime.
    pub fn start(settings: &TraceSettings) -> Option<Self> {
        let queue = Arc::new(Queue::new(MOST_SPANS, BATCH));
        let (last, ending) = watch::channel(false);
        let sender = tokio::spawn(Sender::new(settings, queue.clone(), ending).run());
        let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(settings.sample)));
        Some(Self { sampler, queue, last, sender: Mutex::new(Some(sender)) })
    }

    /// A request begins. `None` if it is not traced.
    pub(in crate::api) fn begin(&self, headers: &HeaderMap, uri: &Uri, at: Instant) -> Option<Origin> {
        let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(headers));
        let parent = context.span().span_context().clone();
        let ids = RandomIdGenerator::default();
        let trace_id = if parent.is_valid() { parent.trace_id() } else { ids.new_trace_id() };
        let sampled = self.sampler.should_sample(Some(&context), trace_id, "", &SpanKind::Server, &[], &[]);
        if sampled.decision != SamplingDecision::RecordAndSample {
            return None;
        }
        let span_id = ids.new_span_id();
        Some(Origin {
            context: SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, sampled.trace_state),
            parent,
            at,
            wall: SystemTime::now(),
            path: uri.path().chars().take(LONGEST_PATH).collect(),
        })
    }

    /// A request that is traced has ended.
    pub(in crate::api) fn end(&self, finished: Finished) {
        let visits = finished.record.facts().visits.as_ref().map_or(0, |visits| visits.kept.len());
        self.queue.put(finished, 1 + visits);
    }

    /// Send what waits, for so long at most. Later requests are not traced any more.
    pub async fn flush(&self, within: Duration) {
        self.last.send_replace(true);
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(sender) = sender {
            let abort = sender.abort_handle();
            // One that panicked has sent what it could.
            if tokio::time::timeout(within, sender).await.is_err() {
                abort.abort();
            }
        }
        let left = self.queue.open();
        self.queue.close();
        if left > 0 {
            tracing::warn!(spans = left, "traces: the collector did not take the last spans in time; they are lost");
        }
    }

    pub(in crate::api) fn write_metrics(&self, out: &mut Exposition) {
        out.counter("tokenrouter_trace_spans_total", "Spans of traces by what became of them.")
            .sample(&[("outcome", "sent")], self.queue.sent.read())
            .sample(&[("outcome", "dropped")], self.queue.dropped.read());
        out.gauge("tokenrouter_trace_spans_waiting", "Spans of traces that are to be sent.")
            .sample(&[], self.queue.open());
    }
}

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Traces").field("sampler", &self.sampler).finish_non_exhaustive()
    }
}

impl Origin {
    pub fn trace_id(&self) -> String {
        self.context.trace_id().to_string()
    }

    /// `instant` by the wall's clock.
    pub fn wall(&self, instant: Instant) -> SystemTime {
        match instant.checked_duration_since(self.at) {
            Some(after) => self.wall + after,
            None => self.wall - self.at.saturating_duration_since(instant),
        }
    }
}

/// Headers as the propagator reads them. One that comes twice says nothing.
struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let mut values = self.0.get_all(key).iter();
        let value = values.next().filter(|_| values.next().is_none());
        value.and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(axum::http::HeaderName::as_str).collect()
    }
}
