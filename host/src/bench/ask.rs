//! What a load asks for, and what came of it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::request::{RequestId, TokenId};

/// What an answer is to follow.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Tokens(Vec<TokenId>),
    /// Text as it is, without a chat template.
    Text(String),
    /// Messages of a conversation, as OpenAI's API has them.
    Messages(Vec<Value>),
}

/// One request, or one turn of a session.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// In a session after the first turn: what follows the last answer.
    pub prompt: Prompt,
    /// Tokens of the answer; end tokens do not end it.
    pub output_len: u32,
    pub seed: u64,
    /// Line of the data set, counted from 1.
    pub line: Option<usize>,
}

/// What was answered, to go on from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    pub text: String,
    /// Empty where the target tells text only.
    pub tokens: Vec<TokenId>,
}

impl Prompt {
    /// The conversation after `reply` to it, and then `next`, which is of the same kind.
    pub fn followed(self, reply: Reply, next: Self) -> Self {
        match (self, next) {
            (Self::Tokens(said), Self::Tokens(next)) => Self::Tokens([said, reply.tokens, next].concat()),
            (Self::Text(said), Self::Text(next)) => Self::Text(said + &reply.text + &next),
            (Self::Messages(mut said), Self::Messages(next)) => {
                said.push(json!({"role": "assistant", "content": reply.text}));
                said.extend(next);
                Self::Messages(said)
            }
            // The reader of data sets refuses sessions of several kinds.
            (_, next) => next,
        }
    }
}

/// A request and what came of it. In process it ends with its last commit, over HTTP with the chunk that has
/// the reason for its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Number of its session, and of the turn in it.
    pub session: usize,
    pub turn: usize,
    /// In process: the engine's name for it.
    pub id: Option<RequestId>,
    /// When it was to be sent, and when it was.
    pub due: Instant,
    pub submitted: Instant,
    pub ended: Instant,
    pub prompt_tokens: u64,
    /// Those of them that a prefix cache had; `None` where the target does not tell.
    pub cached_tokens: Option<u64>,
    /// Tokens of the answer, as the target counts them.
    pub tokens: u64,
    /// When something came, and with how many tokens; over HTTP each chunk with text counts as one.
    pub arrivals: Vec<(Instant, u64)>,
    /// How many tokens each model wrote; empty where the target does not tell.
    pub by_model: BTreeMap<String, u64>,
    pub handoffs: Option<u64>,
    /// Broken off when the time of the load was over: what came until then counts, and it has no end.
    pub cut: bool,
    /// Why it failed. What came before that counts for nothing.
    pub failure: Option<String>,
}

/// When a load is broken off, if ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Until(pub Option<Instant>);

impl Until {
    /// Whether the time is over.
    pub fn over(self) -> bool {
        self.0.is_some_and(|until| until <= Instant::now())
    }

    /// `None` where `work` does not end in time.
    pub async fn limit<T>(self, work: impl Future<Output = T>) -> Option<T> {
        match self.0 {
            Some(until) => tokio::time::timeout_at(until.into(), work).await.ok(),
            None => Some(work.await),
        }
    }
}

/// The times of one answer, in ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    pub ttft: f64,
    /// `None` for answers of one token.
    pub tpot: Option<f64>,
    /// `None` for one that was broken off.
    pub e2e: Option<f64>,
}

impl Answer {
    /// An answer of which nothing is known yet.
    pub fn new(submitted: Instant) -> Self {
        Self {
            session: 0,
            turn: 0,
            id: None,
            due: submitted,
            submitted,
            ended: submitted,
            prompt_tokens: 0,
            cached_tokens: None,
            tokens: 0,
            arrivals: Vec::new(),
            by_model: BTreeMap::new(),
            handoffs: None,
            cut: false,
            failure: None,
        }
    }

    /// It is broken off now.
    pub fn broken_off(self) -> Self {
        let tokens = self.arrivals.iter().map(|(_, tokens)| tokens).sum();
        Self { cut: true, ended: Instant::now(), tokens, ..self }
    }

    /// It failed now.
    pub fn failed(self, failure: impl std::fmt::Display) -> Self {
        Self { ended: Instant::now(), failure: Some(failure.to_string()), ..self }
    }

    /// `None` for one that failed, or was broken off before its first token.
    pub fn times(&self) -> Option<Times> {
        let (first, _) = self.arrivals.first().filter(|_| self.failure.is_none())?;
        let after_first = self.tokens.saturating_sub(1);
        // What was under way when it was broken off belongs to no token.
        let last = self.arrivals.last().filter(|_| self.cut).map_or(self.ended, |(last, _)| *last);
        Some(Times {
            ttft: ms(*first - self.submitted),
            tpot: (after_first > 0).then(|| ms(last - *first) / after_first as f64),
            e2e: (!self.cut).then(|| ms(self.ended - self.submitted)),
        })
    }
}

/// Milliseconds.
pub fn ms(duration: Duration) -> f64 {
    1e3 * duration.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations_grow() {
        let reply = Reply { text: " b".into(), tokens: vec![3, 4] };
        let text = Prompt::Text("a".into()).followed(reply.clone(), Prompt::Text(" c".into()));
        assert_eq!(text, Prompt::Text("a b c".into()));
        let tokens = Prompt::Tokens(vec![1, 2]).followed(reply.clone(), Prompt::Tokens(vec![5]));
        assert_eq!(tokens, Prompt::Tokens(vec![1, 2, 3, 4, 5]));
        let user = |text: &str| json!({"role": "user", "content": text});
        let messages = Prompt::Messages(vec![user("a")]).followed(reply, Prompt::Messages(vec![user("c")]));
        let assistant = json!({"role": "assistant", "content": " b"});
        assert_eq!(messages, Prompt::Messages(vec![user("a"), assistant, user("c")]));
    }

    #[test]
    fn times_of_an_answer() {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let answer = Answer { ended: at(60), tokens: 5, arrivals: vec![(at(20), 1), (at(50), 3)], ..Answer::new(zero) };
        assert_eq!(answer.times(), Some(Times { ttft: 20.0, tpot: Some(10.0), e2e: Some(60.0) }));
        let cut = Answer { cut: true, ..answer.clone() };
        assert_eq!(cut.times(), Some(Times { ttft: 20.0, tpot: Some(7.5), e2e: None }));
        assert_eq!(Answer { tokens: 1, ..answer.clone() }.times().and_then(|times| times.tpot), None);
        assert_eq!(answer.failed("gone").times(), None);
    }
}
