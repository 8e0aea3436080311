//! Signal columns of a forward, and which of them anybody asked for.

use tokenrouter_plugin_api::{Requirements, SignalColumns, SignalSet, TokenId};

/// The signals that a forward computes: the union of what its routes' policies asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SignalRequest {
    /// Scalar signals.
    pub scalars: SignalSet,
    /// Largest raw logits a row; 0 for none.
    pub top_k: u32,
    /// Tokens whose raw logit is wanted.
    pub token_logits: Vec<TokenId>,
}

impl SignalRequest {
    /// Ask for everything in `requirements` as well.
    pub fn add(&mut self, requirements: &Requirements) {
        self.scalars = self.scalars | requirements.signals;
        self.top_k = self.top_k.max(requirements.top_k);
        for &id in &requirements.token_logits {
            if !self.token_logits.contains(&id) {
                self.token_logits.push(id);
            }
        }
    }
}

/// One value a sampled row in each column that was asked for; the other columns are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Columns {
    pub entropy: Vec<f32>,
    pub entropy_norm: Vec<f32>,
    pub top1_prob: Vec<f32>,
    pub margin: Vec<f32>,
    pub logsumexp: Vec<f32>,
    pub candidate_prob: Vec<f32>,
    /// `request.top_k` values a row, descending; short vocabularies are filled up with -inf
    /// and [`NO_TOKEN`](super::sampler::NO_TOKEN).
    pub topk_values: Vec<f32>,
    pub topk_ids: Vec<TokenId>,
    /// `request.token_logits.len()` values a row.
    pub token_logits: Vec<f32>,
}

impl Columns {
    /// The rows `rows` of these columns (computed for `computed`), cut to what `wanted` asked for.
    pub fn gather(&self, computed: &SignalRequest, wanted: &Requirements, rows: &[usize]) -> Columns {
        let scalar = |signal: SignalSet, column: &[f32]| -> Vec<f32> {
            if wanted.signals.contains(signal) { rows.iter().map(|&r| column[r]).collect() } else { Vec::new() }
        };
        let (have, want) = (computed.top_k as usize, wanted.top_k as usize);
        let places: Vec<usize> =
            wanted.token_logits.iter().filter_map(|id| computed.token_logits.iter().position(|c| c == id)).collect();
        let width = computed.token_logits.len();
        Columns {
            entropy: scalar(SignalSet::ENTROPY, &self.entropy),
            entropy_norm: scalar(SignalSet::ENTROPY_NORM, &self.entropy_norm),
            top1_prob: scalar(SignalSet::TOP1_PROB, &self.top1_prob),
            margin: scalar(SignalSet::MARGIN, &self.margin),
            logsumexp: scalar(SignalSet::LOGSUMEXP, &self.logsumexp),
            candidate_prob: scalar(SignalSet::CANDIDATE_PROB, &self.candidate_prob),
            topk_values: rows.iter().flat_map(|&r| &self.topk_values[r * have..r * have + want]).copied().collect(),
            topk_ids: rows.iter().flat_map(|&r| &self.topk_ids[r * have..r * have + want]).copied().collect(),
            token_logits: rows
                .iter()
                .flat_map(|&r| places.iter().map(move |&p| self.token_logits[r * width + p]))
                .collect(),
        }
    }

    /// The view that policies get. `wanted` are the requirements these columns were gathered for.
    pub fn view<'a>(&'a self, wanted: &Requirements) -> SignalColumns<'a> {
        SignalColumns {
            entropy: &self.entropy,
            entropy_norm: &self.entropy_norm,
            top1_prob: &self.top1_prob,
            margin: &self.margin,
            logsumexp: &self.logsumexp,
            candidate_prob: &self.candidate_prob,
            topk_values: &self.topk_values,
            topk_ids: &self.topk_ids,
            top_k: wanted.top_k,
            token_logits: &self.token_logits,
            token_logit_count: wanted.token_logits.len() as u32,
            net_scores: &[],
            net_width: 0,
        }
    }

    /// Scalar signals of one row by name, for `routing` in answers. All that were computed:
    /// ask for [`SignalSet::ALL`] where the answer must not depend on what others in the batch asked for.
    pub fn named(&self, row: usize) -> Vec<(&'static str, f32)> {
        let columns: [(&'static str, &[f32]); 6] = [
            ("entropy", &self.entropy),
            ("entropy_norm", &self.entropy_norm),
            ("top1_prob", &self.top1_prob),
            ("margin", &self.margin),
            ("logsumexp", &self.logsumexp),
            ("candidate_prob", &self.candidate_prob),
        ];
        columns.into_iter().filter_map(|(name, column)| Some((name, *column.get(row)?))).collect()
    }
}
