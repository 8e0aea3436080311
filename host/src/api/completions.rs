//! POST /v1/completions

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
use super::prompts::Prompts;
use super::reader::{Fields, Warned};
use super::run::{Answer, Options, Run};
use super::sse::{self, Encoder};
use super::state::{AppState, Route, unix_time};
use super::unbuilt::{refuse_unbuilt, special_tokens};
use crate::request::MAX_TOP_LOGPROBS;

const NAMES: Names = Names { max_tokens: &["max_tokens", "max_completion_tokens"], min_tokens: "min_tokens" };
const DEFAULT_MAX_TOKENS: u32 = 16;

pub async fn handle(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    admission::answer(state, request, answer).await
}

async fn answer(state: Arc<AppState>, mut fields: Fields) -> Result<Response, ApiError> {
    let route = state.route(&mut fields)?;
    let Asked { mut generation, streaming, return_routing, prompts } = Asked::read(fields, &route, &state.warned)?;
    let prompts = state.text_work.prompts(&route, prompts, "prompt").await?;
    let options = Options {
        default_max_tokens: Some(DEFAULT_MAX_TOKENS),
        return_signals: return_routing,
        prompt_field: "prompt",
    };
    state.constrain(&route, &mut generation).await?;
    let run = Run::start(&state, &route, prompts, &generation, options).await?;
    let shape = Shape {
        id: random_id("cmpl-"),
        created: unix_time(),
        logprobs: generation.sampling.top_logprobs.is_some(),
        return_routing,
        include_usage: streaming.include_usage,
        route,
    };
    run.named(&shape.id);
    let mut usage = Usage::new(run.prompt_tokens, generation.n);
    if streaming.stream {
        return Ok(sse::respond(run, CompletionStream { usage, shape }, state.keep_alive));
    }
    let answers = run.collect().await?;
    for (index, answer) in answers.iter().enumerate() {
        usage.add(&shape.route, index, &answer.entries, answer.end.as_ref());
    }
    let choices = answers.iter().enumerate().map(|(index, answer)| shape.choice(index, answer)).collect();
    let mut body = shape.envelope(choices);
    body["usage"] = usage.to_json();
    Ok(json_response(StatusCode::OK, &body))
}

/// What a body asks for.
pub(super) struct Asked {
    pub generation: Generation,
    streaming: Streaming,
    return_routing: bool,
    pub prompts: Prompts,
}

impl Asked {
    pub(super) fn read(mut fields: Fields, route: &Route, warned: &Warned) -> Result<Self, ApiError> {
        refuse_unbuilt(&mut fields)?;
        let mut generation = Generation::read(&mut fields, NAMES, &route.defaults, route.vocab)?;
        let streaming = Streaming::read(&mut fields)?;
        let logprobs = fields.integer("logprobs", 0..=i64::from(MAX_TOP_LOGPROBS))?;
        generation.sampling.top_logprobs = logprobs.map(|top| top as u32);
        let return_routing = fields.boolean("return_routing")?.unwrap_or(false);
        let prompt = fields.take("prompt").ok_or_else(|| ApiError::missing("prompt", "`prompt` is required."))?;
        let prompts = Prompts::read("prompt", prompt, route.vocab)?;
        special_tokens(&mut fields, route, true, prompts.has_text())?;
        fields.finish(warned);
        Ok(Self { generation, streaming, return_routing, prompts })
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
    fn envelope(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.route.name,
            "choices": choices,
        })
    }

    fn choice(&self, index: usize, answer: &Answer) -> Value {
        let mut choice = json!({
            "index": index,
            "text": answer.text,
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
        let text = |id| answer::token_text(&self.route.text.tokenizer, id);
        let top = |entry: &Entry| {
            let top = answer::top_with_chosen(entry).into_iter();
            top.map(|(id, logprob)| (text(id), answer::logprob(logprob).into())).collect::<Map<String, Value>>()
        };
        let column = |of: &dyn Fn(&Entry) -> Value| entries.iter().map(of).collect::<Vec<_>>();
        json!({
            "tokens": column(&|entry| text(entry.committed.token).into()),
            "token_logprobs": column(&|entry| answer::logprob(entry.committed.logprob).into()),
            "top_logprobs": column(&|entry| top(entry).into()),
            "text_offset": column(&|entry| entry.offset.into()),
        })
    }
}

struct CompletionStream {
    shape: Shape,
    usage: Usage,
}

impl CompletionStream {
    fn chunk(&self, choices: Vec<Value>) -> Value {
        let mut chunk = self.shape.envelope(choices);
        if self.shape.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

impl Encoder for CompletionStream {
    fn open(&mut self) -> Vec<Value> {
        Vec::new()
    }

    fn piece(&mut self, index: usize, piece: Piece) -> Vec<Value> {
        self.usage.add(&self.shape.route, index, &piece.entries, piece.end.as_ref());
        let mut events = Vec::new();
        let tokens_matter = self.shape.logprobs || self.shape.return_routing;
        if !piece.text.is_empty() || (tokens_matter && !piece.entries.is_empty()) {
            let part = Answer { text: piece.text, entries: piece.entries, end: None };
            events.push(self.chunk(vec![self.shape.choice(index, &part)]));
        }
        if let Some(end) = piece.end {
            let mut choice = json!({"index": index, "text": "", "logprobs": null});
            choice["finish_reason"] = answer::finish_reason(&end).into();
            choice["stop_reason"] = answer::stop_reason(&end);
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
