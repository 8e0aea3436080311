//! The rows of a made-up batch, with the signals that an instance asked for.

use tokenrouter_plugin_api::{
    Decision, DecisionKind, ModelDescription, ModelIndex, NO_MODEL, NO_TOKEN, Requirements, RouteBatch, SignalColumns,
    SignalSet, Slot, TokenId, random,
};

use super::setup::VOCABULARY;

/// Values that a careless comparison or index takes the wrong way.
const HOSTILE: [f32; 9] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::from_bits(1),
    -f32::MIN_POSITIVE / 2.0,
    -0.0,
    f32::MAX,
    f32::MIN,
    0.0,
];

/// Where signals come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signals {
    /// In the ranges that models produce, by seed, position and model alone.
    Plain,
    /// No row without a value that is not a plain number, and no token in the top logits.
    Hostile,
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub request: u64,
    pub slot: Slot,
    pub seed: u64,
    pub position: u32,
    pub candidate: TokenId,
    pub draft: TokenId,
    pub last_model: ModelIndex,
    pub remaining: u32,
}

impl Row {
    /// The first row of request number `at`, as the entry model has it.
    pub fn first(at: usize) -> Self {
        let (request, slot) = (at as u64, at as Slot);
        let seed = request.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { request, slot, seed, position: 0, candidate: 300, draft: NO_TOKEN, last_model: NO_MODEL, remaining: 24 }
    }
}

/// Owned columns.
#[derive(Debug, Default)]
pub struct Rows {
    requests: Vec<u64>,
    slots: Vec<Slot>,
    seeds: Vec<u64>,
    positions: Vec<u32>,
    candidates: Vec<TokenId>,
    drafts: Vec<TokenId>,
    last_models: Vec<ModelIndex>,
    remaining: Vec<u32>,
    /// In the order of the bits of [`SignalSet`].
    scalars: [Vec<f32>; 6],
    topk_values: Vec<f32>,
    topk_ids: Vec<TokenId>,
    top_k: u32,
    token_logits: Vec<f32>,
    token_logit_count: u32,
    net_scores: Vec<f32>,
    net_width: u32,
}

impl Rows {
    /// `rows` at `model`, whose instance asked for `wanted`. No net is computed here: each scores one number.
    pub fn new(rows: &[Row], model: ModelIndex, wanted: &Requirements, signals: Signals) -> Self {
        let mut columns = Self {
            top_k: wanted.top_k,
            token_logit_count: wanted.token_logits.len() as u32,
            net_width: wanted.nets.len() as u32,
            ..Self::default()
        };
        for (at, row) in rows.iter().enumerate() {
            columns.requests.push(row.request);
            columns.slots.push(row.slot);
            columns.seeds.push(row.seed);
            columns.positions.push(row.position);
            columns.candidates.push(row.candidate);
            columns.drafts.push(row.draft);
            columns.last_models.push(row.last_model);
            columns.remaining.push(row.remaining);
            columns.signals_of(at, row, model, wanted, signals);
        }
        columns
    }

    fn signals_of(&mut self, at: usize, row: &Row, model: ModelIndex, wanted: &Requirements, signals: Signals) {
        let draw = |column: u64| random::uniform(row.seed, u64::from(row.position), column << 8 | u64::from(model));
        // Half of the tokens are as good as certain, as those of a trained model are.
        let doubt = if draw(0) < 0.5 { 0.02 * draw(1) } else { draw(1) };
        let hostile = |column: usize| HOSTILE[(at + column) % HOSTILE.len()];
        let value = |column: usize, plain: f64| match signals {
            Signals::Plain => plain as f32,
            Signals::Hostile => hostile(column),
        };
        let plain =
            [doubt * f64::from(VOCABULARY).ln(), doubt, 1.0 - doubt, (1.0 - 2.0 * doubt).max(0.0), 20.0, 1.0 - doubt];
        for (column, plain) in plain.into_iter().enumerate() {
            let asked = SignalSet::from_bits(1 << column).is_some_and(|signal| wanted.signals.contains(signal));
            if asked {
                self.scalars[column].push(value(column, plain));
            }
        }
        for place in 0..wanted.top_k {
            self.topk_values.push(value(6 + place as usize, 20.0 - f64::from(place) * (10.0 - 9.9 * doubt)));
            self.topk_ids.push(match signals {
                Signals::Plain => (row.candidate + place) % VOCABULARY,
                Signals::Hostile => NO_TOKEN,
            });
        }
        for place in 0..wanted.token_logits.len() {
            self.token_logits.push(value(7 + place, 10.0 * draw(2 + place as u64) - 5.0));
        }
        for place in 0..wanted.nets.len() {
            self.net_scores.push(value(8 + place, draw(1000 + place as u64)));
        }
    }

    pub fn batch(&self) -> RouteBatch<'_> {
        let [entropy, entropy_norm, top1_prob, margin, logsumexp, candidate_prob] = &self.scalars;
        RouteBatch {
            request_ids: &self.requests,
            slots: &self.slots,
            seeds: &self.seeds,
            positions: &self.positions,
            candidates: &self.candidates,
            drafts: &self.drafts,
            last_models: &self.last_models,
            remaining: &self.remaining,
            signals: SignalColumns {
                entropy,
                entropy_norm,
                top1_prob,
                margin,
                logsumexp,
                candidate_prob,
                topk_values: &self.topk_values,
                topk_ids: &self.topk_ids,
                top_k: self.top_k,
                token_logits: &self.token_logits,
                token_logit_count: self.token_logit_count,
                net_scores: &self.net_scores,
                net_width: self.net_width,
            },
        }
    }
}

/// The decision's meaning. The error says what makes no sense of it.
pub fn meaning(decision: Decision, models: &[ModelDescription]) -> Result<DecisionKind, String> {
    let kind = decision.kind().ok_or("it is of no kind that this version has")?;
    if let DecisionKind::To(model) = kind
        && model as usize >= models.len()
    {
        return Err(format!("it hands over to model {model} of {}", models.len()));
    }
    match decision.replacement() {
        Some(token) if token >= VOCABULARY => {
            Err(format!("it replaces the candidate by token {token} of {VOCABULARY}"))
        }
        _ => Ok(kind),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::check::parse_roles;

    #[test]
    fn only_what_was_asked_for() {
        let mut wanted = Requirements::signals(SignalSet::MARGIN);
        wanted.top_k = 3;
        let rows = Rows::new(&[Row::first(0), Row::first(1)], 0, &wanted, Signals::Plain);
        let batch = rows.batch();
        assert_eq!((batch.len(), batch.signals.margin.len(), batch.signals.topk_values.len()), (2, 2, 6));
        assert!(batch.signals.entropy.is_empty() && batch.signals.net_scores.is_empty());
        assert!(batch.signals.topk_values.windows(2).take(2).all(|pair| pair[0] >= pair[1]));
        let hostile = Rows::new(&[Row::first(0)], 0, &Requirements::signals(SignalSet::ENTROPY), Signals::Hostile);
        assert!(hostile.batch().signals.entropy[0].is_nan());
    }

    #[test]
    fn senseless_decisions() {
        let models = parse_roles("a,b").unwrap();
        assert_eq!(meaning(Decision::to(1), &models), Ok(DecisionKind::To(1)));
        assert_eq!(meaning(Decision::to(2), &models).unwrap_err(), "it hands over to model 2 of 2");
        let replaced = Decision::STAY.replacing(VOCABULARY);
        assert!(meaning(replaced, &models).unwrap_err().contains("token 1000 of 1000"));
    }
}
