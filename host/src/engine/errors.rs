//! Why an engine refuses what it is asked for.

use crate::request::{ModelDown, RouteDisabled, TokenId};
use crate::subserver::coordinator::LadderError;

/// Why the engine could not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    #[error("route `{route}`, model `{model}`: {message}")]
    Policy { route: String, model: String, message: String },
    /// A hook of its policy failed in another way than by saying no.
    #[error("route `{route}`, model `{model}`: {message}")]
    Panicked { route: String, model: String, message: String },
    /// Only as a variant of a route.
    #[error(
        "route `{route}`, model `{model}`: with these settings the policy asks for another router network (`{net}`) than \
         the route has"
    )]
    OtherNets { route: String, model: String, net: String },
    /// Nothing is wrong with the route, but the model cannot take it.
    #[error("route `{route}`, model `{model}`: {message}")]
    NotTaken { route: String, model: String, message: String },
    /// An engine that starts with the route can serve it.
    #[error("route `{route}`, model `{model}`: {message}; restart the server")]
    AtStartOnly { route: String, model: String, message: String },
    /// A hook of a plugin does not come back, and the change needs it, or its model.
    #[error("route `{route}`, model `{model}`: {message}")]
    Hung { route: String, model: String, message: String },
    #[error("the server is shutting down; its routes stay as they are")]
    Stopping,
    #[error(transparent)]
    Ladders(#[from] LadderError),
    #[error("route `{route}`: {message}")]
    Route { route: String, message: String },
    #[error("route `{route}`: the name is taken by another route or a model; choose another")]
    Taken { route: String },
    #[error("the thread of model `{model}` could not be started: {message}")]
    Thread { model: String, message: String },
    #[error("the thread that delivers events could not be started: {message}")]
    Delivery { message: String },
    #[error("the thread that looks after routes could not be started: {message}")]
    Routes { message: String },
    #[error("the thread that watches plugins could not be started: {message}")]
    Watchdog { message: String },
    #[error("batching.mode = \"online\": the tuner could not be started: {message}; set \"fixed\" to go without")]
    Tuner { message: String },
}

/// Why a request was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    #[error("the prompt is empty; it needs at least one token")]
    EmptyPrompt,
    #[error(
        "This model's maximum context length is {context} tokens. However, you requested {} tokens ({prompt} in the \
         prompt, {max_tokens} in the completion). Please reduce the length of the prompt or of the completion.",
        *prompt as u64 + u64::from(*max_tokens)
    )]
    ContextLength { context: u32, prompt: usize, max_tokens: u32 },
    #[error(
        "the prompt ({prompt} tokens) with max_tokens ({max_tokens}) needs {needed} K/V pages of model `{model}`, \
         which has {pages}; lower max_tokens, or give the model more pages"
    )]
    Pool { model: String, prompt: usize, max_tokens: u32, needed: usize, pages: u32 },
    #[error("prompt token {token} is outside the vocabulary; ids are below {vocab}")]
    TokenOutOfRange { token: TokenId, vocab: u32 },
    #[error("the route is no longer served")]
    NoRoute,
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error(transparent)]
    ModelDown(#[from] ModelDown),
    #[error(transparent)]
    RouteDisabled(#[from] RouteDisabled),
}
