//! Requests that come from peers and go to them.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use tokenrouter_plugin_api::{Acceptance, ModelIndex, PeerView};

use super::message::{Effect, PeerReq, Status};
use super::replica::{Replica, Sent};
use super::{SubServer, resolve};
use crate::request::{Committed, RequestId, TokenId};

/// On what terms a request leaves.
#[derive(Debug)]
pub(super) struct Terms {
    pub budget: Option<u32>,
    pub payload: Option<Arc<[u8]>>,
    /// Whether it counts as a hand-off; placing a new request does not.
    pub counted: bool,
}

impl Default for Terms {
    fn default() -> Self {
        Self { budget: None, payload: None, counted: true }
    }
}

impl SubServer {
    /// A peer hands a request over.
    pub(super) fn arrive(&mut self, mut message: Box<PeerReq>) {
        let id = message.id;
        let known = self.replicas.get(&id);
        if self.tombstones.is_dead(id) || known.is_some_and(|r| r.owned || message.seq <= r.seq) {
            self.counters.stale_messages += 1;
            return;
        }
        let held = known.map_or(0, |r| r.committed);
        let spec = known.map(|r| &r.spec).or(message.spec.as_ref());
        let Some(spec) = spec.filter(|_| message.base <= held) else {
            let lost = PeerReq {
                from: self.id,
                to: message.from,
                status: Status::Lost,
                base: 0,
                tokens: Vec::new(),
                provisional: Vec::new(),
                payload: None,
                spec: None,
                ..*message
            };
            self.effects.push(Effect::Send(Box::new(lost)));
            return;
        };
        let Some(attachment) = self.routes.get_mut(spec.new.route) else { return };
        let mut opened = None;
        let replica = match self.replicas.entry(id) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let Some(spec) = message.spec.take() else { return };
                let pages = self.pool.pages(self.prefix_cache.then(|| attachment.root(&spec)));
                let (slot, models) = (attachment.open(), attachment.models.len());
                opened = Some(spec.new.route);
                new.insert(Replica::new(spec, slot, Vec::new(), pages, models))
            }
        };
        let from = attachment.models.iter().position(|&m| m == message.from).map(|i| i as ModelIndex);
        let drafts = &message.provisional;
        let together: Vec<TokenId>;
        let arriving = if drafts.is_empty() {
            &message.tokens
        } else {
            together = message.tokens.iter().copied().chain(drafts.iter().map(|c| c.token)).collect();
            &together
        };
        let payload = message.payload.as_deref().unwrap_or_default();
        let view = PeerView::new(from.unwrap_or_default(), arriving, drafts.len() as u32, payload);
        attachment.at_step(self.counters.steps);
        let acceptance = attachment.receive(&replica.view(), &view);
        let route = replica.spec.new.route;
        if let Some(route) = opened {
            self.routes.opened(route);
        }
        // Own provisional tokens live on only where the message confirms them.
        let provisional = std::mem::take(&mut message.provisional);
        replica.rewrite(message.base, message.tokens.iter().copied(), provisional);
        replica.verify = !replica.provisional.is_empty();
        // Where a request begins its prompt is scored, whatever models come later.
        if opened.is_some() && message.handoffs == 0 {
            replica.score_prompt();
        }
        replica.owned = true;
        replica.seq = message.seq;
        replica.handoffs = message.handoffs;
        replica.idle_handoffs = message.idle_handoffs;
        std::mem::swap(&mut replica.anchors, &mut message.anchors);
        replica.came_from = from;
        replica.budget = message.budget;
        replica.sent = None;
        replica.spent = Some(message);
        self.owned.insert(id);
        match acceptance {
            Ok(Acceptance::Accept(count)) => {
                let mut stand = replica.provisional.clone();
                stand.truncate(count as usize);
                let ends = replica.ends();
                let finish = resolve::close(&mut stand, replica.generated(), replica.spec.new.max_tokens, ends);
                self.commit(id, stand, Vec::new());
                if let Some(reason) = finish {
                    self.finish(id, reason);
                }
            }
            Ok(_) => {}
            Err(failed) => self.policy_failed(&[id], failed),
        }
        self.tell_notes(route);
    }

    /// A receiver lost its state: send the last hand-off again, from 0.
    pub(super) fn send_again(&mut self, lost: &PeerReq) {
        let Some(replica) = self.replicas.get_mut(&lost.id).filter(|r| !r.owned && r.seq == lost.seq) else {
            self.counters.stale_messages += 1;
            return;
        };
        let Some(sent) = replica.sent.take_if(|s| s.to == lost.from) else { return };
        self.effects.push(Effect::Send(replica.message(self.id, &sent, 0, true)));
        replica.sent = Some(sent);
        self.counters.resent += 1;
    }

    /// Hand the request to model `to` of its route. `provisional` goes along uncommitted.
    pub(super) fn hand_off(&mut self, id: RequestId, to: ModelIndex, provisional: Vec<Committed>, handoff: Terms) {
        let Some(replica) = self.replicas.get_mut(&id) else { return };
        let Some(attachment) = self.routes.get(replica.spec.new.route) else { return };
        let committed = replica.committed;
        let (own, index) = (attachment.own as usize, to as usize);
        let (Some(&target), Some(&base)) = (attachment.models.get(index), replica.anchors.get(index)) else { return };
        replica.anchors[own] = committed;
        replica.anchors[index] = committed;
        replica.rewrite(committed, std::iter::empty(), provisional);
        replica.owned = false;
        replica.unscored = None;
        replica.came_from = None;
        replica.budget = None;
        replica.seq += 1;
        replica.handoffs += u32::from(handoff.counted);
        replica.idle_handoffs += 1;
        let first = base == 0;
        let sent = Sent {
            to: target,
            status: if first { Status::New } else { Status::Need },
            budget: handoff.budget,
            payload: handoff.payload,
        };
        self.effects.push(Effect::Send(replica.message(self.id, &sent, base, first)));
        replica.sent = Some(sent);
        self.owned.remove(id);
        self.counters.handoffs += 1;
    }
}
