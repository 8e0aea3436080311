//! One model's tokenizer.

use std::path::Path;

use super::TextError;
use super::bytes::{Lead, Pieces, byte_alphabet};
use crate::engine::TokenText;
use crate::request::TokenId;

/// Name of the thread that tries a tokenizer out; a panic there is an answer, not a fault of the program.
pub const TRIAL_THREAD: &str = "tokenizer-trial";

/// A tokenizer with the bytes of every token laid out for decoding one token at a time.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Bytes of all tokens in one row; token `i` is `arena[ends[i - 1]..ends[i]]`.
    arena: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<Kind>,
    longest: usize,
    lead: Lead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// No token has this id.
    Hole,
    /// Part of the text.
    Text,
    /// Left out of the text.
    Special,
}

impl Tokenizer {
    /// Load `tokenizer.json` from a model's directory.
    pub fn load(directory: &Path) -> Result<Self, TextError> {
        let file = directory.join("tokenizer.json");
        let json = std::fs::read(&file).map_err(|e| {
            TextError(format!(
                "{}: {e}. A model directory needs tokenizer.json; save it with AutoTokenizer.from_pretrained(…).save_pretrained(…)",
                file.display()
            ))
        })?;
        Self::from_json(&json).map_err(|e| TextError(format!("{}: {e}", file.display())))
    }

    /// Read the text of a `tokenizer.json`.
    pub fn from_json(json: &[u8]) -> Result<Self, TextError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(json)
            .map_err(|e| TextError(format!("not a tokenizer: {e}. Save it anew with a current `tokenizers`")))?;
        // Both are leftovers of training runs; a server neither cuts nor pads prompts.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| TextError(format!("cannot switch truncation off: {e}")))?;

        let decoder = serde_json::to_value(inner.get_decoder())
            .map_err(|e| TextError(format!("the decoder section cannot be read: {e}")))?;
        let pieces = Pieces::from_decoder(&decoder)?;
        let alphabet = byte_alphabet();
        let added = inner.get_added_tokens_decoder();
        let mut vocabulary: Vec<(String, TokenId)> = inner.get_vocab(true).into_iter().collect();
        vocabulary.sort_unstable_by_key(|(_, id)| *id);
        let size = vocabulary.last().map_or(0, |(_, id)| *id as usize + 1);
        if size > 1 << 24 {
            return Err(TextError(format!("token id {} is too large; at most 2^24 tokens are supported", size - 1)));
        }

        let mut tokenizer = Self {
            inner,
            arena: Vec::new(),
            longest: 0,
            ends: vec![0; size],
            kinds: vec![Kind::Hole; size],
            lead: pieces.lead,
        };
        let mut vocabulary = vocabulary.iter().peekable();
        for id in 0..size {
            // Two texts may share an id (an added token over an entry of the model); the added one counts.
            while let Some((piece, _)) = vocabulary.next_if(|(_, of)| *of as usize == id) {
                let token = added.get(&(id as TokenId));
                if token.is_some_and(|token| token.content != *piece) {
                    continue;
                }
                let special = token.is_some_and(|token| token.special);
                tokenizer.kinds[id] = if special { Kind::Special } else { Kind::Text };
                tokenizer.arena.extend(pieces.bytes(piece, &alphabet));
            }
            tokenizer.ends[id] = tokenizer.arena.len() as u32;
            tokenizer.longest = tokenizer.longest.max(tokenizer.bytes(id as TokenId).map_or(0, <[u8]>::len));
        }
        tokenizer.trial()?;
        Ok(tokenizer)
    }

    /// Whether texts can be encoded at all: some files load, and then the library panics at each text.
    fn trial(&self) -> Result<(), TextError> {
        if self.kinds.is_empty() {
            return Err(TextError("the vocabulary is empty. Save it anew with a current `tokenizers`".into()));
        }
        let encode = || [true, false].into_iter().try_for_each(|special| self.encode_with("a", special).map(|_| ()));
        let ended = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name(TRIAL_THREAD.into()).spawn_scoped(scope, encode);
            thread.map_err(|e| TextError(format!("no thread can be started: {e}"))).map(|thread| thread.join())
        })?;
        let problem = match ended {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error.0,
            Err(panic) => {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("the library panicked").to_owned()
            }
        };
        Err(TextError(format!(
            "cannot encode the text `a` ({problem}). Mend the post_processor and the model section, or save it anew"
        )))
    }

    /// A token that a model with `width` logits does not know, and whether it is an added one. Those of
    /// the vocabulary proper go first.
    pub fn first_beyond(&self, width: usize) -> Option<(TokenId, bool)> {
        let added = self.inner.get_added_tokens_decoder();
        let beyond = (width..self.vocab_size()).filter(|&id| self.kinds[id] != Kind::Hole).map(|id| id as TokenId);
        beyond.map(|id| (id, added.contains_key(&id))).min_by_key(|&(id, added)| (added, id))
    }

    /// Tokens of `text` alone.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        self.encode_with(text, false)
    }

    /// Tokens of `text` with those that the tokenizer adds by itself (such as a beginning-of-sequence token).
    pub fn encode_with_special_tokens(&self, text: &str) -> Result<Vec<TokenId>, TextError> {
        self.encode_with(text, true)
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<TokenId>, TextError> {
        let encoding = self.inner.encode_fast(text, special);
        let encoding = encoding.map_err(|e| TextError(format!("the text cannot be tokenised: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Tokens of `text`, each with the characters before it. Special tokens are added if `special`.
    pub fn encode_with_offsets(&self, text: &str, special: bool) -> Result<Vec<(TokenId, usize)>, TextError> {
        let encoding = self.inner.encode_char_offsets(text, special);
        let encoding = encoding.map_err(|e| TextError(format!("the text cannot be tokenised: {e}")))?;
        // White space that the tokenizer trims from its own offsets belongs to the token behind it, other characters that
        // its normaliser leaves out to the one before. Tokens that are not in the text lie where the last one ended.
        let chars: Vec<char> = text.chars().collect();
        let spaces = |end: usize| chars.iter().take(end).rev().take_while(|c| c.is_whitespace()).count();
        let (mut at, mut last_end) = (0, 0);
        let placed = encoding.get_ids().iter().zip(encoding.get_offsets()).map(|(&id, &(start, end))| {
            let inside = end > start;
            at = if inside { start.min(last_end.max(start.saturating_sub(spaces(start)))).max(at) } else { last_end };
            last_end = last_end.max(end);
            (id, at)
        });
        Ok(placed.collect())
    }

    /// Text of `ids`, special tokens left out. The detokeniser's concatenated output is exactly this.
    pub fn decode(&self, ids: &[TokenId]) -> String {
        let mut detokenizer = super::Detokenizer::default();
        let mut text: String = ids.iter().map(|&id| detokenizer.push(self, id)).collect();
        text.push_str(&detokenizer.flush());
        text
    }

    /// Bytes of the longest token.
    pub fn longest_token(&self) -> usize {
        self.longest
    }

    /// One more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.kinds.len()
    }

    /// The bytes that `id` stands for, special or not; `None` for an id that no token has.
    pub fn bytes(&self, id: TokenId) -> Option<&[u8]> {
        let index = id as usize;
        if *self.kinds.get(index)? == Kind::Hole {
            return None;
        }
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        self.arena.get(start..self.ends[index] as usize)
    }

    /// The bytes that `id` adds to a text: none for special tokens and unknown ids.
    pub(crate) fn text_bytes(&self, id: TokenId) -> &[u8] {
        if self.is_silent(id, false) { &[] } else { self.bytes(id).unwrap_or_default() }
    }

    /// Whether `id` is left out of texts: special tokens are, unless `special` are kept, and unknown ids.
    pub(super) fn is_silent(&self, id: TokenId, special: bool) -> bool {
        match self.kinds.get(id as usize) {
            Some(Kind::Text) => false,
            Some(Kind::Special) => !special,
            Some(Kind::Hole) | None => true,
        }
    }

    #[cfg(test)]
    pub(super) fn library(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }

    pub(super) fn lead(&self) -> Lead {
        self.lead
    }

    /// The id of the token whose text is exactly `text`.
    pub fn id_of(&self, text: &str) -> Option<TokenId> {
        // A text that the vocabulary holds as such (special tokens) wins over one that merely decodes to it.
        let written = self.inner.token_to_id(text).filter(|&id| self.bytes(id) == Some(text.as_bytes()));
        let decoded = || (0..self.vocab_size() as TokenId).find(|&id| self.bytes(id) == Some(text.as_bytes()));
        written.or_else(decoded)
    }
}

impl TokenText for Tokenizer {
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        self.bytes(id).map(<[u8]>::to_vec)
    }

    fn token_id(&self, text: &str) -> Option<TokenId> {
        self.id_of(text)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).field("lead", &self.lead).finish()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::Tokenizer;
    use crate::text::tokenizer_fixtures::demo_directory;

    fn changed(change: impl FnOnce(&mut Value)) -> Result<Tokenizer, String> {
        let json = std::fs::read(demo_directory().join("tokenizer.json")).unwrap();
        let mut json: Value = serde_json::from_slice(&json).unwrap();
        change(&mut json);
        Tokenizer::from_json(&serde_json::to_vec(&json).unwrap()).map_err(|e| e.0)
    }

    #[test]
    fn what_cannot_encode_is_refused() {
        let error = changed(|json| {
            json["post_processor"] = json!({
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<none>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {},
            });
        })
        .unwrap_err();
        assert!(error.starts_with("cannot encode the text `a` ("), "{error}");
        let error = changed(|json| {
            json["model"]["vocab"] = json!({});
            json["model"]["merges"] = json!([]);
            json["added_tokens"] = json!([]);
        })
        .unwrap_err();
        assert!(error.contains("the vocabulary is empty"), "{error}");
    }

    #[test]
    fn tokens_beyond_the_logits() {
        let tokenizer = changed(|json| {
            let mut added = json["added_tokens"][0].clone();
            added["content"] = "<new>".into();
            added["id"] = 2048.into();
            json["added_tokens"].as_array_mut().unwrap().push(added);
        })
        .unwrap();
        assert_eq!(tokenizer.first_beyond(2049), None);
        assert_eq!(tokenizer.first_beyond(2048), Some((2048, true)));
        assert_eq!(tokenizer.first_beyond(1000), Some((1000, false)));
    }
}
