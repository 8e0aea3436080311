//! One model's copy of a request.

use std::sync::Arc;
use std::time::Duration;

use tokenrouter_plugin_api::{ModelIndex, RequestView, Slot};

use super::message::{PeerReq, Status};
use super::pages::{Pages, pages_for};
use super::plan::{Ready, Run};
use super::resolve::Ends;
use crate::constraint::{Constraint, Matcher};
use crate::request::{Committed, ModelId, RequestSpec, TokenId};
use crate::runner::PAGE_TOKENS;

/// What became of the K/V of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Computed {
    /// No forward was computed here yet.
    Never,
    /// It was given up.
    Lost,
    Held,
}

/// The last hand-off that left this replica, kept so that it can be sent again. Its tokens are those that
/// the replica still has.
#[derive(Debug)]
pub struct Sent {
    pub to: ModelId,
    pub status: Status,
    pub budget: Option<u32>,
    pub payload: Option<Arc<[u8]>>,
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
    /// Tokens with K/V in `pages`; never more than `tokens`. All tokens of shared pages have theirs.
    pub kv_len: usize,
    /// Shared are pages below the last committed token at most: rows from there on may be computed again.
    pub pages: Pages,
    pub computed: Computed,
    /// The position of the first token of the prompt that is yet to be scored here; `None`: there is none. No K/V
    /// of the row before it, nor of any further row, is there until then.
    pub unscored: Option<usize>,
    /// Tokens that the counters have as looked up in the cache.
    looked_up: usize,
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
    /// How far the answer has come in the form asked for. Behind some of its tokens: it follows when it is asked.
    pub matcher: Option<Matcher>,
    pub sent: Option<Sent>,
    /// The message that brought the request here: the next one takes its place in memory.
    pub spent: Option<Box<PeerReq>>,
}

impl Replica {
    /// A replica that knows the prompt at most.
    pub fn new(spec: Arc<RequestSpec>, slot: Option<Slot>, tokens: Vec<TokenId>, pages: Pages, models: usize) -> Self {
        Self {
            matcher: spec.new.sampling.constraint.as_ref().map(Constraint::matcher),
            spec,
            slot,
            committed: tokens.len(),
            tokens,
            provisional: Vec::new(),
            verify: false,
            kv_len: 0,
            pages,
            computed: Computed::Never,
            unscored: None,
            looked_up: 0,
            owned: false,
            seq: 0,
            handoffs: 0,
            idle_handoffs: 0,
            anchors: vec![0; models],
            came_from: None,
            budget: None,
            sent: None,
            spent: None,
        }
    }

    /// Committed tokens after the prompt.
    pub fn generated(&self) -> u32 {
        self.committed.saturating_sub(self.prompt_len()) as u32
    }

    pub fn prompt_len(&self) -> usize {
        self.spec.new.prompt.len()
    }

    /// The prompt is to be scored here, as far as that is asked for.
    pub fn score_prompt(&mut self) {
        let wanted = self.spec.new.sampling.prompt_logprobs;
        self.unscored = wanted.map(|w| w.from.max(1) as usize).filter(|from| *from < self.prompt_len());
    }

    /// How many of the rows before the sampled ones of a run are to be scored.
    pub fn scored_rows(&self, run: &Run) -> usize {
        let Some(unscored) = self.unscored else { return 0 };
        // The row before a token tells of it.
        (run.end - run.sampled).min(self.prompt_len() - 1).saturating_sub(unscored - 1)
    }

    /// So many more tokens are scored. Returns the position of the first.
    pub fn scored(&mut self, tokens: usize) -> usize {
        let start = self.unscored.unwrap_or_default();
        self.unscored = Some(start + tokens).filter(|next| *next < self.prompt_len());
        start
    }

    pub fn ends(&self) -> Ends<'_> {
        let sampling = &self.spec.new.sampling;
        // In an answer of a form an end token comes early only where nothing else may follow.
        let ignore_eos = sampling.ignore_eos && self.matcher.is_none();
        Ends { stop: &sampling.stop_token_ids, ignore_eos }
    }

    /// Replace everything from token `from` on by `commit`, committed, and `provisional`. K/V is kept as
    /// far as the tokens stay the same.
    pub fn rewrite(
        &mut self,
        from: usize,
        commit: impl ExactSizeIterator<Item = TokenId>,
        provisional: Vec<Committed>,
    ) {
        let committed = from + commit.len();
        let mut tokens = commit.chain(provisional.iter().map(|c| c.token)).peekable();
        if from < self.tokens.len() {
            let mut same = from;
            while same < self.tokens.len() && tokens.next_if_eq(&self.tokens[same]).is_some() {
                same += 1;
            }
            self.tokens.truncate(same);
            self.keep_kv(same);
        }
        self.tokens.extend(tokens);
        self.committed = committed;
        self.provisional = provisional;
        self.verify = false;
    }

    /// Give up the K/V of all but the first `tokens` tokens.
    fn keep_kv(&mut self, tokens: usize) {
        self.kv_len = self.kv_len.min(tokens);
        if self.kv_len < self.pages.shared() * PAGE_TOKENS {
            // The next row must not be written to a shared page, so that one goes as a whole.
            self.kv_len -= self.kv_len % PAGE_TOKENS;
        }
        self.pages.shrink_to(pages_for(self.kv_len));
    }

    /// Give up K/V, keep the tokens: on return they are simply more rows.
    pub fn retract(&mut self) {
        self.kv_len = 0;
        self.pages.shrink_to(0);
        self.looked_up = 0;
        if self.computed == Computed::Held {
            self.computed = Computed::Lost;
        }
    }

    /// Tokens that pages may be shared for. The last committed one is left out: its row is computed again
    /// when nothing else is, and policies need its signals.
    fn sharable(&self) -> usize {
        self.committed.saturating_sub(1)
    }

    /// Tokens whose K/V may come from the cache: rows that are to be scored must be computed.
    fn adoptable(&self) -> usize {
        self.unscored.map_or(usize::MAX, |unscored| unscored - 1).min(self.sharable())
    }

    /// Whether a page could come from the cache.
    pub fn lacks_a_page(&self) -> bool {
        self.adoptable() / PAGE_TOKENS > self.kv_len / PAGE_TOKENS && self.pages.can_share()
    }

    /// Take the K/V of trusted tokens from the cache as far as it is there. Returns how many tokens have
    /// come to be looked up, and how many of them were found.
    pub fn adopt(&mut self) -> (usize, usize) {
        let known = self.kv_len.max(self.looked_up);
        let had = self.kv_len;
        self.pages.share(&self.tokens[..self.adoptable()], self.kv_len);
        self.kv_len = self.kv_len.max(self.pages.shared() * PAGE_TOKENS);
        self.looked_up = self.committed;
        (self.committed.saturating_sub(known), self.kv_len - had)
    }

    /// Let others share the full pages of trusted tokens.
    pub fn publish(&mut self) {
        let full = self.sharable().min(self.kv_len);
        if full / PAGE_TOKENS > self.pages.shared() {
            self.pages.share(&self.tokens[..full], self.kv_len);
        }
    }

    /// `freed`: pages that come free when it gives up its own.
    pub fn ready(&self, freed: usize) -> Ready {
        Ready {
            id: self.spec.id,
            len: self.tokens.len(),
            kv_len: self.kv_len,
            verify: if self.verify { self.provisional.len() } else { 0 },
            pages: self.pages.ids().len(),
            freed,
            entering: self.computed != Computed::Held,
        }
    }

    /// The hand-off `sent` for a destination that holds the first `base` tokens.
    pub fn message(&mut self, from: ModelId, sent: &Sent, base: usize, with_spec: bool) -> Box<PeerReq> {
        let mut spent = self.spent.take();
        let (mut tokens, mut anchors) = match &mut spent {
            Some(spent) => (std::mem::take(&mut spent.tokens), std::mem::take(&mut spent.anchors)),
            None => (Vec::new(), Vec::new()),
        };
        tokens.clear();
        tokens.extend_from_slice(&self.tokens[base.min(self.committed)..self.committed]);
        anchors.clone_from(&self.anchors);
        let message = PeerReq {
            id: self.spec.id,
            from,
            to: sent.to,
            seq: self.seq,
            status: sent.status,
            base,
            tokens,
            provisional: self.provisional.clone(),
            budget: sent.budget,
            payload: sent.payload.clone(),
            anchors,
            handoffs: self.handoffs,
            idle_handoffs: self.idle_handoffs,
            spec: with_spec.then(|| self.spec.clone()),
            sent: Duration::ZERO,
        };
        match spent {
            Some(mut spent) => {
                *spent = message;
                spent
            }
            None => Box::new(message),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{NewRequest, RouteId, SamplingParams};
    use crate::subserver::pages::PagePool;
    use crate::subserver::prefix::Root;

    /// With the K/V of `kv_len` of its tokens, as far as others may share it.
    fn replica(pool: &PagePool, prompt: Vec<TokenId>, kv_len: usize) -> Replica {
        let sampling = SamplingParams::greedy();
        let (route, tokens) = (RouteId(0), prompt.clone());
        let new = NewRequest { route, prompt, max_tokens: 99, sampling, return_signals: false, cache_salt: None };
        let spec = Arc::new(RequestSpec::new(1, new));
        let mut replica = Replica::new(spec, None, tokens, pool.pages(Some(Root::default())), 1);
        assert!(replica.pages.grow_to(pages_for(kv_len)));
        replica.kv_len = kv_len;
        replica.publish();
        replica
    }

    #[test]
    fn the_last_committed_token_is_on_a_page_of_its_own() {
        let pool = PagePool::new(8);
        for (tokens, shared) in [(15, 0), (16, 0), (17, 1), (32, 1), (33, 2)] {
            assert_eq!(replica(&pool, (0..tokens).collect(), tokens as usize).pages.shared(), shared, "{tokens}");
        }
        // Provisional tokens do not count.
        let mut drafting = replica(&pool, (100..116).collect(), 16);
        let draft = |token| Committed {
            token,
            model: ModelId(0),
            eos: false,
            complete: false,
            logprob: 0.0,
            top_logprobs: Vec::new(),
            signals: None,
        };
        drafting.rewrite(16, [].into_iter(), vec![draft(1), draft(2)]);
        assert!(drafting.pages.grow_to(2));
        drafting.kv_len = 18;
        drafting.publish();
        assert_eq!(drafting.pages.shared(), 0);
        drafting.rewrite(16, [1].into_iter(), vec![draft(2)]);
        drafting.publish();
        assert_eq!(drafting.pages.shared(), 1);
    }

    #[test]
    fn where_the_tokens_change_a_shared_page_goes_as_a_whole() {
        let pool = PagePool::new(8);
        let mut replica = replica(&pool, (0..40).collect(), 39);
        let first = replica.pages.ids()[0];
        replica.rewrite(20, [7, 8].into_iter(), Vec::new());
        assert_eq!((replica.kv_len, replica.pages.ids(), replica.pages.shared()), (16, &[first][..], 1));
        assert_eq!(pool.cached(), 1);
    }
}
