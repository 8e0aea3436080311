//! Bodies of answers, and events of streams.

use serde_json::{Value, json};

use super::schema::{
    Field, about, any_number, any_of, constant, count, list, map, named, object, one_of, or_null, string,
};

/// Schemas of all answers that are made of tokens, by name.
pub fn schemas() -> Vec<Field> {
    vec![
        ("ChatCompletion", chat()),
        ("ChatCompletionChunk", chat_chunk()),
        ("Completion", completion()),
        ("CompletionChunk", completion_chunk()),
        ("Generated", generated(vec![])),
        ("GeneratedEvent", generated(vec![("index", about(count(), "Of a list of answers."))])),
        ("Usage", usage()),
        ("Routing", routing()),
        ("ChatLogprobs", chat_logprobs()),
        ("CompletionLogprobs", completion_logprobs()),
        ("PromptLogprobs", prompt_logprobs()),
        ("TokenLogprobs", token_logprobs()),
        ("Tokens", tokens()),
        ("Text", text()),
    ]
}

fn ids() -> Value {
    list(count())
}

fn usage_fields() -> Vec<Field> {
    vec![
        ("prompt_tokens", about(count(), "Each prompt once.")),
        ("completion_tokens", count()),
        ("total_tokens", count()),
        ("prompt_tokens_details", object(vec![("cached_tokens", count())], vec![])),
        ("tokens_by_model", map(count())),
        ("handoffs", count()),
    ]
}

fn usage() -> Value {
    object(usage_fields(), vec![])
}

fn finish_reason() -> Value {
    one_of(&["stop", "length", "abort"])
}

fn stop_reason() -> Value {
    about(json!({"type": ["string", "integer", "null"]}), "The stop string, or the id of the stop token.")
}

/// What is shown of a choice's tokens if it is asked for.
fn shown() -> Vec<Field> {
    vec![("routing", named("Routing")), ("token_ids", ids())]
}

/// What is shown of a prompt if it is asked for.
fn shown_prompt() -> Vec<Field> {
    vec![("prompt_logprobs", named("PromptLogprobs")), ("prompt_token_ids", ids())]
}

fn envelope(kind: &str, choice: Value) -> Vec<Field> {
    vec![
        ("id", string()),
        ("object", constant(kind)),
        ("created", about(count(), "Seconds since 1970.")),
        ("model", about(string(), "The route or model that was asked for.")),
        ("choices", list(choice)),
    ]
}

/// The usage of a chunk: that of the last one, where it was asked for.
fn usage_of_chunk() -> Field {
    ("usage", about(or_null(named("Usage")), "With `include_usage`: null in all chunks but the last one."))
}

fn chat() -> Value {
    let message = vec![("role", constant("assistant")), ("content", string()), ("refusal", json!({"type": "null"}))];
    let choice = object(
        vec![
            ("index", count()),
            ("message", object(message, vec![])),
            ("logprobs", or_null(named("ChatLogprobs"))),
            ("finish_reason", finish_reason()),
            ("stop_reason", stop_reason()),
        ],
        shown(),
    );
    let mut required = envelope("chat.completion", choice);
    required.push(("usage", named("Usage")));
    object(required, shown_prompt())
}

fn chat_chunk() -> Value {
    let delta = object(vec![], vec![("role", constant("assistant")), ("content", string())]);
    let mut optional = shown();
    optional.push(("stop_reason", stop_reason()));
    let choice = object(
        vec![
            ("index", count()),
            ("delta", delta),
            ("logprobs", or_null(named("ChatLogprobs"))),
            ("finish_reason", about(or_null(finish_reason()), "In the last chunk of the choice.")),
        ],
        optional,
    );
    let mut optional = shown_prompt();
    optional.push(usage_of_chunk());
    object(envelope("chat.completion.chunk", choice), optional)
}

fn completion_choice(finish_reason: Value) -> Value {
    let required = vec![
        ("index", count()),
        ("text", string()),
        ("logprobs", or_null(named("CompletionLogprobs"))),
        ("finish_reason", finish_reason),
        ("stop_reason", stop_reason()),
    ];
    object(required, shown().into_iter().chain(shown_prompt()).collect())
}

fn completion() -> Value {
    let mut required = envelope("text_completion", completion_choice(finish_reason()));
    required.push(("usage", named("Usage")));
    object(required, vec![])
}

fn completion_chunk() -> Value {
    let choice = completion_choice(about(or_null(finish_reason()), "In the last chunk of the choice."));
    object(envelope("text_completion", choice), vec![usage_of_chunk()])
}

fn generated(more: Vec<Field>) -> Value {
    let mut meta = usage_fields();
    meta.extend([
        ("id", string()),
        ("model", string()),
        ("cached_tokens", count()),
        ("finish_reason", about(or_null(native_end()), "Null while the answer is not complete.")),
    ]);
    let one = || named("TokenLogprobs");
    let best = || list(or_null(one()));
    let optional = vec![
        ("e2e_latency", about(any_number(), "Seconds, once the answer is complete.")),
        ("input_token_logprobs", one()),
        ("output_token_logprobs", one()),
        ("input_top_logprobs", best()),
        ("output_top_logprobs", best()),
        ("input_token_ids_logprobs", best()),
        ("output_token_ids_logprobs", best()),
    ];
    let required = vec![("text", string()), ("output_ids", ids()), ("meta_info", object(meta, optional))];
    object(required, more.into_iter().chain([("routing", named("Routing"))]).collect())
}

fn native_end() -> Value {
    let end = |kind, what| object(vec![("type", constant(kind)), what], vec![]);
    any_of([
        end("stop", ("matched", json!({"type": ["string", "integer", "null"]}))),
        end("length", ("length", count())),
        end("abort", ("message", string())),
    ])
}

fn routing() -> Value {
    let entry = vec![
        ("id", count()),
        ("text", string()),
        ("model", about(string(), "Who wrote the token.")),
        ("logprob", any_number()),
        ("signals", map(json!({"type": ["number", "null"]}))),
    ];
    about(list(object(entry, vec![])), "One entry for each token.")
}

fn chat_logprobs() -> Value {
    let token = || vec![("token", string()), ("logprob", any_number()), ("bytes", list(count()))];
    let mut whole = token();
    whole.push(("top_logprobs", list(object(token(), vec![]))));
    object(vec![("content", list(object(whole, vec![]))), ("refusal", json!({"type": "null"}))], vec![])
}

fn completion_logprobs() -> Value {
    let required = vec![
        ("tokens", list(string())),
        ("token_logprobs", list(json!({"type": ["number", "null"]}))),
        ("top_logprobs", list(or_null(map(any_number())))),
        ("text_offset", list(count())),
    ];
    object(required, vec![])
}

fn prompt_logprobs() -> Value {
    let entry = vec![("logprob", any_number()), ("rank", count()), ("decoded_token", string())];
    about(list(or_null(map(object(entry, vec![])))), "By token id; null for the first token of the prompt.")
}

fn token_logprobs() -> Value {
    let entry = json!({
        "type": "array",
        "prefixItems": [{"type": ["number", "null"]}, {"type": "integer", "minimum": 0}, {"type": ["string", "null"]}],
        "items": false,
        "minItems": 3,
    });
    about(list(entry), "Log-probability, token id and, if it was asked for, text.")
}

fn tokens() -> Value {
    let one_or_many = |one: Value| any_of([one.clone(), list(one)]);
    let required = vec![
        ("count", one_or_many(count())),
        ("max_model_len", count()),
        ("tokens", one_or_many(ids())),
        ("token_strs", or_null(one_or_many(list(string())))),
    ];
    about(object(required, vec![]), "Of a list of texts: lists.")
}

fn text() -> Value {
    let text = || any_of([string(), list(string())]);
    object(vec![("prompt", text()), ("text", about(text(), "The same."))], vec![])
}
