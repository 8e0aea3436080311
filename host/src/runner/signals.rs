//! Signal columns of a forward, and which of them anybody asked for.

use super::net::NetId;
use crate::request::SignalName;
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

/// Scores of one net.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NetScores {
    /// Numbers a row.
    pub width: usize,
    /// Of every sampled row of the batch; NaN for those whose sequence does not name the net.
    pub scores: Vec<f32>,
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
    /// Of the nets that some sequence of the batch names, ascending.
    pub nets: Vec<(NetId, NetScores)>,
}

/// What one policy asked for, of the rows that it decides about.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gathered {
    columns: Columns,
    top_k: u32,
    token_logit_count: u32,
    net_scores: Vec<f32>,
    net_width: u32,
}

impl Columns {
    /// Scores of a net.
    pub fn net(&self, id: NetId) -> Option<&NetScores> {
        self.nets.iter().find(|(net, _)| *net == id).map(|(_, scores)| scores)
    }

    /// Scalar signals of one row by name. All that were computed: ask for [`SignalSet::ALL`] where the answer
    /// must not depend on what others in the batch asked for.
    pub fn named(&self, row: usize) -> Vec<(SignalName, f32)> {
        let columns: [(&'static str, &[f32]); 6] = [
            ("entropy", &self.entropy),
            ("entropy_norm", &self.entropy_norm),
            ("top1_prob", &self.top1_prob),
            ("margin", &self.margin),
            ("logsumexp", &self.logsumexp),
            ("candidate_prob", &self.candidate_prob),
        ];
        columns.into_iter().filter_map(|(name, column)| Some((name.into(), *column.get(row)?))).collect()
    }
}

impl NetScores {
    /// Scores of a row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.scores[row * self.width..][..self.width]
    }
}

impl Gathered {
    /// Take the rows `rows` of `columns` (computed for `computed`), cut to what `wanted` asked for, in place of
    /// what was here. `nets` are the runner's ids of the nets in `wanted`.
    pub fn gather(
        &mut self,
        columns: &Columns,
        computed: &SignalRequest,
        wanted: &Requirements,
        nets: &[NetId],
        rows: &[usize],
    ) {
        let Self { columns: own, top_k, token_logit_count, net_scores, net_width } = self;
        for (signal, from, to) in [
            (SignalSet::ENTROPY, &columns.entropy, &mut own.entropy),
            (SignalSet::ENTROPY_NORM, &columns.entropy_norm, &mut own.entropy_norm),
            (SignalSet::TOP1_PROB, &columns.top1_prob, &mut own.top1_prob),
            (SignalSet::MARGIN, &columns.margin, &mut own.margin),
            (SignalSet::LOGSUMEXP, &columns.logsumexp, &mut own.logsumexp),
            (SignalSet::CANDIDATE_PROB, &columns.candidate_prob, &mut own.candidate_prob),
        ] {
            to.clear();
            if wanted.signals.contains(signal) {
                to.extend(rows.iter().map(|&row| from[row]));
            }
        }
        *top_k = wanted.top_k;
        *token_logit_count = wanted.token_logits.len() as u32;
        *net_width = 0;
        own.topk_values.clear();
        own.topk_ids.clear();
        own.token_logits.clear();
        net_scores.clear();
        // Most policies want scalars alone.
        if wanted.top_k > 0 {
            let (have, want) = (computed.top_k as usize, wanted.top_k as usize);
            for &row in rows {
                own.topk_values.extend_from_slice(&columns.topk_values[row * have..][..want]);
                own.topk_ids.extend_from_slice(&columns.topk_ids[row * have..][..want]);
            }
        }
        if !wanted.token_logits.is_empty() {
            let place = |id| computed.token_logits.iter().position(|c| c == id);
            let places: Vec<usize> = wanted.token_logits.iter().filter_map(place).collect();
            for row in rows.iter().map(|row| row * computed.token_logits.len()) {
                own.token_logits.extend(places.iter().map(|place| columns.token_logits[row + place]));
            }
        }
        if !nets.is_empty() {
            let nets: Vec<&NetScores> = nets.iter().filter_map(|&id| columns.net(id)).collect();
            *net_width = nets.iter().map(|net| net.width as u32).sum();
            for &row in rows {
                nets.iter().for_each(|net| net_scores.extend_from_slice(net.row(row)));
            }
        }
    }

    /// The view that policies get.
    pub fn view(&self) -> SignalColumns<'_> {
        let Self { columns, top_k, token_logit_count, net_scores, net_width } = self;
        SignalColumns {
            entropy: &columns.entropy,
            entropy_norm: &columns.entropy_norm,
            top1_prob: &columns.top1_prob,
            margin: &columns.margin,
            logsumexp: &columns.logsumexp,
            candidate_prob: &columns.candidate_prob,
            topk_values: &columns.topk_values,
            topk_ids: &columns.topk_ids,
            top_k: *top_k,
            token_logits: &columns.token_logits,
            token_logit_count: *token_logit_count,
            net_scores,
            net_width: *net_width,
        }
    }
}
