//! Requests under way, until they become lines.

use std::collections::HashMap;

use super::manifest::{RequestLine, Sampling};
use crate::request::{Committed, Event, FinishReason, Ledger, NewRequest, RequestId, RouteId};

/// Most requests followed at once.
const MAX_OPEN: usize = 1 << 16;

struct Open {
    /// Lacks what only the end tells.
    line: RequestLine,
    ledger: Ledger,
}

/// What became of an event.
pub enum Entered {
    /// Nothing to write; events of unknown requests are among these.
    Nothing,
    Ended(Box<RequestLine>),
    /// The request cannot be followed.
    Lost,
}

/// Requests that have begun and not ended.
#[derive(Default)]
pub struct OpenRequests {
    open: HashMap<RequestId, Open>,
}

impl OpenRequests {
    /// Follow a request to `route`, as the manifest numbers it. `token_ids`: keep the ids of prompt and answer.
    pub fn begin(&mut self, id: RequestId, route: RouteId, new: &NewRequest, token_ids: bool, now_us: u64) -> Entered {
        if self.open.len() >= MAX_OPEN {
            return Entered::Lost;
        }
        let line = RequestLine {
            id,
            route: route.0,
            sampling: Sampling::from(&new.sampling),
            max_tokens: new.max_tokens,
            prompt_tokens: new.prompt.len() as u64,
            prompt_ids: token_ids.then(|| new.prompt.clone()),
            token_ids: token_ids.then(Vec::new),
            writers: Vec::new(),
            end: String::new(),
            error: None,
            handoffs: None,
            started_us: now_us,
            wall_us: 0,
        };
        self.open.insert(id, Open { line, ledger: Ledger::default() });
        Entered::Nothing
    }

    pub fn event(&mut self, id: RequestId, event: &Event, now_us: u64) -> Entered {
        match event {
            Event::PromptCached { .. } | Event::PromptScored { .. } => Entered::Nothing,
            Event::Committed { start, tokens } => {
                let Some(open) = self.open.get_mut(&id) else { return Entered::Nothing };
                let bare = |c: &Committed| Committed {
                    token: c.token,
                    model: c.model,
                    eos: c.eos,
                    complete: c.complete,
                    logprob: c.logprob,
                    top_logprobs: Vec::new(),
                    signals: None,
                };
                if open.ledger.enter(*start, tokens.iter().map(bare).collect()).is_err() {
                    self.open.remove(&id);
                    return Entered::Lost;
                }
                Entered::Nothing
            }
            Event::Finished { reason, handoffs } => {
                let end = match reason {
                    FinishReason::Stop(_) | FinishReason::Complete => "stop",
                    FinishReason::Length => "length",
                };
                self.end(id, end, now_us, |line| line.handoffs = Some(*handoffs))
            }
            Event::Failed(error) => self.end(id, "failed", now_us, |line| line.error = Some(error.to_string())),
        }
    }

    pub fn cancelled(&mut self, id: RequestId, now_us: u64) -> Entered {
        self.end(id, "cancelled", now_us, |_| {})
    }

    fn end(&mut self, id: RequestId, end: &str, now_us: u64, more: impl FnOnce(&mut RequestLine)) -> Entered {
        let Some(Open { mut line, ledger }) = self.open.remove(&id) else { return Entered::Nothing };
        line.end = end.into();
        line.wall_us = now_us.saturating_sub(line.started_us);
        line.writers = ledger.tokens().iter().map(|c| c.model.0).collect();
        if let Some(ids) = &mut line.token_ids {
            ids.extend(ledger.tokens().iter().map(|c| c.token));
        }
        more(&mut line);
        Entered::Ended(Box::new(line))
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.open.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{ModelId, RequestError, SamplingParams};

    fn new() -> NewRequest {
        let sampling = SamplingParams { seed: 5, stop_token_ids: vec![8], ..SamplingParams::greedy() };
        NewRequest {
            route: RouteId(2),
            prompt: vec![1, 2],
            max_tokens: 9,
            sampling,
            return_signals: false,
            cache_salt: None,
        }
    }

    fn committed(start: u32, tokens: &[(u32, u32)]) -> Event {
        let token = |&(token, model): &(u32, u32)| Committed {
            token,
            model: ModelId(model),
            eos: false,
            complete: false,
            logprob: 0.0,
            top_logprobs: Vec::new(),
            signals: None,
        };
        Event::Committed { start, tokens: tokens.iter().map(token).collect() }
    }

    fn ended(entered: Entered) -> RequestLine {
        match entered {
            Entered::Ended(line) => *line,
            _ => panic!("the request has not ended"),
        }
    }

    #[test]
    fn a_request_becomes_a_line() {
        let mut requests = OpenRequests::default();
        requests.begin(7, RouteId(2), &new(), true, 100);
        requests.event(7, &committed(1, &[(11, 1)]), 110);
        requests.event(7, &committed(0, &[(10, 0)]), 120);
        let finished = Event::Finished { reason: FinishReason::Stop(11), handoffs: 3 };
        let line = ended(requests.event(7, &finished, 150));
        assert_eq!((line.prompt_ids, line.token_ids, line.writers), (Some(vec![1, 2]), Some(vec![10, 11]), vec![0, 1]));
        assert_eq!((line.end.as_str(), line.handoffs, line.wall_us, line.route), ("stop", Some(3), 50, 2));
        assert_eq!((line.sampling.seed, line.sampling.stop_token_ids), (5, vec![8]));
        assert_eq!(requests.len(), 0);
    }

    #[test]
    fn without_ids_no_tokens_are_kept() {
        let mut requests = OpenRequests::default();
        requests.begin(7, RouteId(2), &new(), false, 0);
        requests.event(7, &committed(0, &[(1234, 0)]), 0);
        let line = ended(requests.cancelled(7, 10));
        let text = serde_json::to_string(&line).unwrap();
        assert!(!text.contains("1234") && !text.contains("\"prompt_ids") && !text.contains("\"token_ids"), "{text}");
        assert_eq!((line.end.as_str(), line.prompt_tokens, line.writers), ("cancelled", 2, vec![0]));
    }

    #[test]
    fn strangers_are_ignored_and_contradictions_given_up() {
        let mut requests = OpenRequests::default();
        assert!(matches!(requests.event(1, &committed(0, &[(1, 1)]), 0), Entered::Nothing));
        assert!(matches!(requests.event(1, &Event::Failed(RequestError::ShuttingDown), 0), Entered::Nothing));
        assert!(matches!(requests.cancelled(1, 0), Entered::Nothing));
        requests.begin(2, RouteId(2), &new(), true, 0);
        requests.event(2, &committed(0, &[(1, 1)]), 0);
        assert!(matches!(requests.event(2, &committed(0, &[(2, 1)]), 0), Entered::Lost));
        for id in 0..MAX_OPEN as u64 {
            assert!(matches!(requests.begin(id, RouteId(2), &new(), false, 0), Entered::Nothing));
        }
        assert!(matches!(requests.begin(1 << 20, RouteId(2), &new(), false, 0), Entered::Lost));
        assert_eq!(requests.len(), MAX_OPEN);
    }
}
