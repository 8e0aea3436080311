//! What requests for answers have in common: how tokens are drawn, when an answer ends, and its form.

use serde_json::{Value, json};

use super::schema::{
    Field, about, any_of, boolean, bytes, closed, default, integer, list_of, map, number, object, one_of, string, taken,
};
use crate::api::params::{
    MAX_BIAS, MAX_BIASES, MAX_N, MAX_PENALTY, MAX_REPETITION, MAX_SALT_BYTES, MAX_STOP_BYTES, MAX_STOP_TOKENS,
    MAX_STOPS, MAX_TEMPERATURE, MIN_REPETITION,
};

/// Largest integer where nothing else limits one.
pub const MOST: i64 = u32::MAX as i64;

pub fn token_id() -> Value {
    integer(0..=MOST)
}

/// The fields that `Generation::read` takes, with the names that the endpoint has for limits of tokens.
pub fn fields(limits: &[(&'static str, &'static str)], min_tokens: &'static str, least: i64) -> Vec<Field> {
    const MODEL: &str = "Left out: the model's generation_config.json, else";
    let above_0 = |most: f64| json!({"type": "number", "exclusiveMinimum": 0, "maximum": most});
    let mut fields = vec![
        ("temperature", about(number(0.0..=MAX_TEMPERATURE), &format!("0 takes the most probable token. {MODEL} 1."))),
        ("top_p", about(above_0(1.0), &format!("{MODEL} 1."))),
        ("top_k", about(integer(-1..=MOST), &format!("0 and -1 switch it off. {MODEL} off."))),
        ("min_p", about(number(0.0..=1.0), &format!("{MODEL} 0."))),
        ("repetition_penalty", about(number(MIN_REPETITION..=MAX_REPETITION), &format!("{MODEL} 1."))),
        ("presence_penalty", default(number(-MAX_PENALTY..=MAX_PENALTY), 0)),
        ("frequency_penalty", default(number(-MAX_PENALTY..=MAX_PENALTY), 0)),
        ("seed", about(integer(i64::MIN..=i64::MAX), "The same seed gives the same answer. Left out: random.")),
        ("n", about(default(integer(1..=MAX_N), 1), "Choices for each prompt; at most 256 over all prompts.")),
        (min_tokens, about(default(integer(0..=MOST), 0), "End tokens and stop strings do not count before.")),
        ("stop", about(stop(), "Strings that end the answer; lengths are in bytes.")),
        ("stop_token_ids", list_of(0..=MAX_STOP_TOKENS, token_id())),
        ("include_stop_str_in_output", about(default(boolean(), false), "The stop string belongs to the answer.")),
        ("no_stop_trim", about(default(boolean(), false), "The same, as SGLang names it.")),
        ("skip_special_tokens", about(default(boolean(), true), "Special tokens are no part of the text.")),
        ("ignore_eos", about(default(boolean(), false), "The models' end tokens do not end the answer.")),
        ("logit_bias", logit_bias()),
        ("cache_salt", cache_salt()),
    ];
    fields.extend(limits.iter().map(|&(name, words)| (name, about(integer(least..=MOST), words))));
    fields.extend(forms());
    fields
}

pub fn cache_salt() -> Value {
    about(bytes(1..=MAX_SALT_BYTES), "K/V of the prompt is shared only with requests that have the same.")
}

fn stop() -> Value {
    let one = bytes(1..=MAX_STOP_BYTES);
    any_of([one.clone(), list_of(0..=MAX_STOPS, one)])
}

fn logit_bias() -> Value {
    let mut schema = map(number(-MAX_BIAS..=MAX_BIAS));
    schema["propertyNames"] = json!({"pattern": "^[0-9]{1,10}$"});
    schema["maxProperties"] = MAX_BIASES.into();
    about(schema, "By token id.")
}

/// The fields that ask for a form. A request has one form.
pub fn forms() -> Vec<Field> {
    let structured = closed(taken(
        vec![],
        vec![
            ("json", json_schema()),
            ("json_object", boolean()),
            ("regex", regex()),
            ("choice", choice()),
            ("grammar", grammar()),
        ],
    ));
    vec![
        ("response_format", response_format()),
        ("structured_outputs", structured),
        ("json_schema", json_schema()),
        ("regex", regex()),
        ("grammar", grammar()),
        ("ebnf", grammar()),
        ("guided_json", json_schema()),
        ("guided_regex", regex()),
        ("guided_choice", choice()),
        ("guided_grammar", grammar()),
    ]
}

fn json_schema() -> Value {
    // False is satisfied by nothing.
    let schema = any_of([json!({"type": ["object", "string"]}), json!({"const": true})]);
    about(schema, "A JSON schema, or the text of one.")
}

fn regex() -> Value {
    about(string(), "A regular expression for the whole answer, in Rust's syntax.")
}

fn grammar() -> Value {
    about(string(), "A grammar in llguidance's Lark.")
}

fn choice() -> Value {
    let texts = json!({"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}});
    about(texts, "The answer is one of these.")
}

fn response_format() -> Value {
    let anything = || json!({});
    let schema = taken(
        vec![("schema", json_schema())],
        vec![
            ("name", about(anything(), "Without effect.")),
            ("description", about(anything(), "Without effect.")),
            ("strict", about(anything(), "Without effect: every schema is kept to.")),
        ],
    );
    let plain = object(vec![("type", one_of(&["text"]))], vec![]);
    let json_object = taken(vec![("type", one_of(&["json_object"]))], vec![("schema", json_schema())]);
    let by_schema = object(vec![("type", one_of(&["json_schema"])), ("json_schema", schema)], vec![]);
    any_of([plain, json_object, by_schema])
}
