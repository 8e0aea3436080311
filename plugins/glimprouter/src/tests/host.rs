//! What a host does, for one request after the other.

use tokenrouter_plugin_api::{
    Context, Decision, DecisionKind, ModelDescription, PeerView, Policy, RequestView, RouteBatch, Services,
    SignalColumns, Slot,
};

use crate::{GlimpRouter, entropy as entropy_of};

/// A host whose token `i` has the text `texts[i]`.
pub struct Texts(pub Vec<Option<Vec<u8>>>);

impl Services for Texts {
    fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.0.get(id as usize).cloned().flatten()
    }
}

pub fn create_at(
    model: u32,
    roles: &[&str],
    texts: &dyn Services,
    width: u32,
    settings: &str,
) -> Result<GlimpRouter, String> {
    let models: Vec<_> =
        roles.iter().map(|role| ModelDescription { name: format!("m-{role}"), role: role.to_string() }).collect();
    let context =
        Context { route: "r", model, models: &models, entry: 0, vocab_size: width, eos: &[], services: texts };
    GlimpRouter::create(&context, settings).map_err(|e| e.message)
}

pub const ROLES: [&str; 2] = ["slm", "llm"];

/// The instances at the small and the large model.
pub fn pair(texts: &Texts, settings: &str) -> [GlimpRouter; 2] {
    [0, 1].map(|model| create_at(model, &ROLES, texts, texts.0.len() as u32, settings).unwrap())
}

/// `width` logits with this entropy, the first above the others, which are alike.
pub fn logits(entropy: f64, width: usize) -> Vec<f32> {
    let (mut low, mut high) = (0.0, 60.0);
    let of = |gap: f64| {
        let mut logits = vec![0.0_f32; width];
        logits.iter_mut().take(1).for_each(|first| *first = gap as f32);
        logits
    };
    for _ in 0..100 {
        let gap = (low + high) / 2.0;
        if entropy_of(&of(gap)) > entropy { low = gap } else { high = gap }
    }
    of(low)
}

/// A request and what a host does for it: candidates in, committed tokens and the next owner out.
pub struct Request {
    pub slots: [Slot; 2],
    prompt: usize,
    pub tokens: Vec<u32>,
    /// Who wrote each token after the prompt.
    pub writers: Vec<usize>,
    held: [usize; 2],
    owner: usize,
    pub forwards: usize,
}

impl Request {
    pub fn new(policies: &mut [GlimpRouter; 2], slots: [Slot; 2], prompt: &[u32]) -> Self {
        let mut request = Self {
            slots,
            prompt: prompt.len(),
            tokens: prompt.into(),
            writers: vec![],
            held: [0; 2],
            owner: 0,
            forwards: 0,
        };
        let entry = policies[0].entry(&request.view(0)).unwrap() as usize;
        request.held[0] = prompt.len();
        if entry != 0 {
            request.hand_over(policies, entry);
        }
        request
    }

    fn view(&self, model: usize) -> RequestView<'_> {
        RequestView::new(1, self.slots[model], 0, self.prompt as u32, 999, &self.tokens[..self.held[model]])
    }

    fn hand_over(&mut self, policies: &mut [GlimpRouter; 2], to: usize) {
        self.owner = to;
        let message = PeerView::new(1 - to as u32, &self.tokens[self.held[to]..], 0, &[]);
        policies[to].receive(&self.view(to), &message);
        self.held[to] = self.tokens.len();
    }

    /// One forward of the owner. `sample` gives its candidate and the entropy there, for the position and
    /// the owner. Whether a token was committed.
    fn step(&mut self, policies: &mut [GlimpRouter; 2], sample: impl Fn(usize, usize) -> (u32, f64)) -> bool {
        let (owner, position) = (self.owner, self.writers.len());
        let (candidate, entropy) = sample(position, owner);
        self.forwards += 1;
        let width = policies[owner].requirements().top_k;
        let logits = logits(entropy, width as usize);
        let signals = SignalColumns { topk_values: &logits, top_k: width, ..SignalColumns::default() };
        let mut out = [Decision::STAY];
        let batch = RouteBatch {
            request_ids: &[1],
            slots: &[self.slots[owner]],
            positions: &[position as u32],
            candidates: &[candidate],
            signals,
            ..RouteBatch::default()
        };
        policies[owner].route(&batch, &mut out);
        let to = match out[0].kind().unwrap() {
            DecisionKind::To(to) => Some(to),
            kind => {
                assert_eq!(kind, DecisionKind::Stay);
                None
            }
        };
        let handoff = to.map(|to| policies[owner].send(&self.view(owner), to));
        assert!(handoff.as_ref().is_none_or(|h| h.budget.is_none() && h.rollback == 0 && !h.verify));
        let kept = handoff.is_none_or(|handoff| handoff.keep_candidate);
        if kept {
            self.tokens.push(candidate);
            self.writers.push(owner);
            self.held[owner] = self.tokens.len();
        }
        if let Some(to) = to {
            self.hand_over(policies, to as usize);
        }
        kept
    }

    /// Until a token is committed.
    pub fn write(&mut self, policies: &mut [GlimpRouter; 2], sample: impl Fn(usize, usize) -> (u32, f64)) {
        // A drop, then the other model's token.
        assert!(self.step(policies, &sample) || self.step(policies, &sample), "no token in two forwards");
    }
}
