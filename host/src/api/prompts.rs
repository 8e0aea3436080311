//! Prompts as a request gives them.

use serde_json::Value;

use super::error::ApiError;
use super::params::token;
use crate::request::TokenId;

pub(super) const MAX_PROMPTS: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<TokenId>),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompts {
    pub list: Vec<Prompt>,
    /// Given as a list of prompts.
    pub batch: bool,
}

impl Prompts {
    /// A string, a list of strings, a list of token ids, or a list of such lists.
    pub fn read(field: &str, value: Value, vocab: u32) -> Result<Self, ApiError> {
        let one = |prompt| Ok(Self { list: vec![prompt], batch: false });
        let items = match value {
            Value::String(text) => return one(Prompt::Text(text)),
            Value::Array(items) => items,
            other => return Err(ApiError::wrong_type(field, "a string or a list", &other)),
        };
        let Some(first) = items.first() else {
            return Err(ApiError::value(field, format!("`{field}` is an empty list.")));
        };
        let tokens = |items: &[Value]| {
            if items.is_empty() {
                return Err(ApiError::value(field, format!("`{field}` has a prompt without tokens.")));
            }
            let ids: Result<Vec<TokenId>, ApiError> = items.iter().map(|item| token(field, item, vocab)).collect();
            Ok(Prompt::Tokens(ids?))
        };
        if first.is_number() {
            return one(tokens(&items)?);
        }
        if items.len() > MAX_PROMPTS {
            return Err(ApiError::value(field, format!("`{field}` may have at most {MAX_PROMPTS} prompts.")));
        }
        let prompt = |item: Value| match item {
            Value::String(text) => Ok(Prompt::Text(text)),
            Value::Array(items) => tokens(&items),
            other => Err(ApiError::wrong_type(field, "made of strings or lists of token ids", &other)),
        };
        Ok(Self { list: items.into_iter().map(prompt).collect::<Result<_, _>>()?, batch: true })
    }

    /// Whether any of them is to be tokenised.
    pub fn has_text(&self) -> bool {
        self.list.iter().any(|prompt| matches!(prompt, Prompt::Text(_)))
    }
}
