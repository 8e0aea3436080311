//! Reading bodies without an engine.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use super::error::ApiError;
use super::params::{Generation, SamplingDefaults};
use super::prompts::{Prompt, Prompts};
use super::reader::{Fields, Warned};
use super::state::Route;
use super::{chat, completions, generate};
use crate::request::{RouteId, TokenId};
use crate::text::ModelText;

/// What an endpoint makes of a body.
pub(crate) struct Read {
    pub generation: Generation,
    pub prompts: Vec<Vec<TokenId>>,
}

/// The answers of the three endpoints to a body, before anything is generated.
pub(crate) fn read(body: &[u8], text: &Arc<ModelText>) -> [Result<Read, ApiError>; 3] {
    let route = route(text);
    let warned = Warned::default();
    let fields = || Fields::parse(body);
    let chat = || {
        let asked = chat::Asked::read(fields()?, &route, &warned)?;
        let rendered = text.render_chat(asked.messages, asked.template, UNIX_EPOCH);
        let rendered = rendered.unwrap_or_else(|| Ok(String::new()));
        let rendered = rendered.map_err(|e| ApiError::value("messages", e.to_string()))?;
        let prompt = text.encode_chat(&rendered).map_err(|e| ApiError::value("messages", e.to_string()))?;
        Ok(Read { generation: asked.generation, prompts: vec![prompt] })
    };
    let completion = || {
        let asked = completions::Asked::read(fields()?, &route, &warned)?;
        Ok(Read { generation: asked.generation, prompts: tokens(text, asked.prompts)? })
    };
    let native = || {
        let asked = generate::Asked::read(fields()?, &route, &warned)?;
        let generation = asked.generations.into_iter().next();
        let generation = generation.ok_or_else(|| ApiError::internal("no prompt, and no error"))?;
        Ok(Read { generation, prompts: tokens(text, asked.prompts)? })
    };
    [chat(), completion(), native()]
}

/// A route of an engine that is not there.
pub(super) fn route(text: &Arc<ModelText>) -> Route {
    Route {
        served: Arc::new(crate::engine::ServedRoute::unconnected(RouteId(0), "r")),
        settings: None,
        name: "route".into(),
        text: Arc::clone(text),
        defaults: SamplingDefaults::default(),
        vocab: text.tokenizer.vocab_size() as u32,
        context: 1 << 20,
        room: 1 << 20,
        eos: Arc::default(),
        model_names: Arc::default(),
    }
}

fn tokens(text: &ModelText, prompts: Prompts) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let tokens = |prompt| match prompt {
        Prompt::Tokens(ids) => Ok(ids),
        Prompt::Text(prompt) => text.encode_prompt(&prompt).map_err(|e| ApiError::value("prompt", e.to_string())),
    };
    prompts.list.into_iter().map(tokens).collect()
}
