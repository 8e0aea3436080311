//! Which requests are traced, and under which parent.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::http::{HeaderMap, Uri};
use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanKind, TraceContextExt, TraceFlags};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, Sampler, SamplingDecision, ShouldSample};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::context;
use super::queue::{Queue, Size};
use super::sender::Sender;
use super::{Finished, TraceSettings};
use crate::api::record::Record;
use crate::metrics::text::Exposition;

/// What waits or is being sent.
const MOST: Size = Size { spans: 16_384, bytes: 32 << 20 };
/// One message to the collector.
const BATCH: Size = Size { spans: 2048, bytes: 4 << 20 };
/// About what a span has without texts of clients, in a message; it is less while it waits.
const SPAN_BYTES: usize = 512;
/// Characters of a path in a span.
const LONGEST_PATH: usize = 200;

/// Traces requests, until dropped.
pub struct Traces {
    sampler: Sampler,
    /// For requests whose client does not decide.
    share: Sampler,
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
        let queue = Arc::new(Queue::new(MOST, BATCH));
        let (last, ending) = watch::channel(false);
        let sender = tokio::spawn(Sender::new(settings, queue.clone(), ending).run());
        let share = Sampler::TraceIdRatioBased(settings.sample);
        let sampler = Sampler::ParentBased(Box::new(share.clone()));
        Some(Self { sampler, share, queue, last, sender: Mutex::new(Some(sender)) })
    }

    /// A request begins. `None` if it is not traced.
    pub(in crate::api) fn begin(&self, headers: &HeaderMap, uri: &Uri, at: Instant) -> Option<Origin> {
        let parent = context::parent(headers);
        // A context with a span, even with none that is valid, would be a parent that does not sample.
        let context = parent.clone().map(|parent| Context::new().with_remote_span_context(parent));
        let parent = parent.unwrap_or(SpanContext::NONE);
        let ids = RandomIdGenerator::default();
        let trace_id = if parent.is_valid() { parent.trace_id() } else { ids.new_trace_id() };
        let sampled = self.sampler.should_sample(context.as_ref(), trace_id, "", &SpanKind::Server, &[], &[]);
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

    /// Whether a request that was refused is traced all the same: a client that may not ask decides nothing.
    pub(in crate::api) fn keeps_refused(&self, origin: &Origin) -> bool {
        if !origin.parent.is_sampled() {
            return true;
        }
        // The client has chosen its trace's id, so the share is drawn with another.
        let id = RandomIdGenerator::default().new_trace_id();
        let drawn = self.share.should_sample(None, id, "", &SpanKind::Server, &[], &[]);
        drawn.decision == SamplingDecision::RecordAndSample
    }

    /// A request that is traced has ended.
    pub(in crate::api) fn end(&self, finished: Finished) {
        let size = size(&finished.record);
        self.queue.put(finished, size);
    }

    /// Send what waits, for so long at most. Later requests are not traced any more. Returns how many spans are lost.
    pub async fn flush(&self, within: Duration) -> u64 {
        let before = self.queue.dropped.read();
        self.last.send_replace(true);
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(sender) = sender {
            let abort = sender.abort_handle();
            // One that panicked has sent what it could.
            if tokio::time::timeout(within, sender).await.is_err() {
                abort.abort();
            }
        }
        self.queue.close();
        let lost = self.queue.dropped.read() - before;
        if lost > 0 {
            tracing::warn!(spans = lost, "traces: the collector did not take the last spans; they are lost");
        }
        lost
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

/// About what its spans take, while they wait and in a message.
fn size(record: &Record) -> Size {
    let facts = record.facts();
    let mut spans = 1;
    let mut texts = record.id.len() + record.path.len();
    texts += record.trace.as_ref().map_or(0, |origin| origin.path.len() + origin.context.trace_state().header().len());
    texts += [&facts.model, &facts.policy, &facts.answer].into_iter().flatten().map(String::len).sum::<usize>();
    if let Some(visits) = &facts.visits {
        spans += visits.kept.len();
        let name = |model: usize| visits.names.get(model).map_or(0, String::len);
        // In the name of the span and in an attribute.
        texts += visits.kept.iter().map(|visit| 2 * name(visit.model.index())).sum::<usize>();
    }
    Size { spans, bytes: spans * SPAN_BYTES + texts }
}
