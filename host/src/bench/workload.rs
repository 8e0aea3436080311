//! What is asked in a load: lengths, random prompts, and the requests of a data set.

use std::fmt;
use std::str::FromStr;

use tokenrouter_plugin_api::random;

use super::ask::{Ask, Prompt};
use super::dataset::{Content, Session};
use crate::request::TokenId;

/// Streams of [`random::uniform`]: tokens of prompts, of the shared prefix, and lengths.
const TOKENS: u64 = 0x6265;
const PREFIX: u64 = 0x6266;
const INPUT_LEN: u64 = 0x6267;
const OUTPUT_LEN: u64 = 0x6268;

/// A number of tokens, drawn evenly from `base - spread` to `base + spread`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length {
    base: u32,
    /// Less than `base`.
    spread: u32,
}

impl Length {
    fn draw(self, seed: u64, stream: u64) -> u32 {
        let width = 2.0 * f64::from(self.spread) + 1.0;
        self.base - self.spread + (random::uniform(seed, 0, stream) * width) as u32
    }
}

impl FromStr for Length {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (base, spread) = text.split_once(':').unwrap_or((text, "0"));
        let number = |text: &str| text.parse().ok().filter(|number: &u32| *number <= 1 << 30);
        match (number(base), number(spread)) {
            (Some(base), Some(spread)) if spread < base => Ok(Self { base, spread }),
            (Some(_), Some(_)) => Err("the shortest length would be 0; write L or L:SPREAD with SPREAD below L".into()),
            _ => Err("must be L or L:SPREAD, in tokens, for example 1024 or 1024:256".into()),
        }
    }
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.spread {
            0 => write!(f, "{}", self.base),
            spread => write!(f, "{}:{spread}", self.base),
        }
    }
}

/// What is needed to make a request and was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Of the data set.
    pub line: Option<usize>,
    pub what: &'static str,
}

const OUTPUT_LEN_MISSING: &str =
    "the length of the answer is missing; give --output-len, or `output_len` in the data set";
const VOCAB_SIZE_MISSING: &str = "--vocab-size is missing: random prompts are token ids below it, and the server does not \
                                  tell it; give the model's, or a --dataset with `prompt` or `messages`";

/// How requests are made.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Of the random prompts.
    pub input: Length,
    /// `None`: the data set gives it.
    pub output: Option<Length>,
    /// Tokens that random prompts share, before their own.
    pub prefix: u32,
    /// Different prefixes of a load, which its requests have in turns and no other load has. `None`: all loads have the
    /// same one, the warm-up, too.
    pub prefixes: Option<u32>,
    /// Turns of a session of random prompts; each has new tokens behind the answers so far. At least 1.
    pub turns: u32,
    /// Random tokens are below it. `None`: there are none.
    pub vocab_size: Option<u32>,
    /// Request `i` is drawn and sampled with `seed + i`.
    pub seed: u64,
    /// Empty: every prompt is random.
    pub sessions: Vec<Session>,
}

impl Workload {
    /// How many sessions the data set has.
    pub fn len(&self) -> Option<usize> {
        Some(self.sessions.len()).filter(|len| *len > 0)
    }

    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// Sessions number `first..first + count`, each with its turns. A data set is begun anew where it ends.
    pub fn sessions(&self, first: u64, count: usize) -> Result<Vec<Vec<Ask>>, Missing> {
        (0..count as u64).map(|index| self.session(first, index)).collect()
    }

    /// Number `index` of those from `first` on.
    fn session(&self, first: u64, index: u64) -> Result<Vec<Ask>, Missing> {
        let seed = self.seed.wrapping_add(first + index);
        // No two loads have a `first` below the number of the other's last request.
        let prefix = self.prefixes.map_or(0, |prefixes| 1 + first + index % u64::from(prefixes.max(1)));
        let Some(session) = self.sessions.get(index as usize % self.sessions.len().max(1)) else {
            let turn = |turn: u32| {
                let seed = turn_seed(seed, turn as usize);
                let length = self.input.draw(seed, INPUT_LEN);
                self.ask(self.random(seed, length, (turn == 0).then_some(prefix))?, None, seed, None)
            };
            return (0..self.turns.max(1)).map(turn).collect();
        };
        let turn = |(turn, asked): (usize, &super::dataset::Turn)| {
            let seed = turn_seed(seed, turn);
            let prompt = match &asked.content {
                Content::Length(length) => self.random(seed, *length, (turn == 0).then_some(prefix))?,
                Content::Given(prompt) => prompt.clone(),
            };
            self.ask(prompt, asked.output_len, seed, Some(asked.line))
        };
        session.turns.iter().enumerate().map(turn).collect()
    }

    fn ask(&self, prompt: Prompt, given: Option<u32>, seed: u64, line: Option<usize>) -> Result<Ask, Missing> {
        let drawn = self.output.map(|output| output.draw(seed, OUTPUT_LEN));
        let output_len = given.or(drawn).ok_or(Missing { line, what: OUTPUT_LEN_MISSING })?;
        Ok(Ask { prompt, output_len, seed, line })
    }

    /// `prefix`: the number of the one that goes before.
    fn random(&self, seed: u64, length: u32, prefix: Option<u64>) -> Result<Prompt, Missing> {
        let size = self.vocab_size.ok_or(Missing { line: None, what: VOCAB_SIZE_MISSING })?;
        let token =
            |seed, stream| move |at: u32| (random::uniform(seed, u64::from(at), stream) * f64::from(size)) as TokenId;
        let of_prefix = token(self.seed.wrapping_add(prefix.unwrap_or(0)), PREFIX);
        let shared = (0..prefix.map_or(0, |_| self.prefix)).map(of_prefix);
        Ok(Prompt::Tokens(shared.chain((0..length).map(token(seed, TOKENS))).collect()))
    }
}

/// Turns of one session are drawn apart.
fn turn_seed(seed: u64, turn: usize) -> u64 {
    seed.wrapping_add((turn as u64) << 32)
}

#[cfg(test)]
mod tests {
    use super::super::dataset;
    use super::*;

    fn workload(data: &str) -> Workload {
        let sessions = if data.is_empty() { Vec::new() } else { dataset::parse(data.as_bytes(), "d").unwrap() };
        Workload {
            input: "20:5".parse().unwrap(),
            output: Some("8:2".parse().unwrap()),
            prefix: 3,
            prefixes: None,
            turns: 1,
            vocab_size: Some(100),
            seed: 9,
            sessions,
        }
    }

    #[test]
    fn random_requests() {
        let asks = workload("").sessions(0, 500).unwrap().concat();
        let tokens = |ask: &Ask| match &ask.prompt {
            Prompt::Tokens(tokens) => tokens.clone(),
            other => panic!("{other:?}"),
        };
        let first = tokens(&asks[0]);
        let (mut inputs, mut outputs) = ([0; 50], [0; 20]);
        for ask in &asks {
            let tokens = tokens(ask);
            assert!(tokens.starts_with(&first[..3]) && tokens.iter().all(|token| *token < 100));
            inputs[tokens.len()] += 1;
            outputs[ask.output_len as usize] += 1;
        }
        // Every length within the spread comes, and no other.
        assert!(inputs.iter().enumerate().all(|(length, count)| (*count > 0) == (18..=28).contains(&length)));
        assert!(outputs.iter().enumerate().all(|(length, count)| (*count > 0) == (6..=10).contains(&length)));
        assert_ne!(first[3..], tokens(&asks[1])[3..]);
        assert_eq!(workload("").sessions(7, 3).unwrap().concat(), asks[7..10]);
    }

    #[test]
    fn prefixes_are_of_one_load() {
        let workload = Workload { prefixes: Some(2), turns: 2, ..workload("") };
        let heads = |first, count| -> Vec<Vec<u32>> {
            let sessions = workload.sessions(first, count).unwrap();
            let head = |turns: &Vec<Ask>| match (&turns[0].prompt, turns.len()) {
                (Prompt::Tokens(tokens), 2) => tokens[..3].to_vec(),
                other => panic!("{other:?}"),
            };
            sessions.iter().map(head).collect()
        };
        let (warm_up, load) = (heads(0, 1), heads(1, 4));
        assert!(load[0] == load[2] && load[1] == load[3] && load[0] != load[1], "{load:?}");
        assert!(!load.contains(&warm_up[0]) && heads(5, 2).iter().all(|head| !load.contains(head)));
        // Later turns have tokens of their own, and no prefix.
        let [first, second] = workload.sessions(1, 1).unwrap()[0].clone().try_into().unwrap();
        let (Prompt::Tokens(first), Prompt::Tokens(second)) = (first.prompt, second.prompt) else { panic!() };
        assert!(second.len() <= 25 && first[3..] != second[..] && !second.starts_with(&first[..3]));
    }

    #[test]
    fn data_sets_are_begun_anew() {
        let data = "{\"prompt\": \"a\", \"output_len\": 3}\n{\"prompt_len\": 4, \"session\": 1}\n{\"prompt_len\": 2, \
                    \"session\": 1}\n";
        let workload = workload(data);
        let sessions = workload.sessions(0, 3).unwrap();
        assert_eq!((workload.len(), sessions.iter().map(Vec::len).collect::<Vec<_>>()), (Some(2), vec![1, 2, 1]));
        assert_eq!((&sessions[0][0].prompt, sessions[0][0].output_len), (&Prompt::Text("a".into()), 3));
        assert_eq!((sessions[0][0].line, sessions[1][1].line), (Some(1), Some(3)));
        let lengths = sessions[1].iter().map(|ask| match &ask.prompt {
            Prompt::Tokens(tokens) => tokens.len(),
            other => panic!("{other:?}"),
        });
        // The prefix is before the first turn only.
        assert_eq!(lengths.collect::<Vec<_>>(), [7, 2]);
    }

    #[test]
    fn what_is_missing() {
        let error = |workload: Workload| workload.sessions(0, 1).unwrap_err();
        let missing = |line, what| Missing { line, what };
        assert_eq!(error(Workload { output: None, ..workload("") }), missing(None, OUTPUT_LEN_MISSING));
        assert_eq!(error(Workload { vocab_size: None, ..workload("") }), missing(None, VOCAB_SIZE_MISSING));
        let without = Workload { output: None, ..workload("\n{\"prompt\": \"a\"}") };
        assert_eq!(error(without), missing(Some(2), OUTPUT_LEN_MISSING));
    }

    #[test]
    fn lengths_as_written() {
        for text in ["7", "1024:256"] {
            assert_eq!(text.parse::<Length>().unwrap().to_string(), text);
        }
        for text in ["", "0", "5:5", "x", "-1", "5:", "5:-1", "9999999999"] {
            assert!(text.parse::<Length>().is_err(), "{text}");
        }
    }
}
