//! What sub-servers say to each other.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;

use super::Attachment;
use crate::policy::monitor::Note;
use crate::request::{Committed, Event, ModelDown, ModelId, RequestId, RequestSpec, RouteId, TokenId};
use crate::runner::net::{NetId, ReadyNet};

/// Why a peer writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The receiver owns the request from now on, for the first time.
    New,
    /// The receiver owns the request again.
    Need,
    /// The request is over.
    Finished,
    /// The request was cancelled or failed.
    Cancelled,
    /// The writer lacks the tokens below `base` of message `seq`: send that hand-off again from 0.
    Lost,
}

/// One message about one request. A receiver takes a `seq` once and ignores older ones, so messages
/// may be repeated and reordered.
#[derive(Clone, Debug)]
pub struct PeerReq {
    pub id: RequestId,
    pub from: ModelId,
    pub to: ModelId,
    /// Grows with every message that changes who owns the request.
    pub seq: u64,
    pub status: Status,
    /// How many trusted tokens the receiver holds already; `tokens` follow them.
    pub base: usize,
    /// Trusted tokens that the receiver lacks.
    pub tokens: Vec<TokenId>,
    /// Tokens behind `tokens` that are not committed yet.
    pub provisional: Vec<Committed>,
    /// Most tokens that the receiver may write before it hands back.
    pub budget: Option<u32>,
    /// Opaque to the host. `None`: empty.
    pub payload: Option<Arc<[u8]>>,
    /// For each model of the route, how many trusted tokens it holds once this message is taken.
    pub anchors: Vec<usize>,
    /// Hand-offs so far, for `usage`.
    pub handoffs: u32,
    /// Hand-offs since a token was committed last.
    pub idle_handoffs: u32,
    /// Prompt length, sampling parameters and so on; only on a receiver's first visit.
    pub spec: Option<Arc<RequestSpec>>,
    /// When the writer's thread sent it, since the start of the server.
    pub sent: Duration,
}

/// A route begins at a model.
pub struct Attach {
    pub route: RouteId,
    pub attachment: Attachment,
    /// Nets that it names and the runner does not have yet.
    pub nets: Vec<(NetId, ReadyNet)>,
    /// Told whether it is attached, or why not.
    pub done: Sender<Result<(), String>>,
}

impl fmt::Debug for Attach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attach").field("route", &self.route).finish_non_exhaustive()
    }
}

/// What a route leaves behind at a model, for another thread to drop: that may take longer than a step.
pub struct Detached {
    pub route: RouteId,
    /// `None`: it was never attached.
    pub attachment: Option<Box<Attachment>>,
    /// The runner does not have these any more, and their ids are free.
    pub nets: Vec<NetId>,
    pub given_up: Vec<ReadyNet>,
}

impl fmt::Debug for Detached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Detached").field("route", &self.route).field("nets", &self.nets).finish_non_exhaustive()
    }
}

/// What lands in a sub-server's inbox.
#[derive(Debug)]
pub enum Message {
    /// A new request from the client loop.
    Submit(Arc<RequestSpec>),
    /// From another sub-server.
    Peer(Box<PeerReq>),
    /// The client is gone, or a stop string was found.
    Cancel(RequestId),
    /// A route begins here.
    Attach(Box<Attach>),
    /// No request of the route lives or comes any more: forget it, and these nets, with its last replica.
    Detach(RouteId, Vec<NetId>),
    /// Something that the gate depends on has changed.
    Wake,
    /// Fail everything and end.
    Shutdown,
}

/// What a sub-server wants done.
#[derive(Debug)]
pub enum Effect {
    /// Deliver to `PeerReq::to`.
    Send(Box<PeerReq>),
    /// Tell the client loop.
    Event(RequestId, Event),
    /// This model has gone down. Comes before the ends of its requests.
    ModelDown(ModelDown),
    /// A policy failed and is not called again at this model. `disables`: the route takes no new requests.
    PolicyFailed { route: u32, hook: &'static str, step: u64, message: String, disables: bool },
    /// A policy goes on, but not as it should: for the log.
    PolicyNote { route: u32, step: u64, note: Note },
    /// A route is gone from here.
    Detached(Box<Detached>),
}
