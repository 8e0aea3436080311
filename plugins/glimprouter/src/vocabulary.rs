//! The text of every token, read once.

use tokenrouter_plugin_api::{Context, PolicyError, TokenId};

/// Bytes of every token, one behind the other.
#[derive(Clone)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    /// Where each token's bytes end.
    ends: Vec<usize>,
}

impl Vocabulary {
    /// Ask the host for each token of the route. A token without text has no bytes; a host without any text
    /// is an error.
    pub fn read(ctx: &Context<'_>) -> Result<Self, PolicyError> {
        let (mut bytes, mut ends) = (Vec::new(), Vec::with_capacity(ctx.vocab_size as usize));
        for id in 0..ctx.vocab_size {
            bytes.extend(ctx.services.token_bytes(id).unwrap_or_default());
            ends.push(bytes.len());
        }
        if bytes.is_empty() {
            return Err(PolicyError::new(format!(
                "route `{}` has no text for its tokens, which steps are found by; give its models a tokenizer",
                ctx.route
            )));
        }
        Ok(Self { bytes, ends })
    }

    /// The bytes of a token; none for an id outside the vocabulary.
    pub fn text(&self, id: TokenId) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start..end]
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("tokens", &self.ends.len()).field("bytes", &self.bytes.len()).finish()
    }
}
