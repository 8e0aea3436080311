//! A policy at each model of a route, and what of a trace it is to see.

use std::sync::Arc;

use tokenrouter_plugin_api::{
    Context, Decision, DecisionKind, Handoff, ModelDescription, ModelIndex, NO_MODEL, PeerView, RequestView,
    Requirements, RouteBatch, Services, SignalColumns, SignalSet, Slot, TokenId,
};

use super::{Columns, Row, Trace};
use crate::policy::monitor::{Hook, Monitor, Monitors, Names};
use crate::policy::{PolicyFactory, PolicyFailure, PolicyInstance};

/// Every request has this slot: one lives at a time.
const SLOT: Slot = 0;

/// In the order of the bits of [`SignalSet`].
pub const SCALARS: [&str; 6] = ["entropy", "entropy_norm", "top1_prob", "margin", "logsumexp", "candidate_prob"];

#[derive(Debug, thiserror::Error)]
pub enum TeamError {
    #[error(transparent)]
    Refused(#[from] PolicyFailure),
    #[error("{trace}; it has no `{signal}` at model `{model}`, which policy `{policy}` asks for: {remedy}")]
    Missing { trace: String, signal: String, model: String, policy: String, remedy: String },
    #[error(
        "{trace}; it has no rows of model `{model}`, the route's entry: it has those of {there}. Name its models with --roles, such as {there}=slm"
    )]
    NoEntry { trace: String, model: String, there: String },
}

/// Where the policy works.
pub struct Place<'a> {
    pub route: &'a str,
    pub models: &'a [ModelDescription],
    pub entry: usize,
    pub vocab_size: u32,
    /// By model.
    pub eos: &'a [Vec<TokenId>],
    /// By model.
    pub services: &'a [&'a dyn Services],
    /// Who watches the hooks.
    pub monitors: &'a Monitors,
}

struct Member<'a> {
    monitor: Arc<Monitor>,
    instance: Box<dyn PolicyInstance>,
    /// The model's number in the trace, if it has rows there.
    columns: Option<&'a Columns>,
    /// Columns in the order in which the policy gets them.
    scalars: Vec<Option<&'a [f32]>>,
    token_logits: Vec<&'a [f32]>,
    nets: Vec<&'a [f32]>,
    top_k: usize,
}

/// The instances of one route, by its models.
pub struct Team<'a> {
    members: Vec<Member<'a>>,
    /// By model of the trace: the route's model of the same name.
    pub route_model: Vec<Option<usize>>,
    pub models: &'a [ModelDescription],
    pub entry: usize,
}

/// The signals that `wanted` names, as a recording calls them; a net by the name of its score, or of the first one.
fn names(wanted: &Requirements) -> Vec<String> {
    let scalar = |bit: usize| SignalSet::from_bits(1 << bit).is_some_and(|signal| wanted.signals.contains(signal));
    let scalars = SCALARS.iter().enumerate().filter(|(bit, _)| scalar(*bit)).map(|(_, name)| name.to_string());
    let logits = wanted.token_logits.iter().map(|id| format!("token_logit_{id}"));
    scalars.chain(logits).chain(wanted.nets.iter().map(|net| format!("net_{}", net.name))).collect()
}

impl<'a> Team<'a> {
    /// An instance at each model. The trace has all that they ask for where it has rows of their model.
    pub fn new(
        factory: &dyn PolicyFactory,
        settings: &str,
        place: &Place<'a>,
        trace: &'a Trace,
    ) -> Result<Self, TeamError> {
        let number = |name: &str| trace.models.iter().position(|known| known == name);
        let has_rows = |model: &ModelDescription| number(&model.name).is_some_and(|at| trace.columns[at].rows > 0);
        if !has_rows(&place.models[place.entry]) {
            let there = trace.models.iter().zip(&trace.columns).filter(|(_, columns)| columns.rows > 0);
            return Err(TeamError::NoEntry {
                trace: trace.source.clone(),
                model: place.models[place.entry].name.clone(),
                there: there.map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", "),
            });
        }
        let mut members = Vec::new();
        for (model, described) in place.models.iter().enumerate() {
            let context = Context {
                route: place.route,
                model: model as ModelIndex,
                models: place.models,
                entry: place.entry as ModelIndex,
                vocab_size: place.vocab_size,
                eos: place.eos.get(model).map_or(&[], Vec::as_slice),
                services: place.services[model],
            };
            let names = Names {
                route: place.route.to_owned(),
                model: described.name.clone(),
                plugin: factory.name().to_owned(),
            };
            let monitor = place.monitors.add_maker(names);
            let instance = monitor.watch(Hook::Create, || factory.create(&context, settings));
            let instance = instance.map_err(TeamError::Refused)?;
            let columns = number(&described.name).map(|at| &trace.columns[at]).filter(|columns| columns.rows > 0);
            let member = Member::new(monitor, instance, columns).map_err(|(signal, remedy)| TeamError::Missing {
                trace: trace.source.clone(),
                signal,
                model: described.name.clone(),
                policy: factory.name().to_owned(),
                remedy,
            })?;
            members.push(member);
        }
        let route_model = trace.models.iter().map(|name| place.models.iter().position(|m| m.name == *name)).collect();
        Ok(Self { members, route_model, models: place.models, entry: place.entry })
    }

    /// Whether the policy gets scores of router networks.
    pub fn reads_nets(&self) -> bool {
        self.members.iter().any(|member| !member.nets.is_empty())
    }

    /// What the policy at `model` sees in a row, by name.
    pub fn seen(&self, model: usize, row: &Row) -> Vec<(String, f32)> {
        let member = &self.members[model];
        let scalars = member.scalars.iter().flatten().map(|column| column[row.at]);
        let own = member.token_logits.iter().chain(&member.nets).map(|column| column[row.at]);
        names(member.instance.requirements()).into_iter().zip(scalars.chain(own)).collect()
    }

    pub fn entry(&mut self, request: &RequestView<'_>) -> Result<usize, PolicyFailure> {
        let entry = self.entry;
        let answer =
            self.members[entry].call(Hook::Entry, |instance| instance.entry(request))?.map(|model| model as usize);
        Ok(answer.filter(|&model| model < self.members.len()).unwrap_or(entry))
    }

    /// What the policy at `model` decides about a row of `request`.
    pub fn route(
        &mut self,
        model: usize,
        request: &super::Request,
        row: &Row,
        last: Option<usize>,
    ) -> Result<DecisionKind, PolicyFailure> {
        let member = &mut self.members[model];
        let (scalars, [topk_values, token_logits, net_scores], topk_ids) = member.row(row);
        let [entropy, entropy_norm, top1_prob, margin, logsumexp, candidate_prob] = &scalars;
        let batch = RouteBatch {
            request_ids: &[request.id],
            slots: &[SLOT],
            seeds: &[request.seed],
            positions: &[row.position],
            candidates: &[row.candidate],
            drafts: &[row.draft],
            last_models: &[last.map_or(NO_MODEL, |model| model as ModelIndex)],
            remaining: &[request.max_tokens.saturating_sub(row.position).max(1)],
            signals: SignalColumns {
                entropy,
                entropy_norm,
                top1_prob,
                margin,
                logsumexp,
                candidate_prob,
                topk_values: &topk_values,
                topk_ids: &topk_ids,
                top_k: member.top_k as u32,
                token_logit_count: token_logits.len() as u32,
                token_logits: &token_logits,
                net_width: net_scores.len() as u32,
                net_scores: &net_scores,
            },
        };
        let mut out = [Decision::STAY];
        member.call(Hook::Route, |instance| instance.route(&batch, &mut out))?;
        // As in a server, what makes no sense is taken as `Stay`, and so is a hand-off to itself.
        Ok(match out[0].kind() {
            Some(DecisionKind::To(to)) if to as usize >= self.members.len() || to as usize == model => {
                DecisionKind::Stay
            }
            kind => kind.unwrap_or(DecisionKind::Stay),
        })
    }

    pub fn send(&mut self, model: usize, request: &RequestView<'_>, to: usize) -> Result<Handoff, PolicyFailure> {
        self.members[model].call(Hook::Send, |instance| instance.send(request, to as ModelIndex))
    }

    pub fn receive(&mut self, model: usize, view: &RequestView<'_>, from: &PeerView<'_>) -> Result<(), PolicyFailure> {
        self.members[model].call(Hook::Receive, |instance| instance.receive(view, from)).map(drop)
    }

    pub fn finished(&mut self) -> Result<(), PolicyFailure> {
        let finished = |member: &mut Member<'_>| member.call(Hook::Finished, |instance| instance.finished(SLOT));
        self.members.iter_mut().try_for_each(finished)
    }
}

/// The request as a model that holds `tokens` of it sees it.
pub fn view<'a>(request: &super::Request, tokens: &'a [TokenId], candidate: TokenId) -> RequestView<'a> {
    let (prompt, most) = (request.prompt.len() as u32, request.max_tokens);
    let mut view = RequestView::new(request.id, SLOT, request.seed, prompt, most, tokens);
    view.candidate = candidate;
    view
}

impl<'a> Member<'a> {
    /// The error is what is missing and how to come by it.
    fn new(
        monitor: Arc<Monitor>,
        instance: Box<dyn PolicyInstance>,
        columns: Option<&'a Columns>,
    ) -> Result<Self, (String, String)> {
        let wanted = instance.requirements().clone();
        let top_k = wanted.top_k as usize;
        let (scalars, token_logits, nets) = (Vec::new(), Vec::new(), Vec::new());
        let mut member = Self { monitor, instance, columns, scalars, token_logits, nets, top_k };
        let Some(columns) = columns else { return Ok(member) };
        let column = |name: &str| {
            let column = columns.scalars.get(name).map(Vec::as_slice);
            column.filter(|values| values.iter().any(|value| !value.is_nan()))
        };
        for (bit, name) in SCALARS.into_iter().enumerate() {
            let asked = SignalSet::from_bits(1 << bit).is_some_and(|signal| wanted.signals.contains(signal));
            let remedy = "record it: a [record] table keeps every scalar signal";
            let found = asked.then(|| column(name).ok_or_else(|| (name.to_owned(), remedy.to_owned())));
            member.scalars.push(found.transpose()?);
        }
        if columns.top_k < top_k {
            let signal = format!("topk_values ({} of the {top_k} largest logits)", columns.top_k);
            return Err((signal, format!("record with record.top_k = {top_k} or more")));
        }
        for id in &wanted.token_logits {
            let name = format!("token_logit_{id}");
            let remedy = "record a route whose policy asks for that token's logit";
            member.token_logits.push(column(&name).ok_or_else(|| (name, remedy.to_owned()))?);
        }
        for net in &wanted.nets {
            let name = format!("net_{}", net.name);
            // A score of several numbers has a column for each.
            let several = (0..).map_while(|part| column(&format!("{name}_{part}")));
            let found: Vec<&[f32]> = column(&name).map_or_else(|| several.collect(), |one| vec![one]);
            if found.is_empty() {
                return Err((name, "record a route whose policy has the same net".to_owned()));
            }
            member.nets.extend(found);
        }
        Ok(member)
    }

    fn call<T>(&mut self, hook: Hook, body: impl FnOnce(&mut dyn PolicyInstance) -> T) -> T {
        self.monitor.watch(hook, || body(&mut *self.instance))
    }

    /// The columns of a batch of this row alone.
    #[allow(clippy::type_complexity)] // Used once.
    fn row(&self, row: &Row) -> ([Vec<f32>; 6], [Vec<f32>; 3], Vec<TokenId>) {
        let mut scalars: [Vec<f32>; 6] = Default::default();
        for (values, column) in scalars.iter_mut().zip(&self.scalars) {
            values.extend(column.map(|column| column[row.at]));
        }
        let of = |columns: &[&[f32]]| columns.iter().map(|column| column[row.at]).collect();
        let top = self.columns.map_or((&[][..], &[][..]), |columns| {
            let first = row.at * columns.top_k;
            let end = first + self.top_k;
            (columns.topk_values.get(first..end).unwrap_or(&[]), columns.topk_ids.get(first..end).unwrap_or(&[]))
        });
        (scalars, [top.0.to_vec(), of(&self.token_logits), of(&self.nets)], top.1.to_vec())
    }
}
