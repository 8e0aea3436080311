//! A policy whose every answer is a hash of (key, seed, position, model), so that what it does does
//! not depend on when it is asked; and an oracle that decodes one request with it, alone.

use tokenrouter::request::{FinishReason, ModelId, NewRequest};
use tokenrouter::runner::simulated::next_token;
use tokenrouter::subserver::MAX_IDLE_HANDOFFS;
use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, DecisionKind, Handoff, ModelIndex, PeerView, Policy, PolicyError, RequestView,
    RouteBatch,
};

/// SplitMix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
    pub fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }
}

pub struct Script {
    key: u64,
    model: ModelIndex,
    models: u32,
    faulty: bool,
}

impl Script {
    /// Panic at some (position, hook), if this is the faulty kind.
    fn stumble(&self, seed: u64, position: usize, hook: u64) {
        assert!(!self.faulty || !self.rng(seed, position, 100 + hook).chance(0.03), "stumbled");
    }

    fn rng(&self, seed: u64, position: usize, salt: u64) -> Rng {
        let mut rng =
            Rng(self.key ^ seed.rotate_left(17) ^ (position as u64) << 32 ^ u64::from(self.model) << 8 ^ salt);
        rng.next();
        rng
    }

    fn decide(&self, seed: u64, position: usize, draft: bool) -> Decision {
        let mut rng = self.rng(seed, position, 1);
        if draft && rng.chance(0.7) {
            return Decision::ACCEPT;
        }
        let decision = match rng.below(100) {
            0..40 => Decision::STAY,
            40..55 => Decision::DRAFT,
            // Sometimes a model that does not exist, or itself.
            _ => Decision::to(rng.below(u64::from(self.models) * 10 + 1) as u32 / 10),
        };
        if rng.chance(0.1) { decision.replacing(1 + rng.below(50) as u32) } else { decision }
    }

    fn leave(&self, seed: u64, position: usize) -> Handoff {
        let mut rng = self.rng(seed, position, 2);
        let mut handoff = if rng.chance(0.5) { Handoff::default() } else { Handoff::drop_candidate() };
        handoff.budget = rng.chance(0.4).then(|| 1 + rng.below(4) as u32);
        handoff.rollback = if rng.chance(0.2) { rng.below(4) as u32 } else { 0 };
        handoff.verify = rng.chance(0.4);
        handoff.payload = position.to_le_bytes().to_vec();
        handoff
    }

    fn take(&self, seed: u64, committed: usize) -> Acceptance {
        let mut rng = self.rng(seed, committed, 3);
        if rng.chance(0.7) { Acceptance::Verify } else { Acceptance::Accept(rng.below(3) as u32) }
    }

    fn start(&self, seed: u64) -> Option<ModelIndex> {
        let mut rng = self.rng(seed, 0, 4);
        rng.chance(0.5).then(|| rng.below(u64::from(self.models)) as u32)
    }
}

impl Policy for Script {
    const NAME: &'static str = "script";

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let (key, faulty) = settings.strip_suffix(" faulty").map_or((settings, false), |key| (key, true));
        let key = key.parse().map_err(|_| PolicyError::new("the settings are not a key"))?;
        Ok(Self { key, model: ctx.model, models: ctx.models.len() as u32, faulty })
    }
    fn entry(&mut self, request: &RequestView<'_>) -> Option<ModelIndex> {
        self.stumble(request.seed, 0, 0);
        self.start(request.seed)
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (i, out) in out.iter_mut().enumerate() {
            self.stumble(batch.seeds[i], batch.positions[i] as usize, 1);
            let draft = batch.drafts[i] != tokenrouter_plugin_api::NO_TOKEN;
            *out = self.decide(batch.seeds[i], batch.positions[i] as usize, draft);
        }
    }
    fn send(&mut self, request: &RequestView<'_>, _: ModelIndex) -> Handoff {
        self.stumble(request.seed, request.generated().len(), 2);
        self.leave(request.seed, request.generated().len())
    }
    fn finished(&mut self, slot: u32) {
        self.stumble(u64::from(slot), 0, 4);
    }
    fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Acceptance {
        // The committed tokens after this message, whatever this replica knew before.
        let committed = usize::try_from(u64::from_le_bytes(message.payload.try_into().unwrap_or([0; 8]))).unwrap_or(0);
        self.stumble(request.seed, committed, 3);
        self.take(request.seed, committed)
    }
}

type Text = Vec<(u32, ModelId)>;

/// Decodes one request.
struct Oracle<'a> {
    new: &'a NewRequest,
    committed: Text,
    drafts: Text,
    finished: Option<FinishReason>,
}

impl Oracle<'_> {
    fn commit(&mut self, tokens: &[(u32, ModelId)]) {
        for &token in tokens {
            if self.finished.is_some() {
                return;
            }
            self.committed.push(token);
            if token.0 == crate::eos(token.1) && !self.new.sampling.ignore_eos {
                self.finished = Some(FinishReason::Stop(token.0));
            } else if self.committed.len() == self.new.max_tokens as usize {
                self.finished = Some(FinishReason::Length);
            }
        }
    }

    fn commit_drafts(&mut self) {
        let drafts = std::mem::take(&mut self.drafts);
        self.commit(&drafts);
    }

    fn candidate(&self, drafts: usize, model: ModelId, vocab: u32) -> u32 {
        let tail = self.committed.iter().chain(&self.drafts[..drafts]).map(|t| t.0);
        let prefix: Vec<u32> = self.new.prompt.iter().copied().chain(tail).collect();
        next_token(&prefix, model.0, vocab)
    }
}

/// What the request must say, who wrote each token, and why it ends.
pub fn oracle(
    new: &NewRequest,
    models: &[ModelId],
    entry: usize,
    key: Option<u64>,
    vocab: u32,
) -> (Text, FinishReason) {
    let seed = new.sampling.seed;
    let at = |model: usize| Script {
        key: key.unwrap_or(0),
        model: model as u32,
        models: models.len() as u32,
        faulty: false,
    };
    let mut o = Oracle { new, committed: Vec::new(), drafts: Vec::new(), finished: None };
    let (mut own, mut came_from, mut budget, mut verify, mut idle) = (entry, None, None, false, 0);
    if key.is_some()
        && let Some(start) = at(entry).start(seed).map(|m| m as usize).filter(|&m| m != entry)
    {
        (own, came_from, idle) = (start, Some(entry), 1);
    }
    // Whoever takes over with drafts may accept some unseen.
    let arrive = |o: &mut Oracle<'_>, own: usize, payload: usize, verify: &mut bool| {
        if let Acceptance::Accept(count) = at(own).take(seed, payload) {
            o.drafts.truncate(count as usize);
            o.commit_drafts();
            *verify = false;
        }
    };
    if key.is_some() && came_from.is_some() {
        arrive(&mut o, own, 0, &mut verify);
    }
    loop {
        if let Some(reason) = o.finished {
            return (o.committed, reason);
        }
        let before = o.committed.len();
        let script = at(own);
        let position = |o: &Oracle<'_>, drafts: usize| o.committed.len() + drafts;
        let no_handoffs = idle >= MAX_IDLE_HANDOFFS;
        let asked = key.is_some() && (budget != Some(1) || verify);
        let mut rows = if verify { 0 } else { o.drafts.len() };
        let decide = |o: &Oracle<'_>, rows: usize| {
            if !asked {
                return Decision::STAY;
            }
            let decision = script.decide(seed, position(o, rows), verify && rows < o.drafts.len());
            let to = matches!(decision.kind(), Some(DecisionKind::To(_)));
            if to && no_handoffs { Decision::STAY } else { decision }
        };
        while verify && rows < o.drafts.len() && decide(&o, rows) == Decision::ACCEPT {
            rows += 1;
        }
        let decision = decide(&o, rows);
        let sampled = o.candidate(rows, models[own], vocab);
        let token = decision.replacement().filter(|&t| t < vocab).unwrap_or(sampled);
        let candidate = (token, models[own]);
        o.drafts.truncate(rows);
        if verify {
            o.commit_drafts();
            if o.finished.is_some() {
                continue;
            }
            verify = false;
        }
        let to = match decision.kind() {
            Some(DecisionKind::To(to)) if (to as usize) < models.len() && to as usize != own => Some(to as usize),
            _ => None,
        };
        if let Some(to) = to {
            if o.committed.len() > before {
                idle = 0;
            }
            let before = o.committed.len();
            let here = o.committed.len() + o.drafts.len();
            let handoff = script.leave(seed, here);
            let rollback = (handoff.rollback as usize).min(o.drafts.len());
            o.drafts.truncate(o.drafts.len() - rollback);
            if handoff.keep_candidate && rollback == 0 {
                o.drafts.push(candidate);
            }
            if !handoff.verify {
                o.commit_drafts();
            }
            if o.finished.is_some() {
                continue;
            }
            idle = if o.committed.len() > before { 1 } else { idle + 1 };
            (came_from, own, budget) = (Some(own), to, handoff.budget);
            verify = !o.drafts.is_empty();
            let before = o.committed.len();
            arrive(&mut o, own, here, &mut verify);
            if o.committed.len() > before {
                idle = 0;
            }
            continue;
        }
        budget = budget.map(|b: u32| b - 1);
        let draft = decision.kind() == Some(DecisionKind::Draft);
        o.drafts.push(candidate);
        let full = o.committed.len() + o.drafts.len() >= new.max_tokens as usize;
        if !draft || budget == Some(0) || full {
            o.commit_drafts();
        }
        if o.committed.len() > before {
            idle = 0;
        }
        if budget == Some(0) && o.finished.is_none() {
            let Some(back) = came_from else { unreachable!("a budget comes from somebody") };
            (came_from, own, budget) = (Some(own), back, None);
            idle += 1;
            arrive(&mut o, own, 0, &mut verify);
        }
    }
}
