//! Watching evaluations: for recording what a router's trainer needs, and for tests.

use tokenrouter_plugin_api::{Decision, Requirements, SignalSet};

use super::own_signals::OwnSignals;
use crate::request::{Event, ModelId, NewRequest, RequestId, RouteId, SignalName, TokenId};
use crate::runner::net::NetId;
use crate::runner::{Columns, SignalRequest};

/// What an observer wants computed besides what policies ask for. It is asked before each forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Scalar signals.
    pub scalars: SignalSet,
    /// Largest raw logits a row; clipped to the vocabulary.
    pub top_k: u32,
    /// Whether to give last hidden states.
    pub hidden: bool,
}

/// One sampled row of a forward and what was decided about it.
#[derive(Clone, Copy, Debug)]
pub struct Evaluation<'a> {
    pub request: RequestId,
    pub route: RouteId,
    /// The model that was evaluated.
    pub model: ModelId,
    /// Index of the candidate among the generated tokens.
    pub position: u32,
    pub candidate: TokenId,
    /// Natural logarithm of the candidate's probability.
    pub logprob: f32,
    /// The provisional token at this position, on a verifying visit.
    pub draft: Option<TokenId>,
    /// What the policy answered, `Stay` for one that has failed. `None` where nobody was asked: at a model
    /// alone, and for the last token of a budget.
    pub decision: Option<Decision>,
    /// What the route asks for at this model.
    pub requirements: &'a Requirements,
    /// The runner's ids of the nets in `requirements`.
    pub nets: &'a [NetId],
    /// Signals of the whole forward.
    pub columns: &'a Columns,
    /// What `columns` were computed for.
    pub computed: &'a SignalRequest,
    /// Place of this row in `columns`.
    pub row: usize,
    /// Last hidden state after the final norm; empty unless wanted.
    pub hidden: &'a [f32],
}

impl<'a> Evaluation<'a> {
    /// What the route asks for at this model beyond the scalar signals.
    pub fn own_signals(&self) -> OwnSignals<'a> {
        let &Self { requirements, nets, columns, computed, .. } = self;
        OwnSignals { requirements, nets, columns, computed }
    }

    /// The scalar signals that were computed, and what the route asks for beyond them, by name.
    pub fn named_signals(&self) -> Vec<(SignalName, f32)> {
        let own = self.own_signals();
        let mut named = self.columns.named(self.row);
        named.extend(own.names().into_iter().zip(own.values(self.row)));
        named
    }
}

/// Told of every request. Called from the models' threads: it must not block.
pub trait Observer: Send + Sync {
    fn wanted(&self) -> Wanted;
    /// A request was accepted.
    fn submitted(&self, id: RequestId, new: &NewRequest);
    /// Requests for the route's name come to `new` from now on. Those of `old` that are under way go on there.
    fn replaced(&self, _old: RouteId, _new: RouteId) {}
    fn evaluated(&self, evaluation: &Evaluation<'_>);
    /// What the request's client is told.
    fn event(&self, id: RequestId, event: &Event);
    /// The request's client is gone.
    fn cancelled(&self, id: RequestId);
}
