//! All choices of one HTTP request at once.

use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::choice::{Choice, ChoiceError, End, Ending, Entry, Piece, Reason};
use super::error::ApiError;
use super::front::{Deadline, Slot, over};
use super::params::Generation;
use super::running::Named;
use super::seen::Seen;
use super::state::{AppState, Route};
use crate::constraint::Constraint;
use crate::request::{NewRequest, SamplingParams, Score, TokenId};

/// Most choices of one HTTP request, over all its prompts.
const MAX_CHOICES: usize = 256;
/// Pieces that wait for a slow client.
const BUFFER: usize = 64;

/// What a request asks for besides the shared fields.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Tokens if the request sets no limit; `None`: what the context leaves.
    pub default_max_tokens: Option<u32>,
    pub return_signals: bool,
    /// Field with the prompt, for errors.
    pub prompt_field: &'static str,
}

/// One prompt with what is asked about it.
#[derive(Clone, Debug)]
pub struct Ask {
    pub prompt: Vec<TokenId>,
    pub generation: Arc<Generation>,
    /// By which it can be aborted.
    pub names: Vec<String>,
}

/// Refuse what can never be under way at once. Before anything that costs more than reading.
pub fn check_choices(state: &AppState, prompts: usize, n: usize, prompt_field: &str) -> Result<(), ApiError> {
    let per_client = state.front.limits.requests_per_client.unwrap_or(MAX_CHOICES);
    let most = MAX_CHOICES.min(state.max_requests).min(per_client);
    if prompts * n <= most {
        return Ok(());
    }
    let message = format!("{prompts} prompts with n = {n} are more than {most} choices.");
    Err(ApiError::value(prompt_field, message))
}

/// Choices being generated. Dropping it cancels all of them.
pub struct Run {
    pieces: mpsc::Receiver<(usize, Result<Piece, ChoiceError>)>,
    pub choices: usize,
    /// Tokens of the prompts, each counted once.
    pub prompt_tokens: usize,
    seen: Seen,
    _named: Vec<Named>,
    deadline: Option<Deadline>,
}

/// A complete answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub text: String,
    pub entries: Vec<Entry>,
    /// Of the prompt's tokens, as far as they were asked for.
    pub scores: Vec<Score>,
    pub end: Option<End>,
}

impl Run {
    /// Hand all choices to the engine: those of the first prompt, then those of the next one. Either all
    /// are accepted or none runs. All prompts have as many choices. Where not all requests can run at once, wait for this
    /// one's turn.
    pub async fn start(state: &AppState, route: &Route, asks: Vec<Ask>, options: Options) -> Result<Self, ApiError> {
        let n = asks.first().map_or(1, |ask| ask.generation.n);
        let choices = asks.len() * n;
        check_choices(state, asks.len(), n, options.prompt_field)?;
        let prompt_tokens = asks.iter().map(|ask| ask.prompt.len()).sum();
        let mut seen = Seen::new(prompt_tokens, n, route);
        // Before the wait, during which it may be aborted, too.
        let (named, aborted): (Vec<_>, Vec<_>) = asks.iter().map(|ask| state.running.enter(ask.names.clone())).unzip();
        let all_aborted = async {
            for mut aborted in aborted.clone() {
                told(&mut aborted).await;
            }
        };
        let request = |route_id, prompt: Vec<TokenId>, generation: &Generation, seed, choice| {
            // At least one, so that a prompt that leaves no room is refused by the engine with the numbers.
            let left = (route.room as usize).saturating_sub(prompt.len()).max(1) as u32;
            let default = options.default_max_tokens.map_or(left, |most| most.min(left));
            NewRequest {
                route: route_id,
                prompt,
                max_tokens: generation.max_tokens.unwrap_or(default),
                sampling: generation.sampling_of(seed, choice),
                return_signals: options.return_signals,
                cache_salt: generation.cache_salt.clone(),
            }
        };
        // Before others wait for it, or a policy is made for it. Choices of a prompt differ in their seeds alone.
        for Ask { prompt, generation, .. } in &asks {
            let first = request(route.served.id, prompt.clone(), generation, generation.prompt_seed(), 0);
            state.engine.check(&first).map_err(|e| ApiError::refused(&e, options.prompt_field))?;
        }
        let enter = async {
            let (slots, mut deadline) = state.enter(choices, prompt_tokens).await?;
            // Held until its requests hold it.
            let served = tokio::select! {
                biased;
                served = state.served(route) => served?,
                error = over(&mut deadline) => return Err(error),
                // What makes its policy may never come back.
                () = state.admissions.closed() => return Err(ApiError::shutting_down()),
            };
            Ok::<_, ApiError>((slots, deadline, served))
        };
        let (slots, deadline, served) = tokio::select! {
            biased;
            entered = enter => entered?,
            () = all_aborted => return Ok(Self::never_begun(choices, prompt_tokens, seen, named)),
        };
        let ends = deadline.as_ref().map(Deadline::at);
        let mut submitting = Vec::with_capacity(choices);
        for (Ask { prompt, generation, .. }, aborted) in asks.into_iter().zip(aborted) {
            let ending = Ending {
                eos: Arc::clone(&route.eos),
                stop_tokens: generation.sampling.stop_token_ids.clone(),
                stops: generation.stops.clone(),
                include_stop: generation.include_stop,
                min_tokens: generation.sampling.min_tokens,
                keep_special: generation.keep_special,
            };
            let from = generation.sampling.prompt_logprobs.map_or(u32::MAX, |wanted| wanted.from.max(1));
            let to_score = from.min(prompt.len() as u32)..prompt.len() as u32;
            let seed = generation.prompt_seed();
            for choice in 0..n {
                let request = request(served.id, prompt.clone(), &generation, seed, choice);
                submitting.push((request, ending.clone(), to_score.clone(), aborted.clone()));
            }
        }
        prepare(state, submitting.iter().map(|(request, ..)| &request.sampling)).await?;
        let mut running = Vec::with_capacity(choices);
        for (request, ending, to_score, aborted) in submitting {
            let prompt = request.prompt.clone();
            let stream = state.engine.submit(request).map_err(|e| ApiError::refused(&e, options.prompt_field))?;
            seen.submitted(&stream);
            let choice = Choice::new(stream, &prompt, Arc::clone(&route.text), ending).scoring(to_score);
            running.push((choice, aborted));
        }
        let (sender, pieces) = mpsc::channel(BUFFER);
        for (index, ((choice, aborted), slot)) in running.into_iter().zip(slots).enumerate() {
            tokio::spawn(follow(index, choice, aborted, sender.clone(), slot, ends));
        }
        Ok(Self { pieces, choices, prompt_tokens, seen, _named: named, deadline })
    }

    /// All choices were aborted before their turn came.
    fn never_begun(choices: usize, prompt_tokens: usize, seen: Seen, named: Vec<Named>) -> Self {
        let (sender, pieces) = mpsc::channel(choices.max(1));
        for index in 0..choices {
            let end = Some(End { reason: Reason::Aborted, handoffs: 0, cached_tokens: 0 });
            // There is room for all.
            let _ = sender.try_send((index, Ok(Piece { end, ..Piece::default() })));
        }
        Self { pieces, choices, prompt_tokens, seen, _named: named, deadline: None }
    }

    /// The answer has this `id`.
    pub fn named(&self, id: &str) {
        self.seen.enter(|facts| facts.answer = Some(id.to_owned()));
    }

    /// It is answered piece by piece.
    pub fn streams(&self) {
        self.seen.enter(|facts| facts.stream = true);
    }

    /// It is broken off with this error.
    pub fn failed(&self, error: &ApiError) {
        self.seen.enter(|facts| {
            facts.error = Some(error.code);
            facts.broken = error.status.is_server_error();
        });
    }

    /// The next piece of any choice; `None` after the last one.
    pub fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<(usize, Result<Piece, ChoiceError>)>> {
        // First, as pieces may always be there.
        if let Some(deadline) = &mut self.deadline
            && let Poll::Ready(error) = deadline.poll_over(cx)
        {
            return Poll::Ready(Some((0, Err(ChoiceError::Deadline(error)))));
        }
        let piece = std::task::ready!(self.pieces.poll_recv(cx));
        // The choices know of the deadline, too, and may be the first to.
        if let (None, Some(deadline)) = (&piece, &mut self.deadline)
            && deadline.at() <= Instant::now()
        {
            return deadline.poll_over(cx).map(|error| Some((0, Err(ChoiceError::Deadline(error)))));
        }
        if let Some((index, Ok(piece))) = &piece {
            self.seen.piece(*index, piece);
        }
        Poll::Ready(piece)
    }

    /// All answers, in the order of the choices.
    pub async fn collect(mut self) -> Result<Vec<Answer>, ApiError> {
        let mut answers = vec![Answer::default(); self.choices];
        while let Some((index, piece)) = std::future::poll_fn(|cx| self.poll_piece(cx)).await {
            let piece = piece?;
            if let Some(answer) = answers.get_mut(index) {
                answer.text.push_str(&piece.text);
                answer.entries.extend(piece.entries);
                answer.scores.extend(piece.scores);
                answer.end = piece.end;
            }
        }
        if answers.iter().any(|answer| answer.end.is_none()) {
            return Err(ChoiceError::Lost.into());
        }
        Ok(answers)
    }
}

/// Make what answers of a form need for themselves: neither a thread that serves connections nor one that decodes should.
async fn prepare(state: &AppState, all: impl Iterator<Item = &SamplingParams>) -> Result<(), ApiError> {
    let constraints: Vec<Constraint> = all.filter_map(|sampling| sampling.constraint.clone()).collect();
    if constraints.is_empty() {
        return Ok(());
    }
    let prepare = move || {
        constraints.iter().for_each(Constraint::prepare);
        Ok(())
    };
    state.work(prepare).await
}

/// Until the answer is aborted.
async fn told(aborted: &mut watch::Receiver<bool>) {
    if aborted.wait_for(|aborted| *aborted).await.is_err() {
        // Nobody is left who could: the run is over, and whoever waits here ends with it.
        std::future::pending().await
    }
}

/// Pass a choice's pieces on until it ends, is aborted, takes too long, or nobody listens. The engine's part and the slot
/// are given up then, whether or not the client takes what it is sent.
async fn follow(
    index: usize,
    mut choice: Choice,
    mut aborted: watch::Receiver<bool>,
    sender: mpsc::Sender<(usize, Result<Piece, ChoiceError>)>,
    slot: Slot,
    over: Option<Instant>,
) {
    let over = async move {
        match over {
            Some(over) => tokio::time::sleep_until(over).await,
            None => std::future::pending().await,
        }
    };
    let mut over = std::pin::pin!(over);
    loop {
        let piece = tokio::select! {
            () = sender.closed() => return,
            // What the client is told, the run says.
            () = &mut over => return,
            () = told(&mut aborted) => Ok(choice.abort()),
            piece = choice.next() => piece,
        };
        let last = piece.as_ref().map_or(true, |piece| piece.end.is_some());
        let mut sending = std::pin::pin!(sender.send((index, piece)));
        let sent = tokio::select! {
            biased;
            sent = &mut sending => sent,
            () = &mut over => return,
            () = told(&mut aborted), if !last => {
                let end = choice.abort();
                drop((choice, slot));
                if sending.await.is_ok() {
                    let _ = sender.send((index, Ok(end))).await;
                }
                return;
            }
        };
        if sent.is_err() || last {
            return;
        }
    }
}
