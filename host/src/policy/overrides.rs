//! Which of a route's settings a request may set, and what they come to. Pure.

use std::fmt;

use serde_json::{Map, Number, Value};

/// Variants of a route that are kept, if a route says nothing.
pub const DEFAULT_MAX_VARIANTS: usize = 8;

/// Largest settings of a request, as JSON.
pub const MAX_BYTES: usize = 4096;

/// Up to here every integer is a number of its own as a float.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// Place of a setting: the keys of the objects on the way to it. Never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key(Vec<String>);

impl Key {
    /// `a.b`; a part with dots in it is written `a."b.c"`. `None` for anything else.
    pub fn parse(mut text: &str) -> Option<Self> {
        let mut parts = Vec::new();
        loop {
            let quoted = text.strip_prefix('"').map(|rest| rest.split_once('"'));
            let (part, rest) = match quoted {
                Some(quoted) => quoted?,
                None => text.split_at(text.find('.').unwrap_or(text.len())),
            };
            if part.is_empty() || part.contains('"') {
                return None;
            }
            parts.push(part.to_owned());
            if rest.is_empty() {
                return Some(Self(parts));
            }
            text = rest.strip_prefix('.')?;
        }
    }

    /// `None` where `schema` has a setting there: it names each part, or says what those are that it does not name.
    /// Else the settings that it names where the parts lead, as far as they do.
    fn instead(&self, schema: &Value) -> Option<Vec<Self>> {
        let (mut at, mut known) = (schema, Vec::new());
        for (depth, part) in self.0.iter().enumerate() {
            let properties = at.get("properties").and_then(Value::as_object);
            if let Some(properties) = properties {
                let names = properties.iter().filter(|(_, schema)| **schema != Value::Bool(false));
                known = names.map(|(name, _)| Self([&self.0[..depth], std::slice::from_ref(name)].concat())).collect();
            }
            let named = properties.and_then(|properties| properties.get(part));
            match named.or_else(|| at.get("additionalProperties")).filter(|schema| **schema != Value::Bool(false)) {
                Some(schema) => at = schema,
                None => return Some(known),
            }
        }
        None
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&place(&self.0))
    }
}

/// A place as [`Key::parse`] reads it.
fn place(parts: &[String]) -> String {
    let part = |part: &String| if part.contains('.') { format!("\"{part}\"") } else { part.clone() };
    parts.iter().map(part).collect::<Vec<_>>().join(".")
}

/// What requests may set of a route. Without a key: nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overrides {
    /// Each stands for itself and, where it is an object, for all that is in it.
    pub keys: Vec<Key>,
    /// Variants of the route that are kept.
    pub max_variants: usize,
}

impl Default for Overrides {
    fn default() -> Self {
        Self { keys: Vec::new(), max_variants: DEFAULT_MAX_VARIANTS }
    }
}

impl Overrides {
    /// The keys as they are written.
    pub fn names(&self) -> Vec<String> {
        self.keys.iter().map(Key::to_string).collect()
    }

    /// The index of the first key that is none of the settings of `schema`, the text of a policy's JSON Schema, and the
    /// settings that it might be.
    pub fn unknown_key(&self, schema: &str) -> Option<(usize, Vec<String>)> {
        // One that is not JSON has refused the settings already.
        let schema: Value = serde_json::from_str(schema).unwrap_or_default();
        let mut keys = self.keys.iter().enumerate();
        keys.find_map(|(index, key)| Some((index, key.instead(&schema)?.iter().map(Key::to_string).collect())))
    }

    /// `settings` with those of a request in their places: objects key by key, all else as a whole. `null` is the
    /// same as leaving a setting out. Those that it does not give stay as they are written; the others are in
    /// [`canonical`] form, as a policy may read `8` where `8.0` is no integer to it. The error is the place of one that
    /// requests may not set.
    pub fn merged(&self, settings: &Value, given: Map<String, Value>) -> Result<Value, String> {
        // Settings that are no object have none in them.
        let mut merged = settings.as_object().cloned().unwrap_or_default();
        let given = given.into_iter().map(|(name, value)| (name, canonical(value))).collect();
        self.merge(&mut merged, given, &mut Vec::new())?;
        Ok(Value::Object(merged))
    }

    fn merge(
        &self,
        into: &mut Map<String, Value>,
        given: Map<String, Value>,
        at: &mut Vec<String>,
    ) -> Result<(), String> {
        for (name, value) in given {
            if value.is_null() {
                continue;
            }
            at.push(name.clone());
            let covered = self.keys.iter().any(|Key(key)| at.starts_with(key));
            let leads_on = self.keys.iter().any(|Key(key)| key.starts_with(at));
            match value {
                Value::Object(inner) if covered || leads_on => match into.get_mut(&name) {
                    Some(Value::Object(there)) => self.merge(there, inner, at)?,
                    // It would be replaced, and requests may set what is in it alone.
                    Some(_) if !covered => return Err(place(at)),
                    _ => {
                        let mut table = Map::new();
                        self.merge(&mut table, inner, at)?;
                        if covered || !table.is_empty() {
                            into.insert(name, Value::Object(table));
                        }
                    }
                },
                value if covered => drop(into.insert(name, value)),
                _ => return Err(place(at)),
            }
            at.pop();
        }
        Ok(())
    }
}

/// The same value in the one form that stands for all of its spellings: keys sorted, whole numbers as integers.
pub fn canonical(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.into_iter().map(|(key, value)| (key, canonical(value))).collect();
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
            Value::Object(entries.into_iter().collect())
        }
        Value::Array(items) => items.into_iter().map(canonical).collect(),
        Value::Number(number) => Value::Number(whole(&number).map_or(number, Number::from)),
        other => other,
    }
}

fn whole(number: &Number) -> Option<i64> {
    let float = number.as_f64().filter(|_| number.is_f64())?;
    (float.fract() == 0.0 && float.abs() <= EXACT).then_some(float as i64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn overrides(keys: &[&str]) -> Overrides {
        let keys = keys.iter().map(|key| Key::parse(key).unwrap()).collect();
        Overrides { keys, ..Overrides::default() }
    }

    fn merged(keys: &[&str], settings: Value, given: Value) -> Result<String, String> {
        let Value::Object(given) = given else { panic!("{given}") };
        overrides(keys).merged(&settings, given).map(|merged| canonical(merged).to_string())
    }

    #[test]
    fn keys_are_read_and_written() {
        for text in ["threshold", "a.b", "a.\"b.c\".d", "\"x.y\"", "a b", "é"] {
            assert_eq!(Key::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Key::parse("\"a\".b"), Key::parse("a.b"));
        for text in ["", ".", "a.", ".a", "a..b", "\"a", "a\"b\"", "\"a\"b", "\"\"", "a.\"\""] {
            assert_eq!(Key::parse(text), None, "{text}");
        }
    }

    #[test]
    fn keys_are_settings_of_the_schema() {
        let schema = json!({
            "additionalProperties": false,
            "properties": {
                "threshold": {"type": "number"},
                "probabilities": {"additionalProperties": {"type": "number"}},
                "closed": {"properties": {"a": true, "b": false}, "additionalProperties": false},
                "open": {}
            }
        })
        .to_string();
        let known = ["threshold", "probabilities", "probabilities.\"qwen3-0.6b\"", "closed.a", "open"];
        assert_eq!(overrides(&known).unknown_key(&schema), None);
        let top = ["closed", "open", "probabilities", "threshold"].as_slice();
        for (unknown, instead) in [
            ("treshold", top),
            ("threshold.x", top),
            ("probabilities.a.b", top),
            ("closed.b", &["closed.a"]),
            ("closed.c", &["closed.a"]),
            ("open.x", top),
        ] {
            let (index, mut known) = overrides(&["threshold", unknown]).unknown_key(&schema).unwrap();
            known.sort();
            assert_eq!(
                (index, known.iter().map(String::as_str).collect::<Vec<_>>()),
                (1, instead.to_vec()),
                "{unknown}"
            );
        }
        // A schema that says nothing of its settings has none to name.
        assert_eq!(overrides(&["a"]).unknown_key("{}"), Some((0, Vec::new())));
    }

    #[test]
    fn a_request_sets_what_it_may() {
        let settings = || json!({"threshold": 0.5, "router": "r.pt", "weights": {"large": 0.5, "small": 0.5}});
        let keys = ["threshold", "weights.large"];
        let one = merged(&keys, settings(), json!({"threshold": 0.7})).unwrap();
        assert_eq!(one, r#"{"router":"r.pt","threshold":0.7,"weights":{"large":0.5,"small":0.5}}"#);
        let inner = merged(&keys, settings(), json!({"weights": {"large": 0.25, "small": null}})).unwrap();
        assert_eq!(inner, r#"{"router":"r.pt","threshold":0.5,"weights":{"large":0.25,"small":0.5}}"#);
        for (given, refused) in [
            (json!({"router": "/etc/passwd"}), "router"),
            (json!({"threshold": 0.7, "weights": {"small": 0.5}}), "weights.small"),
            (json!({"weights": 1}), "weights"),
            (json!({"weights": {"large": 1, "a.b": {}}}), "weights.\"a.b\""),
            (json!({"weights.large": 1}), "\"weights.large\""),
            (json!({"other": {}}), "other"),
        ] {
            assert_eq!(merged(&keys, settings(), given), Err(refused.to_owned()));
        }
        assert_eq!(merged(&[], settings(), json!({"threshold": 0.5})), Err("threshold".into()));
        let whole = merged(&["weights"], settings(), json!({"weights": {"other": [1.0]}})).unwrap();
        assert!(whole.contains(r#""weights":{"large":0.5,"other":[1],"small":0.5}"#), "{whole}");
        // What its schema will say of it is another question.
        assert!(merged(&["threshold"], settings(), json!({"threshold": "x"})).is_ok());
        assert_eq!(merged(&["a.b"], json!({}), json!({"a": {"b": 1}})), Ok(r#"{"a":{"b":1}}"#.into()));
        for there in [json!({"a": 3}), json!({"a": null})] {
            assert_eq!(merged(&["a.b"], there.clone(), json!({"a": {"b": 1}})), Err("a".into()));
            assert_eq!(merged(&["a"], there, json!({"a": {"b": 1}})), Ok(r#"{"a":{"b":1}}"#.into()));
        }
        for nothing in [json!({"a": {}}), json!({"a": {"b": null}})] {
            assert_eq!(merged(&["a.b"], json!({}), nothing), Ok("{}".into()));
        }
        assert_eq!(merged(&["a"], json!({}), json!({"a": {}})), Ok(r#"{"a":{}}"#.into()));
    }

    #[test]
    fn what_a_request_does_not_give_stays_as_it_is_written() {
        let settings = json!({"b": 1.0, "a": {"y": 2.0, "x": 3.0}, "t": 5});
        let Value::Object(given) = json!({"t": 8.0, "a": {"x": 4.0}}) else { unreachable!() };
        let merged = overrides(&["t", "a.x"]).merged(&settings, given).unwrap().to_string();
        assert_eq!(merged, r#"{"b":1.0,"a":{"y":2.0,"x":4},"t":8}"#);
    }

    #[test]
    fn equal_settings_have_one_form() {
        let form = |text: &str| canonical(serde_json::from_str(text).unwrap()).to_string();
        assert_eq!(form(r#"{"b": 1.0, "a": [2e0, {"d": -0.0, "c": 0.50}]}"#), r#"{"a":[2,{"c":0.5,"d":0}],"b":1}"#);
        for text in ["0.1", "9007199254740993", "18446744073709551615", "1e300", "-1.5", "true", "null", "\"1.0\""] {
            assert_eq!(form(text), serde_json::from_str::<Value>(text).unwrap().to_string());
        }
    }
}
