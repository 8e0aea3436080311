//! Chat templates, rendered as `transformers` renders them.

use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, from_args};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior};
use serde_json::Map;

use super::clock::strftime;
use super::python_json::{Style, dumps};
use super::{TextError, chat::tags::without_generation_tags};

/// Why a conversation could not be rendered: the conversation's fault, so the client's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TemplateError(pub String);

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Compile a template.
    pub fn new(source: &str) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| TextError(format!("the template syntax cannot be set: {e}")))?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(python_method);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|e| TextError(format!("the chat template cannot be compiled: {e}")))?;
        Ok(Self { environment })
    }

    /// Render a conversation. `context` holds `messages` and whatever else the template may read;
    /// `now` is the time for templates that write the date.
    pub fn render(&self, context: Map<String, serde_json::Value>, now: SystemTime) -> Result<String, TemplateError> {
        let mut context: Vec<(String, Value)> =
            context.iter().map(|(name, value)| (name.clone(), Value::from(Serde(value)))).collect();
        context.push((
            "strftime_now".into(),
            Value::from_function(move |format: String| {
                strftime(now, &format).map_err(|directive| {
                    Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know {directive}"))
                })
            }),
        ));
        let context = Value::from_pairs(context);
        let template = self.environment.get_template(NAME).map_err(|e| TemplateError(e.to_string()))?;
        template.render(context).map_err(|e| TemplateError(e.detail().map_or_else(|| e.to_string(), str::to_owned)))
    }
}

fn to_json(value: Value, options: Kwargs) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson of an undefined value"));
    }
    let separators: Option<Vec<String>> = options.get("separators")?;
    let separators = match separators.map(<[String; 2]>::try_from) {
        None => None,
        Some(Ok([item, key])) => Some((item, key)),
        Some(Err(_)) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson needs two separators")),
    };
    let style = Style {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent: options.get("indent")?,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators,
    };
    options.assert_all_used()?;
    let value =
        serde_json::to_value(&value).map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}")))?;
    Ok(Value::from(dumps(&value, &style)))
}

mod tags {
    /// `source` with the training marks `{% generation %}` and `{% endgeneration %}` turned into a
    /// condition that always holds: the text and its white space are the same.
    pub fn without_generation_tags(source: &str) -> String {
        let mut out = String::with_capacity(source.len());
        let mut rest = source;
        while let Some(start) = rest.find("{%") {
            let (before, tag) = rest.split_at(start + 2);
            out.push_str(before);
            let inner = tag.trim_start_matches(['-', '+']).trim_start();
            let skipped = tag.len() - inner.len();
            let word = inner.find(|c: char| !c.is_alphanumeric() && c != '_').map_or(inner, |end| &inner[..end]);
            let after = inner[word.len()..].trim_start().trim_start_matches(['-', '+']);
            out.push_str(&tag[..skipped]);
            out.push_str(match word {
                "generation" if after.starts_with("%}") => "if true",
                "endgeneration" if after.starts_with("%}") => "endif",
                word => word,
            });
            rest = &inner[word.len()..];
        }
        out.push_str(rest);
        out
    }
}

/// Python's methods, which templates call: the library's, and those that it lacks.
fn python_method(state: &mut State<'_, '_>, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    if let (Some(text), "removeprefix" | "removesuffix") = (value.as_str(), method) {
        let (part,): (&str,) = from_args(arguments)?;
        let rest = if method == "removeprefix" { text.strip_prefix(part) } else { text.strip_suffix(part) };
        return Ok(rest.unwrap_or(text).into());
    }
    if let (Some(text), "title", []) = (value.as_str(), method, arguments) {
        let mut title = String::with_capacity(text.len());
        let mut inside = false;
        for c in text.chars() {
            if inside {
                title.extend(c.to_lowercase())
            } else {
                title.extend(c.to_uppercase())
            }
            inside = c.is_alphabetic();
        }
        return Ok(title.into());
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use serde_json::json;

    use super::*;

    fn render(source: &str, context: serde_json::Value) -> Result<String, TemplateError> {
        let template = ChatTemplate::new(source).unwrap();
        let serde_json::Value::Object(context) = context else { panic!("not a map") };
        template.render(context, UNIX_EPOCH + Duration::from_secs(1_735_689_600))
    }

    fn text(source: &str) -> String {
        render(source, json!({"messages": [{"role": "user", "content": " Hi <b> "}], "tool": {"a": 1, "b": ["é"]}}))
            .unwrap()
    }

    #[test]
    fn json_as_python_writes_it() {
        assert_eq!(text("{{ tool | tojson }}"), r#"{"a": 1, "b": ["é"]}"#);
        assert_eq!(text("{{ tool | tojson(ensure_ascii=true) }}"), r#"{"a": 1, "b": ["\u00e9"]}"#);
        assert_eq!(text("{{ messages[0].content | tojson }}"), r#"" Hi <b> ""#);
        assert_eq!(text("{{ [1, 2] | tojson(indent=1) }}"), "[\n 1,\n 2\n]");
        assert_eq!(text("{{ [1, 2] | tojson(separators=(',', ':')) }}"), "[1,2]");
    }

    #[test]
    fn python_methods_and_slices() {
        assert_eq!(text("{{ messages[0].content.strip() }}|{{ 'a,b'.split(',')[-1] }}"), "Hi <b>|b");
        assert_eq!(text("{% for k, v in tool.items() %}{{ k }}{% endfor %}"), "ab");
        assert_eq!(text("{% for m in messages[::-1] %}{{ m.role.startswith('us') }}{% endfor %}"), "True");
        assert_eq!(text("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"), "1");
        assert_eq!(text("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}"), "2");
    }

    #[test]
    fn white_space_of_blocks() {
        assert_eq!(text("a\n  {% if true %}\nb\n  {% endif %}\nc\n"), "a\nb\nc");
    }

    #[test]
    fn generation_marks_leave_no_trace() {
        assert_eq!(
            text("a\n{% generation %}\nb {%- endgeneration -%} \n c"),
            text("a\n{% if 1 %}\nb {%- endif -%} \n c")
        );
        assert_eq!(text("{%- generation -%} x {%- endgeneration %}"), "x");
        assert_eq!(text("{% set generation = 1 %}{{ generation }}"), "1");
    }

    #[test]
    fn missing_values_are_empty() {
        assert_eq!(text("{{ bos_token }}{% if tools %}x{% endif %}{{ messages[0].name }}"), "");
    }

    #[test]
    fn the_date_is_an_argument() {
        assert_eq!(text("{{ strftime_now('%d %b %Y') }}"), "01 Jan 2025");
    }

    /// Templates in the manner of many models, against Jinja with the settings of `transformers`.
    #[test]
    fn bug_48_templates_of_published_models() {
        let file = crate::text::tokenizer_fixtures::repository().join("tests/fixtures/goldens/templates.json");
        let goldens: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let now = UNIX_EPOCH + Duration::from_secs(goldens["now"].as_u64().unwrap());
        let mut wrong = Vec::new();
        for golden in goldens["templates"].as_array().unwrap() {
            let template = ChatTemplate::new(golden["template"].as_str().unwrap()).unwrap();
            let rendered = golden["rendered"].as_array().unwrap();
            for (case, wanted) in goldens["cases"].as_array().unwrap().iter().zip(rendered) {
                let mut context = json!({"bos_token": "<s>", "eos_token": "</s>", "tools": null, "documents": null,
                    "add_generation_prompt": true});
                context.as_object_mut().unwrap().extend(case.as_object().unwrap().clone());
                let serde_json::Value::Object(context) = context else { panic!("not a map") };
                let got = match template.render(context, now) {
                    Ok(text) => json!({"text": text}),
                    Err(error) => json!({"error": error.0}),
                };
                if got != *wanted {
                    wrong.push(format!("{}\n  got    {got}\n  wanted {wanted}", golden["name"]));
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn errors_keep_the_templates_own_words() {
        let error = render("{{ raise_exception('roles must alternate') }}", json!({})).unwrap_err();
        assert_eq!(error.0, "roles must alternate");
        assert!(render("{{ messages.a.b }}", json!({})).is_err());
        assert!(ChatTemplate::new("{% if %}").is_err());
    }
}
