//! A module's instance as the sub-servers see it.

use std::sync::Arc;
use std::time::Instant;

use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, Handoff, ModelIndex, NO_MODEL, PeerView, PerRequest, RequestView, Requirements,
    RouteBatch, SignalColumns, SignalSet, Slot,
};
use wasmtime::Module;

use super::guest::{Fault, Guest, fuel};
use super::layout::{self, Answer, Leave, Numbering, ROWS, Seat};
use super::manifest::Manifest;
use super::restarts::{MOST, Restarts};
use crate::policy::nets::HostNet;
use crate::policy::{PolicyFailure, PolicyInstance, Survived};

pub(super) struct WasmInstance {
    manifest: Arc<Manifest>,
    module: Module,
    seat: Seat,
    requirements: Requirements,
    guest: Guest,
    restarts: Restarts,
    /// What nobody has asked for yet.
    survived: Vec<Survived>,
    /// How the request at a slot leaves, from the last decision to hand it over.
    leaving: PerRequest<Option<Leave>>,
    /// Of the last call; the memory is kept for the next one.
    answers: Box<[Answer; ROWS]>,
    /// Set when no fresh instance is left.
    failed: bool,
}

impl WasmInstance {
    pub(super) fn create(
        manifest: &Arc<Manifest>,
        module: &Module,
        nets: &[HostNet],
        context: &Context<'_>,
        settings: &str,
    ) -> Result<Self, PolicyFailure> {
        let failure = |hook| {
            let plugin = manifest.name.clone();
            move |message| PolicyFailure { plugin, hook, message }
        };
        let settings = manifest.numbers(settings).map_err(failure("create"))?;
        let numbering = numbering(manifest, context).map_err(failure("create"))?;
        if nets.len() != manifest.nets.len() {
            let nets = manifest.nets.join(", ");
            return Err(failure("create")(format!("asks for the nets {nets}; describe them in [routes.ROUTE.nets]")));
        }
        let mut requirements = Requirements::signals(manifest.signals);
        let mut places = Vec::new();
        for net in nets {
            let here = computes(net, context).map_err(failure("create"))? == context.model;
            places.push(here.then_some(requirements.nets.len()));
            requirements.nets.extend(here.then(|| net.net.clone()));
        }
        let seat = Seat { model: context.model, entry: context.entry, numbering, settings, nets: places };
        let start = || Guest::start(module, &seat).map_err(|fault| fault.to_string());
        rehearse(&mut start().map_err(failure("create"))?, manifest, &seat).map_err(failure("create"))?;
        // Not the one that rehearsed: it remembers requests that never were.
        let guest = start().map_err(failure("create"))?;
        Ok(Self {
            manifest: manifest.clone(),
            module: module.clone(),
            seat,
            requirements,
            guest,
            restarts: Restarts::default(),
            survived: Vec::new(),
            leaving: PerRequest::new(),
            answers: Box::new([Answer::STAY; ROWS]),
            failed: false,
        })
    }

    fn failure(&self, hook: &'static str, message: String) -> PolicyFailure {
        PolicyFailure { plugin: self.manifest.name.clone(), hook, message }
    }

    /// After a fault: whatever state the instance is in, it is not called again.
    fn restart(&mut self, hook: &'static str, fault: &Fault) -> Result<(), PolicyFailure> {
        self.failed = true;
        let Some(number) = self.restarts.enter(Instant::now()) else {
            let message = format!("{fault}; it was started anew {MOST} times in the minute before");
            return Err(self.failure(hook, message));
        };
        self.survived.push(Survived {
            unknown_destination: matches!(fault, Fault::Answer(_)),
            wrong_answer: matches!(fault, Fault::Returned { .. }),
            message: format!("{fault}; it starts anew without its state, {number} of {MOST} in a minute"),
        });
        self.guest = Guest::start(&self.module, &self.seat).map_err(|e| self.failure(hook, e.to_string()))?;
        self.failed = false;
        Ok(())
    }

    fn usable(&self, hook: &'static str) -> Result<(), PolicyFailure> {
        let message = "not called, because an earlier call of this instance failed";
        if self.failed { Err(self.failure(hook, message.to_owned())) } else { Ok(()) }
    }

    /// Put the answers for the rows that begin at `first` into `self.answers`, and say how many. A call that fails is repeated by a fresh instance:
    /// every decision is the module's. The repetitions have what fuel the call left, so that a module cannot hold its
    /// model up for longer by failing; one that used up all of it is not repeated.
    fn decide(&mut self, batch: &RouteBatch<'_>, first: usize) -> Result<usize, PolicyFailure> {
        let rows = (batch.len() - first).min(ROWS);
        let mut left = fuel(rows);
        let mut before: Option<Fault> = None;
        loop {
            let Self { manifest, seat, guest, answers, .. } = self;
            match call(guest, batch, first, manifest.signals, seat, left, &mut answers[..rows]) {
                Ok(Ok(())) => return Ok(rows),
                Ok(Err(missing)) => {
                    self.failed = true;
                    return Err(self.failure("route", missing.to_string()));
                }
                Err(fault) => {
                    left = self.guest.fuel_left();
                    if left == 0 || matches!(fault, Fault::Fuel(_)) {
                        self.failed = true;
                        let message = match before {
                            Some(before) => format!("{before}; its repetition used up what fuel the call had left"),
                            None => fault.to_string(),
                        };
                        return Err(self.failure("route", message));
                    }
                    self.restart("route", &fault)?;
                    before = Some(fault);
                }
            }
        }
    }
}

/// The outer error is the module's, the inner one the host's.
fn call(
    guest: &mut Guest,
    batch: &RouteBatch<'_>,
    first: usize,
    signals: SignalSet,
    seat: &Seat,
    left: u64,
    answers: &mut [Answer],
) -> Result<Result<(), layout::MissingColumn>, Fault> {
    let block = guest.block()?;
    let written = layout::write_rows(block, batch, first, signals, &seat.numbering)
        .and_then(|rows| layout::write_nets(block, batch, first, rows, &seat.nets).map(|()| rows));
    let rows = match written {
        Ok(rows) => rows,
        Err(missing) => return Ok(Err(missing)),
    };
    guest.route(rows, left)?;
    Ok(Ok(layout::read_answers(guest.block()?, &seat.numbering, answers)?))
}

/// The model that computes a net.
fn computes(net: &HostNet, context: &Context<'_>) -> Result<ModelIndex, String> {
    let Some(at) = &net.at else { return Ok(context.entry) };
    let found = context.models.iter().position(|model| model.role == *at || model.name == *at);
    found.map(|model| model as ModelIndex).ok_or_else(|| {
        let roles: Vec<_> = context.models.iter().map(|model| model.role.as_str()).collect();
        format!("nets.{}.at = {at:?}: no model of the route has this role; it has {}", net.net.name, roles.join(", "))
    })
}

/// The models of the route as the module counts them.
fn numbering(manifest: &Manifest, context: &Context<'_>) -> Result<Numbering, String> {
    let roles: Vec<&str> = manifest.roles.iter().map(String::as_str).collect();
    let name = &manifest.name;
    let order = match roles[..] {
        [] => Ok((0..context.models.len() as ModelIndex).collect()),
        [a] => context.roles(name, [a]).map(Vec::from),
        [a, b] => context.roles(name, [a, b]).map(Vec::from),
        [a, b, c] => context.roles(name, [a, b, c]).map(Vec::from),
        [a, b, c, d] => context.roles(name, [a, b, c, d]).map(Vec::from),
        _ => return Err(format!("roles: asks for {}, the limit is {}", roles.len(), super::manifest::MAX_ROLES)),
    };
    let order = order.map_err(|e| e.message)?;
    if let Some(at) = manifest.entry.as_ref().and_then(|entry| manifest.roles.iter().position(|role| role == entry)) {
        context.begins_at(name, order[at]).map_err(|e| e.message)?;
    }
    Ok(Numbering::new(&order))
}

/// Call the module on made-up rows, so that one that never works is refused at the start.
fn rehearse(guest: &mut Guest, manifest: &Manifest, seat: &Seat) -> Result<(), String> {
    let odd = [0.0, 0.5, 1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, f32::MIN_POSITIVE / 2.0, f32::MAX];
    let signal: Vec<f32> = odd.into_iter().cycle().take(ROWS).collect();
    let (ids, numbers): (Vec<u64>, Vec<u32>) = (0..ROWS as u32).map(|row| (u64::from(row), row)).unzip();
    let (nowhere, remaining) = ([NO_MODEL; ROWS], [1; ROWS]);
    let signals = SignalColumns {
        entropy: &signal,
        entropy_norm: &signal,
        top1_prob: &signal,
        margin: &signal,
        logsumexp: &signal,
        candidate_prob: &signal,
        ..SignalColumns::default()
    };
    let here = seat.nets.iter().flatten().count();
    let scores: Vec<f32> = odd.into_iter().cycle().take(ROWS * here).collect();
    for rows in [1, ROWS] {
        let batch = RouteBatch {
            request_ids: &ids[..rows],
            slots: &numbers,
            positions: &numbers,
            last_models: &nowhere,
            remaining: &remaining,
            signals: SignalColumns { net_scores: &scores[..rows * here], net_width: here as u32, ..signals },
            ..RouteBatch::default()
        };
        let mut answers = [Answer::STAY; ROWS];
        let called = call(guest, &batch, 0, manifest.signals, seat, fuel(rows), &mut answers[..rows]);
        let called = called.map_err(|fault| match rows {
            1 => format!("a rehearsal with 1 row: {fault}"),
            rows => format!("a rehearsal with {rows} rows: {fault}"),
        })?;
        called.map_err(|missing| missing.to_string())?;
    }
    guest.finished(0).map_err(|fault| format!("a rehearsal of tr_finished: {fault}"))
}

impl PolicyInstance for WasmInstance {
    fn requirements(&self) -> &Requirements {
        &self.requirements
    }

    fn entry(&mut self, _request: &RequestView<'_>) -> Result<Option<ModelIndex>, PolicyFailure> {
        self.usable("entry")?;
        Ok(None)
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) -> Result<(), PolicyFailure> {
        self.usable("route")?;
        for first in (0..batch.len()).step_by(ROWS) {
            let rows = self.decide(batch, first)?;
            let answers = &self.answers[..rows];
            for ((answer, decision), &slot) in answers.iter().zip(&mut out[first..]).zip(&batch.slots[first..]) {
                *decision = answer.decision;
                let leaving = self.leaving.get(slot);
                // Selected, not skipped: which rows leave cannot be predicted.
                *leaving = answer.leave.or(*leaving);
            }
        }
        Ok(())
    }

    fn send(&mut self, request: &RequestView<'_>, _to: ModelIndex) -> Result<Handoff, PolicyFailure> {
        self.usable("send")?;
        let leave = self.leaving.get(request.slot).take();
        leave
            .map(Leave::handoff)
            .ok_or_else(|| self.failure("send", "asked for a request that was not handed over".to_owned()))
    }

    fn receive(&mut self, _request: &RequestView<'_>, _message: &PeerView<'_>) -> Result<Acceptance, PolicyFailure> {
        self.usable("receive")?;
        // No module hands provisional tokens over, so there are none to judge.
        Ok(Acceptance::Verify)
    }

    fn finished(&mut self, slot: Slot) -> Result<(), PolicyFailure> {
        self.usable("finished")?;
        self.leaving.forget(slot);
        // A fresh instance knows nothing of the slot: no second call.
        self.guest.finished(slot).or_else(|fault| self.restart("finished", &fault))
    }

    fn survived(&mut self) -> Vec<Survived> {
        std::mem::take(&mut self.survived)
    }
}
