//! What each token's bytes are, derived once from the tokenizer's decoder.

use std::collections::HashMap;

use serde_json::Value;

use super::TextError;

/// How a decoder turns a token's piece into bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pieces {
    byte_level: bool,
    byte_fallback: bool,
    /// Replacements within a piece, in order.
    replace: Vec<(String, String)>,
    /// What happens to spaces at the start of a text.
    pub lead: Lead,
}

/// What a decoder does to the start of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lead {
    Keep,
    /// Drop up to this many spaces.
    Strip(usize),
    /// Drop all spaces of the first token.
    FirstToken,
}

impl Pieces {
    /// Read a `decoder` section. Fails on decoders whose output for a token depends on later tokens: no
    /// text could be streamed with those.
    pub fn from_decoder(decoder: &Value) -> Result<Self, TextError> {
        let mut pieces = Self { byte_level: false, byte_fallback: false, replace: Vec::new(), lead: Lead::Keep };
        let single = std::slice::from_ref(decoder);
        let steps = match decoder.get("decoders").and_then(Value::as_array) {
            Some(steps) => steps.as_slice(),
            None => single,
        };
        for step in steps {
            pieces.add(step)?;
        }
        if !(pieces.byte_level || pieces.byte_fallback || !pieces.replace.is_empty()) {
            return Err(unsupported(decoder));
        }
        Ok(pieces)
    }

    fn add(&mut self, step: &Value) -> Result<(), TextError> {
        let text = |key: &str| step.get(key).and_then(Value::as_str);
        match text("type") {
            Some("ByteLevel") => self.byte_level = true,
            Some("ByteFallback") => self.byte_fallback = true,
            Some("Fuse") => {}
            Some("Replace") => {
                let from = step.pointer("/pattern/String").and_then(Value::as_str);
                let (Some(from), Some(to)) = (from, text("content")) else { return Err(unsupported(step)) };
                self.replace.push((from.into(), to.into()));
            }
            Some("Strip") if text("content") == Some(" ") && step.get("stop") == Some(&Value::from(0)) => {
                let start = step.get("start").and_then(Value::as_u64).ok_or_else(|| unsupported(step))?;
                if start > 0 {
                    self.lead = Lead::Strip(start as usize);
                }
            }
            Some("Metaspace") => {
                let from = text("replacement").ok_or_else(|| unsupported(step))?;
                self.replace.push((from.into(), " ".into()));
                if text("prepend_scheme") != Some("never") {
                    self.lead = Lead::FirstToken;
                }
            }
            _ => return Err(unsupported(step)),
        }
        Ok(())
    }

    /// The bytes of a piece.
    pub fn bytes(&self, piece: &str, byte_of: &HashMap<char, u8>) -> Vec<u8> {
        if self.byte_level {
            let mapped: Option<Vec<u8>> = piece.chars().map(|c| byte_of.get(&c).copied()).collect();
            return mapped.unwrap_or_else(|| piece.as_bytes().to_vec());
        }
        if self.byte_fallback
            && let Some(hex) = piece.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'))
            && hex.len() == 2
            && let Ok(byte) = u8::from_str_radix(hex, 16)
        {
            return vec![byte];
        }
        let replaced = self.replace.iter().fold(piece.to_owned(), |text, (from, to)| text.replace(from, to));
        replaced.into_bytes()
    }
}

fn unsupported(step: &Value) -> TextError {
    let kind = step.get("type").and_then(Value::as_str).unwrap_or("none");
    TextError(format!(
        "decoder `{kind}` cannot be streamed; supported are ByteLevel, Metaspace, and sequences of Replace, ByteFallback, Fuse and a leading Strip"
    ))
}

/// The byte of each character of the byte-level alphabet: printable Latin-1 stands for itself, the
/// other bytes for U+0100 onwards in order.
pub(super) fn byte_alphabet() -> HashMap<char, u8> {
    let itself = |b: &u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100u32;
    let mut alphabet = HashMap::with_capacity(256);
    for byte in 0..=u8::MAX {
        let code = if itself(&byte) {
            u32::from(byte)
        } else {
            next += 1;
            next - 1
        };
        if let Some(c) = char::from_u32(code) {
            alphabet.insert(c, byte);
        }
    }
    alphabet
}

/// Bytes as text: themselves where they are UTF-8, `bytes:\xe2\x82` where not, so that different
/// tokens stay different.
pub fn readable(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}
