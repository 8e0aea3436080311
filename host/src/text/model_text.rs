//! Everything about text that one model's directory says.

use std::path::Path;
use std::time::SystemTime;

use serde_json::{Map, Value};

use super::{ChatTemplate, TemplateError, TextError, Tokenizer};
use crate::engine::TokenText;
use crate::request::TokenId;

/// A model's tokenizer, special tokens and chat template.
#[derive(Debug)]
pub struct ModelText {
    pub tokenizer: Tokenizer,
    /// `None`: the model was not made for chat.
    pub template: Option<ChatTemplate>,
    /// Special tokens by role, such as `bos_token`, as templates read them.
    specials: Map<String, Value>,
    /// The configuration asks for a beginning-of-sequence token.
    add_bos: bool,
}

impl ModelText {
    /// Read a model's directory: `tokenizer.json`, and if present `tokenizer_config.json` and
    /// `chat_template.jinja` (which goes before a template in the configuration).
    pub fn load(directory: &Path) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::load(directory)?;
        let config_file = directory.join("tokenizer_config.json");
        let config = match read_optional(&config_file)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|e| TextError(format!("{}: not JSON: {e}. Fetch the file again", config_file.display())))?,
            None => Value::Null,
        };
        let template_file = directory.join("chat_template.jinja");
        let (file, source) = match read_optional(&template_file)? {
            Some(source) => (template_file, Some(source)),
            None => {
                let source = template_of(&config).map_err(|e| TextError(format!("{}: {e}", config_file.display())))?;
                (config_file, source)
            }
        };
        let template = source.map(|source| ChatTemplate::new(&source)).transpose();
        let template = template.map_err(|e| TextError(format!("{}: {e}", file.display())))?;
        Ok(Self::new(tokenizer, template, &config))
    }

    /// From parts; `config` as in `tokenizer_config.json`.
    pub fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>, config: &Value) -> Self {
        let mut specials = Map::new();
        for (name, value) in config.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token")) {
            // A special token is a string, or an object with the string as its content.
            if let Some(text) = value.as_str().or_else(|| value.get("content").and_then(Value::as_str)) {
                specials.insert(name.clone(), text.into());
            }
        }
        let add_bos = config.get("add_bos_token").and_then(Value::as_bool).unwrap_or(false);
        Self { tokenizer, template, specials, add_bos }
    }

    /// Text of the beginning-of-sequence token.
    pub fn bos(&self) -> Option<&str> {
        self.specials.get("bos_token").and_then(Value::as_str)
    }

    /// Text of the end-of-sequence token.
    pub fn eos(&self) -> Option<&str> {
        self.specials.get("eos_token").and_then(Value::as_str)
    }

    /// Tokens of a prompt given as text. If the model wants a beginning-of-sequence token there is
    /// exactly one, whether or not the text begins with it.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        let mut ids = self.tokenizer.encode_with_special_tokens(text)?;
        if let Some(bos) = self.bos().and_then(|bos| self.tokenizer.id_of(bos)) {
            if self.add_bos && ids.first() != Some(&bos) {
                ids.insert(0, bos);
            }
            if ids.starts_with(&[bos, bos]) && self.bos().is_some_and(|bos| text.starts_with(bos)) {
                ids.remove(0);
            }
        }
        Ok(ids)
    }

    /// Whether prompts given as text get tokens that are not in the text.
    pub fn adds_special_tokens(&self) -> bool {
        self.encode_prompt("").is_ok_and(|ids| !ids.is_empty())
    }

    /// A conversation as the model's template writes it. `options` are further values for the template.
    /// `None` if the model has no template.
    pub fn render_chat(
        &self,
        messages: Vec<Value>,
        options: Map<String, Value>,
        now: SystemTime,
    ) -> Option<Result<String, TemplateError>> {
        let template = self.template.as_ref()?;
        let mut context = self.specials.clone();
        context.insert("add_generation_prompt".into(), true.into());
        context.insert("tools".into(), Value::Null);
        context.insert("documents".into(), Value::Null);
        context.extend(options);
        context.insert("messages".into(), messages.into());
        Some(template.render(context, now))
    }

    /// Tokens of a rendered conversation. The template has written the special tokens; none are added.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<TokenId>, TextError> {
        self.tokenizer.encode(rendered)
    }
}

impl TokenText for ModelText {
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        self.tokenizer.token_bytes(id)
    }

    fn token_id(&self, text: &str) -> Option<TokenId> {
        self.tokenizer.token_id(text)
    }
}

/// The template in a `tokenizer_config.json`: one, or a list of named ones of which `default` counts.
fn template_of(config: &Value) -> Result<Option<String>, TextError> {
    match config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(Value::Array(named)) => {
            let text = |entry: &Value, key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
            let default = named.iter().find(|entry| text(entry, "name").as_deref() == Some("default"));
            let source = default.and_then(|entry| text(entry, "template"));
            source.map(Some).ok_or_else(|| {
                TextError("chat_template has no entry named `default`; name one so, or add chat_template.jinja".into())
            })
        }
        Some(_) => Err(TextError("chat_template is neither a string nor a list of named templates".into())),
    }
}

fn read_optional(file: &Path) -> Result<Option<String>, TextError> {
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(TextError(format!("{}: {e}. Make the file readable UTF-8", file.display()))),
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use serde_json::json;

    use super::*;
    use crate::text::tokenizer_fixtures::{byte_fallback, demo, demo_directory, repository};

    fn goldens() -> Value {
        let file = repository().join("tests/fixtures/goldens/tokenizer.json");
        serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
    }

    fn ids(value: &Value) -> Vec<TokenId> {
        serde_json::from_value(value.clone()).unwrap()
    }

    #[test]
    fn golden_texts() {
        let text = ModelText::load(&demo_directory()).unwrap();
        let goldens = goldens();
        let texts = goldens["texts"].as_array().unwrap();
        assert!(texts.len() > 10);
        for case in texts {
            let source = case["text"].as_str().unwrap();
            assert_eq!(text.encode_prompt(source).unwrap(), ids(&case["ids"]), "{source:?}");
        }
    }

    #[test]
    fn golden_chats() {
        let text = ModelText::load(&demo_directory()).unwrap();
        let goldens = goldens();
        let chats = goldens["chats"].as_array().unwrap();
        assert!(chats.len() > 3);
        for case in chats {
            let messages = case["messages"].as_array().unwrap().clone();
            let rendered = text.render_chat(messages, Map::new(), UNIX_EPOCH).unwrap().unwrap();
            assert_eq!(rendered, case["text"].as_str().unwrap());
            assert_eq!(text.encode_chat(&rendered).unwrap(), ids(&case["ids"]));
        }
    }

    #[test]
    fn exactly_one_bos() {
        let config = json!({"bos_token": {"content": "<s>"}, "add_bos_token": true});
        let template = ChatTemplate::new("{{ bos_token }}{{ messages[0].content }}").unwrap();
        let text = ModelText::new(byte_fallback(), Some(template), &config);
        let bos = text.tokenizer.id_of("<s>").unwrap();
        for prompt in ["hello", "<s>hello", ""] {
            let ids = text.encode_prompt(prompt).unwrap();
            assert_eq!(ids.iter().filter(|&&id| id == bos).count(), 1, "{prompt:?} {ids:?}");
            assert_eq!(ids[0], bos);
        }
        let rendered = text.render_chat(vec![json!({"content": "hello"})], Map::new(), UNIX_EPOCH).unwrap().unwrap();
        assert_eq!(text.encode_chat(&rendered).unwrap().iter().filter(|&&id| id == bos).count(), 1);
    }

    #[test]
    fn no_template_is_not_an_error() {
        let text = ModelText::new(demo(), None, &Value::Null);
        assert!(text.render_chat(vec![], Map::new(), UNIX_EPOCH).is_none());
        assert_eq!(template_of(&json!({"chat_template": null})), Ok(None));
    }

    #[test]
    fn named_templates() {
        let named =
            json!({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]});
        assert_eq!(template_of(&named), Ok(Some("d".into())));
        assert!(template_of(&json!({"chat_template": [{"name": "rag", "template": "r"}]})).is_err());
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = ModelText::load(&repository().join("models/none")).unwrap_err();
        assert!(error.0.contains("tokenizer.json") && error.0.contains("save_pretrained"), "{error}");
    }
}
