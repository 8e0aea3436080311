//! POST /tokenize and /detokenize, in the shapes of vLLM and SGLang.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::admission;
use super::chat;
use super::error::ApiError;
use super::http::json_response;
use super::prompts::{Prompt, Prompts};
use super::reader::Fields;
use super::state::{AppState, Route};
use super::unbuilt::refuse_unbuilt;
use crate::request::TokenId;
use crate::text::{Detokenizer, readable};

pub async fn tokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    admission::answer(state, request, tokens_of).await
}

pub async fn detokenize(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    admission::answer(state, request, text_of).await
}

async fn tokens_of(state: Arc<AppState>, mut fields: Fields) -> Result<Response, ApiError> {
    let route = state.route(&mut fields)?;
    refuse_unbuilt(&mut fields)?;
    let strings = fields.boolean("return_token_strs")?.unwrap_or(false);
    let (lists, batch) = match fields.take("prompt") {
        Some(prompt) => prompt_tokens(&state, &route, &mut fields, prompt).await?,
        None => (vec![conversation_tokens(&state, &route, &mut fields).await?], false),
    };
    fields.finish(&state.warned);
    // As long as the text, so in its turn.
    let response = move || {
        let strings_of = |ids: &Vec<TokenId>| -> Value {
            let bytes = |id: &TokenId| readable(route.text.tokenizer.bytes(*id).unwrap_or_default());
            ids.iter().map(bytes).collect()
        };
        let body = |count: Value, tokens: Value, strings: Value| json!({"count": count, "max_model_len": route.context, "tokens": tokens, "token_strs": strings});
        let body = if batch {
            let strings = if strings { lists.iter().map(strings_of).collect() } else { Value::Null };
            body(lists.iter().map(Vec::len).collect(), json!(lists), strings)
        } else {
            let ids = lists.into_iter().next().unwrap_or_default();
            let strings = if strings { strings_of(&ids) } else { Value::Null };
            body(ids.len().into(), ids.into(), strings)
        };
        Ok(json_response(StatusCode::OK, &body))
    };
    state.work(response).await
}

/// Tokens of texts, and whether they were given as a list. An empty text has none.
async fn prompt_tokens(
    state: &AppState,
    route: &Route,
    fields: &mut Fields,
    prompt: Value,
) -> Result<(Vec<Vec<TokenId>>, bool), ApiError> {
    let added = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let Prompts { list, batch } = Prompts::read("prompt", prompt, route.vocab)?;
    let text = |prompt| match prompt {
        Prompt::Text(text) => Ok(text),
        Prompt::Tokens(_) => Err(ApiError::value("prompt", "`prompt` has tokens already; give text.")),
    };
    let texts = list.into_iter().map(text).collect::<Result<_, _>>()?;
    Ok((state.text_tokens(route, texts, added).await?, batch))
}

async fn conversation_tokens(state: &AppState, route: &Route, fields: &mut Fields) -> Result<Vec<TokenId>, ApiError> {
    let missing = || ApiError::missing("prompt", "`prompt` or `messages` is required.");
    if !fields.has("messages") {
        return Err(missing());
    }
    let messages = chat::messages(fields, &state.warned)?;
    let (template, continues) = chat::template_options(fields)?;
    if fields.boolean("add_special_tokens")? == Some(true) && route.text.adds_special_tokens() {
        let remedy = "leave it out: the chat template writes the special tokens";
        return Err(ApiError::unsupported("add_special_tokens", remedy));
    }
    state.chat_tokens(route, messages, template, continues, None).await
}

async fn text_of(state: Arc<AppState>, mut fields: Fields) -> Result<Response, ApiError> {
    let route = state.route(&mut fields)?;
    let keep = !fields.boolean("skip_special_tokens")?.unwrap_or(false);
    let tokens = fields.take("tokens").ok_or_else(|| ApiError::missing("tokens", "`tokens` is required."))?;
    fields.finish(&state.warned);
    let vocabulary = route.text.tokenizer.vocab_size() as u32;
    let (list, batch) = match tokens {
        Value::Array(items) if items.is_empty() => (Vec::new(), false),
        tokens => {
            let prompts = Prompts::read("tokens", tokens, vocabulary)?;
            (prompts.list, prompts.batch)
        }
    };
    let model = Arc::clone(&route.text);
    let text = move |prompt: &Prompt| match prompt {
        Prompt::Tokens(ids) => {
            let mut detokenizer = Detokenizer::keeping(keep);
            let mut text: String = ids.iter().map(|&id| detokenizer.push(&model.tokenizer, id)).collect();
            text.push_str(&detokenizer.flush());
            Ok(text)
        }
        Prompt::Text(_) => Err(ApiError::value("tokens", "`tokens` has text; give token ids.")),
    };
    let texts: Vec<String> = state.work(move || list.iter().map(text).collect::<Result<_, _>>()).await?;
    let text = if batch { Value::from(texts) } else { texts.into_iter().next().unwrap_or_default().into() };
    // vLLM calls it `prompt`, SGLang `text`.
    Ok(json_response(StatusCode::OK, &json!({"prompt": text, "text": text})))
}
