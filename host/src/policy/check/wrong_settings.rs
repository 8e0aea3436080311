//! Settings that a schema refuses, made from the schema itself.

use serde_json::{Map, Value, json};

use crate::policy::validate_settings;

/// Each differs from `good` in one place and is refused by `schema`.
pub fn refused(schema: &str, good: &Value) -> Vec<Value> {
    let values = [json!(null), json!(true), json!(-1e300), json!(1e300), json!(""), json!([0]), json!({"x": -1})];
    let object = good.as_object().cloned().unwrap_or_default();
    let parsed: Value = serde_json::from_str(schema).unwrap_or_default();
    let names: Vec<String> = match parsed.get("properties").and_then(Value::as_object) {
        Some(properties) => properties.keys().cloned().collect(),
        None => object.keys().cloned().collect(),
    };
    let with = |name: &str, value: Value| {
        let mut changed: Map<String, Value> = object.clone();
        changed.insert(name.to_owned(), value);
        Value::Object(changed)
    };
    let without = |name: &String| {
        let mut changed = object.clone();
        changed.shift_remove(name).map(|_| Value::Object(changed))
    };
    let mut all = vec![json!(null), json!([]), json!("text"), with(UNKNOWN, json!(1))];
    all.extend(names.iter().filter_map(without));
    all.extend(names.iter().flat_map(|name| values.iter().map(|value| with(name, value.clone()))));
    all.retain(|settings| validate_settings(schema, settings).is_err());
    all
}

/// A name that no policy gives to a setting.
pub const UNKNOWN: &str = "no_such_setting";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_refused() {
        let schema = r#"{
            "type": "object", "additionalProperties": false, "required": ["a"],
            "properties": { "a": { "type": "number", "minimum": 0, "maximum": 1 }, "b": { "type": "string" } }
        }"#;
        let all = refused(schema, &json!({ "a": 0.5 }));
        assert!(all.contains(&json!({})) && all.contains(&json!({ "a": -1e300 })), "{all:?}");
        assert!(all.contains(&json!({ "a": 0.5, "b": null })) && all.contains(&json!({ "a": 0.5, UNKNOWN: 1 })));
        assert!(!all.contains(&json!({ "a": 0.5, "b": "" })));
        // A schema without a rule refuses nothing.
        assert!(refused("{}", &json!({})).is_empty());
    }
}
