//! Which tokens the models of a route share.

use super::Tokenizer;
use crate::request::TokenId;

/// Two models read one token id as different texts, so no request could move between them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "models `{first}` and `{second}` do not share a vocabulary: token {token} is {first_text:?} for the one and {second_text:?} for the other. Route only between models with the same tokenizer."
)]
pub struct VocabularyMismatch {
    pub token: TokenId,
    pub first: String,
    pub first_text: String,
    pub second: String,
    pub second_text: String,
}

/// Tokens that not all of the named tokenizers know, ascending. Compares what ids mean, not how many
/// there are: ids that some models have beyond the others are fine, as long as none is generated.
pub fn excluded_tokens(tokenizers: &[(&str, &Tokenizer)]) -> Result<Vec<TokenId>, VocabularyMismatch> {
    let size = tokenizers.iter().map(|(_, t)| t.vocab_size()).max().unwrap_or(0);
    let mut excluded = Vec::new();
    for id in 0..size as TokenId {
        let mut known = tokenizers.iter().filter_map(|(name, t)| t.bytes(id).map(|bytes| (*name, bytes)));
        let first = known.next();
        let mut count = usize::from(first.is_some());
        if let Some((first, first_bytes)) = first {
            for (second, second_bytes) in known {
                count += 1;
                if first_bytes != second_bytes {
                    return Err(VocabularyMismatch {
                        token: id,
                        first: first.into(),
                        first_text: super::readable(first_bytes),
                        second: second.into(),
                        second_text: super::readable(second_bytes),
                    });
                }
            }
        }
        if count < tokenizers.len() {
            excluded.push(id);
        }
    }
    Ok(excluded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer_fixtures::{changed_demo, demo};

    #[test]
    fn the_same_tokenizer_shares_everything() {
        let (a, b) = (demo(), demo());
        assert_eq!(excluded_tokens(&[("a", &a), ("b", &b)]), Ok(vec![]));
    }

    #[test]
    fn further_tokens_are_excluded() {
        let (a, b) = (
            demo(),
            changed_demo(|json| {
                let mut token = json["added_tokens"][0].clone();
                (token["id"], token["content"]) = (2048.into(), "<think>".into());
                json["added_tokens"].as_array_mut().unwrap().push(token);
            }),
        );
        assert_eq!(excluded_tokens(&[("a", &a), ("b", &b)]), Ok(vec![2048]));
        assert_eq!(excluded_tokens(&[("b", &b), ("a", &a)]), Ok(vec![2048]));
    }

    #[test]
    fn a_different_meaning_is_an_error_that_shows_both() {
        let (a, b) = (demo(), changed_demo(|json| json["added_tokens"][1]["content"] = "<|other|>".into()));
        let mismatch = excluded_tokens(&[("a", &a), ("b", &b)]).unwrap_err();
        assert_eq!((mismatch.token, mismatch.first_text.as_str()), (2046, "<|im_start|>"));
        assert_eq!(mismatch.second_text, "<|other|>");
    }
}
