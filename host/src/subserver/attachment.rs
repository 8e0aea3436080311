//! A route at one model: its policy instance, and the translation between the policy's model
//! indices and the engine's.

use std::sync::Arc;

use tokenrouter_plugin_api::net::Op;
use tokenrouter_plugin_api::{
    Acceptance, Decision, Handoff, MAX_PAYLOAD_BYTES, ModelIndex, NO_MODEL, NO_TOKEN, PeerView, RequestView,
    Requirements, RouteBatch, Slot,
};

use super::hooks::{Failed, Hooks};
use super::own_signals::OwnSignals;
use super::prefix::Root;
use crate::engine::OnError;
use crate::policy::PolicyInstance;
use crate::policy::monitor::{Hook, Meter, Monitor, Note, worth_a_line};
use crate::request::{ModelId, RequestId, RequestSpec, SignalName, TokenId};
use crate::runner::net::NetId;
use crate::runner::{Columns, Gathered, SignalRequest};

/// Dense slots: the lowest free one first.
#[derive(Debug, Default)]
struct Slots {
    free: std::collections::BTreeSet<Slot>,
    next: Slot,
}

impl Slots {
    fn take(&mut self) -> Slot {
        self.free.pop_first().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }
    fn give(&mut self, slot: Slot) {
        self.free.insert(slot);
    }
}

/// One row of the step, as its policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct RouteRow {
    pub id: RequestId,
    pub slot: Slot,
    pub seed: u64,
    pub position: u32,
    pub candidate: TokenId,
    pub draft: Option<TokenId>,
    pub came_from: Option<ModelIndex>,
    /// Tokens that may still be generated, the candidate included.
    pub remaining: u32,
    /// Where its signals are in the step's columns.
    pub sample: usize,
}

/// The rows that a policy is asked about in one call, by column. Kept for the memory.
#[derive(Debug, Default)]
pub struct Asked {
    pub ids: Vec<RequestId>,
    pub samples: Vec<usize>,
    slots: Vec<Slot>,
    seeds: Vec<u64>,
    positions: Vec<u32>,
    candidates: Vec<TokenId>,
    drafts: Vec<TokenId>,
    last_models: Vec<ModelIndex>,
    remaining: Vec<u32>,
    /// What it answers; `Stay` if it does not.
    pub decisions: Vec<Decision>,
}

impl Asked {
    pub fn push(&mut self, row: RouteRow) {
        self.ids.push(row.id);
        self.samples.push(row.sample);
        self.slots.push(row.slot);
        self.seeds.push(row.seed);
        self.positions.push(row.position);
        self.candidates.push(row.candidate);
        self.drafts.push(row.draft.unwrap_or(NO_TOKEN));
        self.last_models.push(row.came_from.unwrap_or(NO_MODEL));
        self.remaining.push(row.remaining);
        self.decisions.push(Decision::STAY);
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    pub fn clear(&mut self) {
        self.ids.clear();
        self.samples.clear();
        self.slots.clear();
        self.seeds.clear();
        self.positions.clear();
        self.candidates.clear();
        self.drafts.clear();
        self.last_models.clear();
        self.remaining.clear();
        self.decisions.clear();
    }
}

/// A route at one model.
pub struct Attachment {
    hooks: Hooks,
    requirements: Requirements,
    /// Where the runner has the nets of the requirements, in their order.
    nets: Vec<NetId>,
    /// All models of the route, in the policy's order.
    pub models: Vec<ModelId>,
    /// This model among them.
    pub own: ModelIndex,
    /// Name of the route, for messages.
    pub name: String,
    /// Tokens never sampled here: those not all models know, and those the policy masks. Ascending.
    pub masked: Arc<[TokenId]>,
    /// Answers without meaning so far.
    misled: u64,
    /// A net gave no number, which has been told: a router that is damaged, or of another model, looks like one
    /// that is content with every token.
    without_score: bool,
    slots: Slots,
    /// Empty between steps.
    pub asked: Asked,
    /// Signals of `asked`.
    gathered: Gathered,
}

impl Attachment {
    /// Attach `policy` (or none, for a model alone) at model `own` of `models`.
    pub fn new(
        name: &str,
        policy: Option<Box<dyn PolicyInstance>>,
        models: Vec<ModelId>,
        own: ModelIndex,
        on_error: OnError,
        excluded: &[TokenId],
    ) -> Self {
        let requirements = policy.as_ref().map(|p| p.requirements().clone()).unwrap_or_default();
        let mut masked: Vec<TokenId> = excluded.iter().chain(&requirements.masked_tokens).copied().collect();
        masked.sort_unstable();
        masked.dedup();
        Self {
            hooks: Hooks::new(policy, on_error),
            requirements,
            nets: Vec::new(),
            models,
            own,
            name: name.into(),
            masked: masked.into(),
            misled: 0,
            without_score: false,
            slots: Slots::default(),
            asked: Asked::default(),
            gathered: Gathered::default(),
        }
    }

    /// The same attachment, with the runner's ids of the nets that its requirements describe.
    pub fn with_nets(self, nets: Vec<NetId>) -> Self {
        Self { nets, ..self }
    }

    /// The same attachment, with its policy's calls measured.
    pub fn watched(mut self, monitor: Arc<Monitor>) -> Self {
        self.hooks.meter = Some(Meter::new(monitor));
        self
    }

    /// The model's step that calls from now on belong to.
    pub fn at_step(&self, step: u64) {
        if let Some(meter) = &self.hooks.meter {
            meter.at_step(step);
        }
    }

    /// What the operator should know since the last call.
    pub fn notes(&mut self) -> std::vec::Drain<'_, Note> {
        self.hooks.notes.drain(..)
    }

    pub fn nets(&self) -> &[NetId] {
        &self.nets
    }

    /// With whom a request of this route may share pages.
    pub fn root(&self, spec: &RequestSpec) -> Root {
        let hidden = |op: &Op| matches!(op, Op::Hidden { back: 1.. } | Op::TopLogits { back: 1.., .. });
        let hidden = self.requirements.nets.iter().flat_map(|net| &net.nodes).any(|node| hidden(&node.op));
        Root { salt: spec.new.cache_salt.clone(), hidden }
    }

    /// Signals of `row` by name: the scalars that were computed, and what this route alone asks for.
    pub fn named_signals(&self, columns: &Columns, computed: &SignalRequest, row: usize) -> Vec<(SignalName, f32)> {
        let own = OwnSignals { requirements: &self.requirements, nets: &self.nets, columns, computed };
        let mut named = columns.named(row);
        named.extend(own.names().into_iter().zip(own.values(row)));
        named
    }

    pub fn on_error(&self) -> OnError {
        self.hooks.on_error
    }

    pub fn requirements(&self) -> &Requirements {
        &self.requirements
    }

    /// A slot for a new request; `None` for a model alone.
    pub fn open(&mut self) -> Option<Slot> {
        self.hooks.policy.is_some().then(|| self.slots.take())
    }

    /// The request at `slot` is over.
    pub fn close(&mut self, slot: Option<Slot>) -> Result<(), Failed> {
        let Some(slot) = slot else { return Ok(()) };
        self.slots.give(slot);
        self.hooks.call(Hook::Finished, |policy| policy.finished(slot)).map(|_| ())
    }

    /// Slots in use.
    pub fn open_slots(&self) -> usize {
        self.slots.next as usize - self.slots.free.len()
    }

    /// Answers of `hook` were not taken: `unknown` that name no model of the route, and `others`. `message` says
    /// what was answered and what was done in place of it.
    pub fn misled(&mut self, hook: Hook, unknown: u64, others: u64, message: impl FnOnce() -> String) {
        if let Some(meter) = &self.hooks.meter {
            meter.monitor.count_wrong(hook, unknown, others);
        }
        self.misled += 1;
        if worth_a_line(self.misled) {
            let message = format!("{} ({} such answers so far)", message(), self.misled);
            self.hooks.notes.push(Note { hook, message });
        }
    }

    /// The model that a new request starts at.
    pub fn entry(&mut self, view: &RequestView<'_>) -> Result<Option<ModelIndex>, Failed> {
        let entry = self.hooks.call(Hook::Entry, |policy| policy.entry(view))?.flatten();
        match entry {
            Some(model) if model as usize >= self.models.len() => {
                let models = self.models.len();
                self.misled(Hook::Entry, 1, 0, || {
                    format!("the policy lets a request begin at model {model} of {models}; it begins here")
                });
                Ok(None)
            }
            entry => Ok(entry.filter(|&model| model != self.own)),
        }
    }

    /// How a request leaves for `to`.
    pub fn send(&mut self, view: &RequestView<'_>, to: ModelIndex) -> Result<Option<Handoff>, Failed> {
        let Some(handoff) = self.hooks.call(Hook::Send, |policy| policy.send(view, to))? else { return Ok(None) };
        let bytes = handoff.payload.len();
        if bytes > MAX_PAYLOAD_BYTES {
            let message = format!("send gave a payload of {bytes} bytes; the limit is {MAX_PAYLOAD_BYTES}");
            return Err(self.hooks.refuse(Hook::Send, message));
        }
        if handoff.budget == Some(0) {
            let message = "send gave a budget of 0 tokens; use at least 1, or none for no limit".into();
            return Err(self.hooks.refuse(Hook::Send, message));
        }
        Ok(Some(handoff))
    }

    /// What becomes of the provisional tokens of an arriving message.
    pub fn receive(&mut self, view: &RequestView<'_>, message: &PeerView<'_>) -> Result<Acceptance, Failed> {
        let answer = self.hooks.call(Hook::Receive, |policy| policy.receive(view, message))?;
        let provisional = message.provisional;
        if let Some(Acceptance::Accept(count)) = answer
            && count > provisional
        {
            self.misled(Hook::Receive, 0, 1, || {
                format!("the policy accepts {count} of {provisional} provisional tokens; all are accepted")
            });
        }
        Ok(answer.unwrap_or(Acceptance::Verify))
    }

    /// Decide about the rows in `asked`. Without a policy, or with a failed one whose requests stay local, all
    /// stay.
    pub fn route(&mut self, columns: &Columns, computed: &SignalRequest) -> Result<(), Failed> {
        let Self { hooks, asked, gathered, .. } = self;
        if asked.is_empty() || hooks.policy.is_none() {
            return Ok(());
        }
        gathered.gather(columns, computed, &self.requirements, &self.nets, &asked.samples);
        let signals = gathered.view();
        if !self.without_score && signals.net_scores.iter().any(|score| score.is_nan()) {
            self.without_score = true;
            let message = "a router network gave a score that is no number; the policy takes it as no signal. Are the \
                           weights damaged, or of another model?";
            hooks.notes.push(Note { hook: Hook::Route, message: message.into() });
        }
        let batch = RouteBatch {
            request_ids: &asked.ids,
            slots: &asked.slots,
            seeds: &asked.seeds,
            positions: &asked.positions,
            candidates: &asked.candidates,
            drafts: &asked.drafts,
            last_models: &asked.last_models,
            remaining: &asked.remaining,
            signals,
        };
        hooks.call(Hook::Route, |policy| policy.route(&batch, &mut asked.decisions))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Linked, PolicyFactory};
    use crate::runner::NetScores;
    use tokenrouter_plugin_api::{Context, ModelDescription, NoServices, Policy, PolicyError, net::Net};

    struct Asks;

    impl Policy for Asks {
        const NAME: &'static str = "asks";
        fn create(_: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
            Ok(Self)
        }
        fn requirements(&self) -> Requirements {
            let mut requirements = Requirements::default();
            requirements.nets.push(Net::new("n", "w"));
            requirements
        }
        fn route(&mut self, _: &RouteBatch<'_>, _: &mut [Decision]) {}
    }

    #[test]
    fn a_score_that_is_no_number_is_reported_once() {
        let models = [ModelDescription { name: "m".into(), role: "m".into() }];
        let context =
            Context { route: "r", model: 0, models: &models, entry: 0, vocab_size: 9, eos: &[], services: &NoServices };
        let policy = Linked::<Asks>::default().create(&context, "{}").unwrap();
        let attachment = Attachment::new("r", Some(policy), vec![ModelId(0)], 0, OnError::default(), &[]);
        let mut attachment = attachment.with_nets(vec![NetId(4)]);
        let nets = vec![(NetId(4), NetScores { width: 1, scores: vec![0.5, f32::NAN] })];
        let columns = Columns { nets, ..Columns::default() };
        let mut routed = |sample| {
            let (slot, seed, position, candidate, remaining) = (0, 0, 0, 1, 5);
            let row =
                RouteRow { id: 1, slot, seed, position, candidate, draft: None, came_from: None, remaining, sample };
            attachment.asked.clear();
            attachment.asked.push(row);
            attachment.route(&columns, &SignalRequest::default()).unwrap();
            attachment.notes().count()
        };
        assert_eq!([0, 1, 1, 0].map(&mut routed), [0, 1, 0, 0]);
    }
}
