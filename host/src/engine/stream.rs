//! What a client of an engine has of a request.

use std::sync::Arc;

use tokio::sync::mpsc::UnboundedReceiver;

use super::counts::Ended;
use super::shared::Shared;
use crate::request::{RequestId, RequestSpec, Told};

/// The events of one request, ending with [`Event::Finished`] or [`Event::Failed`].
pub struct RequestStream {
    pub id: RequestId,
    pub events: UnboundedReceiver<Told>,
    pub(super) behind: Option<Behind>,
}

/// What a stream has to do with an engine.
pub(super) struct Behind {
    pub shared: Arc<Shared>,
    pub spec: Arc<RequestSpec>,
    /// How the request ends if the stream is dropped.
    pub ended: Ended,
}

impl RequestStream {
    /// A stream with no engine behind it: for tests of those who read streams.
    pub fn unconnected(id: RequestId, events: UnboundedReceiver<Told>) -> Self {
        Self { id, events, behind: None }
    }

    /// The request, with the moment that it begins.
    pub fn spec(&self) -> Option<&Arc<RequestSpec>> {
        self.behind.as_ref().map(|behind| &behind.spec)
    }

    /// Its text has ended before the models hear of it: dropping the stream breaks nothing off.
    pub fn stopped(&mut self) {
        if let Some(behind) = &mut self.behind {
            behind.ended = Ended::Stop;
        }
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if let Some(Behind { shared, ended, .. }) = &self.behind {
            shared.cancel(self.id, *ended);
        }
    }
}
