//! Traces: a span for each request with a span for each visit under it, sent to a collector by OpenTelemetry's
//! protocol (protobuf over HTTP).
//!
//! A request that is traced only notes its visits. At its end it goes into a queue of bounded size; a task makes the
//! spans and sends them, so that no request waits for a collector. What finds no room, or is refused, is counted.
//!
//! The types, the rules of sampling and the encoding are those of OpenTelemetry's crates. Queue and sender are our own:
//! theirs do not tell how much they drop, and read environment variables behind the configuration's back.

#[cfg(feature = "otel")]
mod context;
mod destination;
#[cfg(not(feature = "otel"))]
mod off;
#[cfg(feature = "otel")]
mod post;
#[cfg(feature = "otel")]
mod queue;
#[cfg(feature = "otel")]
mod sender;
#[cfg(feature = "otel")]
mod spans;
#[cfg(feature = "otel")]
mod tracer;

use std::sync::Arc;
use std::time::Instant;

use super::record::Record;

pub use destination::Destination;
#[cfg(not(feature = "otel"))]
pub use off::{Origin, Traces};
#[cfg(feature = "otel")]
pub use tracer::{Origin, Traces};

/// What is traced, and where that goes.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceSettings {
    pub endpoint: Destination,
    /// Share of the requests that are traced, of those whose client has not decided it.
    pub sample: f64,
    /// What the server is called in traces.
    pub service_name: String,
}

/// A request that is over.
#[cfg_attr(not(feature = "otel"), expect(dead_code, reason = "there is nobody to read it"))]
#[derive(Clone, Debug)]
pub(super) struct Finished {
    pub record: Arc<Record>,
    /// As it is counted.
    pub status: u16,
    pub ended: Instant,
}
