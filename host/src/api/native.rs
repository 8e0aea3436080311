//! Fields of /generate that are SGLang's own: names of requests, log-probabilities, values by prompt.

use serde_json::{Value, json};

use super::answer::{logprob, token_text};
use super::error::ApiError;
use super::http::random_id;
use super::params::token;
use super::reader::{Fields, whole};
use super::run::Answer;
use super::shown::check_name;
use crate::request::{MAX_TOP_LOGPROBS, TokenId};
use crate::text::Tokenizer;

/// How values that may be given once or by prompt are read.
#[derive(Clone, Copy, Debug)]
pub struct Each {
    pub prompts: usize,
    /// The prompts were given as a list.
    pub batch: bool,
}

impl Each {
    /// The value of a field for each prompt, with its name for errors.
    pub fn take(self, fields: &mut Fields, field: &str) -> Result<Vec<(String, Option<Value>)>, ApiError> {
        let name = fields.name(field);
        match fields.take(field) {
            Some(Value::Array(values)) if self.batch => {
                if values.len() != self.prompts {
                    let message =
                        format!("`{name}` has {} entries for {} prompts; give one each.", values.len(), self.prompts);
                    return Err(ApiError::value(name, message));
                }
                let value = |(i, value): (usize, Value)| (format!("{name}[{i}]"), Some(value).filter(|v| !v.is_null()));
                Ok(values.into_iter().enumerate().map(value).collect())
            }
            given => Ok(vec![(name, given); self.prompts]),
        }
    }

    /// The same, read by `read` under the name of the field alone.
    fn read<T>(
        self,
        fields: &mut Fields,
        field: &str,
        read: impl Fn(&mut Fields) -> Result<T, ApiError>,
    ) -> Result<Vec<T>, ApiError> {
        let values = self.take(fields, field)?.into_iter();
        values.map(|(_, value)| read(&mut Fields::one(field, value.unwrap_or_default()))).collect()
    }
}

/// The log-probabilities that `return_logprob` asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Logprobs {
    /// The first token of the prompt that is told of; -1 for none.
    start: i64,
    pub top: u32,
    pub listed: Vec<TokenId>,
}

impl Logprobs {
    /// One a prompt; `None` for those without.
    pub fn read(fields: &mut Fields, each: Each, vocab: u32) -> Result<Vec<Option<Self>>, ApiError> {
        let wanted = each.read(fields, "return_logprob", |f| Ok(f.boolean("return_logprob")?.unwrap_or(false)))?;
        let starts =
            each.read(fields, "logprob_start_len", |f| f.integer("logprob_start_len", -1..=i64::from(u32::MAX)))?;
        let tops =
            each.read(fields, "top_logprobs_num", |f| f.integer("top_logprobs_num", 0..=i64::from(MAX_TOP_LOGPROBS)))?;
        let listed = Self::listed(fields, each, vocab)?;
        let all = wanted.into_iter().zip(starts).zip(tops).zip(listed).map(|(((wanted, start), top), listed)| {
            let asks = top.is_some_and(|top| top > 0) || !listed.is_empty() || start.is_some_and(|start| start >= 0);
            if !wanted && asks {
                let message =
                    "`logprob_start_len`, `top_logprobs_num` and `token_ids_logprob` need `return_logprob: true`.";
                return Err(ApiError::value("return_logprob", message));
            }
            let logprobs = Self { start: start.unwrap_or(-1), top: top.unwrap_or(0) as u32, listed };
            Ok(wanted.then_some(logprobs))
        });
        all.collect()
    }

    /// `token_ids_logprob`: a list of ids for all prompts, or a list of such.
    fn listed(fields: &mut Fields, each: Each, vocab: u32) -> Result<Vec<Vec<TokenId>>, ApiError> {
        const NAME: &str = "token_ids_logprob";
        let ids = |mut of: Fields| -> Result<Vec<TokenId>, ApiError> {
            let ids = of.list(NAME, MAX_TOP_LOGPROBS as usize)?.unwrap_or_default();
            ids.iter().map(|id| token(NAME, id, vocab)).collect()
        };
        match fields.take(NAME) {
            Some(Value::Array(items)) if items.iter().any(|item| whole(item).is_none()) => {
                let values = each.take(&mut Fields::one(NAME, items.into()), NAME)?;
                values.into_iter().map(|(_, value)| ids(Fields::one(NAME, value.unwrap_or_default()))).collect()
            }
            given => Ok(vec![ids(Fields::one(NAME, given.unwrap_or_default()))?; each.prompts]),
        }
    }

    /// Position of the first token of a prompt that is scored: one after the first that is told of, which has
    /// no log-probability.
    pub fn first_scored(&self, prompt: usize) -> Option<u32> {
        u32::try_from(self.start).ok().map(|start| start.saturating_add(1)).filter(|from| (*from as usize) < prompt)
    }

    /// Enter what is asked for in `meta`. With a tokenizer entries have their text.
    pub fn write(&self, meta: &mut Value, tokenizer: Option<&Tokenizer>, prompt: &[TokenId], answer: &Answer) {
        let one = |id: TokenId, value: Option<f32>| {
            json!([value.map(logprob), id, tokenizer.map(|tokenizer| token_text(tokenizer, id))])
        };
        let list = |of: &[(TokenId, f32)]| of.iter().map(|&(id, value)| one(id, Some(value))).collect::<Value>();
        // The most probable ones, then those that were listed.
        let parts = |of: &'_ [(TokenId, f32)]| {
            let (top, listed) = of.split_at(of.len().saturating_sub(self.listed.len()));
            (list(top), list(listed))
        };
        let told = usize::try_from(self.start).ok().and_then(|start| prompt.get(start..)).unwrap_or_default();
        let first = told.first().map(|&id| one(id, None));
        let scored = told.iter().skip(1).zip(&answer.scores);
        let input = scored.clone().map(|(&id, score)| one(id, Some(score.logprob)));
        meta["input_token_logprobs"] = first.iter().cloned().chain(input).collect();
        let committed = || answer.entries.iter().map(|entry| &entry.committed);
        meta["output_token_logprobs"] = committed().map(|c| one(c.token, Some(c.logprob))).collect();
        let nothing = || first.iter().map(|_| Value::Null);
        let input = || scored.clone().map(|(_, score)| parts(&score.top_logprobs));
        let output = || committed().map(|c| parts(&c.top_logprobs));
        if self.top > 0 {
            meta["input_top_logprobs"] = nothing().chain(input().map(|(top, _)| top)).collect();
            meta["output_top_logprobs"] = output().map(|(top, _)| top).collect();
        }
        if !self.listed.is_empty() {
            meta["input_token_ids_logprobs"] = nothing().chain(input().map(|(_, listed)| listed)).collect();
            meta["output_token_ids_logprobs"] = output().map(|(_, listed)| listed).collect();
        }
    }
}

/// The names that a client gives its prompts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ids {
    One(String),
    Each(Vec<String>),
}

/// Names of the parts of a request.
pub struct Named {
    /// By which a prompt can be aborted.
    pub by_prompt: Vec<Vec<String>>,
    /// What answers are called.
    pub by_choice: Vec<String>,
}

impl Ids {
    /// Read `rid`: one, or one for each of `prompts`.
    pub fn read(fields: &mut Fields, prompts: usize) -> Result<Self, ApiError> {
        match fields.take("rid") {
            None => Ok(Self::One(random_id("gen-"))),
            Some(Value::String(id)) => check_name("rid", id).map(Self::One),
            Some(Value::Array(ids)) if ids.len() == prompts => {
                let each = |id| match id {
                    Value::String(id) => check_name("rid", id),
                    other => Err(ApiError::wrong_type("rid", "made of strings", &other)),
                };
                ids.into_iter().map(each).collect::<Result<_, _>>().map(Self::Each)
            }
            Some(Value::Array(ids)) => {
                let message = format!("`rid` has {} entries for {prompts} prompts; give one each.", ids.len());
                Err(ApiError::value("rid", message))
            }
            Some(other) => Err(ApiError::wrong_type("rid", "a string or a list of strings", &other)),
        }
    }

    /// For `prompts` prompts with `n` choices each; `batch`: the answer is a list.
    pub fn names(&self, prompts: usize, n: usize, batch: bool) -> Named {
        let choice = |index: usize| match self {
            Self::One(id) if batch => format!("{id}-{index}"),
            Self::One(id) => id.clone(),
            Self::Each(ids) if n == 1 => ids[index].clone(),
            Self::Each(ids) => format!("{}-{}", ids[index / n], index % n),
        };
        let by_choice: Vec<String> = (0..prompts * n).map(choice).collect();
        let by_prompt = (0..prompts).map(|prompt| {
            let own = match self {
                Self::One(id) => id.clone(),
                Self::Each(ids) => ids[prompt].clone(),
            };
            // A choice has no name of its own among several.
            let single = by_choice.get(prompt).filter(|name| n == 1 && **name != own).cloned();
            std::iter::once(own).chain(single).collect()
        });
        Named { by_prompt: by_prompt.collect(), by_choice }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let one = Ids::One("a".into());
        assert_eq!(one.names(1, 1, false).by_choice, ["a"]);
        let batch = one.names(2, 1, true);
        assert_eq!(batch.by_choice, ["a-0", "a-1"]);
        assert_eq!(batch.by_prompt[1], ["a", "a-1"]);
        let each = Ids::Each(vec!["x".into(), "y".into()]);
        assert_eq!(each.names(2, 1, true).by_choice, ["x", "y"]);
        let several = each.names(2, 2, true);
        assert_eq!(several.by_choice, ["x-0", "x-1", "y-0", "y-1"]);
        assert_eq!(several.by_prompt, [["x"], ["y"]]);
    }

    #[test]
    fn values_by_prompt() {
        let read = |value: Value, batch| {
            let mut fields = Fields::of("body", json!({"return_logprob": true, "top_logprobs_num": value})).unwrap();
            let all = Logprobs::read(&mut fields, Each { prompts: 2, batch }, 100)?;
            Ok::<_, ApiError>(all.into_iter().map(|wanted| wanted.unwrap().top).collect::<Vec<_>>())
        };
        assert_eq!(read(json!(3), true), Ok(vec![3, 3]));
        assert_eq!(read(json!([1, null]), true), Ok(vec![1, 0]));
        assert_eq!(read(json!([1]), true).unwrap_err().param.as_deref(), Some("body.top_logprobs_num"));
        assert_eq!(read(json!([1, 2]), false).unwrap_err().code, "invalid_type");
        assert_eq!(read(json!(21), true).unwrap_err().param.as_deref(), Some("top_logprobs_num"));
        let listed = |ids: Value| {
            let mut fields = Fields::of("body", json!({"return_logprob": true, "token_ids_logprob": ids})).unwrap();
            let all = Logprobs::read(&mut fields, Each { prompts: 2, batch: true }, 100)?;
            Ok::<_, ApiError>(all.into_iter().map(|wanted| wanted.unwrap().listed).collect::<Vec<_>>())
        };
        assert_eq!(listed(json!([1, 2])), Ok(vec![vec![1, 2], vec![1, 2]]));
        assert_eq!(listed(json!([[1], [2, 3]])), Ok(vec![vec![1], vec![2, 3]]));
        assert!(listed(json!([100])).is_err());
    }

    #[test]
    fn the_first_token_that_is_told_of_has_no_value() {
        let start = |start| Logprobs { start, top: 0, listed: vec![] };
        assert_eq!(start(-1).first_scored(5), None);
        assert_eq!(start(0).first_scored(5), Some(1));
        assert_eq!((start(3).first_scored(5), start(4).first_scored(5)), (Some(4), None));
    }
}
