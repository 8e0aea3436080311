//! Tokenizers for tests.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::Tokenizer;
use crate::request::TokenId;

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

pub fn demo_directory() -> PathBuf {
    repository().join("models/demo/small")
}

/// The demo family's tokenizer: byte-level BPE with 2,048 tokens.
pub fn demo() -> Tokenizer {
    Tokenizer::load(&demo_directory()).unwrap()
}

/// The demo tokenizer with a change.
pub fn changed_demo(change: impl FnOnce(&mut Value)) -> Tokenizer {
    let json = std::fs::read(demo_directory().join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&json).unwrap();
    change(&mut json);
    Tokenizer::from_json(&serde_json::to_vec(&json).unwrap()).unwrap()
}

/// A sentencepiece-like tokenizer: `▁` for spaces, one leading space stripped, token 100 + b for byte b.
pub fn byte_fallback() -> Tokenizer {
    let mut vocabulary = json!({
        "<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "h": 4, "e": 5, "l": 6, "o": 7, "w": 8, "r": 9,
        "▁hello": 10, "hi": 11, "▁▁": 12, "é": 13,
    });
    for byte in 0..=255 {
        vocabulary[format!("<0x{byte:02X}>")] = (100 + byte).into();
    }
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    };
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                  "vocab": vocabulary, "merges": []},
    });
    Tokenizer::from_json(&serde_json::to_vec(&json).unwrap()).unwrap()
}

impl Tokenizer {
    /// The library's own decoding, to compare with.
    pub fn library_decode(&self, ids: &[TokenId]) -> String {
        self.library().decode(ids, true).unwrap()
    }
}
