//! Tokens that end answers, from all files that name some.

use std::path::Path;

use serde::Deserialize;

use super::json::read_json;
use super::{LoadError, ModelConfig, TokenIds};

/// Tokens that end the messages of chats. A model whose template writes one learned to end its answers with it, also
/// where its files name another one, which ended the texts of its first training.
const MESSAGE_ENDS: [&str; 4] = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"];

#[derive(Deserialize)]
pub(super) struct RawGeneration {
    eos_token_id: Option<TokenIds>,
}

#[derive(Default, Deserialize)]
struct RawTokenizerConfig {
    eos_token: Option<RawToken>,
    chat_template: Option<serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a text, or an object with `content`")]
enum RawToken {
    Text(String),
    Object { content: String },
}

#[derive(Deserialize)]
struct RawTokenizer {
    #[serde(default)]
    added_tokens: Vec<RawAddedToken>,
}

#[derive(Deserialize)]
struct RawAddedToken {
    id: super::TokenId,
    content: String,
}

impl ModelConfig {
    /// Unite the end tokens of all files that name some: a model may end with any of them.
    pub(super) fn add_end_tokens(&mut self, dir: &Path) -> Result<(), LoadError> {
        let file = dir.join("generation_config.json");
        if let Some(ids) = read_json::<RawGeneration>(&file)?.and_then(|raw| raw.eos_token_id) {
            let ids = ids.into_vec();
            self.known_end_tokens(&file, "eos_token_id", &ids)?;
            self.eos.extend(ids);
        }
        let config = read_json::<RawTokenizerConfig>(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        // What is wrong with the file of the template is told where templates are read.
        let template = match std::fs::read_to_string(dir.join("chat_template.jinja")) {
            Ok(template) => template,
            Err(_) => config.chat_template.map(|template| template.to_string()).unwrap_or_default(),
        };
        let named = config.eos_token.map(|(RawToken::Text(text) | RawToken::Object { content: text })| text);
        let named = named.map(|text| ("eos_token", text));
        let written = MESSAGE_ENDS.iter().filter(|end| template.contains(**end));
        let written = written.map(|end| ("end of messages", (*end).to_owned()));
        let texts: Vec<(&str, String)> = named.into_iter().chain(written).collect();
        let file = dir.join("tokenizer.json");
        if !texts.is_empty()
            && let Some(tokenizer) = read_json::<RawTokenizer>(&file)?
        {
            for (what, text) in texts {
                let ids: Vec<_> = tokenizer.added_tokens.iter().filter(|t| t.content == text).map(|t| t.id).collect();
                self.known_end_tokens(&file, &format!("added_tokens: the id of the {what} `{text}`"), &ids)?;
                self.eos.extend(ids);
            }
        }
        self.eos.sort_unstable();
        self.eos.dedup();
        Ok(())
    }
}
