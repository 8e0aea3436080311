//! Text from tokens, one token at a time.

use super::Tokenizer;
use super::bytes::Lead;
use crate::request::TokenId;

/// Turns tokens into text as they come.
///
/// Works on bytes: a character whose bytes are spread over tokens comes with the token that completes
/// it, even when the tokens come from different models. Bytes that can no longer become a character
/// are replaced by U+FFFD, as decoding all bytes at once would. Costs the bytes of the token, however
/// long the text is.
#[derive(Debug, Default)]
pub struct Detokenizer {
    /// The start of a character: at most three bytes.
    partial: Vec<u8>,
    start: Start,
    /// Special tokens are part of the text.
    special: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Start {
    /// No token of the text has come.
    #[default]
    Fresh,
    /// This many leading spaces may still be dropped.
    Stripping(usize),
    Past,
}

impl Detokenizer {
    /// One that writes special tokens as well, if `special`.
    pub fn keeping(special: bool) -> Self {
        Self { special, ..Self::default() }
    }

    /// The same where `prompt` comes before. What a decoder drops at the start of a text it drops there, and not from
    /// an answer that goes on with it, unless the prompt has no text at all.
    pub fn after(self, tokenizer: &Tokenizer, prompt: &[TokenId]) -> Self {
        let begins = prompt.iter().all(|&id| tokenizer.is_silent(id, self.special));
        Self { start: if begins { self.start } else { Start::Past }, ..self }
    }

    /// The text that `id` completes.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: TokenId) -> String {
        if tokenizer.is_silent(id, self.special) {
            return String::new();
        }
        let bytes = self.past_lead(tokenizer.lead(), tokenizer.bytes(id).unwrap_or_default());
        self.partial.extend(bytes);
        self.complete()
    }

    /// What is left at the end: U+FFFD if a character was never completed.
    pub fn flush(&mut self) -> String {
        let rest = std::mem::take(&mut self.partial);
        String::from_utf8_lossy(&rest).into_owned()
    }

    /// Whether the text so far ends within a character.
    pub fn is_partial(&self) -> bool {
        !self.partial.is_empty()
    }

    fn past_lead(&mut self, lead: Lead, bytes: &[u8]) -> Vec<u8> {
        if self.start == Start::Fresh {
            self.start = match lead {
                Lead::Strip(most) => Start::Stripping(most),
                Lead::Keep | Lead::FirstToken => Start::Past,
            };
            if lead == Lead::FirstToken {
                return bytes.iter().copied().filter(|&b| b != b' ').collect();
            }
        }
        let Start::Stripping(most) = self.start else { return bytes.to_vec() };
        let drop = bytes.iter().take(most).take_while(|&&b| b == b' ').count();
        self.start = if drop == bytes.len() && drop < most { Start::Stripping(most - drop) } else { Start::Past };
        bytes[drop..].to_vec()
    }

    fn complete(&mut self) -> String {
        let mut text = String::new();
        let mut rest = self.partial.as_slice();
        while !rest.is_empty() {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                }
                Err(error) => {
                    let (valid, bad) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = bad;
                    let Some(length) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &bad[length..];
                }
            }
        }
        let consumed = self.partial.len() - rest.len();
        self.partial.drain(..consumed);
        text
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;
    use crate::text::tokenizer_fixtures::{byte_fallback, demo};

    static DEMO: LazyLock<Tokenizer> = LazyLock::new(demo);
    static FALLBACK: LazyLock<Tokenizer> = LazyLock::new(byte_fallback);

    fn pieces(tokenizer: &Tokenizer, ids: &[TokenId]) -> Vec<String> {
        let mut detokenizer = Detokenizer::default();
        let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(tokenizer, id)).collect();
        pieces.push(detokenizer.flush());
        pieces
    }

    #[test]
    fn a_character_comes_with_the_token_that_completes_it() {
        let demo = demo();
        let text = "한국어 😀 ďábelské";
        let ids = demo.encode(text).unwrap();
        assert!(ids.len() > text.chars().count(), "the characters must be spread over tokens");
        let pieces = pieces(&demo, &ids);
        assert!(pieces.iter().all(|p| !p.contains(char::REPLACEMENT_CHARACTER)), "{pieces:?}");
        assert_eq!(pieces.concat(), text);
    }

    /// With what came before, an answer is the text that the library makes of both.
    #[test]
    fn an_answer_goes_on_with_its_prompt() {
        let tokenizer = byte_fallback();
        for prompt in [vec![], vec![1], vec![10], vec![1, 11], vec![1, 12]] {
            for ids in [vec![10, 11], vec![12, 10], vec![12, 12, 11], vec![3], vec![113, 10]] {
                let mut detokenizer = Detokenizer::default().after(&tokenizer, &prompt);
                let answer: String = ids.iter().map(|&id| detokenizer.push(&tokenizer, id)).collect();
                let all: Vec<TokenId> = prompt.iter().chain(&ids).copied().collect();
                let whole = tokenizer.library_decode(&all);
                assert_eq!(tokenizer.library_decode(&prompt) + &answer, whole, "{prompt:?} {ids:?}");
            }
        }
    }

    #[test]
    fn leading_spaces_of_sentencepiece() {
        let tokenizer = byte_fallback();
        let library = |ids: &[TokenId]| tokenizer.library_decode(ids);
        for ids in [vec![10, 11], vec![11, 10], vec![12, 10], vec![12, 12, 10], vec![1, 10], vec![13, 10]] {
            assert_eq!(tokenizer.decode(&ids), library(&ids), "{ids:?}");
        }
        assert_eq!(tokenizer.decode(&[10, 11, 10]), "hellohi hello");
    }

    #[test]
    fn bytes_of_fallback_tokens() {
        let tokenizer = byte_fallback();
        let bytes = |text: &str| -> Vec<TokenId> { text.bytes().map(|b| 100 + TokenId::from(b)).collect() };
        assert_eq!(tokenizer.decode(&bytes("😀é")), "😀é");
        assert_eq!(tokenizer.bytes(100 + 0xE2), Some(&[0xE2][..]));
        // A bad byte costs one replacement character and nothing around it.
        assert_eq!(tokenizer.decode(&[100 + 0xE2, 100 + 0x82, 11]), "\u{FFFD}hi");
        assert_eq!(tokenizer.decode(&[100 + 0xFF, 11, 100 + 0xF0]), "\u{FFFD}hi\u{FFFD}");
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_library_decode_of_all(ids in proptest::collection::vec(0u32..2050, 0..60)) {
            let demo = &*DEMO;
            prop_assert_eq!(pieces(demo, &ids).concat(), demo.library_decode(&ids));
        }

        #[test]
        fn texts_come_back(text in "[가-힣a-z \n😀-😏é]{0,40}") {
            let demo = &*DEMO;
            let ids = demo.encode(&text).unwrap();
            let pieces = pieces(demo, &ids);
            prop_assert!(pieces.iter().all(|p| !p.contains(char::REPLACEMENT_CHARACTER)));
            prop_assert_eq!(pieces.concat(), text);
        }

        #[test]
        fn sentencepiece_pieces_join_to_the_library_decode(
            ids in proptest::collection::vec(prop_oneof![1u32..14, 133u32..227], 0..40)
        ) {
            let tokenizer = &*FALLBACK;
            prop_assert_eq!(pieces(tokenizer, &ids).concat(), tokenizer.library_decode(&ids));
        }
    }
}
