//! POST /generate: the native endpoint, with the field names of SGLang's.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::admission;
use super::answer::{self, Usage};
use super::choice::{End, Piece, Reason};
use super::error::ApiError;
use super::http::{json_response, random_id};
use super::params::{Generation, Names, cache_salt};
use super::prompts::Prompts;
use super::reader::{Fields, Warned};
use super::run::{Answer, Options, Run};
use super::sse::{self, Encoder};
use super::state::{AppState, Route};
use super::structured;
use super::unbuilt::{refuse_unbuilt, special_tokens};

const NAMES: Names = Names { max_tokens: &["max_new_tokens"], min_tokens: "min_new_tokens" };
const DEFAULT_MAX_TOKENS: u32 = 128;

pub async fn handle(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    admission::answer(state, request, answer).await
}

async fn answer(state: Arc<AppState>, mut fields: Fields) -> Result<Response, ApiError> {
    let route = state.route(&mut fields)?;
    let Asked { mut generation, stream, return_routing, id, field, prompts } =
        Asked::read(fields, &route, &state.warned)?;
    let batch = prompts.batch || generation.n > 1;
    let prompts = state.text_work.prompts(&route, prompts, field).await?;
    let prompt_lengths = prompts.iter().flat_map(|p| std::iter::repeat_n(p.len(), generation.n)).collect();
    let options =
        Options { default_max_tokens: Some(DEFAULT_MAX_TOKENS), return_signals: return_routing, prompt_field: field };
    state.constrain(&route, &mut generation).await?;
    let run = Run::start(&state, &route, prompts, &generation, options).await?;
    run.named(&id);
    let shape = Shape { id, route, prompt_lengths, batch, return_routing };
    if stream {
        let answers = vec![Answer::default(); run.choices];
        return Ok(sse::respond(run, GenerateStream { shape, answers }, state.keep_alive));
    }
    let answers = run.collect().await?;
    let mut results: Vec<Value> = answers.iter().enumerate().map(|(index, a)| shape.result(index, a)).collect();
    let body = if batch { Value::from(results) } else { results.remove(0) };
    Ok(json_response(StatusCode::OK, &body))
}

/// What a body asks for.
pub(super) struct Asked {
    pub generation: Generation,
    stream: bool,
    return_routing: bool,
    id: String,
    /// Which one gave the prompts.
    field: &'static str,
    pub prompts: Prompts,
}

impl Asked {
    pub(super) fn read(mut fields: Fields, route: &Route, warned: &Warned) -> Result<Self, ApiError> {
        refuse_unbuilt(&mut fields)?;
        let mut sampling = match fields.object("sampling_params")? {
            Some(sampling) => sampling,
            None => Fields::of("sampling_params", json!({}))?,
        };
        refuse_unbuilt(&mut sampling)?;
        let mut generation = Generation::read(&mut sampling, NAMES, &route.defaults, route.vocab)?;
        generation.form = structured::only(structured::read(&mut fields)?, generation.form)?;
        generation.cache_salt = cache_salt(&mut fields)?.or(generation.cache_salt);
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let return_routing = fields.boolean("return_routing")?.unwrap_or(false);
        let id = fields.string("rid")?.unwrap_or_else(|| random_id("gen-"));
        let (field, prompts) = match (fields.take("text"), fields.take("input_ids")) {
            (Some(text), None) => ("text", Prompts::read("text", text, route.vocab)?),
            (None, Some(ids)) => ("input_ids", Prompts::read("input_ids", ids, route.vocab)?),
            _ => return Err(ApiError::missing("text", "Exactly one of `text` and `input_ids` is required.")),
        };
        for object in [&mut fields, &mut sampling] {
            special_tokens(object, route, true, prompts.has_text())?;
        }
        sampling.finish(warned);
        fields.finish(warned);
        Ok(Self { generation, stream, return_routing, id, field, prompts })
    }
}

struct Shape {
    id: String,
    route: Route,
    /// By choice.
    prompt_lengths: Vec<usize>,
    batch: bool,
    return_routing: bool,
}

impl Shape {
    fn result(&self, index: usize, answer: &Answer) -> Value {
        let ids: Vec<_> = answer.entries.iter().map(|entry| entry.committed.token).collect();
        let mut usage = Usage::new(self.prompt_lengths.get(index).copied().unwrap_or(0), 1);
        usage.add(&self.route, 0, &answer.entries, answer.end.as_ref());
        let mut meta = usage.to_json();
        meta["cached_tokens"] = usage.cached_tokens().into();
        meta["id"] = if self.batch { format!("{}-{index}", self.id) } else { self.id.clone() }.into();
        meta["finish_reason"] =
            answer.end.as_ref().map_or(Value::Null, |end| finish(end, &ids, usage.completion_tokens()));
        let mut result = json!({"text": answer.text, "output_ids": ids, "meta_info": meta});
        if self.return_routing {
            result["routing"] = answer::routing(&self.route, &answer.entries);
        }
        result
    }
}

fn finish(end: &End, ids: &[u32], length: usize) -> Value {
    match &end.reason {
        Reason::Length => json!({"type": "length", "length": length}),
        Reason::StopString(text) => json!({"type": "stop", "matched": text}),
        Reason::StopToken(token) => json!({"type": "stop", "matched": token}),
        Reason::Complete => json!({"type": "stop", "matched": null}),
        Reason::EndOfSequence => json!({"type": "stop", "matched": ids.last()}),
    }
}

/// Each event holds everything so far.
struct GenerateStream {
    shape: Shape,
    answers: Vec<Answer>,
}

impl Encoder for GenerateStream {
    fn open(&mut self) -> Vec<Value> {
        Vec::new()
    }

    fn piece(&mut self, index: usize, piece: Piece) -> Vec<Value> {
        let Some(answer) = self.answers.get_mut(index) else { return Vec::new() };
        answer.text.push_str(&piece.text);
        answer.entries.extend(piece.entries);
        answer.end = piece.end;
        let mut result = self.shape.result(index, answer);
        if self.shape.batch {
            result["index"] = index.into();
        }
        vec![result]
    }

    fn close(&mut self) -> Vec<Value> {
        Vec::new()
    }
}
