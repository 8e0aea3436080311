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
        self.settle_bos(text, &mut ids, |id| *id, |id| id);
        Ok(ids)
    }

    /// The same with the characters of `text` before each token.
    pub fn encode_prompt_with_offsets(&self, text: &str) -> Result<Vec<(TokenId, usize)>, TextError> {
        let mut tokens = self.tokenizer.encode_with_offsets(text, true)?;
        self.settle_bos(text, &mut tokens, |(id, _)| *id, |id| (id, 0));
        Ok(tokens)
    }

    /// `id` and `token` go from a token to its id and back.
    fn settle_bos<T>(&self, text: &str, tokens: &mut Vec<T>, id: fn(&T) -> TokenId, token: fn(TokenId) -> T) {
        let Some((written, bos)) = self.bos().and_then(|bos| Some((bos, self.tokenizer.id_of(bos)?))) else { return };
        if self.add_bos && tokens.first().map(id) != Some(bos) {
            tokens.insert(0, token(bos));
        }
        if tokens.len() > 1 && tokens[..2].iter().all(|token| id(token) == bos) && text.starts_with(written) {
            tokens.remove(0);
        }
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
    fn offsets_are_those_of_the_text_as_it_was_written() {
        let text = ModelText::load(&demo_directory()).unwrap();
        for source in ["The answer is 한국어 😀.", "  two spaces", "<|im_start|>user\nHi", "é", ""] {
            let tokens = text.encode_prompt_with_offsets(source).unwrap();
            let ids: Vec<TokenId> = tokens.iter().map(|(id, _)| *id).collect();
            assert_eq!(ids, text.encode_prompt(source).unwrap());
            let mut detokenizer = crate::text::Detokenizer::keeping(true);
            let mut chars = 0;
            for (id, offset) in tokens {
                assert_eq!(offset, chars, "{source:?}");
                chars += detokenizer.push(&text.tokenizer, id).chars().count();
            }
        }
        let config = json!({"bos_token": "<s>", "add_bos_token": true});
        let text = ModelText::new(byte_fallback(), None, &config);
        for source in ["hello", "<s>hello"] {
            let tokens = text.encode_prompt_with_offsets(source).unwrap();
            let ids: Vec<TokenId> = tokens.iter().map(|(id, _)| *id).collect();
            assert_eq!(ids, text.encode_prompt(source).unwrap());
            assert_eq!((tokens[0].1, tokens[1].1), (0, source.len() - "hello".len()), "{source}");
        }
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
