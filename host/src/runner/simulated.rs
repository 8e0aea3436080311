//! The simulated runner: schedulers, gates and protocols run on it without a model.
//!
//! It keeps the tokens themselves in its K/V pages, and the next token is a hash of what the pages of
//! the sequence hold. A wrong page, a cursor that is off by one or a lost rollback therefore changes
//! the text at once.

use std::time::Duration;

use super::{Columns, ModelInfo, PAGE_TOKENS, RowBatch, RowOutputs, Rows, Runner, RunnerError, Sample, SignalRequest};
use crate::constraint::allows;
use crate::request::{Score, TokenId};

/// Time of a step by its requests and rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latency {
    /// Times at some numbers of requests, ascending; not empty.
    points: Vec<(usize, Duration)>,
    row: Duration,
}

impl Latency {
    /// The same time whatever the batch.
    pub fn constant(time: Duration) -> Self {
        Self { points: vec![(1, time)], row: Duration::ZERO }
    }

    /// `points`: times at some numbers of requests. Between them the time follows straight lines, and beyond the
    /// last it goes on as before it; below the first it is the first. `row`: more for each row beyond one a
    /// request. `None` without points, or where two are for one number.
    pub fn new(mut points: Vec<(usize, Duration)>, row: Duration) -> Option<Self> {
        points.sort_unstable();
        let distinct = points.windows(2).all(|pair| pair[0].0 < pair[1].0);
        (distinct && !points.is_empty()).then_some(Self { points, row })
    }

    /// Time of a step of `requests` requests with `rows` rows together.
    pub fn of(&self, requests: usize, rows: usize) -> Duration {
        let more = rows.saturating_sub(requests);
        let more = self.row.saturating_mul(u32::try_from(more).unwrap_or(u32::MAX));
        self.of_requests(requests).saturating_add(more)
    }

    fn of_requests(&self, requests: usize) -> Duration {
        let next = self.points.partition_point(|(size, _)| *size < requests);
        // The line is that through the points around it, or through the last two.
        let pair = match (next, self.points.len()) {
            (0, _) | (_, 1) => return self.points.first().map_or(Duration::ZERO, |(_, time)| *time),
            (next, points) => &self.points[next.min(points - 1) - 1..][..2],
        };
        let ((from, low), (to, high)) = (pair[0], pair[1]);
        let share = (requests - from) as f64 / (to - from) as f64;
        let nanos = low.as_nanos() as f64 + share * (high.as_nanos() as f64 - low.as_nanos() as f64);
        Duration::from_nanos(nanos.max(0.0).round() as u64)
    }
}

/// What `model` says after `prefix`: a hash of both.
pub fn digest(prefix: impl IntoIterator<Item = TokenId>, model: u32) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64 ^ u64::from(model);
    for token in prefix {
        hash = (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3);
        hash ^= hash >> 29;
    }
    hash ^ hash >> 32
}

/// The token that `model` writes after `prefix`.
pub fn next_token(prefix: &[TokenId], model: u32, vocab_size: u32) -> TokenId {
    (digest(prefix.iter().copied(), model) % u64::from(vocab_size)) as TokenId
}

/// A model that hashes. Every scalar signal of a row is the same pseudo-random number in [0, 1).
pub struct SimulatedRunner {
    info: ModelInfo,
    model: u32,
    /// The token at each position of each page.
    cells: Vec<Option<TokenId>>,
}

impl SimulatedRunner {
    /// A model called `name` whose tokens depend on `model`. Token 0 ends a sequence, unless `ending_with`
    /// says otherwise.
    pub fn new(name: &str, model: u32, vocab_size: u32, pages: u32) -> Self {
        let info = ModelInfo {
            name: name.into(),
            description: "simulated".into(),
            vocab_size,
            hidden_size: 1,
            context: pages.saturating_mul(PAGE_TOKENS as u32),
            eos: vec![0],
            pages,
            weight_bytes: 0,
            page_bytes: 0,
        };
        Self { info, model, cells: vec![None; pages as usize * PAGE_TOKENS] }
    }

    /// The same model with other end tokens, ascending.
    pub fn ending_with(mut self, eos: Vec<TokenId>) -> Self {
        self.info.eos = eos;
        self
    }

    fn cell(&self, rows: &Rows<'_>, position: usize) -> Result<usize, RunnerError> {
        match rows.pages.get(position / PAGE_TOKENS) {
            Some(&page) if page < self.info.pages => Ok(page as usize * PAGE_TOKENS + position % PAGE_TOKENS),
            page => Err(RunnerError::new(format!("position {position} has no page in the pool: {page:?}"))),
        }
    }

    /// Hash of the sequence up to `last` as the pages hold it.
    fn read(&self, rows: &Rows<'_>, last: usize) -> Result<u64, RunnerError> {
        let mut prefix = Vec::with_capacity(last + 1);
        for position in 0..=last {
            let token = self.cells[self.cell(rows, position)?];
            prefix.push(token.ok_or_else(|| RunnerError::new(format!("position {position} was never computed")))?);
        }
        Ok(digest(prefix, self.model))
    }
}

/// One of the tokens that `allowed` allows; of all, where it is empty.
fn choose(hash: u64, vocab_size: u32, allowed: &[u32]) -> TokenId {
    let possible = allowed.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
    if possible == 0 {
        return (hash % u64::from(vocab_size)) as TokenId;
    }
    let mut tokens = (0..vocab_size).filter(|&token| allows(allowed, token));
    tokens.nth((hash % possible) as usize).unwrap_or_default()
}

/// A number in [0, 1).
fn value(hash: u64) -> f32 {
    (hash >> 40) as f32 / (1u64 << 24) as f32
}

fn fill(columns: &mut Columns, request: &SignalRequest, hash: u64) {
    use tokenrouter_plugin_api::SignalSet as S;
    let value = value(hash);
    for (signal, column) in [
        (S::ENTROPY, &mut columns.entropy),
        (S::ENTROPY_NORM, &mut columns.entropy_norm),
        (S::TOP1_PROB, &mut columns.top1_prob),
        (S::MARGIN, &mut columns.margin),
        (S::LOGSUMEXP, &mut columns.logsumexp),
        (S::CANDIDATE_PROB, &mut columns.candidate_prob),
    ] {
        if request.scalars.contains(signal) {
            column.push(value);
        }
    }
    columns.topk_values.extend((0..request.top_k).map(|i| value - i as f32));
    columns.topk_ids.extend(0..request.top_k);
    columns.token_logits.extend(request.token_logits.iter().map(|_| value));
}

impl Runner for SimulatedRunner {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        let mut out = RowOutputs::default();
        for rows in &batch.sequences {
            if rows.start >= rows.end
                || rows.end > rows.context.len()
                || rows.sampled + rows.scored > rows.end - rows.start
            {
                return Err(RunnerError::new(format!("rows {}..{} of {}", rows.start, rows.end, rows.context.len())));
            }
            for position in rows.start..rows.end {
                let cell = self.cell(rows, position)?;
                self.cells[cell] = Some(rows.context[position]);
            }
        }
        for rows in &batch.sequences {
            for last in rows.scored_positions() {
                // Of the token as well, so that one that is off by a position is noticed.
                let given = *rows.context.get(last + 1).ok_or_else(|| RunnerError::new("no token follows"))?;
                let hash = self.read(rows, last)? ^ u64::from(given);
                let logprob = -value(hash.wrapping_mul(0x0100_0000_01b3));
                out.scores.push(Some(Score { logprob, rank: 1, top_logprobs: Vec::new() }));
            }
            for index in 0..rows.sampled {
                let hash = self.read(rows, rows.end - rows.sampled + index)?;
                let token = choose(hash, self.info.vocab_size, rows.allowed_at(index, self.info.vocab_size as usize));
                out.samples.push(Sample { token, logprob: -1.0, top_logprobs: Vec::new(), finite: true });
                fill(&mut out.signals, &batch.signals, hash);
                out.hidden.extend(batch.hidden.then(|| value(hash)));
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::SamplingParams;

    #[test]
    fn the_text_is_what_the_pages_hold() {
        let mut runner = SimulatedRunner::new("sim", 3, 50, 4);
        let (sampling, context) = (SamplingParams::greedy(), (1..=20).collect::<Vec<_>>());
        let mut forward = |start, end, pages: &[u32]| {
            let rows = Rows {
                context: &context,
                start,
                end,
                pages,
                sampled: 1,
                scored: 0,
                sampling: &sampling,
                prompt_len: 4,
                masked: &[],
                nets: &[],
                allowed: &[],
            };
            runner.forward(&RowBatch { sequences: vec![rows], ..Default::default() }).map(|o| o.samples[0].token)
        };
        assert_eq!(forward(0, 18, &[2, 0]), Ok(next_token(&context[..18], 3, 50)));
        assert_eq!(forward(18, 20, &[2, 0]), Ok(next_token(&context, 3, 50)));
        assert!(forward(18, 20, &[1, 0]).is_err(), "page 1 was never written");
        assert!(forward(18, 20, &[2]).is_err(), "no page for position 18");
    }

    #[test]
    fn latency_by_requests_and_rows() {
        let (ms, micros) = (Duration::from_millis, Duration::from_micros);
        let latency = Latency::new(vec![(8, ms(5)), (2, ms(2)), (4, ms(3))], micros(10)).unwrap();
        let of = [1, 2, 3, 4, 6, 8, 12].map(|requests| latency.of(requests, requests));
        assert_eq!(of, [2000, 2000, 2500, 3000, 4000, 5000, 7000].map(micros));
        assert_eq!(latency.of(2, 102), ms(3));
        assert_eq!(Latency::constant(ms(7)).of(900, 9000), ms(7));
        assert_eq!(Latency::new(vec![(1, ms(5)), (1, ms(6))], ms(0)), None);
        assert_eq!(Latency::new(vec![], ms(0)), None);
    }
}
