//! When the large model writes the next token.
//!
//! A measure may be NaN, "no signal". A rule that reads it then stays with the small model, and a rule with
//! state leaves the state as it is, as if the row had not been.

use std::collections::VecDeque;

use tokenrouter_plugin_api::random;

/// Stream of [`random::uniform`] for the draws.
const STREAM: u64 = 0x0072_3272;

/// What the rules read of one row. A measure that was not asked for is NaN.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The router's probability that the candidate diverges.
    pub score: f64,
    /// Aleatoric uncertainty of the ten largest logits.
    pub aleatoric: f64,
    /// Epistemic uncertainty of the ten largest logits.
    pub epistemic: f64,
    /// Entropy in nats.
    pub entropy: f64,
    /// Index of the candidate among the generated tokens.
    pub position: u32,
    /// Seed of the request.
    pub seed: u64,
}

/// What a rule remembers of one request. A new request counts as written by the large model so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct State {
    /// Whether the last choice was the small model.
    small_chosen: bool,
    momentum: f64,
    /// The last values while the large model is chosen, oldest first.
    window: VecDeque<f64>,
}

/// A rule on a router's score, before its threshold is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeuralRule {
    /// Each row by itself (`neural`).
    Each,
    /// Hysteresis: back to the small model by a mean (`neural_rolling`).
    Rolling {
        /// Scores in the mean.
        window: usize,
    },
    /// Each row by itself, of a router that reads several positions (`neural_multi_input`).
    Window,
}

/// When the large model writes the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// `neural`, and `neural_multi_input` with a window above 1: from `threshold` on, and at the first
    /// `window - 1` positions of the answer.
    Score {
        /// Score from which the large model writes.
        threshold: f64,
        /// Positions that the router reads.
        window: u32,
    },
    /// `neural_rolling`: from `threshold` on; then until the mean score is below it.
    RollingScore {
        /// Score from which the large model writes.
        threshold: f64,
        /// Scores in the mean.
        window: usize,
    },
    /// `immediate` and `entropy`: where each measure that has a threshold reaches it.
    Measures {
        /// Threshold of the aleatoric uncertainty.
        aleatoric: Option<f64>,
        /// Threshold of the epistemic uncertainty.
        epistemic: Option<f64>,
        /// Threshold of the entropy, nats.
        entropy: Option<f64>,
    },
    /// `momentum`: a running mean of "simple" with a bound for each direction.
    Momentum {
        /// Aleatoric uncertainty below which a token is simple.
        aleatoric: f64,
        /// Share of the old momentum in the new one.
        factor: f64,
        /// Momentum up to which the large model takes over.
        quick_to_ref: f64,
        /// Momentum up to which the large model goes on.
        ref_to_quick: f64,
    },
    /// `rolling`: where a token is not simple; then until the mean aleatoric uncertainty is below its
    /// threshold. The token that called the large model is in the mean.
    Rolling {
        /// Aleatoric uncertainty below which a token is simple.
        aleatoric: f64,
        /// Entropy, nats, below which a token is simple.
        entropy: f64,
        /// Values in the mean.
        window: usize,
    },
    /// `duo_rolling`: the same without entropy, and the mean starts after the token that called.
    DuoRolling {
        /// Aleatoric uncertainty below which a token is simple.
        aleatoric: f64,
        /// Values in the mean.
        window: usize,
    },
    /// `random`: by a draw for each position.
    Random {
        /// Probability of the large model.
        reference_prob: f64,
    },
}

impl Rule {
    /// Whether the large model writes the token at `row`; `state` is that of the row's request.
    pub fn wants_large(&self, state: &mut State, row: &Row) -> bool {
        match *self {
            // NaN reaches no threshold. The positions below the window need no score.
            Self::Score { threshold, window } => row.position + 1 < window || row.score >= threshold,
            Self::RollingScore { threshold, window } => {
                state.hysteresis(row.score, row.score >= threshold, threshold, window, true)
            }
            // At least one threshold is given; NaN reaches none.
            Self::Measures { aleatoric, epistemic, entropy } => {
                [(aleatoric, row.aleatoric), (epistemic, row.epistemic), (entropy, row.entropy)]
                    .iter()
                    .all(|&(threshold, value)| threshold.is_none_or(|threshold| value >= threshold))
            }
            Self::Momentum { aleatoric, factor, quick_to_ref, ref_to_quick } => {
                // NaN would count as "not simple".
                if row.aleatoric.is_nan() {
                    return false;
                }
                let simple = if row.aleatoric < aleatoric { 1.0 } else { 0.0 };
                state.momentum = factor * state.momentum + (1.0 - factor) * simple;
                let bound = if state.small_chosen { quick_to_ref } else { ref_to_quick };
                state.small_chosen = state.momentum > bound;
                !state.small_chosen
            }
            Self::Rolling { aleatoric, entropy, window } => {
                // NaN in either is not hard. While the large model is chosen the entropy is not read.
                let hard = row.aleatoric >= aleatoric && row.entropy >= entropy;
                state.hysteresis(row.aleatoric, hard, aleatoric, window, true)
            }
            Self::DuoRolling { aleatoric, window } => {
                state.hysteresis(row.aleatoric, row.aleatoric >= aleatoric, aleatoric, window, false)
            }
            Self::Random { reference_prob } => {
                random::uniform(row.seed, u64::from(row.position), STREAM) < reference_prob
            }
        }
    }

    /// Whether the rule reads the two uncertainties.
    pub fn reads_logits(&self) -> bool {
        match self {
            Self::Measures { aleatoric, epistemic, .. } => aleatoric.is_some() || epistemic.is_some(),
            Self::Momentum { .. } | Self::Rolling { .. } | Self::DuoRolling { .. } => true,
            Self::Score { .. } | Self::RollingScore { .. } | Self::Random { .. } => false,
        }
    }

    /// Whether the rule reads the entropy.
    pub fn reads_entropy(&self) -> bool {
        matches!(self, Self::Rolling { .. } | Self::Measures { entropy: Some(_), .. })
    }
}

impl State {
    /// From the small model to the large one where the row is `hard`; back where the mean of the last
    /// `window` values falls below `threshold`. `keep_first`: the value of the hard row is in the mean.
    fn hysteresis(&mut self, value: f64, hard: bool, threshold: f64, window: usize, keep_first: bool) -> bool {
        // A mean with NaN in it would be below no threshold, and keep the large model.
        if value.is_nan() {
            return false;
        }
        let large = if self.small_chosen {
            if hard && keep_first {
                self.window.push_back(value);
            }
            hard
        } else {
            if self.window.len() == window {
                self.window.pop_front();
            }
            self.window.push_back(value);
            self.window.iter().sum::<f64>() / self.window.len() as f64 >= threshold
        };
        if !large {
            self.window.clear();
        }
        self.small_chosen = !large;
        large
    }
}
