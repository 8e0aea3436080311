//! What a policy answers.

use crate::{ModelIndex, TokenId, views::NO_TOKEN};

/// A hand-off's payload may hold at most this many bytes.
pub const MAX_PAYLOAD_BYTES: usize = 64 * 1024;

/// What becomes of one row of a [`RouteBatch`](crate::RouteBatch).
///
/// Numbers, not an enum, cross the library boundary: the host checks every field, so no bit pattern
/// is undefined behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, abi_stable::StableAbi)]
#[repr(C)]
pub struct Decision {
    kind: u32,
    model: u32,
    token: u32,
}

/// The checked meaning of a [`Decision`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionKind {
    /// Commit the candidate (and every provisional token before it); this model goes on.
    Stay,
    /// Keep the candidate as provisional; this model goes on. Where no token remains after it, in the
    /// request or in the visit's budget, it is committed with all provisional tokens instead: hand over
    /// before, see [`RouteBatch::remaining`](crate::RouteBatch::remaining).
    Draft,
    /// Another model takes over; [`Policy::send`](crate::Policy::send) says what becomes of the candidate.
    To(ModelIndex),
    /// Verifying visits only: the provisional token at this row stands; look at the next row. Elsewhere it
    /// means `Stay`.
    Accept,
}

impl Decision {
    /// Commit the candidate and go on with this model.
    pub const STAY: Self = Self { kind: 0, model: 0, token: NO_TOKEN };
    /// Keep the candidate as provisional and go on with this model.
    pub const DRAFT: Self = Self { kind: 1, model: 0, token: NO_TOKEN };
    /// The provisional token at this row stands.
    pub const ACCEPT: Self = Self { kind: 3, model: 0, token: NO_TOKEN };

    /// Hand the request to `model`.
    pub const fn to(model: ModelIndex) -> Self {
        Self { kind: 2, model, token: NO_TOKEN }
    }

    /// The same decision, with `token` in place of the candidate (Co-LLM's compose, verification).
    pub const fn replacing(self, token: TokenId) -> Self {
        Self { token, ..self }
    }

    /// The token that replaces the candidate, if any.
    pub fn replacement(&self) -> Option<TokenId> {
        (self.token != NO_TOKEN).then_some(self.token)
    }

    /// The meaning, or `None` when the plugin wrote an unknown kind.
    pub fn kind(&self) -> Option<DecisionKind> {
        match self.kind {
            0 => Some(DecisionKind::Stay),
            1 => Some(DecisionKind::Draft),
            2 => Some(DecisionKind::To(self.model)),
            3 => Some(DecisionKind::Accept),
            _ => None,
        }
    }
}

/// How a request leaves a model.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Handoff {
    /// Keep the candidate (it is committed before the hand-off or, with `verify`, goes along as the last
    /// provisional token) or drop it (the destination writes that position anew).
    pub keep_candidate: bool,
    /// Most tokens the destination may commit before the host hands the request back by itself;
    /// `None` is unlimited.
    pub budget: Option<u32>,
    /// How many of the newest provisional tokens to drop first.
    ///
    /// The rollback belongs to the sender: the destination must know which sequence it continues.
    pub rollback: u32,
    /// Whether the provisional tokens left go along as provisional, to be verified by the destination
    /// (`true`), or are committed now (`false`).
    pub verify: bool,
    /// Opaque bytes for the destination's policy, at most [`MAX_PAYLOAD_BYTES`].
    pub payload: Vec<u8>,
}

impl Default for Handoff {
    /// Keep the candidate, unlimited visit.
    fn default() -> Self {
        Self { keep_candidate: true, budget: None, rollback: 0, verify: false, payload: Vec::new() }
    }
}

impl Handoff {
    /// Drop the candidate: the destination writes that position anew. Unlimited visit.
    pub fn drop_candidate() -> Self {
        Self { keep_candidate: false, ..Self::default() }
    }

    /// The same hand-off for at most `tokens` tokens of the destination.
    pub fn budget(self, tokens: u32) -> Self {
        Self { budget: Some(tokens), ..self }
    }

    /// The same hand-off with the provisional tokens, a kept candidate included, still provisional: the
    /// destination verifies them.
    pub fn verify(self) -> Self {
        Self { verify: true, ..self }
    }

    /// The same hand-off after dropping the newest `tokens` provisional tokens. A kept candidate is
    /// dropped with them: it has lost its context.
    pub fn rollback(self, tokens: u32) -> Self {
        Self { rollback: tokens, ..self }
    }

    /// The same hand-off with bytes for the destination's policy.
    pub fn payload(self, bytes: impl Into<Vec<u8>>) -> Self {
        Self { payload: bytes.into(), ..self }
    }
}

/// What a receiving model does with the provisional tokens of a message. Committed tokens are always
/// taken: they have been streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Acceptance {
    /// Sample at every provisional position and ask [`Policy::route`](crate::Policy::route) about each.
    Verify,
    /// Commit the first `n` provisional tokens unseen and drop the others.
    Accept(u32),
}
