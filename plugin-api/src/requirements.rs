//! What a policy asks of the host. The host computes nothing that nobody asked for.

use crate::TokenId;
use crate::net::Net;

/// A set of scalar signals. All are taken on raw logits, before temperature and penalties.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct SignalSet(u32);

impl SignalSet {
    /// No signal.
    pub const NONE: Self = Self(0);
    /// Entropy of the next-token distribution in nats.
    pub const ENTROPY: Self = Self(1);
    /// Entropy divided by ln of the number of tokens that can be sampled.
    pub const ENTROPY_NORM: Self = Self(1 << 1);
    /// Probability of the best token.
    pub const TOP1_PROB: Self = Self(1 << 2);
    /// Probability of the best token less that of the second.
    pub const MARGIN: Self = Self(1 << 3);
    /// Logarithm of the sum of the exponentials of the logits.
    pub const LOGSUMEXP: Self = Self(1 << 4);
    /// Probability of the candidate.
    pub const CANDIDATE_PROB: Self = Self(1 << 5);
    /// Every signal of this version.
    pub const ALL: Self = Self(0x3f);

    /// Both sets together.
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    /// Whether every signal of `other` is in this set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
    /// Whether no signal is in this set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
    /// The set as bits, for the library boundary.
    pub const fn bits(self) -> u32 {
        self.0
    }
    /// The set of known signals among `bits`; `None` when a bit has no meaning in this version.
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits & !Self::ALL.0 == 0 { Some(Self(bits)) } else { None }
    }
}

impl std::ops::BitOr for SignalSet {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        self.union(other)
    }
}

/// What a policy asks of the host for each row that it routes.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Requirements {
    /// Scalar signals.
    pub signals: SignalSet,
    /// How many of the largest raw logits to hand over, with their token ids; 0 for none.
    pub top_k: u32,
    /// Tokens whose raw logit is handed over.
    pub token_logits: Vec<TokenId>,
    /// Tokens that are never sampled and are left out of every distribution. Their raw logits are
    /// still available through `token_logits`.
    pub masked_tokens: Vec<TokenId>,
    /// Router networks whose scores are handed over.
    pub nets: Vec<Net>,
}

impl Requirements {
    /// Only these scalar signals.
    pub fn signals(signals: SignalSet) -> Self {
        Self { signals, ..Self::default() }
    }
}
