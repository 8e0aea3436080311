//! Fields that ask for an answer of a given form, under the names of several servers.

use axum::http::StatusCode;
use serde_json::Value;

use super::error::ApiError;
use super::params::Generation;
use super::reader::{Fields, nothing, shown};
use super::state::{AppState, Route};
use crate::constraint::{Constraint, Form, Refused};

/// A form with the name of the field that asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub field: String,
    pub form: Form,
}

/// How the value of a field becomes a form.
pub(super) type Read = fn(&str, Value) -> Result<Form, ApiError>;

pub(super) const FIELDS: &[(&str, Read)] = &[
    ("json_schema", schema),
    ("regex", regex),
    ("ebnf", grammar),
    ("grammar", grammar),
    ("guided_json", schema),
    ("guided_regex", regex),
    ("guided_choice", choice),
    ("guided_grammar", grammar),
];

/// Those of `structured_outputs`.
const STRUCTURED: &[(&str, Read)] =
    &[("json", schema), ("json_object", json_object), ("regex", regex), ("choice", choice), ("grammar", grammar)];

/// Read all fields that ask for a form.
pub fn read(fields: &mut Fields) -> Result<Option<Wanted>, ApiError> {
    let mut wanted = response_format(fields)?;
    read_all(fields, FIELDS, &mut wanted)?;
    if let Some(mut structured) = fields.object("structured_outputs")? {
        read_all(&mut structured, STRUCTURED, &mut wanted)?;
        for name in structured.names_with_prefix("") {
            structured.refuse(&name, off, "leave it out, or ask with `json`, `regex`, `choice` or `grammar`")?;
        }
    }
    Ok(wanted)
}

/// The one form of two places of a body that may ask for one.
pub fn only(first: Option<Wanted>, second: Option<Wanted>) -> Result<Option<Wanted>, ApiError> {
    match (first, second) {
        (Some(first), Some(second)) => {
            let message = format!(
                "`{}` and `{}` both ask for a form of the answer; give one of them.",
                first.field, second.field
            );
            Err(ApiError::value(second.field, message))
        }
        (first, second) => Ok(first.or(second)),
    }
}

fn read_all(fields: &mut Fields, of: &[(&str, Read)], wanted: &mut Option<Wanted>) -> Result<(), ApiError> {
    for (name, read) in of {
        let Some(value) = fields.take(name).filter(|value| !off(value)) else { continue };
        let field = fields.name(name);
        let form = read(&field, value)?;
        *wanted = only(wanted.take(), Some(Wanted { field, form }))?;
    }
    Ok(())
}

/// False, 0, "" and []. An empty object is a value like any other: an empty schema still asks for JSON.
pub fn off(value: &Value) -> bool {
    nothing(value) && !value.is_object()
}

fn response_format(fields: &mut Fields) -> Result<Option<Wanted>, ApiError> {
    let Some(value) = fields.take("response_format").filter(|value| !off(value)) else { return Ok(None) };
    let field = fields.name("response_format");
    let mut format = Fields::of(&field, value)?;
    let kind = format!("{field}.type");
    let form = match format.string("type")?.as_deref() {
        Some("text") => return Ok(None),
        Some("json_object") => Form::json_object(),
        Some("json_schema") => {
            let missing = |name: String| ApiError::missing(&name, format!("`{name}` is required."));
            let mut schema_object =
                format.object("json_schema")?.ok_or_else(|| missing(format!("{field}.json_schema")))?;
            let name = schema_object.name("schema");
            let value = schema_object.take("schema").ok_or_else(|| missing(name.clone()))?;
            schema(&name, value)?
        }
        Some("structural_tag") => {
            return Err(ApiError::unsupported(&kind, "ask with `json_schema`, or with a grammar in `grammar`"));
        }
        Some(other) => {
            let message = format!(
                "`{kind}` must be \"text\", \"json_object\" or \"json_schema\", not {}.",
                shown(&Value::from(other))
            );
            return Err(ApiError::value(kind, message));
        }
        None => return Err(ApiError::missing(&kind, format!("`{kind}` is required."))),
    };
    Ok(Some(Wanted { field, form }))
}

fn schema(field: &str, value: Value) -> Result<Form, ApiError> {
    match value {
        Value::String(text) => Ok(Form::JsonSchema(text)),
        Value::Object(_) | Value::Bool(_) => Ok(Form::JsonSchema(value.to_string())),
        other => Err(ApiError::wrong_type(field, "a JSON schema or the text of one", &other)),
    }
}

fn json_object(field: &str, value: Value) -> Result<Form, ApiError> {
    match value {
        Value::Bool(true) => Ok(Form::json_object()),
        other => Err(ApiError::wrong_type(field, "a boolean", &other)),
    }
}

fn text(field: &str, value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(ApiError::wrong_type(field, "a string", &other)),
    }
}

fn regex(field: &str, value: Value) -> Result<Form, ApiError> {
    text(field, value).map(Form::Regex)
}

fn grammar(field: &str, value: Value) -> Result<Form, ApiError> {
    text(field, value).map(Form::Lark)
}

fn choice(field: &str, value: Value) -> Result<Form, ApiError> {
    let Value::Array(items) = value else { return Err(ApiError::wrong_type(field, "a list of strings", &value)) };
    let texts = items.into_iter().map(|item| text(field, item)).collect::<Result<Vec<_>, _>>()?;
    if texts.iter().any(String::is_empty) {
        return Err(ApiError::value(field, format!("Each string of `{field}` must have at least 1 byte.")));
    }
    Ok(Form::Choice(texts))
}

impl AppState {
    /// Compile the form that `generation` asks for.
    pub(super) async fn constrain(&self, route: &Route, generation: &mut Generation) -> Result<(), ApiError> {
        let Some(Wanted { field, form }) = generation.form.take() else { return Ok(()) };
        let grammar = self.compiler.grammar(form, &route.text).await.map_err(|refused| match refused {
            Refused::Form(error) => {
                ApiError::value(field.clone(), format!("`{field}` cannot be the form of an answer: {error}."))
            }
            Refused::Busy => {
                let message = "The server is busy compiling other grammars. Try again in a moment.";
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "server_overloaded", message)
            }
            Refused::Failed(message) => {
                tracing::error!(field, message, "a form could not be compiled");
                ApiError::internal(format!("`{field}` could not be compiled; the server's log has the details."))
            }
        })?;
        generation.sampling.constraint = Some(Constraint::new(grammar));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(body: Value) -> Result<Option<Wanted>, ApiError> {
        read(&mut Fields::parse(body.to_string().as_bytes()).unwrap())
    }

    #[test]
    fn the_same_form_under_all_names() {
        let schema = || Form::JsonSchema(r#"{"type":"integer"}"#.into());
        let named = json!({"name": "n", "strict": true, "schema": {"type": "integer"}});
        let (regex, grammar) = (|| Form::Regex("a+".into()), || Form::Lark("start: \"a\"".into()));
        let choice = || Form::Choice(vec!["a".into(), "b".into()]);
        for (body, field, form) in [
            (json!({"response_format": {"type": "json_schema", "json_schema": named}}), "response_format", schema()),
            (json!({"response_format": {"type": "json_object"}}), "response_format", Form::json_object()),
            (json!({"json_schema": r#"{"type":"integer"}"#}), "json_schema", schema()),
            (json!({"json_schema": {"type": "integer"}, "regex": ""}), "json_schema", schema()),
            (json!({"guided_json": {"type": "integer"}}), "guided_json", schema()),
            (json!({"structured_outputs": {"json": {"type": "integer"}}}), "structured_outputs.json", schema()),
            (
                json!({"structured_outputs": {"json_object": true, "regex": null}}),
                "structured_outputs.json_object",
                Form::json_object(),
            ),
            (json!({"regex": "a+"}), "regex", regex()),
            (json!({"guided_regex": "a+"}), "guided_regex", regex()),
            (json!({"structured_outputs": {"regex": "a+"}}), "structured_outputs.regex", regex()),
            (json!({"ebnf": "start: \"a\""}), "ebnf", grammar()),
            (json!({"grammar": "start: \"a\""}), "grammar", grammar()),
            (json!({"guided_grammar": "start: \"a\""}), "guided_grammar", grammar()),
            (json!({"structured_outputs": {"grammar": "start: \"a\""}}), "structured_outputs.grammar", grammar()),
            (json!({"guided_choice": ["a", "b"]}), "guided_choice", choice()),
            (json!({"structured_outputs": {"choice": ["a", "b"]}}), "structured_outputs.choice", choice()),
        ] {
            assert_eq!(of(body.clone()), Ok(Some(Wanted { field: field.into(), form })), "{body}");
        }
        for body in [json!({}), json!({"response_format": {"type": "text"}}), json!({"structured_outputs": {}})] {
            assert_eq!(of(body.clone()), Ok(None), "{body}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, param, code) in [
            (json!({"response_format": {"type": "xml"}}), "response_format.type", "invalid_value"),
            (json!({"response_format": {}}), "response_format.type", "missing_required_parameter"),
            (json!({"response_format": "json"}), "response_format", "invalid_type"),
            (
                json!({"response_format": {"type": "json_schema"}}),
                "response_format.json_schema",
                "missing_required_parameter",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
                "response_format.json_schema.schema",
                "missing_required_parameter",
            ),
            (json!({"response_format": {"type": "structural_tag"}}), "response_format.type", "unsupported_parameter"),
            (
                json!({"structured_outputs": {"structural_tag": "x"}}),
                "structured_outputs.structural_tag",
                "unsupported_parameter",
            ),
            (json!({"structured_outputs": {"json": 5}}), "structured_outputs.json", "invalid_type"),
            (json!({"guided_choice": "a"}), "guided_choice", "invalid_type"),
            (json!({"guided_choice": ["a", ""]}), "guided_choice", "invalid_value"),
            (json!({"guided_choice": ["a", 1]}), "guided_choice", "invalid_type"),
            (json!({"regex": {}}), "regex", "invalid_type"),
        ] {
            let error = of(body.clone()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref(), error.code), (400, Some(param), code), "{body}");
        }
    }

    #[test]
    fn two_forms_are_one_too_many() {
        for body in [
            json!({"regex": "a", "guided_json": {}}),
            json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}),
            json!({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}),
        ] {
            let error = of(body.clone()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.code), (400, "invalid_value"), "{body}");
            assert_eq!(error.message.matches('`').count(), 4, "both are named: {}", error.message);
        }
    }
}
