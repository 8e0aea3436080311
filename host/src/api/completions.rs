//! POST /v1/completions

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
use super::prompt::{Encoded, Truncate, prompt_logprobs};
use super::prompts::Prompts;
use super::reader::{Fields, Warned};
use super::routing;
use super::run::{Answer, Ask, Options, Run, check_choices};
use super::shown::{RequestName, Shown};
use super::sse::{self, Encoder};
use super::state::{AppState, Route, unix_time};
use super::tokenise::Prepare;
use super::unbuilt::{refuse_unbuilt, special_tokens};
use crate::engine::OwnSettings;
use crate::request::{MAX_TOP_LOGPROBS, PromptLogprobs, Score, TokenId};

const NAMES: Names = Names { max_tokens: &["max_tokens", "max_completion_tokens"], min_tokens: "min_tokens", least: 1 };
const DEFAULT_MAX_TOKENS: u32 = 16;

pub async fn handle(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    admission::answer(state, request, answer).await
}

async fn answer(state: Arc<AppState>, mut fields: Fields) -> Result<Response, ApiError> {
    let mut route = state.route(&mut fields)?;
    let Asked { mut generation, settings, streaming, shown, echo, truncate, name, prompts } =
        Asked::read(fields, &route, &state.warned)?;
    route.settings = settings;
    let most = truncate.map(|most| most.most(route.room, Some(generation.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS))));
    let prepare = Prepare { echo, keep_special: generation.keep_special, most };
    let prompts = state.prompt_tokens(&route, prompts, "prompt", prepare).await?;
    let options =
        Options { default_max_tokens: Some(DEFAULT_MAX_TOKENS), return_signals: shown.routing, prompt_field: "prompt" };
    check_choices(&state, prompts.len(), generation.n, "prompt")?;
    state.constrain(&route, [&mut generation]).await?;
    let generation = Arc::new(generation);
    let (id, names) = name.id_and_names("cmpl-");
    let ask =
        |encoded: &Encoded| Ask { prompt: encoded.ids.clone(), generation: generation.clone(), names: names.clone() };
    let run = Run::start(&state, &route, prompts.iter().map(ask).collect(), options).await?;
    let shape = Shape {
        id,
        created: unix_time(),
        logprobs: generation.sampling.top_logprobs,
        shown,
        include_usage: streaming.include_usage,
        prompts,
        n: generation.n,
        route,
    };
    run.named(&shape.id);
    let mut usage = Usage::new(run.prompt_tokens, generation.n);
    if streaming.stream {
        let begun = vec![false; run.choices];
        return Ok(sse::respond(run, CompletionStream { usage, shape, begun }, state.keep_alive));
    }
    let answers = run.collect().await?;
    for (index, answer) in answers.iter().enumerate() {
        usage.add(&shape.route, index, &answer.entries, answer.end.as_ref());
    }
    let choices = answers.iter().enumerate().map(|(index, answer)| shape.choice(index, answer, true)).collect();
    let mut body = shape.envelope(choices);
    body["usage"] = usage.to_json();
    Ok(json_response(StatusCode::OK, &body))
}

/// What a body asks for.
pub(super) struct Asked {
    pub generation: Generation,
    settings: Option<OwnSettings>,
    streaming: Streaming,
    shown: Shown,
    /// The prompt is the beginning of the answer.
    echo: bool,
    truncate: Option<Truncate>,
    name: RequestName,
    pub prompts: Prompts,
}

impl Asked {
    pub(super) fn read(mut fields: Fields, route: &Route, warned: &Warned) -> Result<Self, ApiError> {
        refuse_unbuilt(&mut fields)?;
        misplaced::refuse(&mut fields, misplaced::COMPLETIONS)?;
        let echo = fields.boolean("echo")?.unwrap_or(false);
        let names = Names { least: i64::from(!echo), ..NAMES };
        let mut generation = Generation::read(&mut fields, names, &route.defaults, route.vocab)?;
        let settings = routing::settings(&mut fields, &route.served)?;
        let streaming = Streaming::read(&mut fields)?;
        let logprobs = fields.integer("logprobs", 0..=i64::from(MAX_TOP_LOGPROBS))?.map(|top| top as u32);
        generation.sampling.top_logprobs = logprobs;
        let shown = Shown::read(&mut fields)?;
        let top = logprobs.filter(|_| echo).max(shown.prompt_logprobs);
        generation.sampling.prompt_logprobs = top.map(|top| PromptLogprobs { from: 1, top });
        let truncate = Truncate::read(&mut fields)?;
        let name = RequestName::read(&mut fields)?;
        let prompt = fields.take("prompt").ok_or_else(|| ApiError::missing("prompt", "`prompt` is required."))?;
        let prompts = Prompts::read("prompt", prompt, route.vocab)?;
        special_tokens(&mut fields, route, true, prompts.has_text())?;
        fields.finish(warned);
        Ok(Self { generation, settings, streaming, shown, echo, truncate, name, prompts })
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
    prompts: Vec<Encoded>,
    /// Choices of each prompt.
    n: usize,
}

/// Columns of `logprobs`.
#[derive(Default)]
struct Columns {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<Value>,
}

impl Columns {
    fn push(&mut self, names: TokenNames<'_>, id: TokenId, offset: usize) {
        self.tokens.push(names.of(id).into());
        self.text_offset.push(offset.into());
    }

    fn push_logprobs(&mut self, names: TokenNames<'_>, token: (TokenId, f32), best: &[(TokenId, f32)], most: u32) {
        self.token_logprobs.push(answer::logprob(token.1).into());
        let mut top = Map::new();
        for (id, logprob) in answer::top_with(token.0, token.1, best, most as usize) {
            // Of tokens with one text the most probable counts.
            top.entry(names.of(id)).or_insert_with(|| answer::logprob(logprob).into());
        }
        self.top_logprobs.push(top.into());
    }

    fn into_json(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
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

    fn prompt(&self, index: usize) -> Option<&Encoded> {
        self.prompts.get(index / self.n)
    }

    /// `begins`: the answer's part begins with the prompt, if that belongs to it.
    fn choice(&self, index: usize, answer: &Answer, begins: bool) -> Value {
        let prompt = self.prompt(index);
        let echo = prompt.and_then(|prompt| prompt.echo.as_ref());
        let mut text = echo.filter(|_| begins).map_or_else(String::new, |echo| echo.text.clone());
        text.push_str(&answer.text);
        let echoed = prompt.filter(|_| begins && echo.is_some());
        let mut choice = json!({
            "index": index,
            "text": text,
            "logprobs": self.logprobs(index, echoed, answer),
            "finish_reason": answer.end.as_ref().map(answer::finish_reason),
            "stop_reason": answer.end.as_ref().map_or(Value::Null, answer::stop_reason),
        });
        let tokenizer = &self.route.text.tokenizer;
        if let Some(prompt) = prompt.filter(|_| begins) {
            if let Some(top) = self.shown.prompt_logprobs {
                choice["prompt_logprobs"] = prompt_logprobs(tokenizer, &prompt.ids, &answer.scores, top);
            }
            if self.shown.token_ids {
                choice["prompt_token_ids"] = prompt.ids.clone().into();
            }
        }
        self.shown.tokens(&mut choice, &self.route, &answer.entries);
        choice
    }

    /// `echoed`: the prompt, if its tokens come first.
    fn logprobs(&self, index: usize, echoed: Option<&Encoded>, answer: &Answer) -> Value {
        let Some(most) = self.logprobs else { return Value::Null };
        let names = TokenNames { tokenizer: &self.route.text.tokenizer, as_ids: self.shown.as_ids };
        let mut columns = Columns::default();
        if let Some(Encoded { ids, echo: Some(echo) }) = echoed {
            ids.iter().zip(&echo.offsets).for_each(|(&id, &offset)| columns.push(names, id, offset));
            // Nothing comes before the first token.
            columns.token_logprobs.push(Value::Null);
            columns.top_logprobs.push(Value::Null);
            for (&id, Score { logprob, top_logprobs, .. }) in ids.iter().skip(1).zip(&answer.scores) {
                columns.push_logprobs(names, (id, *logprob), top_logprobs, most);
            }
        }
        let echo = self.prompt(index).and_then(|prompt| prompt.echo.as_ref());
        let before = echo.map_or(0, |echo| echo.text.chars().count());
        for Entry { committed, offset, .. } in &answer.entries {
            columns.push(names, committed.token, before + offset);
            columns.push_logprobs(names, (committed.token, committed.logprob), &committed.top_logprobs, most);
        }
        columns.into_json()
    }
}

struct CompletionStream {
    shape: Shape,
    usage: Usage,
    /// By choice: its first chunk is out.
    begun: Vec<bool>,
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
        let shown = &self.shape.shown;
        let tokens_matter = self.shape.logprobs.is_some() || shown.tokens_matter();
        let echoes = self.shape.prompt(index).is_some_and(|prompt| prompt.echo.is_some());
        let begins = self.begun.get_mut(index).is_some_and(|begun| !std::mem::replace(begun, true));
        let has_beginning = begins && (echoes || shown.prompt_logprobs.is_some() || shown.token_ids);
        if has_beginning || !piece.text.is_empty() || (tokens_matter && !piece.entries.is_empty()) {
            let part = Answer { text: piece.text, entries: piece.entries, scores: piece.scores, end: None };
            events.push(self.chunk(vec![self.shape.choice(index, &part, begins)]));
        }
        if let Some(end) = piece.end {
            let mut choice = json!({"index": index, "text": "", "logprobs": null});
            choice["finish_reason"] = answer::finish_reason(&end).into();
            choice["stop_reason"] = answer::stop_reason(&end);
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
