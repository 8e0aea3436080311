//! A prompt's part of an answer: its text, its tokens and what the model makes of them.

use serde_json::{Map, Value, json};

use super::answer::{logprob, token_text};
use super::error::ApiError;
use super::reader::Fields;
use crate::request::{MAX_TOP_LOGPROBS, Score, TokenId};
use crate::text::{Detokenizer, Tokenizer};

/// A prompt as the models get it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Encoded {
    pub ids: Vec<TokenId>,
    /// If it is to be part of the answer.
    pub echo: Option<Echo>,
}

/// The text of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Echo {
    pub text: String,
    /// Characters before each token.
    pub offsets: Vec<usize>,
}

impl Echo {
    /// Of a prompt that was given as tokens.
    pub fn of_tokens(tokenizer: &Tokenizer, ids: &[TokenId], special: bool) -> Self {
        let mut detokenizer = Detokenizer::keeping(special);
        let (mut echo, mut chars) = (Self::default(), 0);
        for &id in ids {
            echo.offsets.push(chars);
            let text = detokenizer.push(tokenizer, id);
            chars += text.chars().count();
            echo.text.push_str(&text);
        }
        echo.text.push_str(&detokenizer.flush());
        echo
    }
}

impl Encoded {
    /// Keep the last `most` tokens.
    pub fn truncate(&mut self, most: usize) {
        let gone = self.ids.len().saturating_sub(most);
        self.ids.drain(..gone);
        let Some(echo) = self.echo.as_mut().filter(|_| gone > 0) else { return };
        echo.offsets.drain(..gone);
        let start = echo.offsets.first().copied().unwrap_or_default();
        echo.offsets.iter_mut().for_each(|offset| *offset -= start);
        echo.text = echo.text.chars().skip(start).collect();
    }
}

/// Most tokens of a prompt that is cut if need be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncate {
    To(usize),
    /// As many as the context leaves beside the answer.
    ToContext,
}

impl Truncate {
    /// Read `truncate_prompt_tokens`.
    pub fn read(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        const NAME: &str = "truncate_prompt_tokens";
        match fields.integer(NAME, -1..=i64::from(u32::MAX))? {
            None => Ok(None),
            Some(-1) => Ok(Some(Self::ToContext)),
            Some(0) => {
                let message = format!("`{NAME}` must be at least 1, or -1 for what the context leaves; got 0.");
                Err(ApiError::value(fields.name(NAME), message))
            }
            Some(most) => Ok(Some(Self::To(most as usize))),
        }
    }

    /// Most tokens in `room` tokens for prompt and answer; `max_tokens`: of the answer.
    pub fn most(self, room: u32, max_tokens: Option<u32>) -> usize {
        match self {
            Self::To(most) => most,
            Self::ToContext => room.saturating_sub(max_tokens.unwrap_or(1)).max(1) as usize,
        }
    }
}

/// Read vLLM's `prompt_logprobs`: how many of the most probable tokens to tell with each token of the prompt.
pub fn read_prompt_logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    fields.drop_false("prompt_logprobs");
    let top = fields.integer("prompt_logprobs", 0..=i64::from(MAX_TOP_LOGPROBS))?;
    Ok(top.map(|top| top as u32))
}

/// vLLM's `prompt_logprobs` of a prompt: null for the first token, and for each other one the `top` most probable
/// tokens and itself, by id.
pub fn prompt_logprobs(tokenizer: &Tokenizer, ids: &[TokenId], scores: &[Score], top: u32) -> Value {
    let of = |id: TokenId, value: f32, rank: u32| {
        let entry = json!({"logprob": logprob(value), "rank": rank, "decoded_token": token_text(tokenizer, id)});
        (id.to_string(), entry)
    };
    let position = |(&id, score): (&TokenId, &Score)| {
        let best = score.top_logprobs.iter().take(top as usize).zip(1..);
        let mut entries: Map<String, Value> = best.map(|(&(id, value), rank)| of(id, value, rank)).collect();
        entries.extend([of(id, score.logprob, score.rank)]);
        Value::from(entries)
    };
    let rest = ids.iter().skip(1).zip(scores).map(position);
    std::iter::once(Value::Null).chain(rest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer_fixtures::demo;

    #[test]
    fn a_truncated_prompt_keeps_its_end() {
        let tokenizer = demo();
        let ids = tokenizer.encode("한국 is here").unwrap();
        let echo = Echo::of_tokens(&tokenizer, &ids, false);
        assert_eq!(echo.text, "한국 is here");
        let mut cut = Encoded { ids: ids.clone(), echo: Some(echo.clone()) };
        cut.truncate(2);
        let kept = cut.echo.unwrap();
        assert_eq!(cut.ids, ids[ids.len() - 2..]);
        assert_eq!(kept.text, tokenizer.decode(&cut.ids));
        assert_eq!((kept.offsets[0], kept.offsets.len()), (0, 2));
        let mut whole = Encoded { ids: ids.clone(), echo: Some(echo.clone()) };
        whole.truncate(ids.len());
        assert_eq!(whole, Encoded { ids, echo: Some(echo) });
    }

    #[test]
    fn what_the_context_leaves() {
        assert_eq!(Truncate::ToContext.most(100, Some(30)), 70);
        assert_eq!(Truncate::ToContext.most(100, Some(300)), 1);
        assert_eq!(Truncate::To(7).most(100, Some(30)), 7);
    }

    #[test]
    fn the_token_itself_is_among_the_best() {
        let tokenizer = demo();
        let score = Score { logprob: -3.0, rank: 9, top_logprobs: vec![(5, -0.5), (6, -1.0)] };
        let json = prompt_logprobs(&tokenizer, &[1, 2], std::slice::from_ref(&score), 1);
        assert_eq!(json[0], Value::Null);
        assert_eq!(json[1].as_object().unwrap().keys().collect::<Vec<_>>(), ["5", "2"]);
        assert_eq!((&json[1]["2"]["rank"], &json[1]["5"]["rank"]), (&json!(9), &json!(1)));
        let best = prompt_logprobs(&tokenizer, &[1, 5], &[Score { logprob: -0.5, rank: 1, ..score }], 2);
        assert_eq!(best[1].as_object().unwrap().len(), 2);
    }
}
