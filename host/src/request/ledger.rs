//! The ledger: the committed tokens of one request in order, whatever order messages come in.

use std::collections::BTreeMap;

use super::Committed;

/// Committed tokens of one request. Positions are 0 for the first generated token.
#[derive(Debug, Default)]
pub struct Ledger {
    committed: Vec<Committed>,
    /// Tokens that came ahead of a gap, by position.
    early: BTreeMap<u32, Committed>,
}

/// Two messages disagree about a committed position. A committed token is never taken back, so one of
/// them is wrong and the request must fail.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("position {position} was committed as token {first} and again as token {second}")]
pub struct LedgerError {
    pub position: u32,
    pub first: u32,
    pub second: u32,
}

impl Ledger {
    /// All tokens committed so far without a gap.
    pub fn tokens(&self) -> &[Committed] {
        &self.committed
    }

    /// Enter `tokens` from position `start` on. Returns those that are new and follow without a gap.
    pub fn enter(&mut self, start: u32, tokens: Vec<Committed>) -> Result<&[Committed], LedgerError> {
        let before = self.committed.len();
        for (position, token) in (start..).zip(tokens) {
            let known = self.committed.get(position as usize).or_else(|| self.early.get(&position));
            match known {
                Some(known) if known.token != token.token => {
                    return Err(LedgerError { position, first: known.token, second: token.token });
                }
                Some(_) => {}
                None if position as usize == self.committed.len() => self.committed.push(token),
                None => drop(self.early.insert(position, token)),
            }
        }
        while let Some(token) = self.early.remove(&(self.committed.len() as u32)) {
            self.committed.push(token);
        }
        Ok(&self.committed[before..])
    }

    /// Whether tokens wait for an earlier position.
    pub fn has_gap(&self) -> bool {
        !self.early.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::ModelId;

    fn token(token: u32) -> Committed {
        Committed {
            token,
            model: ModelId(0),
            eos: false,
            complete: false,
            logprob: 0.0,
            top_logprobs: Vec::new(),
            signals: None,
        }
    }

    #[test]
    fn orders_and_dedupes() {
        let mut ledger = Ledger::default();
        assert!(ledger.enter(1, vec![token(11)]).unwrap().is_empty());
        assert!(ledger.has_gap());
        let new: Vec<u32> = ledger.enter(0, vec![token(10)]).unwrap().iter().map(|t| t.token).collect();
        assert_eq!(new, [10, 11]);
        assert!(ledger.enter(0, vec![token(10), token(11)]).unwrap().is_empty());
        assert!(!ledger.has_gap());
    }

    #[test]
    fn refuses_a_second_opinion() {
        let mut ledger = Ledger::default();
        ledger.enter(0, vec![token(1)]).unwrap();
        assert_eq!(ledger.enter(0, vec![token(2)]), Err(LedgerError { position: 0, first: 1, second: 2 }));
        ledger.enter(2, vec![token(5)]).unwrap();
        assert!(ledger.enter(2, vec![token(6)]).is_err());
    }
}
