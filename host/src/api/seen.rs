//! What the choices of a request come to, for its record.

use std::sync::Arc;
use std::time::Instant;

use super::answer;
use super::choice::Piece;
use super::record::{Facts, Record};
use super::state::Route;
use super::visits::Visits;
use crate::engine::RequestStream;
use crate::request::{ModelId, RequestSpec};

/// Gathered piece by piece, and entered in the record once, when dropped.
#[derive(Debug)]
pub struct Seen {
    record: Option<Arc<Record>>,
    names: Arc<[String]>,
    /// Before the wait for a turn.
    submitted: Instant,
    /// Of the first choice; of all where visits are noted.
    specs: Vec<Option<Arc<RequestSpec>>>,
    /// Choices of each prompt.
    per_prompt: usize,
    prompt_tokens: usize,
    first_token: Option<Instant>,
    /// By model.
    tokens: Vec<usize>,
    cached_tokens: u64,
    handoffs: u64,
    finish_reasons: Vec<&'static str>,
    /// Where the request is traced.
    visits: Option<Visits>,
}

impl Seen {
    /// Made before the request waits for its turn.
    pub fn new(prompt_tokens: usize, per_prompt: usize, route: &Route) -> Self {
        let record = Record::current();
        let traced = record.as_ref().is_some_and(|record| record.trace.is_some());
        let entry = route.served.models.get(route.served.entry).map_or(ModelId(0), |(entry, _)| *entry);
        Self {
            visits: traced.then(|| Visits::new(route.model_names.clone(), entry)),
            record,
            names: route.model_names.clone(),
            submitted: Instant::now(),
            specs: Vec::new(),
            per_prompt,
            prompt_tokens,
            first_token: None,
            tokens: vec![0; route.model_names.len()],
            cached_tokens: 0,
            handoffs: 0,
            finish_reasons: Vec::new(),
        }
    }

    pub fn submitted(&mut self, stream: &RequestStream) {
        if self.specs.is_empty() || self.visits.is_some() {
            self.specs.push(stream.spec().cloned());
        }
    }

    pub fn enter(&self, enter: impl FnOnce(&mut Facts)) {
        if let Some(record) = &self.record {
            enter(&mut record.facts());
        }
    }

    pub fn piece(&mut self, choice: usize, piece: &Piece) {
        if !piece.entries.is_empty() {
            self.first_token.get_or_insert_with(Instant::now);
        }
        for entry in &piece.entries {
            if let Some(tokens) = self.tokens.get_mut(entry.committed.model.index()) {
                *tokens += 1;
            }
            if let Some(visits) = &mut self.visits {
                let began = || self.specs.get(choice)?.as_ref()?.began();
                visits.token(choice, entry.committed.model, entry.at, began);
            }
        }
        let Some(end) = &piece.end else { return };
        self.handoffs += u64::from(end.handoffs);
        // A prompt counts once, so its first choice stands for it.
        if choice.is_multiple_of(self.per_prompt) {
            self.cached_tokens += u64::from(end.cached_tokens);
        }
        let reason = answer::finish_reason(end);
        if !self.finish_reasons.contains(&reason) {
            self.finish_reasons.push(reason);
        }
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        let Some(record) = &self.record else { return };
        let mut facts = record.facts();
        facts.prompt_tokens = self.prompt_tokens;
        facts.cached_tokens = self.cached_tokens;
        facts.completion_tokens = self.tokens.iter().sum();
        let written = self.names.iter().cloned().zip(self.tokens.iter().copied());
        facts.tokens_by_model = written.filter(|(_, tokens)| *tokens > 0).collect();
        facts.handoffs = self.handoffs;
        facts.finish_reasons = std::mem::take(&mut self.finish_reasons);
        facts.first_token = self.first_token;
        facts.visits = self.visits.take();
        let first = self.specs.first().and_then(Option::as_ref);
        let began = first.and_then(|spec| spec.began());
        facts.queue = began.map(|began| began.saturating_duration_since(self.submitted));
    }
}
