//! The schemas of requests accept what the readers accept.

use std::collections::BTreeSet;
use std::sync::Arc;

use jsonschema::Validator;
use serde_json::{Value, json};

use super::validator;
use crate::api::error::ApiError;
use crate::api::openapi::document;
use crate::api::reader::{Fields, Warned};
use crate::api::state::Route;
use crate::api::{chat, completions, fuzzed, generate};
use crate::text::ModelText;
use crate::text::tokenizer_fixtures::demo;

type Read = fn(Fields, &Route) -> Result<(), ApiError>;

/// An endpoint with a body under which no field needs another one.
struct Endpoint {
    schema: &'static str,
    base: Value,
    /// The object that the fields are in.
    within: Option<&'static str>,
    read: Read,
}

fn endpoints() -> Vec<Endpoint> {
    let native: Read = |fields, route| generate::Asked::read(fields, route, &Warned::default()).map(drop);
    vec![
        Endpoint {
            schema: "ChatRequest",
            base: json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true, "logprobs": true}),
            within: None,
            read: |fields, route| chat::Asked::read(fields, route, &Warned::default()).map(drop),
        },
        Endpoint {
            schema: "CompletionRequest",
            base: json!({"prompt": "Hi", "stream": true, "echo": true}),
            within: None,
            read: |fields, route| completions::Asked::read(fields, route, &Warned::default()).map(drop),
        },
        Endpoint {
            schema: "GenerateRequest",
            base: json!({"text": ["Hi"], "return_logprob": true}),
            within: None,
            read: native,
        },
        Endpoint {
            schema: "SamplingParams",
            base: json!({"text": ["Hi"], "sampling_params": {}}),
            within: Some("sampling_params"),
            read: native,
        },
    ]
}

fn values() -> Vec<Value> {
    let long = |length| "a".repeat(length);
    let plain = json!([
        null, true, false, -101, -2, -1, 0, 1, 2, 3, 0.5, 20, 21, 64, 65, 100, 101, 4294967295_i64, 4294967296_i64, 1e300,
        "", "a", "5", "true", long(256), long(257), long(1025), [], ["a"], [""], [1], [0.5], [[1]], [[]], [null], [true],
        [{}], vec!["a"; 17], vec![1; 129], {}, {"1": 1}, {"1": 101}, {"a": 1}, {"type": "text"}, {"type": "json_object"},
        {"type": "other"}, {"json_object": true}, {"choice": [""]}, {"include_usage": true}
    ]);
    plain.as_array().unwrap().clone()
}

/// Whether the readers take a value that is not of the canonical form, and say so.
fn tolerated(schema: &Value, field: &str, value: &Value) -> bool {
    let kinds = schema.to_string();
    // Of a list with a value for each prompt.
    let one = value.as_array().filter(|items| items.len() == 1).map_or(value, |items| &items[0]);
    let numeral = *one == "5" && (kinds.contains("integer") || kinds.contains("number"));
    let flag = kinds.contains("boolean") && [json!(0), json!(1), json!("true")].contains(one);
    // Values that ask for nothing.
    let forms = ["response_format", "json_schema", "regex", "grammar", "ebnf", "guided_"];
    let off = forms.iter().any(|form| field.starts_with(form)) && crate::api::structured::off(value);
    numeral || flag || off || (field == "prompt_logprobs" && *value == false)
}

/// Whether the readers refuse a value only because of other fields.
fn needs_others(endpoint: &Endpoint, field: &str, value: &Value) -> bool {
    // One of both is required, and one alone.
    let prompt = ["text", "input_ids"].contains(&field) && (value.is_null() || field == "input_ids");
    // A list has an entry for each prompt.
    let by_prompt =
        ["rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"];
    let lists = endpoint.schema == "GenerateRequest" && by_prompt.contains(&field);
    prompt || (lists && value.as_array().is_some_and(|items| items.len() != 1))
}

#[test]
fn schemas_accept_what_the_readers_accept() {
    let document = document();
    let text = Arc::new(ModelText::new(demo(), None, &Value::Null));
    let route = Route { vocab: u32::MAX, ..fuzzed::route(&text) };
    let (mut agreed, mut refused) = (0, 0);
    for endpoint in endpoints() {
        let schema = &document["components"]["schemas"][endpoint.schema];
        // The model is read before the rest.
        for (field, about) in schema["properties"].as_object().unwrap().iter().filter(|(name, _)| *name != "model") {
            let one: Validator = validator(&document, about, false);
            for value in values() {
                let mut body = endpoint.base.clone();
                match endpoint.within {
                    Some(within) => body[within][field] = value.clone(),
                    None => body[field] = value.clone(),
                }
                let read = (endpoint.read)(Fields::parse(body.to_string().as_bytes()).unwrap(), &route);
                let told = one.is_valid(&value);
                let place = format!("{}.{field} = {value}", endpoint.schema);
                match read {
                    Ok(()) => assert!(told || tolerated(about, field, &value), "{place}: read, but not told of"),
                    Err(error) => {
                        refused += 1;
                        let fine = !told || needs_others(&endpoint, field, &value);
                        assert!(fine, "{place}: told of, but refused: {}", error.message);
                    }
                }
                agreed += 1;
            }
        }
    }
    assert!(agreed > 5000 && refused > 1000, "{agreed} {refused}");
}

/// Names that a schema reads, and those that it refuses.
fn read_and_refused(schema: &Value) -> (BTreeSet<&str>, BTreeSet<&str>) {
    let read = schema["properties"].as_object().unwrap().keys().map(String::as_str).collect();
    (read, schema["x-refused-fields"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect())
}

#[test]
fn what_one_endpoint_reads_the_others_read_or_refuse() {
    let document = document();
    let schemas = endpoints().into_iter().map(|endpoint| endpoint.schema);
    let fields: Vec<_> =
        schemas.map(|name| (name, read_and_refused(&document["components"]["schemas"][name]))).collect();
    for (name, (read, refused)) in &fields {
        assert_eq!(read.intersection(refused).next(), None, "{name}");
        for (other, (others, _)) in &fields {
            let ignored: Vec<_> =
                others.iter().filter(|field| !read.contains(*field) && !refused.contains(*field)).collect();
            assert!(ignored.is_empty(), "{name} ignores fields of {other}: {ignored:?}");
        }
    }
}

#[test]
fn what_is_refused_is_refused_with_its_name() {
    let document = document();
    let text = Arc::new(ModelText::new(demo(), None, &Value::Null));
    let route = fuzzed::route(&text);
    for endpoint in endpoints() {
        for field in read_and_refused(&document["components"]["schemas"][endpoint.schema]).1 {
            let read = |value: Value| {
                let mut body = endpoint.base.clone();
                match endpoint.within {
                    Some(within) => body[within][field] = value,
                    None => body[field] = value,
                }
                (endpoint.read)(Fields::parse(body.to_string().as_bytes()).unwrap(), &route)
            };
            assert!(read(Value::Null).is_ok(), "{} {field}", endpoint.schema);
            let error = read(json!("asks")).unwrap_err();
            assert_eq!((error.status.as_u16(), error.code), (400, "unsupported_parameter"), "{field}");
            let place = endpoint.within.map_or(String::new(), |within| format!("{within}."));
            assert_eq!(error.param, Some(format!("{place}{field}")));
        }
    }
}
