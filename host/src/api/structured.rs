//! Fields that ask for an answer of a given form, under the names of several servers.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use serde_json::Value;
use tokio::time::Instant;

use super::error::ApiError;
use super::params::Generation;
use super::reader::{Fields, nothing, shown};
use super::state::{AppState, Route};
use crate::constraint::{Constraint, Form, Grammar, MAX_BYTES, Patience, Refused};

/// A form with the name of the field that asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub field: String,
    pub form: Form,
}

/// How the value of a field becomes a form; `None` if it asks for none.
pub(super) type Read = fn(&str, Value) -> Result<Option<Form>, ApiError>;

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
        let Some(value) = fields.take(name) else { continue };
        let field = fields.name(name);
        let Some(form) = read(&field, value)? else { continue };
        *wanted = only(wanted.take(), Some(Wanted { field, form }))?;
    }
    Ok(())
}

/// False, 0, "" and [] ask for nothing. An empty object is a value like any other: an empty schema still asks for JSON.
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
        // llama.cpp's place for a schema.
        Some("json_object") => match format.take("schema").filter(|value| !value.is_null()) {
            Some(value) => schema(&format.name("schema"), value)?.unwrap_or_else(Form::json_object),
            None => Form::json_object(),
        },
        Some("json_schema") => {
            let missing = |name: String| ApiError::missing(&name, format!("`{name}` is required."));
            let mut schema_object =
                format.object("json_schema")?.ok_or_else(|| missing(format!("{field}.json_schema")))?;
            let name = schema_object.name("schema");
            let value = schema_object.take("schema").ok_or_else(|| missing(name.clone()))?;
            match schema(&name, value)? {
                Some(form) => form,
                None => return Err(missing(name)),
            }
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

/// A schema, or its text. False is one that nothing satisfies: free text would be the opposite of it.
fn schema(field: &str, value: Value) -> Result<Option<Form>, ApiError> {
    match value {
        Value::Bool(false) => {
            let message = format!("`{field}` is false, a schema that no answer satisfies; leave it out for free text.");
            Err(ApiError::value(field, message))
        }
        Value::Object(_) | Value::Bool(_) => Ok(Some(Form::JsonSchema(value.to_string()))),
        other => text(field, "a JSON schema or the text of one", other).map(|text| text.map(Form::JsonSchema)),
    }
}

fn json_object(field: &str, value: Value) -> Result<Option<Form>, ApiError> {
    match value {
        Value::Bool(true) => Ok(Some(Form::json_object())),
        value if off(&value) => Ok(None),
        other => Err(ApiError::wrong_type(field, "a boolean", &other)),
    }
}

/// A text. An empty one asks for nothing, as with other servers: clients send it for a setting that is not set.
fn text(field: &str, wanted: &str, value: Value) -> Result<Option<String>, ApiError> {
    match value {
        Value::String(text) => Ok(Some(text).filter(|text| !text.is_empty())),
        other => Err(ApiError::wrong_type(field, wanted, &other)),
    }
}

fn regex(field: &str, value: Value) -> Result<Option<Form>, ApiError> {
    text(field, "a string", value).map(|text| text.map(Form::Regex))
}

fn grammar(field: &str, value: Value) -> Result<Option<Form>, ApiError> {
    text(field, "a string", value).map(|text| text.map(Form::Lark))
}

fn choice(field: &str, value: Value) -> Result<Option<Form>, ApiError> {
    let Value::Array(items) = value else { return Err(ApiError::wrong_type(field, "a list of strings", &value)) };
    if items.is_empty() {
        let message = format!("`{field}` has no string, so no answer is one of them; leave it out for free text.");
        return Err(ApiError::value(field, message));
    }
    let text = |item| match text(field, "a list of strings", item)? {
        Some(text) => Ok(text),
        None => Err(ApiError::value(field, format!("Each string of `{field}` must have at least 1 byte."))),
    };
    let texts = items.into_iter().map(text).collect::<Result<_, _>>()?;
    Ok(Some(Form::Choice(texts)))
}

impl AppState {
    /// Compile the forms that the prompts of one request ask for, one after the other: together they have the size and the
    /// time of one.
    pub(super) async fn constrain<'a>(
        &self,
        route: &Route,
        generations: impl IntoIterator<Item = &'a mut Generation>,
    ) -> Result<(), ApiError> {
        let wanted =
            generations.into_iter().filter_map(|generation| generation.form.take().map(|form| (generation, form)));
        let wanted: Vec<_> = wanted.collect();
        let different: HashSet<&Form> = wanted.iter().map(|(_, wanted)| &wanted.form).collect();
        let bytes: usize = different.iter().map(|form| form.bytes()).sum();
        if let [_, .., (_, last)] = &wanted[..]
            && different.len() > 1
            && bytes > MAX_BYTES
        {
            let message = format!(
                "The forms of this request have {bytes} bytes; {MAX_BYTES} are possible together. Ask in several requests."
            );
            return Err(ApiError::value(last.field.clone(), message));
        }
        let mut patience = self.compiler.patience();
        let mut grammars: HashMap<Form, Arc<Grammar>> = HashMap::new();
        for (generation, Wanted { field, form }) in wanted {
            let grammar = match grammars.get(&form).cloned() {
                Some(grammar) => grammar,
                None => self.grammar(route, &field, &form, &mut patience).await?,
            };
            grammars.insert(form, Arc::clone(&grammar));
            generation.sampling.constraint = Some(Constraint::new(grammar));
        }
        Ok(())
    }

    async fn grammar(
        &self,
        route: &Route,
        field: &str,
        form: &Form,
        patience: &mut Patience,
    ) -> Result<Arc<Grammar>, ApiError> {
        let outcome = match self.compiler.find(form, &route.text, patience).await {
            Some(outcome) => outcome,
            None => {
                let begun = Instant::now();
                let turn = self.turn(self.front.forms(), "forms to compile");
                let turn = tokio::time::timeout(patience.turns, turn).await;
                patience.turns = patience.turns.saturating_sub(begun.elapsed());
                let turn = turn.map_err(|_| ApiError::overloaded("other forms are being compiled"))??;
                self.compiler.compile(form.clone(), &route.text, turn, patience).await
            }
        };
        outcome.map_err(|refused| match refused {
            Refused::Form(error) => {
                ApiError::value(field, format!("`{field}` cannot be the form of an answer: {error}."))
            }
            Refused::Failed(message) => {
                tracing::error!(field, message, "a form could not be compiled");
                ApiError::internal(format!("`{field}` could not be compiled; the server's log has the details."))
            }
        })
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
            (
                json!({"response_format": {"type": "json_object", "schema": {"type": "integer"}}}),
                "response_format",
                schema(),
            ),
            (
                json!({"response_format": {"type": "json_object", "schema": null}}),
                "response_format",
                Form::json_object(),
            ),
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
        let nothing = json!({"json_schema": null, "regex": "", "ebnf": "", "grammar": "", "guided_choice": null,
            "guided_grammar": "", "guided_json": "", "structured_outputs": {"json_object": false, "regex": ""}});
        for body in
            [json!({}), json!({"response_format": {"type": "text"}}), json!({"structured_outputs": {}}), nothing]
        {
            assert_eq!(of(body.clone()), Ok(None), "{body}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, param, code) in [
            (json!({"response_format": {"type": "xml"}}), "response_format.type", "invalid_value"),
            (json!({"response_format": {}}), "response_format.type", "missing_required_parameter"),
            (
                json!({"response_format": {"type": "json_object", "schema": 123}}),
                "response_format.schema",
                "invalid_type",
            ),
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
            (json!({"guided_choice": []}), "guided_choice", "invalid_value"),
            (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice", "invalid_value"),
            (json!({"json_schema": false}), "json_schema", "invalid_value"),
            (json!({"guided_json": false}), "guided_json", "invalid_value"),
            (json!({"structured_outputs": {"json": false}}), "structured_outputs.json", "invalid_value"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": false}}}),
                "response_format.json_schema.schema",
                "invalid_value",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": ""}}}),
                "response_format.json_schema.schema",
                "missing_required_parameter",
            ),
            (json!({"json_schema": []}), "json_schema", "invalid_type"),
            (json!({"regex": false}), "regex", "invalid_type"),
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
