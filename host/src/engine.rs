//! The engine: loaded models, each with its sub-server, and the routes over them.

use std::sync::Arc;

use tokio::sync::mpsc::UnboundedReceiver;

use crate::policy::PolicyFactory;
use crate::request::{Event, ModelId, NewRequest, RequestError, RequestId, RouteId, TokenId};
use crate::runner::{ModelInfo, Runner};

/// What a policy may ask about text, per model. Implemented by `text::Tokenizer`.
pub trait TokenText: Send + Sync {
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>>;
    fn token_id(&self, text: &str) -> Option<TokenId>;
}

/// A model to serve.
pub struct ModelSetup {
    pub runner: Box<dyn Runner>,
    pub text: Arc<dyn TokenText>,
    /// Requests needed before a forward starts, indexed by active requests less one and clamped; never empty.
    pub min_batch: Vec<u32>,
    /// Longest wait for more requests; the gate then opens anyway.
    pub max_wait: std::time::Duration,
    /// Most rows of one forward.
    pub max_rows: usize,
    /// Most prompt rows of one request in one forward.
    pub prefill_chunk: usize,
}

/// What follows when a policy instance fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// Its requests go on at the model they are at.
    #[default]
    StayLocal,
    /// Its requests fail.
    FailRequest,
}

/// A route to serve.
pub struct RouteSetup {
    pub name: String,
    /// Models of the route with their roles, in the policy's order.
    pub models: Vec<(ModelId, String)>,
    /// Where new requests start: an index into `models`.
    pub entry: usize,
    /// `None`: the entry model alone.
    pub policy: Option<Arc<dyn PolicyFactory>>,
    /// Settings as JSON, already checked against the schema.
    pub settings: String,
    pub on_error: OnError,
    /// Tokens that not every model of the route knows by the same text; ascending.
    pub excluded: Vec<TokenId>,
}

/// A route being served.
#[derive(Clone, Debug)]
pub struct RouteInfo {
    pub name: String,
    pub models: Vec<(ModelId, String)>,
    pub entry: usize,
    /// Name of the policy, `None` for a bare model.
    pub policy: Option<String>,
    pub excluded: Arc<[TokenId]>,
}

/// Why a request was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    #[error(
        "This model's maximum context length is {context} tokens. However, the prompt has {prompt} tokens and {max_tokens} more were asked for. Shorten the prompt or lower max_tokens."
    )]
    ContextLength { context: u32, prompt: usize, max_tokens: u32 },
    #[error(
        "the prompt ({prompt} tokens) with max_tokens ({max_tokens}) needs {needed} K/V pages of model `{model}`, which has {pages}. Lower max_tokens or give the model more pages."
    )]
    Pool { model: String, prompt: usize, max_tokens: u32, needed: u32, pages: u32 },
    #[error("prompt token {token} is outside the vocabulary of {vocab} tokens")]
    TokenOutOfRange { token: TokenId, vocab: u32 },
    #[error("the server is shutting down")]
    ShuttingDown,
}

/// The events of one request. Dropping it before the last event cancels the request everywhere.
pub struct RequestStream {
    pub id: RequestId,
    pub events: UnboundedReceiver<Event>,
}
