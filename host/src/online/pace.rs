//! How fast requests get their tokens, where limits are set on that.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Tokens of a request over which the time per token is taken.
const CHUNK: u64 = 64;
/// Most times that wait to be taken; others are left out.
const MOST: usize = 1 << 16;

/// Times that requests took, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times {
    /// A token, over some tens of tokens of a request.
    pub tpot: Vec<f64>,
    /// From the submission to the first token.
    pub ttft: Vec<f64>,
}

/// Where those who deliver tokens enter times, and the tuner takes them.
#[derive(Debug, Default)]
pub struct Paces(Mutex<Times>);

impl Paces {
    pub fn take(&self) -> Times {
        std::mem::take(&mut *self.times())
    }

    /// A list is longer or it is not, so a panic elsewhere cannot spoil it.
    fn times(&self) -> std::sync::MutexGuard<'_, Times> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pace of one request.
#[derive(Debug)]
pub struct Pace {
    submitted: Instant,
    /// Tokens since a moment: those of the present chunk.
    chunk: Option<(u64, Instant)>,
}

impl Pace {
    pub fn new(submitted: Instant) -> Self {
        Self { submitted, chunk: None }
    }

    /// So many tokens were delivered at `now`.
    pub fn tokens(&mut self, tokens: u64, now: Instant, paces: &Paces) {
        let ms = |time: Duration| 1e3 * time.as_secs_f64();
        let push = |of: fn(&mut Times) -> &mut Vec<f64>, ms: f64| {
            let mut times = paces.times();
            let times = of(&mut times);
            if times.len() < MOST {
                times.push(ms);
            }
        };
        let Some((count, since)) = &mut self.chunk else {
            push(|times| &mut times.ttft, ms(now.saturating_duration_since(self.submitted)));
            self.chunk = Some((0, now));
            return;
        };
        *count += tokens;
        if *count >= CHUNK {
            push(|times| &mut times.tpot, ms(now.saturating_duration_since(*since)) / *count as f64);
            (*count, *since) = (0, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_chunks() {
        let (paces, zero) = (Paces::default(), Instant::now());
        let at = |ms| zero + Duration::from_millis(ms);
        let mut pace = Pace::new(zero);
        pace.tokens(3, at(100), &paces);
        (1..64).for_each(|token| pace.tokens(1, at(100 + 10 * token), &paces));
        assert_eq!(paces.take(), Times { tpot: vec![], ttft: vec![100.0] });
        pace.tokens(1, at(740), &paces);
        pace.tokens(128, at(1380), &paces);
        assert_eq!(paces.take(), Times { tpot: vec![10.0, 5.0], ttft: vec![] });
        assert_eq!(paces.take(), Times::default());
    }
}
