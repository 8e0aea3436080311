//! A request and what comes back from it. Pure data.

mod ledger;
mod sampling;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

pub use ledger::{Ledger, LedgerError};
pub use sampling::{MAX_TOP_LOGPROBS, PromptLogprobs, SamplingParams};

pub use tokenrouter_plugin_api::TokenId;

/// Unique in the life of the server; never reused, so that late messages cannot hit another request.
pub type RequestId = u64;

/// A loaded model, as an index into the engine's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelId(pub u32);

/// A route. Ids count up in the life of an engine and are never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RouteId(pub u32);

impl ModelId {
    /// For indexing tables with one entry a model.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl RouteId {
    /// For tables with an entry for each route there ever was, or for each of the start.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Name of a signal.
pub type SignalName = std::borrow::Cow<'static, str>;

/// What a client asks for, already validated and tokenised.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// Which route serves it.
    pub route: RouteId,
    /// At least one token.
    pub prompt: Vec<TokenId>,
    /// Most tokens to generate, over all models together; 0 computes the prompt alone.
    pub max_tokens: u32,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Attach the policy's signals to each committed token.
    pub return_signals: bool,
    /// K/V is shared only with requests that have the same salt, or none as well.
    pub cache_salt: Option<Arc<str>>,
}

/// A request as the sub-servers know it; shared, never changed but for the moment that it begins.
#[derive(Clone, Debug)]
pub struct RequestSpec {
    /// Id given by the engine.
    pub id: RequestId,
    /// What the client asked for.
    pub new: NewRequest,
    began: OnceLock<Instant>,
}

impl RequestSpec {
    pub fn new(id: RequestId, new: NewRequest) -> Self {
        Self { id, new, began: OnceLock::new() }
    }

    /// When the first step that computed something of it began; `None` while it waits for that.
    pub fn began(&self) -> Option<Instant> {
        self.began.get().copied()
    }

    /// Its first step began at `at`. Only the first call counts.
    pub fn begin(&self, at: Instant) {
        let _ = self.began.set(at);
    }
}

/// One committed token.
#[derive(Clone, Debug, PartialEq)]
pub struct Committed {
    /// The token.
    pub token: TokenId,
    /// The model that wrote it.
    pub model: ModelId,
    /// Whether it is an end token of that model.
    pub eos: bool,
    /// The answer has the form asked for with it, and nothing may follow.
    pub complete: bool,
    /// Natural logarithm of its probability under the model's raw distribution; NaN for a token that a
    /// policy put in place of the model's own.
    pub logprob: f32,
    /// The most probable tokens with their log-probabilities, best first, as many as asked for; behind them
    /// those of [`SamplingParams::listed_logprobs`]. Empty where `logprob` is NaN.
    pub top_logprobs: Vec<(TokenId, f32)>,
    /// Signals of the row that wrote it, by name, if asked for.
    pub signals: Option<Box<Vec<(SignalName, f32)>>>,
}

/// What a model makes of a token that was given.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// Natural logarithm of its probability under the model's raw distribution.
    pub logprob: f32,
    /// Its place among all tokens: 1 for the most probable one; of equal ones the lower id goes first.
    pub rank: u32,
    /// As for a [`Committed`] token.
    pub top_logprobs: Vec<(TokenId, f32)>,
}

/// Why a request ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The token that ended it was committed as the last one.
    Stop(TokenId),
    /// The answer has the form asked for, and nothing may follow.
    Complete,
    /// The token limit was reached.
    Length,
}

/// A model that can compute nothing any more in this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("model `{model}` is down: {message}; restart the server")]
pub struct ModelDown {
    /// Name of the model.
    pub model: String,
    /// What brought it down.
    pub message: String,
}

/// A route that takes no new requests any more, because its policy failed and it says
/// `on_error = "disable_route"`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "route `{route}` is disabled{}: hook `{hook}` of plugin `{plugin}` failed at model `{model}` (on_error = \"disable_route\"); \
     use another one of GET /v1/models; the operator finds the error in the server's log, corrects the plugin and reloads \
     the configuration",
    if *variant { " with these settings" } else { "" }
)]
pub struct RouteDisabled {
    /// Name of the route.
    pub route: String,
    /// It is the route with settings of a request. Which ones is not for other clients.
    pub variant: bool,
    /// Name of its policy.
    pub plugin: String,
    /// The model whose instance failed.
    pub model: String,
    /// The hook that failed.
    pub hook: &'static str,
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The runner could not compute it.
    #[error("model `{model}` failed: {message}")]
    Model { model: String, message: String },
    /// The request was at a model that went down, or came to one.
    #[error(transparent)]
    ModelDown(#[from] ModelDown),
    /// The logits were not finite, or bias and bans left no token.
    #[error(
        "model `{model}` has no token to sample at position {position}: its logits are not finite, or none is allowed"
    )]
    NotFinite { model: String, position: usize },
    /// The answer cannot be continued in the form asked for.
    #[error("model `{model}` cannot continue the answer in the form asked for at position {position}: {message}")]
    Constraint { model: String, position: usize, message: String },
    /// A policy failed and the route says `on_error = "fail_request"`.
    #[error("policy of route `{route}` failed at model `{model}`: {message}")]
    Policy { route: String, model: String, message: String },
    /// The server is going down.
    #[error("the server is shutting down")]
    ShuttingDown,
}

/// What a sub-server tells the client loop about one request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The first model that computes the prompt had the K/V of its first `tokens` tokens already. Comes
    /// once and before any token, and not at all for 0.
    PromptCached { tokens: u32 },
    /// Tokens of the prompt were scored; the first is the one at position `start`. All that are asked for come
    /// before any committed token, those of one model in order. A model that lost its state may say them again.
    PromptScored { start: u32, scores: Vec<Score> },
    /// Tokens were committed; the first is generated token number `start`.
    Committed { start: u32, tokens: Vec<Committed> },
    /// The last event of a request that ended well, with the number of hand-offs it made.
    Finished { reason: FinishReason, handoffs: u32 },
    /// The last event of a request that failed.
    Failed(RequestError),
}

impl Event {
    /// Whether nothing follows it.
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Finished { .. } | Self::Failed(_))
    }
}

/// An event on its way to its client.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// When it happened: for what a step came to, when the step had ended, as the model's thread saw it.
    pub at: Instant,
    /// What happened.
    pub event: Event,
}

impl Told {
    /// It happens now.
    pub fn now(event: Event) -> Self {
        Self { at: Instant::now(), event }
    }
}
