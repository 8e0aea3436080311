//! JSON as Python's `json.dumps` writes it: the form that chat templates were trained on.

use serde_json::Value;

/// Options of `json.dumps`.
#[derive(Clone, Debug, Default)]
pub(super) struct Style {
    pub ensure_ascii: bool,
    pub indent: Option<usize>,
    pub sort_keys: bool,
    /// Between items and after a key; Python's defaults if `None`.
    pub separators: Option<(String, String)>,
}

/// `value` in `style`.
pub(super) fn dumps(value: &Value, style: &Style) -> String {
    let mut out = String::new();
    let item = if style.indent.is_some() { "," } else { ", " };
    let (item, key) = style.separators.as_ref().map_or((item, ": "), |(item, key)| (item, key));
    Writer { style, item, key, out: &mut out }.value(value, 0);
    out
}

/// As Python's `repr`: the fewest digits, with an exponent of at least two below 1e-4 and from 1e16 on.
fn float_text(float: f64) -> String {
    let text = format!("{float:e}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    match exponent.parse::<i32>() {
        Ok(exponent @ (..-4 | 16..)) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
        }
        _ => format!("{float:?}"),
    }
}

struct Writer<'a> {
    style: &'a Style,
    item: &'a str,
    key: &'a str,
    out: &'a mut String,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) {
        match value {
            Value::Null => self.out.push_str("null"),
            Value::Bool(flag) => self.out.push_str(if *flag { "true" } else { "false" }),
            Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(float) => self.out.push_str(&float_text(float)),
                None => self.out.push_str(&number.to_string()),
            },
            Value::String(text) => self.string(text),
            Value::Array(items) => self.list('[', ']', items.iter(), depth, |w, item| w.value(item, depth + 1)),
            Value::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.style.sort_keys {
                    entries.sort_by_key(|(key, _)| key.as_str());
                }
                self.list('{', '}', entries.into_iter(), depth, |w, (key, value)| {
                    w.string(key);
                    w.out.push_str(w.key);
                    w.value(value, depth + 1);
                });
            }
        }
    }

    fn list<T>(
        &mut self,
        open: char,
        close: char,
        items: impl ExactSizeIterator<Item = T>,
        depth: usize,
        write: impl Fn(&mut Self, T),
    ) {
        let empty = items.len() == 0;
        self.out.push(open);
        for (index, item) in items.enumerate() {
            if index > 0 {
                self.out.push_str(self.item);
            }
            self.line(depth + 1);
            write(self, item);
        }
        if !empty {
            self.line(depth);
        }
        self.out.push(close);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.style.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Expected strings are what Python 3 prints for the same calls.
    #[test]
    fn as_python_writes() {
        let value = json!({"b": [1, 2.5, null, true], "a": {"<é😀>": "x\"\n\u{1}"}, "e": [], "o": {}});
        assert_eq!(
            dumps(&value, &Style::default()),
            r#"{"b": [1, 2.5, null, true], "a": {"<é😀>": "x\"\n\u0001"}, "e": [], "o": {}}"#
        );
        let ascii = Style { ensure_ascii: true, sort_keys: true, ..Style::default() };
        assert_eq!(
            dumps(&value, &ascii),
            r#"{"a": {"<\u00e9\ud83d\ude00>": "x\"\n\u0001"}, "b": [1, 2.5, null, true], "e": [], "o": {}}"#
        );
        let indented = Style { indent: Some(2), ..Style::default() };
        assert_eq!(
            dumps(&json!({"a": [1, {"b": 2}], "e": []}), &indented),
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ],\n  \"e\": []\n}"
        );
        let compact = Style { separators: Some((",".into(), ":".into())), ..Style::default() };
        assert_eq!(dumps(&json!({"a": [1, 2]}), &compact), r#"{"a":[1,2]}"#);
    }
}
