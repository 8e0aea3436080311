//! One model's copy of a request.

use std::sync::Arc;

use tokenrouter_plugin_api::{ModelIndex, RequestView, Slot};

use super::message::{PeerReq, Status};
use super::pages::{Pages, pages_for};
use super::plan::{Pending, Ready};
use super::resolve::Ends;
use crate::request::{Committed, ModelId, RequestSpec, TokenId};

/// The last hand-off that left this replica, kept so that it can be sent again.
#[derive(Debug)]
pub struct Sent {
    pub to: ModelId,
    pub status: Status,
    /// Trusted tokens that the destination holds after it.
    pub committed: usize,
    pub provisional: Vec<Committed>,
    pub budget: Option<u32>,
    pub payload: Arc<[u8]>,
}

/// A request at one model. `tokens` is the prompt, the committed tokens that this model knows of, and
/// at the end one token for each entry of `provisional`: `tokens.len() == committed + provisional.len()`.
#[derive(Debug)]
pub struct Replica {
    pub spec: Arc<RequestSpec>,
    /// State slot of the route's policy here.
    pub slot: Option<Slot>,
    pub tokens: Vec<TokenId>,
    /// Prompt and committed tokens.
    pub committed: usize,
    pub provisional: Vec<Committed>,
    /// The provisional tokens came from a peer and are to be verified.
    pub verify: bool,
    /// Tokens with K/V in `pages`; never more than `tokens`.
    pub kv_len: usize,
    pub pages: Pages,
    /// This model owns the request: it is Waiting or Running here, else Pending.
    pub owned: bool,
    /// Of the last message that changed the owner.
    pub seq: u64,
    pub handoffs: u32,
    pub idle_handoffs: u32,
    /// Trusted tokens that each model of the route holds.
    pub anchors: Vec<usize>,
    /// Who handed over for this visit.
    pub came_from: Option<ModelIndex>,
    pub budget: Option<u32>,
    pub sent: Option<Sent>,
}

impl Replica {
    /// A replica that knows the prompt at most.
    pub fn new(spec: Arc<RequestSpec>, slot: Option<Slot>, tokens: Vec<TokenId>, pages: Pages, models: usize) -> Self {
        Self {
            spec,
            slot,
            committed: tokens.len(),
            tokens,
            provisional: Vec::new(),
            verify: false,
            kv_len: 0,
            pages,
            owned: false,
            seq: 0,
            handoffs: 0,
            idle_handoffs: 0,
            anchors: vec![0; models],
            came_from: None,
            budget: None,
            sent: None,
        }
    }

    /// Committed tokens after the prompt.
    pub fn generated(&self) -> u32 {
        self.committed.saturating_sub(self.prompt_len()) as u32
    }

    pub fn prompt_len(&self) -> usize {
        self.spec.new.prompt.len()
    }

    pub fn ends(&self) -> Ends<'_> {
        let sampling = &self.spec.new.sampling;
        Ends { stop: &sampling.stop_token_ids, ignore_eos: sampling.ignore_eos }
    }

    /// Replace everything from token `from` on by `commit`, committed, and `provisional`. K/V is kept as
    /// far as the tokens stay the same.
    pub fn rewrite(
        &mut self,
        from: usize,
        commit: impl ExactSizeIterator<Item = TokenId>,
        provisional: Vec<Committed>,
    ) {
        let (mut at, committed) = (from, from + commit.len());
        for token in commit.chain(provisional.iter().map(|c| c.token)) {
            if self.tokens.get(at) != Some(&token) {
                self.tokens.truncate(at);
                self.kv_len = self.kv_len.min(at);
                self.tokens.push(token);
            }
            at += 1;
        }
        self.tokens.truncate(at);
        self.committed = committed;
        self.provisional = provisional;
        self.verify = false;
        self.kv_len = self.kv_len.min(at);
        self.pages.shrink_to(pages_for(self.kv_len));
    }

    /// Give up K/V, keep the tokens: on return they are simply more rows.
    pub fn retract(&mut self) {
        self.kv_len = 0;
        self.pages.shrink_to(0);
    }

    pub fn ready(&self) -> Ready {
        Ready {
            id: self.spec.id,
            len: self.tokens.len(),
            kv_len: self.kv_len,
            verify: if self.verify { self.provisional.len() } else { 0 },
            pages: self.pages.ids().len(),
        }
    }

    pub fn pending(&self) -> Pending {
        Pending { id: self.spec.id, pages: self.pages.ids().len() }
    }

    /// The hand-off `sent` for a destination that holds the first `base` tokens.
    pub fn message(&self, from: ModelId, sent: &Sent, base: usize, with_spec: bool) -> PeerReq {
        PeerReq {
            id: self.spec.id,
            from,
            to: sent.to,
            seq: self.seq,
            status: sent.status,
            base,
            tokens: self.tokens[base.min(sent.committed)..sent.committed].to_vec(),
            provisional: sent.provisional.clone(),
            budget: sent.budget,
            payload: sent.payload.clone(),
            anchors: self.anchors.clone(),
            handoffs: self.handoffs,
            idle_handoffs: self.idle_handoffs,
            spec: with_spec.then(|| self.spec.clone()),
        }
    }

    /// What the policy sees.
    pub fn view(&self) -> RequestView<'_> {
        let new = &self.spec.new;
        let slot = self.slot.unwrap_or_default();
        let prompt = self.prompt_len() as u32;
        let mut view = RequestView::new(self.spec.id, slot, new.sampling.seed, prompt, new.max_tokens, &self.tokens);
        view.provisional = self.provisional.len() as u32;
        view
    }
}
