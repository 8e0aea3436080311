//! Closed-loop load: a fixed number of requests is always under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokenrouter_plugin_api::random;
use tokio::task::JoinSet;

use crate::engine::{Engine, RequestStream, SubmitError};
use crate::request::{Event, ModelId, NewRequest, RequestError, RouteId, SamplingParams, TokenId};

/// Stream of [`random::uniform`] for the tokens of prompts.
const STREAM: u64 = 0x6265;
/// How often the progress is told.
const TICK: Duration = Duration::from_millis(200);

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Load {
    pub route: RouteId,
    /// Requests under way at once.
    pub requests: usize,
    /// Requests in all.
    pub total: usize,
    /// Tokens of each prompt, drawn from the ids below `vocab_size`.
    pub input_len: usize,
    pub vocab_size: u32,
    /// Tokens of each answer.
    pub output_len: u32,
    /// Request `i` is drawn and sampled with `seed + i`.
    pub seed: u64,
}

/// One request and when its tokens came.
#[derive(Clone, Debug)]
pub struct Answer {
    pub submitted: Instant,
    pub tokens: Vec<(Instant, ModelId)>,
    pub handoffs: u32,
}

/// Why a load could not be carried.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("{0}")]
    Refused(#[from] SubmitError),
    #[error("a request failed: {0}")]
    Failed(#[from] RequestError),
    #[error("the engine stopped")]
    Stopped,
}

impl Load {
    /// Request number `index`. It has exactly `output_len` tokens.
    pub fn request(&self, index: usize) -> NewRequest {
        let seed = self.seed.wrapping_add(index as u64);
        let vocab = f64::from(self.vocab_size);
        let token = |at: usize| (random::uniform(seed, at as u64, STREAM) * vocab) as TokenId;
        NewRequest {
            route: self.route,
            prompt: (0..self.input_len).map(token).collect(),
            max_tokens: self.output_len,
            sampling: SamplingParams { seed, ignore_eos: true, ..SamplingParams::greedy() },
            return_signals: false,
            cache_salt: None,
        }
    }

    /// Put the load on `engine`. `progress` is told the number of tokens so far. Answers in the order of
    /// their requests.
    pub async fn run(&self, engine: &Engine, mut progress: impl FnMut(u64)) -> Result<Vec<Answer>, LoadError> {
        // Made beforehand, so that nothing but the engine is measured.
        let mut requests = (0..self.total).map(|index| self.request(index)).collect::<Vec<_>>().into_iter().enumerate();
        let written = Arc::new(AtomicU64::new(0));
        let mut under_way: JoinSet<Result<_, LoadError>> = JoinSet::new();
        let mut answers: Vec<(usize, Answer)> = Vec::with_capacity(self.total);
        let mut ticks = tokio::time::interval(TICK);
        loop {
            while under_way.len() < self.requests
                && let Some((index, request)) = requests.next()
            {
                let (submitted, room) = (Instant::now(), request.max_tokens as usize);
                let stream = engine.submit(request)?;
                let written = written.clone();
                under_way.spawn(async move { Ok((index, follow(stream, submitted, room, &written).await?)) });
            }
            tokio::select! {
                ended = under_way.join_next() => match ended {
                    Some(Ok(answer)) => answers.push(answer?),
                    Some(Err(_)) => return Err(LoadError::Stopped),
                    None => break,
                },
                _ = ticks.tick() => progress(written.load(Ordering::Relaxed)),
            }
        }
        answers.sort_by_key(|(index, _)| *index);
        Ok(answers.into_iter().map(|(_, answer)| answer).collect())
    }
}

async fn follow(
    mut stream: RequestStream,
    submitted: Instant,
    room: usize,
    written: &AtomicU64,
) -> Result<Answer, LoadError> {
    let mut tokens = Vec::with_capacity(room);
    loop {
        match stream.events.recv().await {
            Some(Event::Committed { tokens: committed, .. }) => {
                let now = Instant::now();
                written.fetch_add(committed.len() as u64, Ordering::Relaxed);
                tokens.extend(committed.iter().map(|token| (now, token.model)));
            }
            Some(Event::PromptCached { .. }) => {}
            Some(Event::Finished { handoffs, .. }) => return Ok(Answer { submitted, tokens, handoffs }),
            Some(Event::Failed(error)) => return Err(error.into()),
            None => return Err(LoadError::Stopped),
        }
    }
}
