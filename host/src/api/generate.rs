//! POST /generate: the native endpoint, with the field names of SGLang's.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::admission;
use super::answer::{self, Usage};
use super::choice::{End, Piece, Reason};
use super::error::ApiError;
use super::http::json_response;
use super::misplaced;
use super::native::{self, Each, Logprobs};
use super::params::{Generation, Names, cache_salt};
use super::prompt::Encoded;
use super::prompts::Prompts;
use super::reader::{Fields, Warned};
use super::routing;
use super::run::{Answer, Ask, Options, Run, check_choices};
use super::sse::{self, Encoder};
use super::state::{AppState, Route};
use super::structured;
use super::tokenise::Prepare;
use super::unbuilt::{refuse_unbuilt, special_tokens};
use crate::engine::OwnSettings;
use crate::request::PromptLogprobs;

const NAMES: Names = Names { max_tokens: &["max_new_tokens"], min_tokens: "min_new_tokens", least: 0 };
const DEFAULT_MAX_TOKENS: u32 = 128;

pub async fn handle(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    admission::answer(state, request, answer).await
}

async fn answer(state: Arc<AppState>, mut fields: Fields) -> Result<Response, ApiError> {
    let started = Instant::now();
    let mut route = state.route(&mut fields)?;
    let Asked { generations, settings, logprobs, stream, return_routing, ids, text_in_logprobs, field, prompts } =
        Asked::read(fields, &route, &state.warned)?;
    route.settings = settings;
    let n = generations.first().map_or(1, |generation| generation.n);
    let batch = prompts.batch || n > 1;
    let mut generations = generations;
    let prompts = state.prompt_tokens(&route, prompts, field, Prepare::default()).await?;
    check_choices(&state, prompts.len(), n, field)?;
    for ((prompt, generation), logprobs) in prompts.iter().zip(&mut generations).zip(&logprobs) {
        let from = logprobs.as_ref().and_then(|wanted| wanted.first_scored(prompt.ids.len()));
        let top = logprobs.as_ref().map_or(0, |wanted| wanted.top);
        generation.sampling.prompt_logprobs = from.map(|from| PromptLogprobs { from, top });
    }
    state.constrain(&route, &mut generations).await?;
    let names = ids.names(prompts.len(), n, batch);
    let ask = |((prompt, generation), names): ((&Encoded, Generation), &Vec<String>)| Ask {
        prompt: prompt.ids.clone(),
        generation: Arc::new(generation),
        names: names.clone(),
    };
    let asks = prompts.iter().zip(generations).zip(&names.by_prompt).map(ask).collect();
    let options =
        Options { default_max_tokens: Some(DEFAULT_MAX_TOKENS), return_signals: return_routing, prompt_field: field };
    let run = Run::start(&state, &route, asks, options).await?;
    let ids = names.by_choice;
    if let Some(id) = ids.first() {
        run.named(id);
    }
    let shape = Shape { ids, route, prompts, logprobs, n, batch, return_routing, text_in_logprobs, started };
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
    /// One a prompt; all have the same `n`.
    pub generations: Vec<Generation>,
    settings: Option<OwnSettings>,
    logprobs: Vec<Option<Logprobs>>,
    stream: bool,
    return_routing: bool,
    ids: native::Ids,
    text_in_logprobs: bool,
    /// Which one gave the prompts.
    field: &'static str,
    pub prompts: Prompts,
}

impl Asked {
    pub(super) fn read(mut fields: Fields, route: &Route, warned: &Warned) -> Result<Self, ApiError> {
        refuse_unbuilt(&mut fields)?;
        misplaced::refuse(&mut fields, misplaced::GENERATE)?;
        let settings = routing::settings(&mut fields, &route.served)?;
        let form = structured::read(&mut fields)?;
        let (field, prompts) = match (fields.take("text"), fields.take("input_ids")) {
            (Some(text), None) => ("text", Prompts::read("text", text, route.vocab)?),
            (None, Some(ids)) => ("input_ids", Prompts::read("input_ids", ids, route.vocab)?),
            _ => ("text", Prompts::default()),
        };
        let missing = prompts.list.is_empty();
        // What is wrong with the other fields is told even so.
        let count = prompts.list.len().max(1);
        let each = Each { prompts: count, batch: prompts.batch };
        let sampling = each.take(&mut fields, "sampling_params")?;
        let salt = cache_salt(&mut fields)?;
        let mut generations = Vec::with_capacity(count);
        for (name, given) in sampling {
            let mut sampling = Fields::of(&name, given.unwrap_or_else(|| json!({})))?;
            refuse_unbuilt(&mut sampling)?;
            misplaced::refuse(&mut sampling, misplaced::SAMPLING_PARAMS)?;
            let mut generation = Generation::read(&mut sampling, NAMES, &route.defaults, route.vocab)?;
            generation.cache_salt = salt.clone().or(generation.cache_salt);
            generation.form = structured::only(form.clone(), generation.form)?;
            special_tokens(&mut sampling, route, true, prompts.has_text())?;
            sampling.finish_as("sampling_params.", warned);
            generations.push(generation);
        }
        if let Some(other) = generations.iter().find(|generation| generation.n != generations[0].n) {
            let message = format!("`n` must be the same for all prompts, got {} and {}.", generations[0].n, other.n);
            return Err(ApiError::value("sampling_params.n", message));
        }
        let logprobs = Logprobs::read(&mut fields, each, route.vocab)?;
        for (generation, wanted) in generations.iter_mut().zip(&logprobs) {
            if let Some(wanted) = wanted {
                generation.sampling.top_logprobs = Some(wanted.top);
                generation.sampling.listed_logprobs = wanted.listed.clone();
            }
        }
        let text_in_logprobs = fields.boolean("return_text_in_logprobs")?.unwrap_or(false);
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let return_routing = fields.boolean("return_routing")?.unwrap_or(false);
        let ids = native::Ids::read(&mut fields, count)?;
        special_tokens(&mut fields, route, true, prompts.has_text())?;
        if missing {
            return Err(ApiError::missing("text", "Exactly one of `text` and `input_ids` is required."));
        }
        fields.finish(warned);
        Ok(Self { generations, settings, logprobs, stream, return_routing, ids, text_in_logprobs, field, prompts })
    }
}

struct Shape {
    /// By choice.
    ids: Vec<String>,
    route: Route,
    prompts: Vec<Encoded>,
    /// By prompt.
    logprobs: Vec<Option<Logprobs>>,
    /// Choices of each prompt.
    n: usize,
    batch: bool,
    return_routing: bool,
    text_in_logprobs: bool,
    started: Instant,
}

impl Shape {
    fn result(&self, index: usize, answer: &Answer) -> Value {
        let ids: Vec<_> = answer.entries.iter().map(|entry| entry.committed.token).collect();
        let prompt = self.prompts.get(index / self.n).map_or(&[][..], |prompt| &prompt.ids);
        let mut usage = Usage::new(prompt.len(), 1);
        usage.add(&self.route, 0, &answer.entries, answer.end.as_ref());
        let mut meta = usage.to_json();
        meta["model"] = self.route.name.clone().into();
        meta["cached_tokens"] = usage.cached_tokens().into();
        meta["id"] = self.ids.get(index).cloned().into();
        meta["finish_reason"] =
            answer.end.as_ref().map_or(Value::Null, |end| finish(end, &ids, usage.completion_tokens()));
        if answer.end.is_some() {
            meta["e2e_latency"] = self.started.elapsed().as_secs_f64().into();
        }
        if let Some(Some(wanted)) = self.logprobs.get(index / self.n) {
            let tokenizer = self.text_in_logprobs.then_some(&self.route.text.tokenizer);
            wanted.write(&mut meta, tokenizer, prompt, answer);
        }
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
        Reason::Aborted => json!({"type": "abort", "message": "The request was aborted."}),
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
        answer.scores.extend(piece.scores);
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
