//! A sub-server: one model with its own pool of pages, its own pace and its own replicas.
//!
//! [`SubServer`] is the decode loop without the loop: messages in ([`SubServer::take`]), one forward
//! at a time ([`SubServer::step`]), effects out. It reads no clock and owns no thread; [`worker`]
//! gives it both. A step is plan (pure) → forward → policy → resolve (pure) → effects.

mod attachment;
mod attachments;
mod by_id;
mod constrained;
pub mod coordinator;
pub mod counts;
mod failures;
pub mod gate;
mod handoff;
mod hooks;
mod message;
pub mod observe;
pub mod observed;
mod own_signals;
pub mod pacer;
mod pages;
mod plan;
mod prefix;
mod prepare;
mod replica;
pub mod resolve;
mod scores;
mod step;
mod tombstones;
mod turns;
pub mod worker;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

pub use attachment::Attachment;
use attachments::Attachments;
use by_id::{Ascending, ById};
use handoff::Terms;
pub use message::{Attach, Detached, Effect, Message, PeerReq, Status};
use observe::Observer;
pub use pages::{PagePool, pages_for};
pub use plan::Limits;
use replica::Replica;
use resolve::Resolve;
pub use step::Stepped;
use step::Work;
use tombstones::Tombstones;

use crate::request::{Committed, Event, FinishReason, ModelDown, ModelId, RequestError, RequestId, RequestSpec};
use crate::runner::Runner;

/// A policy that hands a request round this often without a token committed is told no: the request
/// then stays where it is for one token.
pub const MAX_IDLE_HANDOFFS: u32 = 32;

/// How many ended requests are remembered.
const TOMBSTONES: usize = 1 << 16;

/// Counters of one sub-server since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub steps: u64,
    pub rows: u64,
    /// Requests in all steps together; by `steps` it is the mean batch.
    pub batched: u64,
    /// Of those, requests that were sampled.
    pub evaluated: u64,
    /// Tokens committed here, and requests that ended well here.
    pub committed: u64,
    pub finished: u64,
    /// Of the rows, those of prompts, but for the last of each prompt.
    pub prompt_rows: u64,
    pub handoffs: u64,
    pub retractions: u64,
    pub preemptions: u64,
    /// Tokens whose K/V requests came to need and that were looked up in the prefix cache, once each time
    /// they came to need it; and those of them whose K/V was there.
    pub prefix_queried: u64,
    pub prefix_found: u64,
    /// Cached pages given up because others were needed.
    pub prefix_evicted: u64,
    pub stale_messages: u64,
    pub resent: u64,
    pub invalid_decisions: u64,
}

impl Counters {
    fn add(&mut self, stepped: Stepped) {
        self.steps += 1;
        self.rows += stepped.rows as u64;
        self.batched += stepped.requests as u64;
        self.evaluated += stepped.evaluated as u64;
        self.prompt_rows += stepped.prompt_rows as u64;
    }
}

/// One model and the requests that it knows of.
pub struct SubServer {
    id: ModelId,
    runner: Box<dyn Runner>,
    routes: Attachments,
    replicas: ById<Replica>,
    /// Requests that this model owns. Ids grow, so the first is the oldest.
    owned: Ascending,
    pool: PagePool,
    /// Whether sequences that begin with the same tokens share pages.
    prefix_cache: bool,
    limits: Limits,
    tombstones: Tombstones,
    effects: Vec<Effect>,
    /// Requests whose first step the last one was.
    begun: Vec<Arc<RequestSpec>>,
    counters: Counters,
    resolve: Resolve,
    observer: Option<Arc<dyn Observer>>,
    /// `None` during a step.
    work: Option<Box<Work>>,
    /// The runner is not called again; what this model comes to own fails at once.
    down: Option<ModelDown>,
}

impl SubServer {
    /// `routes`: those of the start, in the order of their ids; `None` where one does not use this model.
    pub fn new(id: ModelId, runner: Box<dyn Runner>, routes: Vec<Option<Attachment>>, limits: Limits) -> Self {
        let pool = PagePool::new(runner.info().pages);
        Self {
            id,
            runner,
            routes: Attachments::new(routes),
            replicas: ById::default(),
            owned: Ascending::default(),
            pool,
            prefix_cache: true,
            limits,
            tombstones: Tombstones::new(TOMBSTONES),
            effects: Vec::new(),
            begun: Vec::new(),
            counters: Counters::default(),
            resolve: resolve::resolve,
            observer: None,
            work: Some(Box::default()),
            down: None,
        }
    }

    /// Whether it keeps K/V for later requests that begin with the same tokens. It does if nothing is said.
    pub fn with_prefix_cache(self, prefix_cache: bool) -> Self {
        Self { prefix_cache, ..self }
    }

    /// Tell `observer` of every evaluation.
    pub fn observed(self, observer: Option<Arc<dyn Observer>>) -> Self {
        Self { observer, ..self }
    }

    /// The runner, for another sub-server, and the routes; `None` for a runner that can compute nothing any more.
    /// What this sub-server still knows of requests is lost.
    pub fn into_parts(self) -> (Option<Box<dyn Runner>>, Vec<Attachment>) {
        (self.down.is_none().then_some(self.runner), self.routes.into_all())
    }

    /// Use another resolve step. For tests that show that the invariants notice a broken one.
    pub fn with_resolve(self, resolve: Resolve) -> Self {
        Self { resolve, ..self }
    }

    /// Requests that could be in a forward now.
    pub fn ready(&self) -> usize {
        self.owned.len()
    }

    /// Requests known here, wherever they live.
    pub fn replicas(&self) -> usize {
        self.replicas.len()
    }

    pub fn counters(&self) -> Counters {
        Counters { prefix_evicted: self.pool.evictions(), ..self.counters }
    }

    /// [`Self::counters`] but for the pages given up, which are behind a lock.
    pub(crate) fn counted(&self) -> &Counters {
        &self.counters
    }

    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Policy state slots in use, over all routes.
    pub fn open_slots(&self) -> usize {
        self.routes.iter().map(Attachment::open_slots).sum()
    }

    /// Routes that are attached here.
    pub fn routes(&self) -> usize {
        self.routes.iter().len()
    }

    /// Invariant 3: every page in use belongs to a live replica, a shared one to several.
    pub fn pages_held(&self) -> usize {
        let pages = self.replicas.values().flat_map(|r| r.pages.ids());
        pages.collect::<HashSet<_>>().len()
    }

    /// What happened since the last call, in order.
    pub fn effects(&mut self) -> std::vec::Drain<'_, Effect> {
        self.effects.drain(..)
    }

    /// [`Self::effects`] in exchange for an empty list, for callers who have something to do with this
    /// sub-server meanwhile.
    pub fn exchange_effects(&mut self, empty: Vec<Effect>) -> Vec<Effect> {
        std::mem::replace(&mut self.effects, empty)
    }

    /// Requests of which the last step was the first that computed something, at any model.
    pub fn begun(&mut self) -> std::vec::Drain<'_, Arc<RequestSpec>> {
        self.begun.drain(..)
    }

    /// Take one message.
    pub fn take(&mut self, message: Message) {
        match message {
            Message::Submit(spec) => self.submit(spec),
            Message::Peer(peer) => match peer.status {
                Status::New | Status::Need => self.arrive(peer),
                Status::Finished | Status::Cancelled => self.bury(peer.id),
                Status::Lost => self.send_again(&peer),
            },
            Message::Cancel(id) => self.bury(id),
            Message::Attach(attach) => self.attach(*attach),
            Message::Detach(route, nets) => self.detach(route, nets),
            Message::Wake | Message::Shutdown => {}
        }
        if let Some(down) = &self.down {
            self.fail_all(&down.clone().into());
        }
    }

    /// The runner can compute nothing any more. Replicas whose requests live elsewhere stay until those end
    /// or come back.
    fn go_down(&mut self, message: String) {
        let down = ModelDown { model: self.runner.info().name.clone(), message };
        self.effects.push(Effect::ModelDown(down.clone()));
        self.fail_all(&down.clone().into());
        self.down = Some(down);
    }

    /// Lose a pending replica, as a model that was started anew has. False for a request that it owns or
    /// does not know.
    pub fn forget(&mut self, id: RequestId) -> bool {
        if self.owned.has(id) {
            return false;
        }
        let Some(replica) = self.replicas.remove(&id) else { return false };
        self.close(&replica);
        true
    }

    /// Whether this model owns the request.
    pub fn owns(&self, id: RequestId) -> bool {
        self.owned.has(id)
    }

    /// Fail every request that this model owns; the others' owners do the same.
    pub fn fail_all(&mut self, error: &RequestError) {
        while let Some(&id) = self.owned.first() {
            self.fail(id, error.clone());
        }
    }

    fn attachment(&mut self, spec: &RequestSpec) -> Option<&mut Attachment> {
        self.routes.get_mut(spec.new.route)
    }

    fn submit(&mut self, spec: Arc<RequestSpec>) {
        let id = spec.id;
        if self.tombstones.is_dead(id) || self.replicas.contains_key(&id) {
            self.counters.stale_messages += 1;
            return;
        }
        let (pool, prefix_cache, step) = (self.pool.clone(), self.prefix_cache, self.counters.steps);
        let Some(attachment) = self.attachment(&spec) else { return };
        attachment.at_step(step);
        let pages = pool.pages(prefix_cache.then(|| attachment.root(&spec)));
        let (slot, models, own) = (attachment.open(), attachment.models.len(), attachment.own);
        let mut replica = Replica::new(spec.clone(), slot, spec.new.prompt.clone(), pages, models);
        let entry = attachment.entry(&replica.view());
        replica.anchors[own as usize] = replica.committed;
        replica.owned = true;
        replica.score_prompt();
        self.replicas.insert(id, replica);
        self.routes.opened(spec.new.route);
        self.owned.insert(id);
        match entry {
            Ok(None) => {}
            Ok(Some(to)) => self.hand_off(id, to, Vec::new(), Terms { counted: false, ..Terms::default() }),
            Err(failed) => self.policy_failed(&[id], failed),
        }
        self.tell_notes(spec.new.route);
    }

    /// The request is over here; nobody is told.
    fn bury(&mut self, id: RequestId) {
        self.tombstones.bury(id);
        self.owned.remove(id);
        if let Some(mut replica) = self.replicas.remove(&id) {
            replica.publish();
            self.close(&replica);
        }
    }

    /// Let the policy forget a replica.
    fn close(&mut self, replica: &Replica) {
        let (route, step) = (replica.spec.new.route, self.counters.steps);
        let Some(attachment) = self.routes.get_mut(route) else { return };
        attachment.at_step(step);
        if let Err(failed) = attachment.close(replica.slot) {
            self.report(route, failed);
        }
        self.tell_notes(route);
        let gone = self.routes.closed(route);
        self.gone(gone);
    }

    /// Tell the peers that hold a replica, and forget the request.
    fn end(&mut self, id: RequestId, status: Status, event: Event) {
        if let Some(replica) = self.replicas.get(&id)
            && let Some(attachment) = self.routes.get(replica.spec.new.route)
        {
            for (index, &to) in attachment.models.iter().enumerate() {
                if to != self.id && replica.anchors[index] > 0 {
                    self.effects.push(Effect::Send(Box::new(PeerReq {
                        id,
                        from: self.id,
                        to,
                        seq: replica.seq + 1,
                        status,
                        base: 0,
                        tokens: Vec::new(),
                        provisional: Vec::new(),
                        budget: None,
                        payload: None,
                        anchors: Vec::new(),
                        handoffs: replica.handoffs,
                        idle_handoffs: 0,
                        spec: None,
                        sent: Duration::ZERO,
                    })));
                }
            }
        }
        self.effects.push(Effect::Event(id, event));
        self.bury(id);
    }

    fn finish(&mut self, id: RequestId, reason: FinishReason) {
        let handoffs = self.replicas.get(&id).map_or(0, |r| r.handoffs);
        self.counters.finished += 1;
        self.end(id, Status::Finished, Event::Finished { reason, handoffs });
    }

    fn fail(&mut self, id: RequestId, error: RequestError) {
        self.end(id, Status::Cancelled, Event::Failed(error));
    }

    /// Enter committed tokens and the provisional ones behind them.
    fn commit(&mut self, id: RequestId, commit: Vec<Committed>, provisional: Vec<Committed>) {
        let Some(replica) = self.replicas.get_mut(&id) else { return };
        if commit.is_empty() && provisional.is_empty() && replica.provisional.is_empty() {
            return;
        }
        let start = replica.generated();
        replica.rewrite(replica.committed, commit.iter().map(|c| c.token), provisional);
        if !commit.is_empty() {
            replica.idle_handoffs = 0;
            self.counters.committed += commit.len() as u64;
            self.effects.push(Effect::Event(id, Event::Committed { start, tokens: commit }));
        }
    }
}
