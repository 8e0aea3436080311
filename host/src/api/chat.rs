//! POST /v1/chat/completions

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::admission;
use super::answer::{self, Streaming, Usage};
use super::choice::{Entry, Piece};
use super::error::ApiError;
use super::http::{json_response, random_id};
use super::params::{Generation, Names};
use super::reader::{Fields, Warned};
use super::run::{Answer, Options, Run};
use super::sse::{self, Encoder};
use super::state::{AppState, Route, unix_time};
use super::unbuilt::{refuse_unbuilt, special_tokens};
use crate::request::{MAX_TOP_LOGPROBS, TokenId};

const NAMES: Names = Names { max_tokens: &["max_completion_tokens", "max_tokens"], min_tokens: "min_tokens" };
const MAX_MESSAGES: usize = 4096;

pub async fn handle(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    admission::answer(state, request, answer).await
}

async fn answer(state: Arc<AppState>, mut fields: Fields) -> Result<Response, ApiError> {
    let route = state.route(&mut fields)?;
    let Asked { mut generation, streaming, return_routing, messages, template } =
        Asked::read(fields, &route, &state.warned)?;
    let prompt = state.text_work.chat(&route, messages, template).await?;
    let options = Options { default_max_tokens: None, return_signals: return_routing, prompt_field: "messages" };
    state.constrain(&route, &mut generation).await?;
    let run = Run::start(&state, &route, vec![prompt], &generation, options).await?;
    let shape = Shape {
        id: random_id("chatcmpl-"),
        created: unix_time(),
        logprobs: generation.sampling.top_logprobs.is_some(),
        return_routing,
        include_usage: streaming.include_usage,
        route,
    };
    run.named(&shape.id);
    if streaming.stream {
        let usage = Usage::new(run.prompt_tokens, generation.n);
        let encoder = ChatStream { usage, choices: run.choices, shape };
        return Ok(sse::respond(run, encoder, state.keep_alive));
    }
    let mut usage = Usage::new(run.prompt_tokens, generation.n);
    let answers = run.collect().await?;
    for (index, answer) in answers.iter().enumerate() {
        usage.add(&shape.route, index, &answer.entries, answer.end.as_ref());
    }
    let choices: Vec<Value> = answers.iter().enumerate().map(|(index, answer)| shape.choice(index, answer)).collect();
    let mut body = shape.envelope("chat.completion", choices);
    body["usage"] = usage.to_json();
    Ok(json_response(StatusCode::OK, &body))
}

/// What a body asks for.
pub(super) struct Asked {
    pub generation: Generation,
    streaming: Streaming,
    return_routing: bool,
    pub messages: Vec<Value>,
    /// For the template.
    pub template: Map<String, Value>,
}

impl Asked {
    pub(super) fn read(mut fields: Fields, route: &Route, warned: &Warned) -> Result<Self, ApiError> {
        refuse_unbuilt(&mut fields)?;
        let mut generation = Generation::read(&mut fields, NAMES, &route.defaults, route.vocab)?;
        let streaming = Streaming::read(&mut fields)?;
        generation.sampling.top_logprobs = logprobs(&mut fields)?;
        let return_routing = fields.boolean("return_routing")?.unwrap_or(false);
        let messages = messages(&mut fields, warned)?;
        let template = template_options(&mut fields)?;
        special_tokens(&mut fields, route, false, true)?;
        fields.finish(warned);
        Ok(Self { generation, streaming, return_routing, messages, template })
    }
}

fn logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=i64::from(MAX_TOP_LOGPROBS))?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as u32)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::value("top_logprobs", "`top_logprobs` needs `logprobs: true`.")),
    }
}

/// Values that the template may read besides the messages.
fn template_options(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let mut options = fields.object("chat_template_kwargs")?.map(Fields::entries).unwrap_or_default();
    if let Some(field) = options.keys().find(|key| ["messages", "tools", "documents"].contains(&key.as_str())) {
        return Err(ApiError::unsupported(&format!("chat_template_kwargs.{field}"), "leave it out"));
    }
    if let Some(flag) = fields.boolean("add_generation_prompt")? {
        options.insert("add_generation_prompt".into(), flag.into());
    }
    Ok(options)
}

/// Messages with plain text as content.
fn messages(fields: &mut Fields, warned: &Warned) -> Result<Vec<Value>, ApiError> {
    let list = fields.list("messages", MAX_MESSAGES)?;
    let list = list.ok_or_else(|| ApiError::missing("messages", "`messages` is required."))?;
    if list.is_empty() {
        return Err(ApiError::value("messages", "`messages` must have at least one message."));
    }
    list.into_iter().enumerate().map(|(index, value)| message(index, value, warned)).collect()
}

fn message(index: usize, value: Value, warned: &Warned) -> Result<Value, ApiError> {
    let place = format!("messages[{index}]");
    let missing =
        |field: &str| ApiError::missing(&format!("{place}.{field}"), format!("`{place}.{field}` is required."));
    let mut fields = Fields::of(&place, value)?;
    let role = fields.string("role")?.ok_or_else(|| missing("role"))?;
    if !["system", "developer", "user", "assistant", "tool"].contains(&role.as_str()) {
        let message = format!("`{place}.role` must be system, developer, user, assistant or tool, not {role:?}.");
        return Err(ApiError::value(format!("{place}.role"), message));
    }
    for field in ["tool_calls", "function_call", "audio"] {
        fields.refuse(field, super::reader::nothing, "give the message's text as its content")?;
    }
    let name = format!("{place}.content");
    let content = match fields.take("content") {
        None => return Err(missing("content")),
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => {
            let parts = parts.iter().enumerate().map(|(part, value)| part_text(&format!("{name}[{part}]"), value));
            parts.collect::<Result<String, _>>()?
        }
        Some(other) => return Err(ApiError::wrong_type(&name, "a string or a list of parts", &other)),
    };
    let mut message = json!({"role": role, "content": content});
    for field in ["name", "tool_call_id"] {
        if let Some(text) = fields.string(field)? {
            message[field] = text.into();
        }
    }
    for field in ["refusal", "annotations"] {
        fields.take(field);
    }
    // Named without the index, so that the set of known names stays small.
    fields.finish_as("messages[].", warned);
    Ok(message)
}

fn part_text<'a>(name: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err(ApiError::missing(&format!("{name}.text"), format!("`{name}.text` is required."))),
        (Some(kind), _) => {
            let message = format!("`{name}` has type {kind:?}; this server reads parts of type \"text\" only.");
            Err(ApiError::value(format!("{name}.type"), message))
        }
        (None, _) => Err(ApiError::missing(&format!("{name}.type"), format!("`{name}.type` is required."))),
    }
}

/// What every answer of one request has in common.
struct Shape {
    id: String,
    created: u64,
    route: Route,
    logprobs: bool,
    return_routing: bool,
    include_usage: bool,
}

impl Shape {
    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({"id": self.id, "object": object, "created": self.created, "model": self.route.name, "choices": choices})
    }

    fn choice(&self, index: usize, answer: &Answer) -> Value {
        let mut choice = json!({
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": null},
            "logprobs": self.logprobs(&answer.entries),
            "finish_reason": answer.end.as_ref().map(answer::finish_reason),
            "stop_reason": answer.end.as_ref().map_or(Value::Null, answer::stop_reason),
        });
        if self.return_routing {
            choice["routing"] = answer::routing(&self.route, &answer.entries);
        }
        choice
    }

    fn logprobs(&self, entries: &[Entry]) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let tokenizer = &self.route.text.tokenizer;
        let token = |(id, logprob): (TokenId, f32)| {
            json!({
                "token": answer::token_text(tokenizer, id),
                "logprob": answer::logprob(logprob),
                "bytes": tokenizer.bytes(id).unwrap_or_default(),
            })
        };
        let content = entries.iter().map(|entry| {
            let mut item = token((entry.committed.token, entry.committed.logprob));
            let top = match entry.committed.top_logprobs.is_empty() {
                true => Vec::new(),
                false => answer::top_with_chosen(entry),
            };
            item["top_logprobs"] = top.into_iter().map(token).collect();
            item
        });
        json!({"content": content.collect::<Vec<_>>(), "refusal": null})
    }
}

struct ChatStream {
    shape: Shape,
    usage: Usage,
    choices: usize,
}

impl ChatStream {
    fn chunk(&self, choices: Vec<Value>) -> Value {
        let mut chunk = self.shape.envelope("chat.completion.chunk", choices);
        if self.shape.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn delta(&self, index: usize, delta: Value, entries: &[Entry]) -> Value {
        let logprobs = if entries.is_empty() { Value::Null } else { self.shape.logprobs(entries) };
        let mut choice = json!({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null});
        if self.shape.return_routing && !entries.is_empty() {
            choice["routing"] = answer::routing(&self.shape.route, entries);
        }
        choice
    }
}

impl Encoder for ChatStream {
    fn open(&mut self) -> Vec<Value> {
        let role = || json!({"role": "assistant", "content": ""});
        (0..self.choices).map(|index| self.chunk(vec![self.delta(index, role(), &[])])).collect()
    }

    fn piece(&mut self, index: usize, piece: Piece) -> Vec<Value> {
        self.usage.add(&self.shape.route, index, &piece.entries, piece.end.as_ref());
        let mut events = Vec::new();
        let tokens_matter = self.shape.logprobs || self.shape.return_routing;
        if !piece.text.is_empty() || (tokens_matter && !piece.entries.is_empty()) {
            events.push(self.chunk(vec![self.delta(index, json!({"content": piece.text}), &piece.entries)]));
        }
        if let Some(end) = &piece.end {
            let mut choice = self.delta(index, json!({}), &[]);
            choice["finish_reason"] = answer::finish_reason(end).into();
            choice["stop_reason"] = answer::stop_reason(end);
            events.push(self.chunk(vec![choice]));
        }
        events
    }

    fn close(&mut self) -> Vec<Value> {
        if !self.shape.include_usage {
            return Vec::new();
        }
        let mut chunk = self.chunk(Vec::new());
        chunk["usage"] = self.usage.to_json();
        vec![chunk]
    }
}
