//! Requests and sessions from JSON lines.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::ask::Prompt;
use crate::eval::dataset::{kind, lines, object};
use crate::request::TokenId;

/// What a line has to say about its prompt.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// So many random tokens.
    Length(u32),
    Given(Prompt),
}

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    pub content: Content,
    pub output_len: Option<u32>,
    /// Counted from 1.
    pub line: usize,
}

/// Turns that go one after the other, each with the answers so far; most have one. Their contents are of one
/// kind: text, messages or tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    pub turns: Vec<Turn>,
}

impl Turn {
    /// Name of the kind; random tokens are tokens.
    fn kind(&self) -> &'static str {
        match &self.content {
            Content::Length(_) | Content::Given(Prompt::Tokens(_)) => "tokens",
            Content::Given(Prompt::Text(_)) => "text",
            Content::Given(Prompt::Messages(_)) => "messages",
        }
    }
}

impl Session {
    /// Whether a turn needs the token ids of the answer before it.
    pub fn needs_tokens(&self) -> bool {
        self.turns.len() > 1 && self.turns.iter().any(|turn| turn.kind() == "tokens")
    }
}

/// Read JSON lines: one object a line with `prompt` (text, or a list of token ids), `messages` or `prompt_len`,
/// and perhaps `output_len` and `session`; lines of one `session` are its turns. Other keys are passed over, and
/// empty lines too. Errors name `file`, line and field.
pub fn parse(bytes: &[u8], file: &str) -> Result<Vec<Session>, String> {
    let mut sessions: Vec<Session> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for (line, bytes) in lines(bytes) {
        let fault = |error: String| format!("{file}:{line}: {error}");
        let (turn, name) = entry(bytes, line).map_err(fault)?;
        match name.as_ref().and_then(|name| places.get(name)).and_then(|place| sessions.get_mut(*place)) {
            Some(session) => {
                let kind = session.turns.first().map_or("", Turn::kind);
                if turn.kind() != kind {
                    let own = turn.kind();
                    return Err(fault(format!("is {own}, but its `session` began with {kind}; use one of them")));
                }
                session.turns.push(turn);
            }
            None => {
                name.and_then(|name| places.insert(name, sessions.len()));
                sessions.push(Session { turns: vec![turn] });
            }
        }
    }
    if sessions.is_empty() {
        return Err(format!("{file}: has no requests; give one object {SHAPE} a line"));
    }
    Ok(sessions)
}

const SHAPE: &str = "{\"prompt\": …} (or `messages`, `prompt_len`)";

/// A turn and the name of its session.
fn entry(line: &[u8], number: usize) -> Result<(Turn, Option<String>), String> {
    let fields = object(line, SHAPE)?;
    let given = |name: &str| fields.get(name).filter(|value| !value.is_null());
    let contents = ["prompt", "messages", "prompt_len"].map(|name| Some((name, given(name)?)));
    let mut contents = contents.into_iter().flatten();
    let content = match (contents.next(), contents.next()) {
        (Some(("prompt", value)), None) => Content::Given(prompt(value)?),
        (Some(("messages", value)), None) => Content::Given(Prompt::Messages(messages(value)?)),
        (Some((name, value)), None) => Content::Length(length(name, value)?),
        (Some((one, _)), Some((other, _))) => return Err(format!("has both `{one}` and `{other}`; give one of them")),
        (None, _) => return Err("has none of `prompt`, `messages` and `prompt_len`; give one of them".into()),
    };
    let output_len = given("output_len").map(|value| length("output_len", value)).transpose()?;
    let session = given("session").map(|value| match value {
        Value::String(name) => Ok(format!("s{name}")),
        Value::Number(number) => Ok(format!("n{number}")),
        other => Err(format!("`session` must be a string or a number, not {}", kind(other))),
    });
    Ok((Turn { content, output_len, line: number }, session.transpose()?))
}

fn length(name: &str, value: &Value) -> Result<u32, String> {
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|n| (1..=1 << 30).contains(n));
    number.ok_or_else(|| format!("`{name}` must be a whole number of tokens from 1 on, not {}", shown(value)))
}

fn prompt(value: &Value) -> Result<Prompt, String> {
    match value {
        Value::String(text) if text.is_empty() => Err("`prompt` is empty".into()),
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(ids) if ids.is_empty() => Err("`prompt` is empty".into()),
        Value::Array(ids) => {
            let token = |id: &Value| id.as_u64().and_then(|id| TokenId::try_from(id).ok());
            let bad = |id: &Value| format!("`prompt` has {}, which is not a token id", shown(id));
            Ok(Prompt::Tokens(ids.iter().map(|id| token(id).ok_or_else(|| bad(id))).collect::<Result<_, _>>()?))
        }
        other => Err(format!("`prompt` must be text or a list of token ids, not {}", kind(other))),
    }
}

fn messages(value: &Value) -> Result<Vec<Value>, String> {
    let Value::Array(messages) = value else {
        return Err(format!("`messages` must be a list, not {}", kind(value)));
    };
    if messages.is_empty() {
        return Err("`messages` is empty".into());
    }
    let role = |message: &Value| {
        message.as_object().and_then(|fields: &Map<String, Value>| fields.get("role")?.as_str()).is_some()
    };
    match messages.iter().position(|message| !role(message)) {
        Some(place) => Err(format!("`messages[{place}]` must be an object with a `role` and a `content`")),
        None => Ok(messages.clone()),
    }
}

/// A value in an error: numbers as they are, of others the kind.
fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        other => kind(other).into(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn every_kind_of_line() {
        let text = "{\"prompt\": \"a\", \"id\": 1}\r\n\n{\"prompt\": [1, 2], \"output_len\": 7}\n\
                    {\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"session\": \"s\"}\n\
                    {\"prompt_len\": 9, \"session\": 1}\n{\"prompt\": [3], \"session\": 1, \"messages\": null}\n\
                    {\"messages\": [{\"role\": \"user\", \"content\": \"y\"}], \"session\": \"s\"}";
        let sessions = parse(text.as_bytes(), "d").unwrap();
        let lines: Vec<Vec<usize>> = sessions.iter().map(|s| s.turns.iter().map(|turn| turn.line).collect()).collect();
        assert_eq!(lines, [vec![1], vec![3], vec![4, 7], vec![5, 6]]);
        assert_eq!(sessions[0].turns[0].content, Content::Given(Prompt::Text("a".into())));
        assert_eq!(sessions[1].turns[0].output_len, Some(7));
        let message = json!({"role": "user", "content": "y"});
        assert_eq!(sessions[2].turns[1].content, Content::Given(Prompt::Messages(vec![message])));
        assert_eq!(sessions[3].turns[0].content, Content::Length(9));
        assert_eq!(sessions.iter().map(Session::needs_tokens).collect::<Vec<_>>(), [false, false, false, true]);
    }

    #[test]
    fn errors_name_file_line_and_field() {
        for (line, message) in [
            ("[1]", "d:2: must be an object {\"prompt\": …}"),
            ("{\"prompt\": 1}", "d:2: `prompt` must be text or a list of token ids, not a number"),
            ("{\"prompt\": \"\"}", "d:2: `prompt` is empty"),
            ("{\"prompt\": [1, -1]}", "d:2: `prompt` has -1, which is not a token id"),
            ("{\"text\": \"x\"}", "d:2: has none of `prompt`, `messages` and `prompt_len`; give one of them"),
            ("{\"prompt\": \"a\", \"prompt_len\": 3}", "d:2: has both `prompt` and `prompt_len`; give one of them"),
            ("{\"prompt_len\": 0}", "d:2: `prompt_len` must be a whole number of tokens from 1 on, not 0"),
            ("{\"prompt_len\": 1.5}", "d:2: `prompt_len` must be a whole number of tokens from 1 on, not 1.5"),
            ("{\"prompt\": \"a\", \"output_len\": \"x\"}", "d:2: `output_len` must be a whole number of tokens"),
            ("{\"messages\": []}", "d:2: `messages` is empty"),
            ("{\"messages\": [{\"content\": \"x\"}]}", "d:2: `messages[0]` must be an object with a `role`"),
            ("{\"prompt\": \"a\", \"session\": []}", "d:2: `session` must be a string or a number, not an array"),
            (
                "{\"prompt_len\": 3, \"session\": 1}",
                "d:2: is tokens, but its `session` began with text; use one of them",
            ),
            ("{\"prompt\" 1}", "d:2: not JSON (column 11: expected `:`); give one object a line"),
        ] {
            let text = format!("{{\"prompt\": \"a\", \"session\": 1}}\n{line}");
            let error = parse(text.as_bytes(), "d").unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
        assert!(parse(b"\n \n", "d").unwrap_err().starts_with("d: has no requests"));
    }

    proptest! {
        /// Whatever the bytes are, there is an answer, and every error names the file.
        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(parse(&bytes, "d").map_or_else(|e| e.starts_with("d:"), |sessions| !sessions.is_empty()));
        }

        /// Nor do objects of any shape matter.
        #[test]
        fn any_fields(
            name in "prompt|messages|prompt_len|output_len|session",
            value in "null|true|-1|0|3|1e400|18446744073709551616|\"\"|\"x\"|\\[\\]|\\[1\\]|\\[\\{\\}\\]|\\{\\}",
            more in "|, \"prompt\": \"a\"|, \"prompt_len\": 2",
        ) {
            let line = format!("{{\"{name}\": {value}{more}}}");
            prop_assert!(parse(line.as_bytes(), "d").map_or_else(|e| e.starts_with("d:"), |s| s.len() == 1), "{}", line);
        }
    }
}
