//! Bodies of requests.

use serde_json::{Value, json};

use super::sampling::{MOST, cache_salt, fields, forms, token_id};
use super::schema::{
    Field, about, any_of, boolean, bytes, closed, default, integer, list, list_of, map, named, nothing, object, one_of,
    or_null, string, taken,
};
use crate::api::abort::MAX_NAMES;
use crate::api::chat::MAX_MESSAGES;
use crate::api::misplaced::{self, CHAT, COMPLETIONS, GENERATE, Misplaced, SAMPLING_PARAMS};
use crate::api::prompts::MAX_PROMPTS;
use crate::api::shown::MAX_NAME;
use crate::api::unbuilt::{WITHOUT_EFFECT, refused_names};
use crate::request::MAX_TOP_LOGPROBS;

/// Log-probabilities of so many tokens at most.
const TOP: i64 = MAX_TOP_LOGPROBS as i64;

/// Schemas of all bodies, by name.
pub fn schemas() -> Vec<Field> {
    vec![
        ("ChatRequest", refusing(chat(), CHAT)),
        ("CompletionRequest", refusing(completion(), COMPLETIONS)),
        ("GenerateRequest", refusing(generate(), GENERATE)),
        ("SamplingParams", refusing(taken(vec![], sampling_params()), SAMPLING_PARAMS)),
        ("Message", message()),
        ("Prompt", prompt()),
        ("TokenizeRequest", refusing(tokenize(), &[])),
        ("DetokenizeRequest", detokenize()),
        ("AbortRequest", abort()),
    ]
}

/// Name the fields that a request may not use, and those that come to nothing.
fn refusing(mut schema: Value, misplaced: &[Misplaced]) -> Value {
    let names: Vec<&str> = refused_names().chain(misplaced::names(misplaced)).collect();
    for &name in WITHOUT_EFFECT {
        schema["properties"][name] = about(json!({}), "Accepted, without effect.");
    }
    schema["x-refused-fields"] = json!(names);
    about(
        schema,
        "`null` is the same as leaving a field out. Unknown fields are ignored; those of `x-refused-fields` are \
         refused, unless their value asks for nothing.",
    )
}

fn model() -> Field {
    ("model", about(string(), "A route or a model. It may be left out where there is just one."))
}

fn routing() -> Field {
    let settings = about(map(json!({})), "Of the route's policy: those that the route lets requests set.");
    ("routing", closed(taken(vec![], vec![("settings", settings)])))
}

fn special_tokens() -> Field {
    ("add_special_tokens", about(boolean(), "Refused where it is not what the endpoint does anyway."))
}

/// What chat and completions have beside sampling.
fn openai() -> Vec<Field> {
    let streams = vec![("include_usage", default(boolean(), false)), ("continuous_usage_stats", nothing())];
    vec![
        model(),
        ("stream", about(default(boolean(), false), "Answer with server-sent events.")),
        ("stream_options", about(taken(vec![], streams), "Only with `stream: true`.")),
        routing(),
        ("return_routing", about(default(boolean(), false), "Which model wrote each token.")),
        ("return_token_ids", default(boolean(), false)),
        ("return_tokens_as_token_ids", default(boolean(), false)),
        ("prompt_logprobs", about(integer(0..=TOP), "So many of the best tokens at each place of the prompt.")),
        ("truncate_prompt_tokens", truncate()),
        ("request_id", about(bytes(1..=MAX_NAME), "The answer's `id` ends with it.")),
        ("rid", about(bytes(1..=MAX_NAME), "The same, as SGLang names it; `request_id` goes first.")),
        special_tokens(),
    ]
}

fn truncate() -> Value {
    let schema = any_of([json!({"const": -1, "type": "integer"}), integer(1..=MOST)]);
    about(schema, "Keep so many of the prompt's last tokens; -1: as many as the context leaves.")
}

fn template() -> Vec<Field> {
    let values = json!({"type": "object", "propertyNames": {"not": {"enum": ["messages", "tools", "documents"]}}});
    vec![
        ("chat_template_kwargs", about(values, "Further values for the model's chat template.")),
        ("add_generation_prompt", boolean()),
        ("continue_final_message", about(default(boolean(), false), "Go on with the last message.")),
    ]
}

fn messages() -> Value {
    list_of(1..=MAX_MESSAGES, named("Message"))
}

fn message() -> Value {
    let text = |kind| object(vec![("type", one_of(&[kind])), ("text", string())], vec![]);
    let content = any_of([string(), list(text("text"))]);
    let mut message = taken(
        vec![("role", one_of(&["system", "developer", "user", "assistant", "tool"])), ("content", content)],
        vec![
            ("name", string()),
            ("tool_call_id", string()),
            ("refusal", about(json!({}), "Without effect.")),
            ("annotations", about(json!({}), "Without effect.")),
        ],
    );
    for name in crate::api::chat::REFUSED_IN_MESSAGES {
        message["properties"][name] = nothing();
    }
    message
}

fn chat() -> Value {
    let limits = [
        ("max_completion_tokens", "Most tokens of the answer. Left out: what the context leaves."),
        ("max_tokens", "The older name; `max_completion_tokens` goes first."),
    ];
    let mut optional = openai();
    optional.extend(fields(&limits, "min_tokens", 1));
    optional.extend(template());
    optional.push(("logprobs", default(boolean(), false)));
    optional.push(("top_logprobs", about(integer(0..=TOP), "Above 0 only with `logprobs: true`.")));
    taken(vec![("messages", messages())], optional)
}

fn completion() -> Value {
    let limits = [
        ("max_tokens", "Most tokens of the answer; 0 only with `echo`. Left out: 16."),
        ("max_completion_tokens", "The same, where `max_tokens` is left out."),
    ];
    let mut optional = openai();
    optional.extend(fields(&limits, "min_tokens", 0));
    optional.push(("logprobs", integer(0..=TOP)));
    optional.push(("echo", about(default(boolean(), false), "The answer begins with the prompt.")));
    taken(vec![("prompt", named("Prompt"))], optional)
}

fn prompt() -> Value {
    let tokens = || json!({"type": "array", "items": token_id(), "minItems": 1});
    let many = list_of(1..=MAX_PROMPTS, any_of([string(), tokens()]));
    about(any_of([string(), tokens(), many]), "A text, token ids, or a list of such.")
}

fn sampling_params() -> Vec<Field> {
    let limits = [("max_new_tokens", "Most tokens of the answer; 0 computes the prompt alone. Left out: 128.")];
    let mut optional = fields(&limits, "min_new_tokens", 0);
    optional.push(special_tokens());
    optional
}

/// A value for all prompts, or a list with one for each.
fn each(schema: Value) -> Value {
    any_of([schema.clone(), list_of(1..=MAX_PROMPTS, or_null(schema))])
}

fn generate() -> Value {
    let prompt = || named("Prompt");
    let id = || bytes(1..=MAX_NAME);
    let listed = || list_of(0..=TOP as usize, token_id());
    let mut optional = vec![
        model(),
        ("text", about(prompt(), "One of `text` and `input_ids` is required.")),
        ("input_ids", about(prompt(), "The same under another name.")),
        ("sampling_params", each(named("SamplingParams"))),
        ("stream", about(default(boolean(), false), "Each event holds everything so far.")),
        ("rid", about(any_of([id(), list_of(1..=MAX_PROMPTS, id())]), "Comes back as `meta_info.id`.")),
        routing(),
        ("return_routing", default(boolean(), false)),
        ("return_logprob", about(each(boolean()), "Left out: false. The next three need it.")),
        ("logprob_start_len", about(each(integer(-1..=MOST)), "First place of the prompt that is told of; -1: none.")),
        ("top_logprobs_num", each(integer(0..=TOP))),
        ("token_ids_logprob", any_of([listed(), list_of(1..=MAX_PROMPTS, or_null(listed()))])),
        ("return_text_in_logprobs", default(boolean(), false)),
        ("cache_salt", cache_salt()),
        special_tokens(),
    ];
    optional.extend(forms());
    taken(vec![], optional)
}

fn tokenize() -> Value {
    let prompt = any_of([string(), list_of(1..=MAX_PROMPTS, string())]);
    let mut optional = vec![
        model(),
        ("prompt", about(prompt, "A text or texts. Either this or `messages` is required.")),
        ("messages", about(messages(), "A conversation, as a chat has it.")),
        ("add_special_tokens", about(boolean(), "Left out: true for texts, false for conversations.")),
        ("return_token_strs", default(boolean(), false)),
    ];
    optional.extend(template());
    taken(vec![], optional)
}

fn detokenize() -> Value {
    let ids = list(token_id());
    let one = json!({"type": "array", "items": token_id(), "minItems": 1});
    let tokens = any_of([ids, list_of(1..=MAX_PROMPTS, one)]);
    taken(vec![("tokens", tokens)], vec![model(), ("skip_special_tokens", default(boolean(), false))])
}

fn abort() -> Value {
    let names = || any_of([string(), list_of(0..=MAX_NAMES, string())]);
    let optional = vec![
        ("rid", about(names(), "Names of answers.")),
        ("request_ids", about(names(), "The same under another name.")),
        ("abort_all", about(default(boolean(), false), "For the operator: needs the admin key or address.")),
    ];
    about(taken(vec![], optional), "One of the three is required.")
}
