//! One answer in the making: committed tokens in, text out.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::error::ApiError;
use crate::engine::RequestStream;
use crate::request::{Committed, Event, FinishReason, Ledger, LedgerError, RequestError, Score, TokenId, Told};
use crate::text::{Detokenizer, ModelText, StopMatcher};

/// A committed token with its part of the text.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub committed: Committed,
    /// Texts of all entries together are the text of the answer.
    pub text: String,
    /// Characters before it in the answer.
    pub offset: usize,
    /// When it was committed.
    pub at: Instant,
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// A token that ends answers at its model.
    EndOfSequence,
    StopToken(TokenId),
    StopString(String),
    /// It has the form asked for, and nothing may follow.
    Complete,
    Length,
    /// Somebody had it aborted.
    Aborted,
}

/// The end of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct End {
    pub reason: Reason,
    /// Hand-offs between models. After a stop string, which is found before the models hear of it: the
    /// changes of model between tokens, at least.
    pub handoffs: u32,
    /// Tokens of the prompt whose K/V the first model that computed it had already.
    pub cached_tokens: u32,
}

/// What became known at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// Of the prompt's tokens, all that were asked for: in the first piece.
    pub scores: Vec<Score>,
    pub text: String,
    /// Tokens whose text is now out completely.
    pub entries: Vec<Entry>,
    pub end: Option<End>,
}

/// Why an answer failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceError {
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("the models disagree: {0}")]
    Ledger(#[from] LedgerError),
    #[error("the request ended without a result")]
    Lost,
    /// The request has taken too long; what its client is told.
    #[error("{}", .0.message)]
    Deadline(ApiError),
}

/// How text ends, for all choices of a request.
#[derive(Clone, Debug)]
pub struct Ending {
    /// Tokens that may end the answer: end tokens of the route's models.
    pub eos: Arc<[TokenId]>,
    pub stop_tokens: Vec<TokenId>,
    pub stops: Vec<String>,
    pub include_stop: bool,
    /// Stop strings do not count before this many tokens.
    pub min_tokens: u32,
    /// Special tokens are part of the text.
    pub keep_special: bool,
}

/// Follows one request of the engine. Dropping it cancels the request.
pub struct Choice {
    request: RequestStream,
    text: Arc<ModelText>,
    ending: Ending,
    ledger: Ledger,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Entries whose text is not out completely, each with the byte position of its end.
    queue: VecDeque<(Entry, usize)>,
    /// A token that ends the answer if nothing follows it, and when it was committed.
    last: Option<(Committed, Instant)>,
    /// Tokens, bytes and characters so far.
    tokens: u32,
    bytes: usize,
    chars: usize,
    /// Bytes that were given out or are in `out`.
    emitted: usize,
    out: String,
    cached_tokens: u32,
    /// Tokens of the prompt to be scored before anything else comes, by position.
    to_score: Range<u32>,
    scores: Vec<Score>,
    finished: Option<(FinishReason, u32)>,
}

impl Choice {
    /// The answer to `prompt`.
    pub fn new(request: RequestStream, prompt: &[TokenId], text: Arc<ModelText>, ending: Ending) -> Self {
        Self {
            request,
            stops: StopMatcher::new(ending.stops.clone(), ending.include_stop),
            detokenizer: Detokenizer::keeping(ending.keep_special).after(&text.tokenizer, prompt),
            text,
            ending,
            ledger: Ledger::default(),
            queue: VecDeque::new(),
            last: None,
            tokens: 0,
            bytes: 0,
            chars: 0,
            emitted: 0,
            out: String::new(),
            cached_tokens: 0,
            to_score: 0..0,
            scores: Vec::new(),
            finished: None,
        }
    }

    /// The same where tokens of the prompt are scored.
    pub fn scoring(self, positions: Range<u32>) -> Self {
        Self { to_score: positions, ..self }
    }

    /// The next piece. The one with an `end` is the last.
    pub async fn next(&mut self) -> Result<Piece, ChoiceError> {
        loop {
            let Told { at, event } = self.request.events.recv().await.ok_or(ChoiceError::Lost)?;
            match event {
                Event::Failed(error) => return Err(error.into()),
                Event::PromptCached { tokens } => self.cached_tokens = tokens,
                Event::PromptScored { start, scores } => self.score(start, scores),
                Event::Finished { reason, handoffs } => self.finished = Some((reason, handoffs)),
                Event::Committed { start, tokens } => {
                    let new = self.ledger.enter(start, tokens)?.to_vec();
                    for token in new {
                        if let Some(reason) = self.commit(token, at) {
                            self.request.stopped();
                            return Ok(self.end(reason, self.changes_of_model()));
                        }
                    }
                }
            }
            let unscored = self.scores.len() < self.to_score.len();
            if unscored && (self.finished.is_some() || !self.ledger.tokens().is_empty()) {
                return Err(ChoiceError::Lost);
            }
            if let Some((reason, handoffs)) = self.finished
                && !self.ledger.has_gap()
            {
                let reason = self.finish(reason);
                return Ok(self.end(reason, handoffs));
            }
            let piece = self.piece(None);
            if piece != Piece::default() {
                return Ok(piece);
            }
        }
    }

    /// Enter scores; those that are known already count once.
    fn score(&mut self, start: u32, scores: Vec<Score>) {
        let known = self.to_score.start + self.scores.len() as u32;
        let left = self.to_score.end.saturating_sub(known) as usize;
        if let Some(said) = known.checked_sub(start) {
            self.scores.extend(scores.into_iter().skip(said as usize).take(left));
        }
    }

    /// End here, with what is held back.
    pub fn abort(&mut self) -> Piece {
        let reason = self.flush().unwrap_or(Reason::Aborted);
        self.end(reason, self.changes_of_model())
    }

    fn commit(&mut self, token: Committed, at: Instant) -> Option<Reason> {
        if let Some((held, at)) = self.last.take()
            && let Some(reason) = self.feed(held, at)
        {
            return Some(reason);
        }
        if self.ending.eos.contains(&token.token) || self.ending.stop_tokens.contains(&token.token) {
            self.last = Some((token, at));
            return None;
        }
        self.feed(token, at)
    }

    fn feed(&mut self, token: Committed, at: Instant) -> Option<Reason> {
        let text = self.detokenizer.push(&self.text.tokenizer, token.token);
        self.tokens += 1;
        self.enqueue(token, at, &text);
        self.emit(&text)
    }

    fn enqueue(&mut self, committed: Committed, at: Instant, text: &str) {
        let entry = Entry { committed, text: text.to_owned(), offset: self.chars, at };
        self.grow(text);
        self.queue.push_back((entry, self.bytes));
    }

    fn grow(&mut self, text: &str) {
        self.bytes += text.len();
        self.chars += text.chars().count();
    }

    /// Pass text on to the stop strings.
    fn emit(&mut self, text: &str) -> Option<Reason> {
        match self.stops.push(text, self.tokens >= self.ending.min_tokens) {
            Ok(text) => {
                self.put(&text);
                None
            }
            Err(stopped) => {
                self.put(&stopped.text);
                self.truncate();
                Some(Reason::StopString(self.stops.stop(stopped.stop).unwrap_or_default().to_owned()))
            }
        }
    }

    fn put(&mut self, text: &str) {
        self.emitted += text.len();
        self.out.push_str(text);
    }

    /// The text ends at `emitted`: cut the entries' texts there.
    fn truncate(&mut self) {
        for (entry, end) in &mut self.queue {
            let start = *end - entry.text.len();
            entry.text.truncate(self.emitted.saturating_sub(start));
            *end = start + entry.text.len();
        }
        self.bytes = self.emitted;
        self.detokenizer = Detokenizer::default();
    }

    fn finish(&mut self, reason: FinishReason) -> Reason {
        let ended_by = match reason {
            FinishReason::Stop(token) => Some(token),
            FinishReason::Complete | FinishReason::Length => None,
        };
        let last = self.last.take();
        let by_stop_token = ended_by.is_some_and(|token| self.ending.stop_tokens.contains(&token));
        let silent = ended_by.is_some() && !(by_stop_token && self.ending.include_stop);
        let mut stopped = None;
        let mut closing = None;
        match last {
            Some(token) if silent => closing = Some(token),
            Some((token, at)) => stopped = self.feed(token, at),
            None => {}
        }
        if stopped.is_none() {
            stopped = self.flush();
        }
        if let Some((token, at)) = closing {
            self.tokens += 1;
            self.enqueue(token, at, "");
        }
        match (stopped, ended_by) {
            (Some(reason), _) => reason,
            (None, Some(token)) if by_stop_token => Reason::StopToken(token),
            (None, Some(_)) => Reason::EndOfSequence,
            (None, None) if reason == FinishReason::Complete => Reason::Complete,
            (None, None) => Reason::Length,
        }
    }

    /// Bring out what was held back: a character that was never completed, and what did not become a
    /// stop string.
    fn flush(&mut self) -> Option<Reason> {
        let rest = self.detokenizer.flush();
        if let Some((entry, end)) = self.queue.back_mut() {
            entry.text.push_str(&rest);
            *end += rest.len();
        }
        self.grow(&rest);
        let stopped = self.emit(&rest);
        if stopped.is_none() {
            let held = self.stops.flush();
            self.put(&held);
        }
        stopped
    }

    fn end(&mut self, reason: Reason, handoffs: u32) -> Piece {
        self.piece(Some(End { reason, handoffs, cached_tokens: self.cached_tokens }))
    }

    fn piece(&mut self, end: Option<End>) -> Piece {
        let mut entries = Vec::new();
        while let Some((_, at)) = self.queue.front() {
            // A token at an unfinished character stays: it takes the replacement if nothing completes it.
            let waits = self.queue.len() == 1 && self.detokenizer.is_partial();
            if end.is_none() && (*at > self.emitted || waits) {
                break;
            }
            entries.extend(self.queue.pop_front().map(|(entry, _)| entry));
        }
        let mut scores = Vec::new();
        if self.scores.len() == self.to_score.len() {
            self.to_score = 0..0;
            scores = std::mem::take(&mut self.scores);
        }
        Piece { scores, text: std::mem::take(&mut self.out), entries, end }
    }

    fn changes_of_model(&self) -> u32 {
        let tokens = self.ledger.tokens().iter().take(self.tokens as usize);
        let models: Vec<_> = tokens.map(|token| token.model).collect();
        models.windows(2).filter(|pair| pair[0] != pair[1]).count() as u32
    }
}
