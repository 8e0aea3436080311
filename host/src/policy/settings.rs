//! A route's settings against its policy's JSON Schema.

use jsonschema::ValidationError;
use jsonschema::error::ValidationErrorKind;
use serde_json::Value;

/// Longest part of a value that an error quotes.
const QUOTE_CHARS: usize = 200;

/// Check `settings`. The error lists all findings on one line: where (a JSON pointer), which value, what is
/// expected.
pub fn validate_settings(schema: &str, settings: &Value) -> Result<(), String> {
    let schema: Value = serde_json::from_str(schema)
        .map_err(|e| format!("the policy's settings schema is not JSON ({e}); ask its author"))?;
    let validator = jsonschema::validator_for(&schema)
        .map_err(|e| format!("the policy's settings schema is not a JSON Schema ({e}); ask its author"))?;
    let findings: Vec<String> =
        validator.iter_errors(settings).map(|error| finding(&schema, settings, &error)).collect();
    if findings.is_empty() { Ok(()) } else { Err(findings.join("; ")) }
}

fn finding(schema: &Value, settings: &Value, error: &ValidationError<'_>) -> String {
    let pointer = error.instance_path().to_string();
    let place = if pointer.is_empty() { "settings".to_owned() } else { format!("settings{pointer}") };
    let unknown = |object: Option<&Value>, keys: &mut dyn Iterator<Item = &String>| {
        let value = |key: &str| object.and_then(|object| object.get(key)).map_or("?".to_owned(), quote);
        let places: Vec<_> = keys.map(|key| format!("{place}/{key} = {}", value(key))).collect();
        format!("{}: no such setting; {}", places.join(", "), known_keys(schema, error))
    };
    match error.kind() {
        ValidationErrorKind::AdditionalProperties { unexpected } => {
            unknown(Some(error.instance()), &mut unexpected.iter())
        }
        // So it is reported for an object that takes no settings at all.
        ValidationErrorKind::FalseSchema if error.schema_path().to_string().ends_with("/additionalProperties") => {
            let object = settings.pointer(&pointer);
            let keys = object.and_then(Value::as_object).into_iter().flat_map(|object| object.keys());
            unknown(object, &mut keys.into_iter())
        }
        ValidationErrorKind::Required { property } => {
            format!("{place}/{}: required but missing", property.as_str().unwrap_or_default())
        }
        // The crate's own message has but some of many.
        ValidationErrorKind::Enum { options } => {
            let options = options.as_array().into_iter().flatten().map(quote).collect::<Vec<_>>();
            format!("{place} = {}: the value is none of {}", quote(error.instance()), options.join(", "))
        }
        // A masked message says what is expected without the value, however large that is.
        _ => format!("{place} = {}: {}", quote(error.instance()), error.masked_with("the value")),
    }
}

/// What the object of an "additional properties" error may hold.
fn known_keys(schema: &Value, error: &ValidationError<'_>) -> String {
    let keyword = error.schema_path().to_string();
    let object = keyword.rsplit_once('/').and_then(|(object, _)| schema.pointer(object));
    let keys: Vec<&str> = object
        .and_then(|object| object.get("properties")?.as_object())
        .map(|properties| properties.keys().map(String::as_str).collect())
        .unwrap_or_default();
    if keys.is_empty() { "it takes none".to_owned() } else { format!("it takes {}", keys.join(", ")) }
}

fn quote(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(QUOTE_CHARS) {
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const SCHEMA: &str = r#"{
        "type": "object", "additionalProperties": false, "required": ["weights"],
        "properties": {
            "threshold": { "type": "number", "minimum": 0, "maximum": 1 },
            "weights": { "type": "object", "additionalProperties": { "type": "number", "exclusiveMinimum": 0 } }
        }
    }"#;

    fn error(settings: Value) -> String {
        validate_settings(SCHEMA, &settings).unwrap_err()
    }

    #[test]
    fn accepts_what_fits() {
        assert_eq!(validate_settings(SCHEMA, &json!({ "weights": { "a": 1 }, "threshold": 0 })), Ok(()));
        assert_eq!(validate_settings(r#"{"type":"object","additionalProperties":false}"#, &json!({})), Ok(()));
    }

    #[test]
    fn names_place_value_and_expectation() {
        assert_eq!(
            error(json!({ "weights": {}, "threshold": 1.5 })),
            "settings/threshold = 1.5: the value is greater than the maximum of 1"
        );
        assert_eq!(
            error(json!({ "weights": { "small": "x" } })),
            "settings/weights/small = \"x\": the value is not of type \"number\""
        );
        assert_eq!(
            error(json!({ "weights": {}, "treshold": 0.1 })),
            "settings/treshold = 0.1: no such setting; it takes threshold, weights"
        );
        assert_eq!(error(json!({})), "settings/weights: required but missing");
        assert_eq!(error(json!(3)), "settings = 3: the value is not of type \"object\"");
        let none = validate_settings(r#"{"type":"object","additionalProperties":false}"#, &json!({ "a": 1 }));
        assert_eq!(none.unwrap_err(), "settings/a = 1: no such setting; it takes none");
        let schema = r#"{"properties": {"mode": {"enum": ["a", "b", "c", "d", 5]}}}"#;
        assert_eq!(
            validate_settings(schema, &json!({ "mode": "e" })).unwrap_err(),
            "settings/mode = \"e\": the value is none of \"a\", \"b\", \"c\", \"d\", 5"
        );
    }

    #[test]
    fn reports_every_finding_and_stays_short() {
        let text = error(json!({ "weights": 1, "threshold": "x".repeat(1 << 20) }));
        assert!(!text.contains('\n') && text.contains("; settings/"), "{text}");
        assert!(text.len() < 1000 && text.contains("… (1048578 bytes)"), "{text}");
    }

    #[test]
    fn a_broken_schema_is_the_authors() {
        for schema in ["{", r#"{"type": "number-ish"}"#] {
            let text = validate_settings(schema, &json!({})).unwrap_err();
            assert!(text.starts_with("the policy's settings schema is not"), "{text}");
        }
    }
}
