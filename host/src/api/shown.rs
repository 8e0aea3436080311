//! What the answers of OpenAI's endpoints show beyond OpenAI's own fields, and what they are called.

use serde_json::Value;

use super::answer;
use super::choice::Entry;
use super::error::ApiError;
use super::http::random_id;
use super::prompt::read_prompt_logprobs;
use super::reader::Fields;
use super::state::Route;
use crate::request::TokenId;

/// Longest name that a client gives a request.
pub(super) const MAX_NAME: usize = 256;

/// Further fields of a choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    pub routing: bool,
    /// `token_ids` and `prompt_token_ids`.
    pub token_ids: bool,
    /// Log-probabilities name tokens by id.
    pub as_ids: bool,
    /// As many of the most probable tokens with each of the prompt.
    pub prompt_logprobs: Option<u32>,
}

impl Shown {
    pub fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let mut flag = |name| Ok::<_, ApiError>(fields.boolean(name)?.unwrap_or(false));
        let (routing, token_ids) = (flag("return_routing")?, flag("return_token_ids")?);
        let as_ids = flag("return_tokens_as_token_ids")?;
        Ok(Self { routing, token_ids, as_ids, prompt_logprobs: read_prompt_logprobs(fields)? })
    }

    /// Whether tokens are shown, even those without text.
    pub fn tokens_matter(&self) -> bool {
        self.routing || self.token_ids
    }

    /// Enter what is shown of the tokens of a choice, or of a part of it.
    pub fn tokens(&self, choice: &mut Value, route: &Route, entries: &[Entry]) {
        if self.routing {
            choice["routing"] = answer::routing(route, entries);
        }
        if self.token_ids {
            let ids: Vec<TokenId> = entries.iter().map(|entry| entry.committed.token).collect();
            choice["token_ids"] = ids.into();
        }
    }
}

/// Read a name that the client gives.
pub fn client_name(fields: &mut Fields, field: &str) -> Result<Option<String>, ApiError> {
    let name = fields.string(field)?;
    name.map(|given| check_name(&fields.name(field), given)).transpose()
}

pub fn check_name(field: &str, name: String) -> Result<String, ApiError> {
    if name.is_empty() || name.len() > MAX_NAME {
        let message = format!("`{field}` must have 1 to {MAX_NAME} bytes, not {}.", name.len());
        return Err(ApiError::value(field, message));
    }
    Ok(name)
}

/// The client's name for a request, if it gives one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestName(Option<String>);

impl RequestName {
    /// Read `request_id`, or SGLang's name for it.
    pub fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let [given, other] = ["request_id", "rid"].map(|field| client_name(fields, field));
        Ok(Self(given?.or(other?)))
    }

    /// The answer's id, and the names by which it can be aborted.
    pub fn id_and_names(self, prefix: &str) -> (String, Vec<String>) {
        match self.0 {
            None => {
                let id = random_id(prefix);
                (id.clone(), vec![id])
            }
            Some(given) => {
                let id = format!("{prefix}{given}");
                (id.clone(), vec![id, given])
            }
        }
    }
}
