//! POST /v1/chat/completions

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::admission;
use super::answer::{self, Streaming, TokenNames, Usage};
use super::choice::{Entry, Piece};
use super::error::ApiError;
use super::http::json_response;
use super::misplaced;
use super::params::{Generation, Names};
use super::prompt::{Truncate, prompt_logprobs};
use super::reader::{Fields, Warned};
use super::routing;
use super::run::{Answer, Ask, Options, Run, check_choices};
use super::shown::{RequestName, Shown};
use super::sse::{self, Encoder};
use super::state::{AppState, Route, unix_time};
use super::unbuilt::{refuse_unbuilt, special_tokens};
use crate::engine::OwnSettings;
use crate::request::{MAX_TOP_LOGPROBS, PromptLogprobs, Score, TokenId};

const NAMES: Names = Names { max_tokens: &["max_completion_tokens", "max_tokens"], min_tokens: "min_tokens", least: 1 };
pub(super) const MAX_MESSAGES: usize = 4096;
/// Fields of a message that are refused where they say something.
pub(super) const REFUSED_IN_MESSAGES: [&str; 3] = ["tool_calls", "function_call", "audio"];

pub async fn handle(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    admission::answer(state, request, answer).await
}

async fn answer(state: Arc<AppState>, mut fields: Fields) -> Result<Response, ApiError> {
    let mut route = state.route(&mut fields)?;
    let Asked { mut generation, settings, streaming, shown, messages, template, continues, truncate, name } =
        Asked::read(fields, &route, &state.warned)?;
    route.settings = settings;
    let most = truncate.map(|most| most.most(route.room, generation.max_tokens));
    let prompt = state.chat_tokens(&route, messages, template, continues, most).await?;
    let options = Options { default_max_tokens: None, return_signals: shown.routing, prompt_field: "messages" };
    check_choices(&state, 1, generation.n, "messages")?;
    state.constrain(&route, [&mut generation]).await?;
    let generation = Arc::new(generation);
    let (id, names) = name.id_and_names("chatcmpl-");
    let ask = Ask { prompt: prompt.clone(), generation: generation.clone(), names };
    let run = Run::start(&state, &route, vec![ask], options).await?;
    let shape = Shape {
        id,
        created: unix_time(),
        logprobs: generation.sampling.top_logprobs,
        shown,
        include_usage: streaming.include_usage,
        prompt,
        route,
    };
    run.named(&shape.id);
    if streaming.stream {
        let usage = Usage::new(run.prompt_tokens, generation.n);
        let encoder = ChatStream { usage, choices: run.choices, shape, begun: false };
        return Ok(sse::respond(run, encoder, state.keep_alive));
    }
    let mut usage = Usage::new(run.prompt_tokens, generation.n);
    let answers = run.collect().await?;
    for (index, answer) in answers.iter().enumerate() {
        usage.add(&shape.route, index, &answer.entries, answer.end.as_ref());
    }
    let choices: Vec<Value> = answers.iter().enumerate().map(|(index, answer)| shape.choice(index, answer)).collect();
    let mut body = shape.envelope("chat.completion", choices);
    let scores = answers.first().map_or(&[][..], |answer| &answer.scores);
    shape.prompt_ids(&mut body);
    shape.prompt_logprobs(&mut body, scores);
    body["usage"] = usage.to_json();
    Ok(json_response(StatusCode::OK, &body))
}

/// What a body asks for.
pub(super) struct Asked {
    pub generation: Generation,
    settings: Option<OwnSettings>,
    streaming: Streaming,
    shown: Shown,
    pub messages: Vec<Value>,
    /// For the template.
    pub template: Map<String, Value>,
    /// The answer goes on with the last message.
    pub continues: bool,
    truncate: Option<Truncate>,
    name: RequestName,
}

impl Asked {
    pub(super) fn read(mut fields: Fields, route: &Route, warned: &Warned) -> Result<Self, ApiError> {
        refuse_unbuilt(&mut fields)?;
        misplaced::refuse(&mut fields, misplaced::CHAT)?;
        let mut generation = Generation::read(&mut fields, NAMES, &route.defaults, route.vocab)?;
        let settings = routing::settings(&mut fields, &route.served)?;
        let streaming = Streaming::read(&mut fields)?;
        generation.sampling.top_logprobs = logprobs(&mut fields)?;
        let shown = Shown::read(&mut fields)?;
        generation.sampling.prompt_logprobs = shown.prompt_logprobs.map(|top| PromptLogprobs { from: 1, top });
        let truncate = Truncate::read(&mut fields)?;
        let name = RequestName::read(&mut fields)?;
        let messages = messages(&mut fields, warned)?;
        let (template, continues) = template_options(&mut fields)?;
        special_tokens(&mut fields, route, false, true)?;
        fields.finish(warned);
        Ok(Self { generation, settings, streaming, shown, messages, template, continues, truncate, name })
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

/// Values that the template may read besides the messages, and whether the last message is to be continued.
pub(super) fn template_options(fields: &mut Fields) -> Result<(Map<String, Value>, bool), ApiError> {
    let mut options = fields.object("chat_template_kwargs")?.map(Fields::entries).unwrap_or_default();
    if let Some(field) = options.keys().find(|key| ["messages", "tools", "documents"].contains(&key.as_str())) {
        return Err(ApiError::unsupported(&format!("chat_template_kwargs.{field}"), "leave it out"));
    }
    let given = fields.boolean("add_generation_prompt")?;
    let continues = fields.boolean("continue_final_message")?.unwrap_or(false);
    if continues && given == Some(true) {
        let message = "`continue_final_message` and `add_generation_prompt` cannot both be true.";
        return Err(ApiError::value("continue_final_message", message));
    }
    if let Some(flag) = given.or(continues.then_some(false)) {
        options.insert("add_generation_prompt".into(), flag.into());
    }
    Ok((options, continues))
}

/// Messages with plain text as content.
pub(super) fn messages(fields: &mut Fields, warned: &Warned) -> Result<Vec<Value>, ApiError> {
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
    for field in REFUSED_IN_MESSAGES {
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
    logprobs: Option<u32>,
    shown: Shown,
    include_usage: bool,
    prompt: Vec<TokenId>,
}

impl Shape {
    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({"id": self.id, "object": object, "created": self.created, "model": self.route.name, "choices": choices})
    }

    /// Enter what is shown of the prompt: all choices share it.
    fn prompt_ids(&self, body: &mut Value) {
        if self.shown.token_ids {
            body["prompt_token_ids"] = self.prompt.clone().into();
        }
    }

    fn prompt_logprobs(&self, body: &mut Value, scores: &[Score]) {
        if let Some(top) = self.shown.prompt_logprobs {
            body["prompt_logprobs"] = prompt_logprobs(&self.route.text.tokenizer, &self.prompt, scores, top);
        }
    }

    fn choice(&self, index: usize, answer: &Answer) -> Value {
        let mut choice = json!({
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": null},
            "logprobs": self.logprobs(&answer.entries),
            "finish_reason": answer.end.as_ref().map(answer::finish_reason),
            "stop_reason": answer.end.as_ref().map_or(Value::Null, answer::stop_reason),
        });
        self.shown.tokens(&mut choice, &self.route, &answer.entries);
        choice
    }

    fn logprobs(&self, entries: &[Entry]) -> Value {
        let Some(most) = self.logprobs else { return Value::Null };
        let tokenizer = &self.route.text.tokenizer;
        let names = TokenNames { tokenizer, as_ids: self.shown.as_ids };
        let token = |(id, logprob): (TokenId, f32)| {
            json!({
                "token": names.of(id),
                "logprob": answer::logprob(logprob),
                "bytes": tokenizer.bytes(id).unwrap_or_default(),
            })
        };
        let content = entries.iter().map(|entry| {
            let committed = &entry.committed;
            let mut item = token((committed.token, committed.logprob));
            let top = match committed.top_logprobs.is_empty() {
                true => Vec::new(),
                false => answer::top_with(committed.token, committed.logprob, &committed.top_logprobs, most as usize),
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
    /// The log-probabilities of the prompt are out.
    begun: bool,
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
        if !entries.is_empty() {
            self.shape.shown.tokens(&mut choice, &self.shape.route, entries);
        }
        choice
    }
}

impl Encoder for ChatStream {
    fn open(&mut self) -> Vec<Value> {
        let role = || json!({"role": "assistant", "content": ""});
        let chunk = |index| self.chunk(vec![self.delta(index, role(), &[])]);
        let mut chunks: Vec<Value> = (0..self.choices).map(chunk).collect();
        if let Some(first) = chunks.first_mut() {
            self.shape.prompt_ids(first);
        }
        chunks
    }

    fn piece(&mut self, index: usize, piece: Piece) -> Vec<Value> {
        self.usage.add(&self.shape.route, index, &piece.entries, piece.end.as_ref());
        let mut events = Vec::new();
        let shown = &self.shape.shown;
        let tokens_matter = self.shape.logprobs.is_some() || shown.tokens_matter();
        let begins = index == 0 && !self.begun && shown.prompt_logprobs.is_some();
        if begins || !piece.text.is_empty() || (tokens_matter && !piece.entries.is_empty()) {
            let mut chunk = self.chunk(vec![self.delta(index, json!({"content": piece.text}), &piece.entries)]);
            if begins {
                self.begun = true;
                self.shape.prompt_logprobs(&mut chunk, &piece.scores);
            }
            events.push(chunk);
        }
        if let Some(end) = &piece.end {
            let mut choice = self.delta(index, json!({}), &[]);
            choice["finish_reason"] = answer::finish_reason(end).into();
            choice["stop_reason"] = answer::stop_reason(end);
            if shown.token_ids {
                choice["token_ids"] = json!([]);
            }
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
