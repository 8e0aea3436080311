//! Questions with their answers, from JSON lines.

use serde_json::{Map, Value};

/// A question and the answer that is right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    pub question: String,
    /// As text; numbers as JSON writes them.
    pub answer: String,
    /// Line of the file, counted from 1.
    pub line: usize,
}

/// Read JSON lines: one object `{"question": …, "answer": …}` a line, other keys are passed over and empty
/// lines too. At most `limit` questions. Errors name `file`, line and field.
pub fn parse(bytes: &[u8], file: &str, limit: Option<usize>) -> Result<Vec<Question>, String> {
    let mut questions = Vec::new();
    for (line, bytes) in lines(bytes).take(limit.unwrap_or(usize::MAX)) {
        let (question, answer) = entry(bytes).map_err(|error| format!("{file}:{line}: {error}"))?;
        questions.push(Question { question, answer, line });
    }
    if questions.is_empty() {
        return Err(format!("{file}: has no questions; give one object {{\"question\": …, \"answer\": …}} a line"));
    }
    Ok(questions)
}

/// Lines that are not empty, with their numbers, counted from 1.
pub fn lines(bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    // Some editors begin a file with a byte order mark.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    (1..).zip(bytes.split(|byte| *byte == b'\n')).filter(|(_, line)| !line.trim_ascii().is_empty())
}

/// The object on a line; `shape` describes it in the error.
pub fn object(line: &[u8], shape: &str) -> Result<Map<String, Value>, String> {
    let value: Value = serde_json::from_slice(line).map_err(|e| {
        let detail = e.to_string();
        let detail = detail.split(" at line ").next().unwrap_or_default();
        format!("not JSON (column {}: {detail}); give one object a line", e.column())
    })?;
    match value {
        Value::Object(fields) => Ok(fields),
        _ => Err(format!("must be an object {shape}")),
    }
}

fn entry(line: &[u8]) -> Result<(String, String), String> {
    let fields = object(line, "{\"question\": …, \"answer\": …}")?;
    let field = |name: &str| fields.get(name).ok_or_else(|| format!("`{name}` is missing"));
    let question = match field("question")? {
        Value::String(text) if text.trim().is_empty() => return Err("`question` is empty".into()),
        Value::String(text) => text.clone(),
        other => return Err(format!("`question` must be a string, not {}", kind(other))),
    };
    let answer = match field("answer")? {
        Value::String(text) if text.trim().is_empty() => return Err("`answer` is empty".into()),
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        other => return Err(format!("`answer` must be a string or a number, not {}", kind(other))),
    };
    Ok((question, answer))
}

/// What a value is, for errors.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        parse(text.as_bytes(), "d.jsonl", None).unwrap_err()
    }

    #[test]
    fn strings_and_numbers() {
        let text =
            "{\"question\": \"a\", \"answer\": 7}\r\n\n{\"answer\": \" 1,5 \", \"question\": \"b\", \"id\": [1]}\n";
        let questions = parse(text.as_bytes(), "d", None).unwrap();
        let seen: Vec<_> = questions.iter().map(|q| (q.question.as_str(), q.answer.as_str(), q.line)).collect();
        assert_eq!(seen, [("a", "7", 1), ("b", " 1,5 ", 3)]);
        assert_eq!(parse(text.as_bytes(), "d", Some(1)).unwrap().len(), 1);
        assert_eq!(parse(text.as_bytes(), "d", Some(9)).unwrap().len(), 2);
    }

    #[test]
    fn errors_name_file_line_and_field() {
        let good = "{\"question\": \"a\", \"answer\": 7}\n";
        for (line, message) in [
            ("[1]", "d.jsonl:2: must be an object {\"question\": …, \"answer\": …}"),
            ("{\"question\": \"a\"}", "d.jsonl:2: `answer` is missing"),
            ("{\"answer\": 1}", "d.jsonl:2: `question` is missing"),
            ("{\"question\": 1, \"answer\": 1}", "d.jsonl:2: `question` must be a string, not a number"),
            ("{\"question\": \" \", \"answer\": 1}", "d.jsonl:2: `question` is empty"),
            ("{\"question\": \"a\", \"answer\": \"\"}", "d.jsonl:2: `answer` is empty"),
            ("{\"question\": \"a\", \"answer\": null}", "d.jsonl:2: `answer` must be a string or a number, not null"),
            (
                "{\"question\": \"a\" \"answer\"}",
                "d.jsonl:2: not JSON (column 18: expected `,` or `}`); give one object a line",
            ),
        ] {
            assert_eq!(error(&format!("{good}{line}")), message);
        }
        assert!(error("\n \n").starts_with("d.jsonl: has no questions"));
        assert!(parse(b"{\"question\": \"\xff\", \"answer\": 1}", "d", None).unwrap_err().starts_with("d:1: not JSON"));
    }
}
