//! Tolerant reading of request bodies: `null` is absent, whole floats and numerals are integers,
//! unknown fields are ignored with one warning each. Values out of range are errors that name the field.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::sync::{Mutex, PoisonError};

use axum::http::StatusCode;
use serde_json::{Map, Value};

use super::error::ApiError;

/// The fields of a JSON object that were not read yet.
#[derive(Debug)]
pub struct Fields {
    map: Map<String, Value>,
    /// Prepended to names in messages, for example `stream_options.`.
    prefix: String,
}

/// Most values of a body, where an object counts as [`OBJECT_WEIGHT`]. They take 72 bytes each.
const MAX_WEIGHT: usize = 1 << 21;
/// The table of an object's names takes as many bytes as so many values, even if there is but one.
const OBJECT_WEIGHT: usize = 8;

/// What the values of a body weigh. Of what is not JSON it is anything.
fn weight(body: &[u8]) -> usize {
    let (mut weight, mut in_text, mut escaped) = (0, false, false);
    for byte in body {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            b',' | b':' | b'[' if !in_text => weight += 1,
            b'{' if !in_text => weight += OBJECT_WEIGHT,
            _ => {}
        }
    }
    weight
}

impl Fields {
    /// The fields of a request's body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let invalid = |message: String| ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", message);
        if weight(body) > MAX_WEIGHT {
            let message = format!("The body has more than {MAX_WEIGHT} values. Send fewer in a request.");
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "payload_too_large", message));
        }
        let value =
            serde_json::from_slice(body).map_err(|e| invalid(format!("The body is not valid JSON: {}.", fault(&e))))?;
        match value {
            Value::Object(map) => Ok(Self { map, prefix: String::new() }),
            _ => Err(invalid("The body must be a JSON object.".into())),
        }
    }

    /// The fields of the object `value` at `place` in the body.
    pub fn of(place: &str, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, prefix: format!("{place}.") }),
            other => Err(ApiError::wrong_type(place, "an object", &other)),
        }
    }

    /// One field.
    pub fn one(field: &str, value: Value) -> Self {
        Self { map: Map::from_iter([(field.to_owned(), value)]), prefix: String::new() }
    }

    /// The name of a field as errors give it.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.prefix)
    }

    /// Whether a field is there and not null.
    pub fn has(&self, field: &str) -> bool {
        self.map.get(field).is_some_and(|value| !value.is_null())
    }

    /// Take a field; `None` if absent or null.
    pub fn take(&mut self, field: &str) -> Option<Value> {
        #[cfg(test)]
        super::asked::note(&self.name(field));
        self.map.shift_remove(field).filter(|value| !value.is_null())
    }

    /// Leave out a field that is `false`, where that asks for nothing but another number would not.
    pub fn drop_false(&mut self, field: &str) {
        if self.map.get(field) == Some(&Value::Bool(false)) {
            self.map.shift_remove(field);
        }
    }

    pub fn integer(&mut self, field: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(field) else { return Ok(None) };
        let name = self.name(field);
        let Some(number) = whole(&value) else {
            let Some(number) = real(&value) else { return Err(ApiError::wrong_type(&name, "an integer", &value)) };
            let (least, most) = range.into_inner();
            let message = format!("`{name}` must be an integer between {least} and {most}, got {}.", shown(&value));
            let code = if number.fract() == 0.0 { "invalid_value" } else { "invalid_type" };
            return Err(ApiError::new(StatusCode::BAD_REQUEST, code, message).param(name));
        };
        in_range(&name, number, &range).map(Some)
    }

    pub fn number(&mut self, field: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(field) else { return Ok(None) };
        let name = self.name(field);
        let number = real(&value).ok_or_else(|| ApiError::wrong_type(&name, "a number", &value))?;
        in_range(&name, number, &range).map(Some)
    }

    pub fn boolean(&mut self, field: &str) -> Result<Option<bool>, ApiError> {
        let Some(value) = self.take(field) else { return Ok(None) };
        let flag = match &value {
            Value::Bool(flag) => Some(*flag),
            Value::String(text) => text.to_ascii_lowercase().parse().ok(),
            other => whole(other).and_then(|n| [false, true].get(usize::try_from(n).ok()?).copied()),
        };
        flag.map(Some).ok_or_else(|| ApiError::wrong_type(&self.name(field), "a boolean", &value))
    }

    pub fn string(&mut self, field: &str) -> Result<Option<String>, ApiError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(ApiError::wrong_type(&self.name(field), "a string", &other)),
        }
    }

    pub fn list(&mut self, field: &str, most: usize) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::Array(items)) if items.len() <= most => Ok(Some(items)),
            Some(Value::Array(items)) => {
                let name = self.name(field);
                let message = format!("`{name}` has {} entries; at most {most} are allowed.", items.len());
                Err(ApiError::value(name, message))
            }
            Some(other) => Err(ApiError::wrong_type(&self.name(field), "a list", &other)),
        }
    }

    pub fn object(&mut self, field: &str) -> Result<Option<Self>, ApiError> {
        match self.take(field) {
            None => Ok(None),
            Some(value) => Self::of(&self.name(field), value).map(Some),
        }
    }

    /// All entries of an object whose keys are data.
    pub fn entries(self) -> Map<String, Value> {
        self.map
    }

    /// Names of fields not read yet that begin with `prefix`.
    pub fn names_with_prefix(&self, prefix: &str) -> Vec<String> {
        self.map.keys().filter(|name| name.starts_with(prefix)).cloned().collect()
    }

    /// Whether two fields are there and say the same.
    pub fn same(&self, field: &str, other: &str) -> bool {
        self.map.get(field).is_some_and(|value| self.map.get(other) == Some(value))
    }

    /// Refuse a field that would change the answer but is not built, unless its value asks for nothing.
    pub fn refuse(&mut self, field: &str, neutral: fn(&Value) -> bool, remedy: &str) -> Result<(), ApiError> {
        match self.take(field) {
            Some(value) if !neutral(&value) => Err(ApiError::unsupported(&self.name(field), remedy)),
            _ => Ok(()),
        }
    }

    /// All known fields were read: warn about the others.
    pub fn finish(self, warned: &Warned) {
        let place = self.prefix.clone();
        self.finish_as(&place, warned);
    }

    /// The same with another name for the object, for those that come in lists.
    pub fn finish_as(self, place: &str, warned: &Warned) {
        for (field, _) in self.map.iter().filter(|(_, value)| !value.is_null()) {
            warned.unknown(&format!("{place}{field}"));
        }
    }
}

/// Values that ask for nothing: false, 0, "", [], {}.
pub fn nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(_) => real(value) == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// An integer, also as `5.0` or `"5"`.
pub fn whole(value: &Value) -> Option<i64> {
    const END: f64 = -(i64::MIN as f64);
    // Not at -END either: integers a little below the range are rounded to it.
    let exact = |float: f64| (float.fract() == 0.0 && -END < float && float < END).then_some(float as i64);
    match value {
        Value::Number(number) => number.as_i64().or_else(|| exact(number.as_f64()?)),
        Value::String(text) => text.trim().parse().ok().or_else(|| exact(text.trim().parse().ok()?)),
        _ => None,
    }
}

/// A finite number, also as a numeral.
pub fn real(value: &Value) -> Option<f64> {
    let number = match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    number.filter(|number| number.is_finite())
}

/// A value as errors show it.
pub fn shown(value: &Value) -> String {
    const MOST: usize = 40;
    let text = value.to_string();
    match text.char_indices().nth(MOST) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// What is wrong with a body, in words that need no knowledge of the parser.
fn fault(error: &serde_json::Error) -> String {
    let words = error.to_string();
    // Each is what the parser says of one half of a surrogate pair alone.
    if words.starts_with("lone leading surrogate") || words.starts_with("unexpected end of hex escape") {
        let (line, column) = (error.line(), error.column());
        return format!("a \\ud800-style escape without its pair at line {line} column {column}");
    }
    words
}

fn in_range<T: PartialOrd + Display>(name: &str, value: T, range: &RangeInclusive<T>) -> Result<T, ApiError> {
    if range.contains(&value) {
        return Ok(value);
    }
    let message = format!("`{name}` must be between {} and {}, got {value}.", range.start(), range.end());
    Err(ApiError::value(name, message))
}

/// Fields that were warned about, and how often requests had them.
#[derive(Debug, Default)]
pub struct Warned(Mutex<BTreeMap<String, u64>>);

/// Stands for the fields that came when [`Warned`] was full.
const OTHERS: &str = "(others)";

impl Warned {
    /// Fields remembered; clients cannot make the set grow without end.
    const MOST: usize = 256;

    fn unknown(&self, field: &str) {
        let field: String = field.chars().take(64).collect();
        let mut fields = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = fields.get_mut(&field) {
            *count += 1;
        } else if fields.len() < Self::MOST {
            tracing::warn!(field, "a request has a field that this server does not know; it is ignored");
            fields.insert(field, 1);
        } else {
            *fields.entry(OTHERS.into()).or_default() += 1;
        }
    }

    /// How often requests had each field.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    #[cfg(test)]
    pub fn fields(&self) -> Vec<String> {
        self.counts().into_keys().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(json: &str) -> Fields {
        Fields::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn tolerant_where_python_servers_are() {
        let mut f = fields(r#"{"a": 5.0, "b": "5", "c": null, "d": "0.5", "e": 1, "f": "false", "g": 3, "g": 4}"#);
        assert_eq!(f.integer("a", 0..=9), Ok(Some(5)));
        assert_eq!(f.integer("b", 0..=9), Ok(Some(5)));
        assert_eq!(f.integer("c", 0..=9), Ok(None));
        assert_eq!(f.number("d", 0.0..=1.0), Ok(Some(0.5)));
        assert_eq!(f.boolean("e"), Ok(Some(true)));
        assert_eq!(f.boolean("f"), Ok(Some(false)));
        assert_eq!(f.integer("g", 0..=9), Ok(Some(4)), "the last of two wins");
        assert_eq!(f.integer("missing", 0..=9), Ok(None));
    }

    #[test]
    fn errors_name_the_field() {
        let mut f = fields(r#"{"a": 5.5, "b": 10, "c": "NaN", "d": {"x": []}, "e": true}"#);
        assert_eq!(f.integer("a", 0..=9).unwrap_err().code, "invalid_type");
        assert_eq!(f.integer("b", 0..=9).unwrap_err().param.as_deref(), Some("b"));
        assert!(f.number("c", 0.0..=1.0).is_err());
        let mut inner = f.object("d").unwrap().unwrap();
        assert_eq!(inner.string("x").unwrap_err().param.as_deref(), Some("d.x"));
        assert!(f.integer("e", 0..=9).is_err());
    }

    #[test]
    fn integers_out_of_range_show_the_value_and_the_range() {
        let json = r#"{"a": 1.5, "b": 1e30, "c": 9223372036854775808, "d": "1e30", "e": -7, "f": "2.5"}"#;
        let cases = [
            ("a", "1.5", "invalid_type"),
            ("b", "1e30", "invalid_value"),
            ("c", "9223372036854775808", "invalid_value"),
            ("d", "1e30", "invalid_value"),
            ("e", "-7", "invalid_value"),
            ("f", "2.5", "invalid_type"),
        ];
        for (field, value, code) in cases {
            let error = fields(json).integer(field, 0..=90).unwrap_err();
            assert_eq!((error.code, error.param.as_deref()), (code, Some(field)));
            let message = error.message.replace("e+", "e");
            assert!(message.contains(value) && message.contains("between 0 and 90"), "{message}");
        }
        let all = i64::MIN..=i64::MAX;
        assert_eq!(fields(r#"{"a": 1e16}"#).integer("a", all.clone()), Ok(Some(10_000_000_000_000_000)));
        assert_eq!(fields(r#"{"a": -9223372036854775808}"#).integer("a", all.clone()), Ok(Some(i64::MIN)));
        for outside in ["9223372036854775808.0", "-9223372036854775809", "\"-9223372036854775809\""] {
            assert!(fields(&format!(r#"{{"a": {outside}}}"#)).integer("a", all.clone()).is_err(), "{outside}");
        }
        assert!(shown(&Value::from("é".repeat(1000))).len() < 100);
    }

    #[test]
    fn half_a_surrogate_pair_is_named_with_its_place() {
        for body in [r#"{"a": "\ud83d"}"#, r#"{"a": "\ud83d\u0041"}"#, r#"{"a": "\ude00"}"#, r#"{"a": "\ud83dx"}"#] {
            let message = Fields::parse(body.as_bytes()).unwrap_err().message;
            assert!(message.contains(r"a \ud800-style escape without its pair at line 1 column 1"), "{body} {message}");
        }
    }

    #[test]
    fn bodies_that_are_not_json_objects() {
        for body in ["", "{", "[]", "1", "{\"a\": NaN}", "{\"a\": 1e999}", r#"{"a": "\ud83d"}"#, "\u{feff}{}"] {
            let error = Fields::parse(body.as_bytes()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.code), (400, "invalid_json"), "{body:?}");
        }
        assert!(Fields::parse(b"{\"a\": \"\xff\"}").is_err());
        // Few bytes may be much to hold. In a text they are not.
        for (part, weight) in [("0,", 1), ("[],", 2), ("{\"\":0},", OBJECT_WEIGHT + 2)] {
            let body = |count: usize| format!(r#"{{"a\"": "{{[,", "b": [{}0]}}"#, part.repeat(count));
            let most = (MAX_WEIGHT - OBJECT_WEIGHT - 4) / weight;
            assert!(Fields::parse(body(most).as_bytes()).is_ok(), "{part}");
            assert_eq!(Fields::parse(body(most + 1).as_bytes()).unwrap_err().code, "payload_too_large", "{part}");
            assert!(Fields::parse(format!("{{\"a\": {:?}}}", part.repeat(MAX_WEIGHT)).as_bytes()).is_ok());
        }
    }

    #[test]
    fn unknown_fields_are_remembered_once() {
        let warned = Warned::default();
        fields(r#"{"foo": 1, "bar": null}"#).finish(&warned);
        fields(r#"{"foo": 2}"#).finish(&warned);
        assert_eq!(warned.counts(), BTreeMap::from([("foo".into(), 2)]));
    }

    #[test]
    fn clients_cannot_make_the_known_names_grow_without_end() {
        let warned = Warned::default();
        (0..1000).for_each(|i| warned.unknown(&format!("f{i}")));
        let counts = warned.counts();
        assert_eq!((counts.len(), counts[OTHERS]), (Warned::MOST + 1, 1000 - Warned::MOST as u64));
    }
}
