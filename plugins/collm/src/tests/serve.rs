//! A stand-in for the host: asks a policy about rows, and serves requests of made-up models by what it
//! answers.

use super::*;
use tokenrouter_plugin_api::{DecisionKind, ModelDescription, Services, SignalColumns, SignalSet, TokenId};

pub const VOCAB: u32 = 8;
/// The deferral token, behind the vocabulary that both models share.
pub const DEFER: TokenId = VOCAB;
pub const SMALL_EOS: &[TokenId] = &[0];
pub const LARGE_EOS: &[TokenId] = &[0, 1];
/// A stop token of the request.
pub const STOP: TokenId = 2;

struct Text;

impl Services for Text {
    fn token_id(&self, text: &str) -> Option<TokenId> {
        (text == "<|defer|>").then_some(DEFER)
    }
}

/// The policy at model 0 (`slm`) or 1 (`llm`).
pub fn create(model: ModelIndex, settings: &str) -> Result<CoLlm, String> {
    let models = ["slm", "llm"].map(|role| ModelDescription { name: format!("m-{role}"), role: role.into() });
    let eos = [SMALL_EOS, LARGE_EOS][model as usize];
    let context = Context { route: "r", model, models: &models, entry: 0, vocab_size: VOCAB, eos, services: &Text };
    CoLlm::create(&context, settings).map_err(|e| e.message)
}

/// A row, with everything that any requirement asks for.
#[derive(Clone, Debug)]
pub struct Row {
    pub slot: Slot,
    pub position: u32,
    pub remaining: u32,
    pub candidate: TokenId,
    pub defer: f32,
    pub logits: Vec<f32>,
}

/// A row of slot 0 whose deferral logit is `defer`.
pub fn row(position: u32, defer: f32) -> Row {
    Row { slot: 0, position, remaining: 99, candidate: 7, defer, logits: vec![0.0; VOCAB as usize] }
}

pub fn logsumexp(logits: &[f32]) -> f64 {
    logits.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln()
}

/// Ask about `rows` in one batch. Signals are handed over as far as the policy requires them.
pub fn ask(policy: &mut CoLlm, rows: &[Row]) -> Vec<Decision> {
    let wanted = policy.requirements();
    let asked = wanted.token_logits == [DEFER];
    let token_logits: Vec<f32> = rows.iter().filter(|_| asked).map(|r| r.defer).collect();
    let lse = wanted.signals.contains(SignalSet::LOGSUMEXP);
    let logsumexp: Vec<f32> = rows.iter().filter(|_| lse).map(|r| logsumexp(&r.logits) as f32).collect();
    let (mut topk_ids, mut topk_values) = (Vec::new(), Vec::new());
    for row in rows {
        let mut ids: Vec<usize> = (0..row.logits.len()).collect();
        ids.sort_by(|&a, &b| row.logits[b].total_cmp(&row.logits[a]));
        ids.truncate(wanted.top_k as usize);
        topk_values.extend(ids.iter().map(|&id| row.logits[id]));
        topk_ids.extend(ids.iter().map(|&id| id as TokenId));
    }
    let signals = SignalColumns {
        token_logits: &token_logits,
        token_logit_count: u32::from(asked),
        logsumexp: &logsumexp,
        topk_values: &topk_values,
        topk_ids: &topk_ids,
        top_k: wanted.top_k,
        ..SignalColumns::default()
    };
    let batch = RouteBatch {
        request_ids: &rows.iter().map(|r| u64::from(r.slot)).collect::<Vec<_>>(),
        slots: &rows.iter().map(|r| r.slot).collect::<Vec<_>>(),
        positions: &rows.iter().map(|r| r.position).collect::<Vec<_>>(),
        candidates: &rows.iter().map(|r| r.candidate).collect::<Vec<_>>(),
        remaining: &rows.iter().map(|r| r.remaining).collect::<Vec<_>>(),
        signals,
        ..RouteBatch::default()
    };
    let mut out = vec![Decision::STAY; rows.len()];
    policy.route(&batch, &mut out);
    out
}

/// What the policy answers when `slot` leaves with `provisional` tokens before the candidate.
pub fn send(policy: &mut CoLlm, slot: Slot, provisional: u32) -> Handoff {
    let tokens = vec![7; 1 + provisional as usize];
    let mut view = RequestView::new(u64::from(slot), slot, 0, 1, 99, &tokens);
    (view.provisional, view.candidate) = (provisional, 7);
    policy.send(&view, 1)
}

/// Let the large model's policy receive `payload` for `slot`.
pub fn receive(policy: &mut CoLlm, slot: Slot, payload: &[u8]) {
    let view = RequestView::new(u64::from(slot), slot, 0, 1, 99, &[7]);
    assert_eq!(policy.receive(&view, &PeerView::new(0, &[], 0, payload)), Acceptance::Verify);
}

/// A token of an answer, and whether the large model wrote it.
pub type Written = (TokenId, bool);

/// A request, by what its made-up models say after `tokens`.
#[derive(Clone, Debug)]
pub struct Request {
    pub seed: u64,
    pub max_tokens: u32,
}

impl Request {
    /// Logits of a model after `tokens`: noise, a function of the request, the model and the tokens.
    pub fn logits(&self, large: bool, tokens: &[TokenId]) -> Vec<f32> {
        let noise = |id| tokenrouter_plugin_api::random::uniform(self.hash(tokens), id, u64::from(large)) as f32;
        // End tokens are rare, or no answer would be long.
        (0..u64::from(VOCAB)).map(|id| 4.0 * noise(id) - if id <= u64::from(STOP) { 1.5 } else { 0.0 }).collect()
    }

    pub fn defer(&self, tokens: &[TokenId]) -> f32 {
        8.0 * tokenrouter_plugin_api::random::uniform(self.hash(tokens), 0, 2) as f32 - 5.0
    }

    fn hash(&self, tokens: &[TokenId]) -> u64 {
        tokens
            .iter()
            .fold(self.seed, |h, &t| (h ^ u64::from(t + 1)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29))
    }

    /// Whether the answer is over behind its last token.
    pub fn is_over(&self, answer: &[Written]) -> bool {
        let Some(&(token, large)) = answer.last() else { return false };
        let eos = if large { LARGE_EOS } else { SMALL_EOS };
        token == STOP || eos.contains(&token) || answer.len() == self.max_tokens as usize
    }
}

pub fn argmax(logits: &[f32]) -> TokenId {
    (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as TokenId
}

struct Live<'a> {
    slot: Slot,
    request: &'a Request,
    committed: Vec<Written>,
    drafts: Vec<TokenId>,
    over: bool,
}

impl Live<'_> {
    fn row(&self, large: bool) -> Row {
        let tokens: Vec<_> = self.committed.iter().map(|w| w.0).chain(self.drafts.iter().copied()).collect();
        let (position, logits) = (tokens.len() as u32, self.request.logits(large, &tokens));
        let (remaining, candidate) = (self.request.max_tokens - position, argmax(&logits));
        Row { slot: self.slot, position, remaining, candidate, defer: self.request.defer(&tokens), logits }
    }

    /// Commit up to the end of the request.
    fn commit(&mut self, tokens: impl IntoIterator<Item = TokenId>, large: bool) {
        for token in tokens {
            if !self.over {
                self.committed.push((token, large));
                self.over = self.request.is_over(&self.committed);
            }
        }
    }
}

/// Serve all `requests` together, each model's in one batch: the answers.
pub fn serve(settings: &str, requests: &[Request]) -> Vec<Vec<Written>> {
    let mut policies = [create(0, settings).unwrap(), create(1, settings).unwrap()];
    let live = |(slot, request)| Live { slot, request, committed: Vec::new(), drafts: Vec::new(), over: false };
    let mut all: Vec<Live<'_>> = (0..).zip(requests).map(live).collect();
    while all.iter().any(|l| !l.over) {
        let mut visits = Vec::new();
        let rows: Vec<Row> = all.iter().filter(|l| !l.over).map(|l| l.row(false)).collect();
        let decisions = ask(&mut policies[0], &rows);
        for (row, decision) in rows.iter().zip(decisions) {
            let l = &mut all[row.slot as usize];
            let mut drafts = std::mem::take(&mut l.drafts);
            match decision.kind().unwrap() {
                DecisionKind::To(1) => {
                    let handoff = send(&mut policies[0], row.slot, drafts.len() as u32);
                    drafts.truncate(drafts.len() - handoff.rollback as usize);
                    let keeps = handoff.keep_candidate && handoff.rollback == 0;
                    l.commit(drafts.into_iter().chain(keeps.then_some(row.candidate)), false);
                    visits.extend((!l.over).then_some((row.slot, handoff)));
                }
                kind => {
                    drafts.push(row.candidate);
                    if kind == DecisionKind::Draft && row.remaining > 1 {
                        l.drafts = drafts;
                    } else {
                        l.commit(drafts, false);
                    }
                }
            }
        }
        for (slot, handoff) in &visits {
            receive(&mut policies[1], *slot, &handoff.payload);
        }
        let asked: Vec<Row> =
            visits.iter().filter(|(_, h)| h.budget != Some(1)).map(|(slot, _)| all[*slot as usize].row(true)).collect();
        let mut decisions = ask(&mut policies[1], &asked).into_iter();
        for (slot, handoff) in visits {
            let l = &mut all[slot as usize];
            let mut token = l.row(true).candidate;
            if handoff.budget != Some(1) {
                let decision = decisions.next().unwrap();
                assert_eq!(decision.kind(), Some(DecisionKind::To(0)));
                token = decision.replacement().unwrap_or(token);
            }
            l.commit([token], true);
        }
    }
    all.into_iter().map(|l| l.committed).collect()
}
