//! In place of traces where the program is built without them.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, Uri};

use super::{Finished, TraceSettings};
use crate::metrics::text::Exposition;

/// There are none. The configuration refuses to ask for them.
#[derive(Debug)]
pub struct Traces(Infallible);

/// There is none, as no request is traced.
#[derive(Debug)]
pub struct Origin(Infallible);

impl Traces {
    pub fn start(_: &TraceSettings) -> Option<Self> {
        None
    }

    pub(in crate::api) fn begin(&self, _: &HeaderMap, _: &Uri, _: Instant) -> Option<Origin> {
        match self.0 {}
    }

    pub(in crate::api) fn keeps_refused(&self, _: &Origin) -> bool {
        match self.0 {}
    }

    pub(in crate::api) fn end(&self, _: Finished) {
        match self.0 {}
    }

    pub async fn flush(&self, _: Duration) -> u64 {
        match self.0 {}
    }

    pub(in crate::api) fn write_metrics(&self, _: &mut Exposition) {
        match self.0 {}
    }
}

impl Origin {
    pub fn trace_id(&self) -> String {
        match self.0 {}
    }
}
