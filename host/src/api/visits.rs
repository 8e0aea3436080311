//! Which models wrote the answers of a request, and when: a visit is a run of tokens from one model. Pure.

use std::sync::Arc;
use std::time::Instant;

use crate::request::ModelId;

/// Visits of a request that are kept, over all its choices.
pub const MOST_VISITS: usize = 1000;

/// Consecutive tokens of one choice that one model wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    pub choice: usize,
    pub model: ModelId,
    /// Place of its first token in the answer.
    pub first: u32,
    pub tokens: u32,
    /// Another model had the request before.
    pub handoff: bool,
    /// When the token before its first was committed; for a choice's first visit, when its first step began.
    pub began: Instant,
    /// When its last token was committed.
    pub ended: Instant,
}

/// Gathered token by token.
#[derive(Clone, Debug, PartialEq)]
pub struct Visits {
    /// Of all models, by model.
    pub names: Arc<[String]>,
    /// In the order of their first tokens.
    pub kept: Vec<Visit>,
    /// Visits beyond those that are kept.
    pub left_out: u64,
    /// The model that gets new requests.
    entry: ModelId,
    most: usize,
    /// By choice; `None` before its first token.
    choices: Vec<Option<Latest>>,
}

/// Where a choice is.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Latest {
    model: ModelId,
    /// Tokens so far.
    tokens: u32,
    at: Instant,
    /// Its visit, if that is kept.
    visit: Option<usize>,
}

impl Visits {
    pub fn new(names: Arc<[String]>, entry: ModelId) -> Self {
        Self { names, kept: Vec::new(), left_out: 0, entry, most: MOST_VISITS, choices: Vec::new() }
    }

    /// The next token of `choice` was committed by `model`. `began` is asked for before a choice's first.
    pub fn token(&mut self, choice: usize, model: ModelId, at: Instant, began: impl FnOnce() -> Option<Instant>) {
        if self.choices.len() <= choice {
            self.choices.resize(choice + 1, None);
        }
        let latest = match self.choices[choice] {
            Some(latest) if latest.model == model => Latest { tokens: latest.tokens + 1, at, ..latest },
            before => {
                let began = before.map_or_else(|| began().unwrap_or(at), |before| before.at);
                let first = before.map_or(0, |before| before.tokens);
                let handoff = before.map_or(self.entry, |before| before.model) != model;
                let visit = (self.kept.len() < self.most).then_some(self.kept.len());
                match visit {
                    Some(_) => self.kept.push(Visit { choice, model, first, tokens: 0, handoff, began, ended: at }),
                    None => self.left_out += 1,
                }
                Latest { model, tokens: first + 1, at, visit }
            }
        };
        if let Some(visit) = latest.visit.and_then(|visit| self.kept.get_mut(visit)) {
            visit.tokens += 1;
            visit.ended = at;
        }
        self.choices[choice] = Some(latest);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn visits() -> Visits {
        Visits::new(["small".to_owned(), "large".to_owned()].into(), ModelId(0))
    }

    #[test]
    fn runs_of_tokens_by_choice() {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let mut visits = visits();
        // Two choices in turns; the second is handed over before it has a token.
        for (choice, model, ms) in [(0, 0, 5), (1, 1, 6), (0, 0, 7), (0, 1, 9), (1, 1, 10), (0, 0, 12)] {
            visits.token(choice, ModelId(model), at(ms), || Some(at(choice as u64 + 1)));
        }
        let visit = |choice, model, first, tokens, handoff, began, ended| Visit {
            choice,
            model: ModelId(model),
            first,
            tokens,
            handoff,
            began: at(began),
            ended: at(ended),
        };
        let expected = [
            visit(0, 0, 0, 2, false, 1, 7),
            visit(1, 1, 0, 2, true, 2, 10),
            visit(0, 1, 2, 1, true, 7, 9),
            visit(0, 0, 3, 1, true, 9, 12),
        ];
        assert_eq!((visits.kept, visits.left_out), (expected.to_vec(), 0));
    }

    #[test]
    fn those_beyond_the_most_are_counted() {
        let now = Instant::now();
        let mut visits = Visits { most: 2, ..visits() };
        for (choice, model) in [(0, 0), (0, 1), (0, 0), (0, 0), (0, 1), (1, 0), (0, 1)] {
            visits.token(choice, ModelId(model), now, || None);
        }
        assert_eq!((visits.kept.len(), visits.left_out), (2, 3));
        assert_eq!(visits.kept.iter().map(|visit| visit.tokens).collect::<Vec<_>>(), [1, 1]);
    }
}
