//! Parts of answers that the endpoints share.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::choice::{End, Entry, Reason};
use super::state::Route;
use crate::request::TokenId;
use crate::text::{Tokenizer, readable};

/// JSON has no infinity; clients expect this number in its place.
const LEAST_LOGPROB: f32 = -9999.0;

pub fn logprob(value: f32) -> f32 {
    if value.is_finite() { value.max(LEAST_LOGPROB) } else { LEAST_LOGPROB }
}

/// `finish_reason` as OpenAI names it.
pub fn finish_reason(end: &End) -> &'static str {
    match end.reason {
        Reason::Length => "length",
        Reason::Aborted => "abort",
        _ => "stop",
    }
}

/// The stop string or token that ended the answer, null for anything else.
pub fn stop_reason(end: &End) -> Value {
    match &end.reason {
        Reason::StopString(text) => text.as_str().into(),
        Reason::StopToken(token) => (*token).into(),
        Reason::EndOfSequence | Reason::Complete | Reason::Length | Reason::Aborted => Value::Null,
    }
}

/// Which model wrote each token, and what its policy saw.
pub fn routing(route: &Route, entries: &[Entry]) -> Value {
    let entry = |entry: &Entry| {
        let committed = &entry.committed;
        let signals = committed.signals.as_deref().map(Vec::as_slice).unwrap_or_default();
        let signals: Map<String, Value> =
            signals.iter().map(|(name, value)| (name.to_string(), json!(value))).collect();
        json!({
            "id": committed.token,
            "text": entry.text,
            "model": model_name(route, entry),
            "logprob": logprob(committed.logprob),
            "signals": signals,
        })
    };
    entries.iter().map(entry).collect()
}

fn model_name<'a>(route: &'a Route, entry: &Entry) -> &'a str {
    route.model_names.get(entry.committed.model.index()).map_or("", String::as_str)
}

/// A token as text, whether or not it is a whole character.
pub fn token_text(tokenizer: &Tokenizer, id: TokenId) -> String {
    readable(tokenizer.bytes(id).unwrap_or_default())
}

/// The best `most` tokens with the given one among them.
pub fn top_with(token: TokenId, logprob: f32, top: &[(TokenId, f32)], most: usize) -> Vec<(TokenId, f32)> {
    let mut top = top[..most.min(top.len())].to_vec();
    if top.iter().all(|(other, _)| *other != token) {
        top.push((token, logprob));
    }
    top
}

/// How tokens are named where log-probabilities are told.
#[derive(Clone, Copy, Debug)]
pub struct TokenNames<'a> {
    pub tokenizer: &'a Tokenizer,
    /// `token_id:ID` instead of their text.
    pub as_ids: bool,
}

impl TokenNames<'_> {
    pub fn of(self, id: TokenId) -> String {
        if self.as_ids { format!("token_id:{id}") } else { token_text(self.tokenizer, id) }
    }
}

/// Counts for the `usage` object.
#[derive(Clone, Debug, Default)]
pub struct Usage {
    prompt_tokens: usize,
    cached_tokens: u64,
    /// Choices of each prompt.
    per_prompt: usize,
    completion_tokens: usize,
    by_model: BTreeMap<String, usize>,
    handoffs: u64,
}

impl Usage {
    /// Of prompts with `prompt_tokens` tokens in all and `per_prompt` choices each.
    pub fn new(prompt_tokens: usize, per_prompt: usize) -> Self {
        Self { prompt_tokens, per_prompt, ..Self::default() }
    }

    /// Count what choice number `index` came to.
    pub fn add(&mut self, route: &Route, index: usize, entries: &[Entry], end: Option<&End>) {
        // A prompt counts once, so its first choice stands for it.
        let first = end.filter(|_| index.is_multiple_of(self.per_prompt));
        self.cached_tokens += first.map_or(0, |end| u64::from(end.cached_tokens));
        self.completion_tokens += entries.len();
        for entry in entries {
            *self.by_model.entry(model_name(route, entry).to_owned()).or_default() += 1;
        }
        self.handoffs += end.map_or(0, |end| u64::from(end.handoffs));
    }

    pub fn completion_tokens(&self) -> usize {
        self.completion_tokens
    }

    pub fn cached_tokens(&self) -> u64 {
        self.cached_tokens
    }

    pub fn to_json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "tokens_by_model": self.by_model,
            "handoffs": self.handoffs,
        })
    }
}

/// What streams report about themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streaming {
    pub stream: bool,
    pub include_usage: bool,
}

impl Streaming {
    /// Read `stream` and `stream_options`.
    pub fn read(fields: &mut super::reader::Fields) -> Result<Self, super::error::ApiError> {
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let Some(mut options) = fields.object("stream_options")? else {
            return Ok(Self { stream, include_usage: false });
        };
        if !stream {
            let message = "`stream_options` may only be given with `stream: true`.";
            return Err(super::error::ApiError::value("stream_options", message));
        }
        let nothing = super::reader::nothing;
        options.refuse("continuous_usage_stats", nothing, "use `include_usage`")?;
        Ok(Self { stream, include_usage: options.boolean("include_usage")?.unwrap_or(false) })
    }
}
