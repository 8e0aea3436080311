//! Parts of JSON schemas, small enough to be put together by hand.

use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};

/// A field with its schema.
pub type Field = (&'static str, Value);

pub fn boolean() -> Value {
    json!({"type": "boolean"})
}

pub fn string() -> Value {
    json!({"type": "string"})
}

/// A text of so many bytes. A schema counts characters, of which there are no more.
pub fn bytes(count: RangeInclusive<usize>) -> Value {
    json!({"type": "string", "minLength": count.start(), "maxLength": count.end()})
}

pub fn one_of(words: &[&str]) -> Value {
    json!({"type": "string", "enum": words})
}

pub fn constant(word: &str) -> Value {
    json!({"type": "string", "const": word})
}

pub fn integer(range: RangeInclusive<i64>) -> Value {
    json!({"type": "integer", "minimum": range.start(), "maximum": range.end()})
}

/// Of a field that is refused where it asks for something.
pub fn nothing() -> Value {
    json!({"enum": [null, false, 0, "", [], {}], "description": "Refused, unless it is empty."})
}

/// How many there are of something.
pub fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

pub fn number(range: RangeInclusive<f64>) -> Value {
    json!({"type": "number", "minimum": range.start(), "maximum": range.end()})
}

pub fn any_number() -> Value {
    json!({"type": "number"})
}

pub fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

pub fn list_of(count: RangeInclusive<usize>, items: Value) -> Value {
    json!({"type": "array", "items": items, "minItems": count.start(), "maxItems": count.end()})
}

/// An object whose keys are data.
pub fn map(values: Value) -> Value {
    json!({"type": "object", "additionalProperties": values})
}

pub fn any_of(schemas: impl Into<Vec<Value>>) -> Value {
    json!({"anyOf": schemas.into()})
}

/// A schema of the document's components.
pub fn named(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// `null` is allowed as well.
pub fn or_null(mut schema: Value) -> Value {
    if schema.get("enum").is_some() || schema.get("$ref").is_some() || schema.get("const").is_some() {
        return any_of([schema, json!({"type": "null"})]);
    }
    if let Some(choices) = schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        choices.push(json!({"type": "null"}));
    } else if let Some(kinds) = schema.get_mut("type") {
        match kinds {
            Value::Array(kinds) => kinds.push("null".into()),
            kind => *kind = json!([kind, "null"]),
        }
    }
    schema
}

pub fn about(mut schema: Value, words: &str) -> Value {
    schema["description"] = words.into();
    schema
}

/// What it is taken as where it is left out.
pub fn default(mut schema: Value, value: impl Into<Value>) -> Value {
    schema["default"] = value.into();
    schema
}

/// An object of a request: what may be left out may be null as well.
pub fn taken(required: Vec<Field>, optional: Vec<Field>) -> Value {
    object(required, optional.into_iter().map(|(name, schema)| (name, or_null(schema))).collect())
}

/// An object of an answer.
pub fn object(required: Vec<Field>, optional: Vec<Field>) -> Value {
    let names: Vec<&str> = required.iter().map(|(name, _)| *name).collect();
    let properties: Map<String, Value> =
        required.into_iter().chain(optional).map(|(name, schema)| (name.to_owned(), schema)).collect();
    let mut schema = json!({"type": "object", "properties": properties});
    if !names.is_empty() {
        schema["required"] = json!(names);
    }
    schema
}

/// An object that has these fields and no others.
pub fn closed(mut object: Value) -> Value {
    object["additionalProperties"] = false.into();
    object
}
