//! Answers held against the document.

use jsonschema::Validator;
use serde_json::{Value, json};

use crate::api::openapi::document;

/// A schema of the document. `closed`: objects have the fields that it names and no others.
pub fn validator(document: &Value, schema: &Value, closed: bool) -> Validator {
    let mut root = schema.clone();
    root["components"] = json!({"schemas": document["components"]["schemas"]});
    if closed {
        close(&mut root);
    }
    jsonschema::draft202012::new(&root).unwrap()
}

fn close(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            fields.values_mut().for_each(close);
            if fields.get("properties").is_some_and(Value::is_object) && !fields.contains_key("additionalProperties") {
                fields.insert("additionalProperties".into(), false.into());
            }
        }
        Value::Array(items) => items.iter_mut().for_each(close),
        _ => {}
    }
}

fn matches(template: &str, path: &str) -> bool {
    match template.split_once("{id}") {
        Some((before, _)) => path.starts_with(before),
        None => template == path,
    }
}

/// The answer of an endpoint with this status, as the document has it.
fn response<'a>(document: &'a Value, method: &str, path: &str, status: u16) -> &'a Value {
    let path = path.split('?').next().unwrap();
    let paths = document["paths"].as_object().unwrap();
    let item = paths.iter().find(|(template, _)| matches(template, path)).map(|(_, item)| item);
    let told = match item.map(|item| &item[method]) {
        Some(operation) if operation.is_object() => &operation["responses"][status.to_string()],
        // Another path, or another method.
        _ => &document["components"]["responses"][format!("Error{status}")],
    };
    let told = match told["$ref"].as_str() {
        Some(reference) => document.pointer(reference.trim_start_matches('#')).unwrap(),
        None => told,
    };
    assert!(told.is_object(), "{method} {path}: status {status} is not in the document");
    told
}

fn validate(document: &Value, schema: &Value, value: &Value, place: &str) {
    let validator = validator(document, schema, true);
    let faults: Vec<String> =
        validator.iter_errors(value).map(|fault| format!("{}: {fault}", fault.instance_path())).collect();
    assert!(faults.is_empty(), "{place}: {faults:#?}\nin {value}");
}

/// An answer in one piece is as the document says.
pub fn check(method: &str, path: &str, status: u16, body: &Value) {
    let document = document();
    let told = response(&document, method, path, status);
    validate(&document, &told["content"]["application/json"]["schema"], body, &format!("{method} {path} {status}"));
}

/// So are the events of a stream.
pub fn check_events(path: &str, events: &[Value]) {
    let document = document();
    let told = response(&document, "post", path, 200);
    let schema = &told["content"]["text/event-stream"]["x-event-schema"];
    let all = json!({"type": "array", "items": schema});
    validate(&document, &all, &Value::from(events), path);
}
