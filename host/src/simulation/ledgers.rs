//! Clients that keep everything they are told: for tests of the protocol.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Audience;
use crate::request::{Event, FinishReason, Ledger, LedgerError, RequestError, RequestId};

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    Finished(FinishReason),
    Failed(RequestError),
    Cancelled,
}

/// The client's side of a request.
#[derive(Debug, Default)]
pub struct Client {
    pub ledger: Ledger,
    pub ending: Option<Ending>,
    /// When it ended.
    pub ended_at: Duration,
    /// A contradiction in the ledger, which must never happen.
    pub contradiction: Option<LedgerError>,
    /// Events that came after the last one.
    pub late: u32,
}

/// The clients of a world.
#[derive(Debug, Default)]
pub struct Ledgers(pub BTreeMap<RequestId, Client>);

impl Client {
    fn end(&mut self, now: Duration, ending: Ending) {
        // What was on its way when the client left does not matter.
        match self.ending {
            None => (self.ending, self.ended_at) = (Some(ending), now),
            Some(Ending::Cancelled) => {}
            Some(_) => self.late += 1,
        }
    }
}

impl Audience for Ledgers {
    fn submitted(&mut self, _: Duration, id: RequestId) {
        self.0.insert(id, Client::default());
    }

    fn cancelled(&mut self, now: Duration, id: RequestId) {
        if let Some(client) = self.0.get_mut(&id) {
            client.end(now, Ending::Cancelled);
        }
    }

    fn hear(&mut self, now: Duration, id: RequestId, event: Event) {
        let Some(client) = self.0.get_mut(&id) else { return };
        match event {
            Event::Committed { start, tokens } => match (&client.ending, client.ledger.enter(start, tokens)) {
                (Some(Ending::Cancelled), _) => {}
                (Some(_), _) => client.late += 1,
                (None, Err(error)) => client.contradiction = Some(error),
                (None, Ok(_)) => {}
            },
            Event::PromptCached { .. } | Event::PromptScored { .. } => {}
            Event::Finished { reason, .. } => client.end(now, Ending::Finished(reason)),
            Event::Failed(error) => client.end(now, Ending::Failed(error)),
        }
    }
}
