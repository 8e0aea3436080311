//! One forward of a sub-server: plan → forward → policy → resolve → effects.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use tokenrouter_plugin_api::{Decision, DecisionKind, Handoff};

use super::attachment::{Attachment, RouteRow};
use super::constrained::Masks;
use super::failures::{forbidden, misled};
use super::handoff::Terms;
use super::observe::Evaluation;
use super::plan::{Plan, Ready, Run};
use super::replica::Computed;
use super::resolve::{Leave, Next, Outcome, Situation, leave};
use super::{Effect, MAX_IDLE_HANDOFFS, SubServer};
use crate::policy::monitor::Hook;
use crate::request::{Committed, Event, FinishReason, RequestError, RequestId, RouteId};
use crate::runner::{PAGE_TOKENS, RowBatch, RowOutputs, Rows, RunnerError, SignalRequest};

/// What one step computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stepped {
    pub rows: usize,
    pub requests: usize,
    /// Of the requests, those that were sampled.
    pub evaluated: usize,
    /// Of the rows, those of prompts, but for the last of each prompt.
    pub prompt_rows: usize,
}

/// Memory of a step, kept for the next one.
#[derive(Default)]
pub(super) struct Work {
    pub ready: Vec<Ready>,
    pub plan: Plan,
    masks: Masks,
    /// Runs that are sampled, each with the place of its first sample.
    alive: Vec<(usize, Run)>,
    /// By sample.
    answers: Vec<Option<Decision>>,
    decisions: Vec<Decision>,
    /// Routes with rows to decide about.
    routes: Vec<RouteId>,
    /// Of one request.
    candidates: Vec<Committed>,
}

impl SubServer {
    /// Run one forward. Tells what was computed; nothing when there was nothing to do.
    pub fn step(&mut self) -> Stepped {
        self.begun.clear();
        let mut work = self.work.take().unwrap_or_default();
        self.plan(&mut work);
        let Work { plan, masks, .. } = &mut *work;
        for id in plan.retract.iter().chain(&plan.preempt) {
            if let Some(replica) = self.replicas.get_mut(id) {
                replica.retract();
            }
        }
        self.counters.retractions += plan.retract.len() as u64;
        self.counters.preemptions += plan.preempt.len() as u64;
        self.constrain(&mut plan.run, masks);
        let (stepped, signals) = self.prepare(&mut plan.run);
        if !plan.run.is_empty() {
            self.counters.add(stepped);
            match self.forward(&plan.run, masks, &signals) {
                Ok(mut outputs) => self.settle(&mut work, &mut outputs, &signals),
                Err(error) if error.fatal => self.go_down(error.message),
                Err(error) => {
                    for run in &plan.run {
                        let model = self.runner.info().name.clone();
                        self.fail(run.id, RequestError::Model { model, message: error.message.clone() });
                    }
                }
            }
        }
        self.work = Some(work);
        stepped
    }

    fn forward(&mut self, runs: &[Run], masks: &Masks, signals: &SignalRequest) -> Result<RowOutputs, RunnerError> {
        let mut sequences = Vec::with_capacity(runs.len());
        for run in runs {
            let Some(replica) = self.replicas.get(&run.id) else { continue };
            debug_assert!(run.start >= replica.pages.shared() * PAGE_TOKENS, "a row would be written to a shared page");
            let attachment = self.routes.get(replica.spec.new.route);
            sequences.push(Rows {
                context: &replica.tokens,
                start: run.start,
                end: run.end,
                pages: replica.pages.ids(),
                sampled: run.sampled,
                scored: replica.scored_rows(run),
                sampling: &replica.spec.new.sampling,
                prompt_len: replica.prompt_len(),
                masked: attachment.map_or(&[], |a| &a.masked),
                nets: attachment.map_or(&[], Attachment::nets),
                allowed: if run.sampled > 0 { masks.of(run.id) } else { &[] },
            });
        }
        let hidden = self.observer.as_ref().is_some_and(|observer| observer.wanted().hidden);
        let batch = RowBatch { sequences, signals: signals.clone(), hidden };
        let (sampled, scored) = (batch.sampled(), batch.scored());
        let runner = &mut self.runner;
        let outputs = catch_unwind(AssertUnwindSafe(|| runner.forward(&batch)))
            .unwrap_or_else(|_| Err(RunnerError::new("the runner panicked; see the log")));
        match &outputs {
            Ok(RowOutputs { samples, .. }) if samples.len() != sampled => {
                Err(RunnerError::new(format!("{} samples for {sampled} sampled rows", samples.len())))
            }
            Ok(RowOutputs { scores, .. }) if scores.len() != scored => {
                Err(RunnerError::new(format!("{} scores for {scored} scored rows", scores.len())))
            }
            _ => outputs,
        }
    }

    /// Turn a forward's outputs into commits and hand-offs.
    fn settle(&mut self, work: &mut Work, outputs: &mut RowOutputs, signals: &SignalRequest) {
        let Work { plan, alive, answers, routes, decisions, candidates, masks, .. } = work;
        let runs = &plan.run;
        alive.clear();
        let mut samples = 0;
        let mut scores = std::mem::take(&mut outputs.scores).into_iter();
        for &run in runs {
            let first = samples;
            samples += run.sampled;
            if let Some(replica) = self.replicas.get_mut(&run.id) {
                replica.kv_len = run.end;
                // Only the model that computes the prompt first answers for it.
                if replica.computed == Computed::Never && replica.handoffs == 0 {
                    self.begun.push(replica.spec.clone());
                    if run.start > 0 {
                        self.effects.push(Effect::Event(run.id, Event::PromptCached { tokens: run.start as u32 }));
                    }
                }
                replica.computed = Computed::Held;
            }
            if !self.tell_scores(&run, &mut scores) {
                continue;
            }
            if run.sampled > 0 {
                alive.push((first, run));
            }
        }
        alive.retain(|&(first, run)| {
            let bad = outputs.samples[first..first + run.sampled].iter().position(|sample| !sample.finite);
            match bad {
                Some(i) => self.not_finite(&run, run.end - run.sampled + i + 1),
                // Nothing is to be written: no policy is asked.
                None if self.replicas.get(&run.id).is_some_and(|r| r.spec.new.max_tokens == 0) => {
                    self.finish(run.id, FinishReason::Length);
                }
                None => return true,
            }
            false
        });
        self.route(alive, outputs, signals, answers, routes);
        self.observe(alive, answers, outputs, signals);
        decisions.clear();
        decisions.extend(answers.iter().map(|answer| answer.unwrap_or(Decision::STAY)));
        for &(first, run) in alive.iter() {
            let decisions = &mut decisions[first..first + run.sampled];
            self.settle_one((first, run), decisions, outputs, signals, masks.of(run.id), candidates);
        }
        if self.prefix_cache {
            for run in runs {
                if let Some(replica) = self.replicas.get_mut(&run.id) {
                    replica.publish();
                }
            }
        }
    }

    /// Ask the policies. One decision a sample; `None` where nobody is asked, which means `Stay`.
    fn route(
        &mut self,
        runs: &[(usize, Run)],
        outputs: &RowOutputs,
        signals: &SignalRequest,
        answers: &mut Vec<Option<Decision>>,
        routes: &mut Vec<RouteId>,
    ) {
        answers.clear();
        answers.resize(outputs.samples.len(), None);
        routes.clear();
        for &(first, run) in runs {
            let Some(replica) = self.replicas.get(&run.id) else { continue };
            let Some(slot) = replica.slot else { continue };
            // The last token of a budget goes back whatever it is; no policy is called for it.
            if replica.budget == Some(1) && !replica.verify {
                continue;
            }
            let route = replica.spec.new.route;
            let Some(attachment) = self.routes.get_mut(route) else { continue };
            if attachment.asked.is_empty() {
                routes.push(route);
            }
            let drafts = if replica.verify { replica.provisional.as_slice() } else { &[] };
            let next = replica.tokens.len() - drafts.len() - replica.prompt_len();
            for i in 0..run.sampled {
                // What holds if the policy fails.
                answers[first + i] = Some(Decision::STAY);
                attachment.asked.push(RouteRow {
                    id: run.id,
                    slot,
                    seed: replica.spec.new.sampling.seed,
                    position: (next + i) as u32,
                    candidate: outputs.samples[first + i].token,
                    draft: drafts.get(i).map(|d| d.token),
                    came_from: replica.came_from,
                    remaining: replica.spec.new.max_tokens.saturating_sub((next + i) as u32),
                    sample: first + i,
                });
            }
        }
        routes.sort_unstable();
        for &route in routes.iter() {
            let Some(attachment) = self.routes.get_mut(route) else { continue };
            attachment.at_step(self.counters.steps);
            let routed = attachment.route(&outputs.signals, signals);
            let asked = &mut attachment.asked;
            match routed {
                Ok(()) => {
                    for (&sample, &decision) in asked.samples.iter().zip(&asked.decisions) {
                        answers[sample] = Some(decision);
                    }
                    asked.clear();
                }
                Err(failed) => {
                    let mut ids = std::mem::take(&mut asked.ids);
                    asked.clear();
                    ids.dedup();
                    self.policy_failed(&ids, failed);
                }
            }
            self.tell_notes(route);
        }
    }

    /// Show the observer each sampled row with its decision.
    fn observe(
        &self,
        runs: &[(usize, Run)],
        decisions: &[Option<Decision>],
        outputs: &RowOutputs,
        computed: &SignalRequest,
    ) {
        let Some(observer) = &self.observer else { return };
        let width = outputs.hidden.len() / outputs.samples.len().max(1);
        for &(first, run) in runs {
            let Some(replica) = self.replicas.get(&run.id) else { continue };
            let route = replica.spec.new.route;
            let Some(attachment) = self.routes.get(route) else { continue };
            let drafts = if replica.verify { replica.provisional.as_slice() } else { &[] };
            let next = replica.tokens.len() - drafts.len() - replica.prompt_len();
            for i in 0..run.sampled {
                let row = first + i;
                observer.evaluated(&Evaluation {
                    request: run.id,
                    route,
                    model: self.id,
                    position: (next + i) as u32,
                    candidate: outputs.samples[row].token,
                    logprob: outputs.samples[row].logprob,
                    draft: drafts.get(i).map(|d| d.token),
                    decision: decisions[row],
                    requirements: attachment.requirements(),
                    nets: attachment.nets(),
                    columns: &outputs.signals,
                    computed,
                    row,
                    hidden: &outputs.hidden[row * width..][..width],
                });
            }
        }
    }

    /// `first` is the place of the run's first sample.
    fn settle_one(
        &mut self,
        (first, run): (usize, Run),
        decisions: &mut [Decision],
        outputs: &mut RowOutputs,
        computed: &SignalRequest,
        mask: &[u32],
        candidates: &mut Vec<Committed>,
    ) {
        let id = run.id;
        let Some(replica) = self.replicas.get_mut(&id) else { return };
        let Some(attachment) = self.routes.get_mut(replica.spec.new.route) else { return };
        let info = self.runner.info();
        candidates.clear();
        candidates.extend((first..first + run.sampled).map(|row| {
            let sample = &mut outputs.samples[row];
            Committed {
                token: sample.token,
                model: self.id,
                eos: info.eos.binary_search(&sample.token).is_ok(),
                complete: false,
                logprob: sample.logprob,
                top_logprobs: std::mem::take(&mut sample.top_logprobs),
                signals: replica
                    .spec
                    .new
                    .return_signals
                    .then(|| Box::new(attachment.named_signals(&outputs.signals, computed, row))),
            }
        }));
        let mut notes = false;
        if !mask.is_empty() {
            match replica.judge(run, mask, &info.eos, candidates, decisions) {
                Ok(0) => {}
                Ok(count) => {
                    self.counters.invalid_decisions += u64::from(count);
                    forbidden(attachment, id);
                    notes = true;
                }
                Err((position, broken)) => return self.fail_constrained(id, position, broken),
            }
        }
        let round = if replica.idle_handoffs >= MAX_IDLE_HANDOFFS { stay_instead(decisions) } else { 0 };
        let situation = Situation {
            generated: replica.generated(),
            max_tokens: replica.spec.new.max_tokens,
            provisional: &replica.provisional,
            verify: replica.verify,
            candidates,
            budget: replica.budget,
            ends: replica.ends(),
            own: attachment.own,
            models: attachment.models.len() as u32,
            vocab_size: info.vocab_size,
            masked: &attachment.masked,
            eos: &info.eos,
        };
        let outcome = (self.resolve)(&situation, decisions);
        self.counters.invalid_decisions += round + u64::from(outcome.invalid);
        if round > 0 || outcome.invalid > 0 {
            misled(attachment, id, round, decisions, outcome.invalid);
            notes = true;
        }
        if notes {
            let route = replica.spec.new.route;
            self.tell_notes(route);
        }
        match outcome.next {
            Next::To(to) => self.leave(id, to, outcome),
            _ => self.go_on(id, outcome),
        }
    }

    /// Enter an outcome that is no hand-off of the policy's.
    fn go_on(&mut self, id: RequestId, outcome: Outcome) {
        self.commit(id, outcome.commit, outcome.provisional);
        let Some(replica) = self.replicas.get_mut(&id) else { return };
        replica.budget = outcome.budget;
        match (outcome.next, replica.came_from) {
            (Next::Finish(reason), _) => self.finish(id, reason),
            (Next::GiveBack, Some(back)) => self.hand_off(id, back, Vec::new(), Terms::default()),
            (Next::GiveBack, None) => replica.budget = None,
            (Next::Stay | Next::To(_), _) => {}
        }
    }

    /// Hand over to `to` as the policy's `send` says.
    fn leave(&mut self, id: RequestId, to: u32, mut outcome: Outcome) {
        self.commit(id, std::mem::take(&mut outcome.commit), outcome.provisional.clone());
        let Some(replica) = self.replicas.get(&id) else { return };
        let Some(attachment) = self.routes.get_mut(replica.spec.new.route) else { return };
        let route = replica.spec.new.route;
        let mut view = replica.view();
        view.candidate = outcome.candidate.as_ref().map_or(view.candidate, |c| c.token);
        let answer = attachment.send(&view, to);
        let budget = replica.budget.map(|budget| budget.saturating_sub(1));
        let (generated, max_tokens) = (replica.generated(), replica.spec.new.max_tokens);
        let ends = replica.ends();
        match answer {
            Ok(Some(handoff)) => {
                let (rollback, provisional) = (handoff.rollback as usize, outcome.provisional.len());
                if rollback > provisional {
                    attachment.misled(Hook::Send, 0, 1, || {
                        format!("the policy rolls {rollback} of {provisional} provisional tokens back; all are")
                    });
                }
                let left = leave(outcome, &handoff, generated, max_tokens, ends);
                self.tell_notes(route);
                let payload = Some(handoff.payload).filter(|payload| !payload.is_empty()).map(Arc::from);
                let terms = Terms { budget: handoff.budget, payload, counted: true };
                self.commit(id, left.commit, left.provisional.clone());
                match left.finish {
                    Some(reason) => self.finish(id, reason),
                    None => self.hand_off(id, to, left.provisional, terms),
                }
            }
            // Without an answer the request stays: the candidate is committed.
            no_answer => {
                let Leave { commit, finish, .. } = leave(outcome, &Handoff::default(), generated, max_tokens, ends);
                let next = match finish {
                    Some(reason) => Next::Finish(reason),
                    None if budget == Some(0) => Next::GiveBack,
                    None => Next::Stay,
                };
                if let Err(failed) = no_answer {
                    self.policy_failed(&[id], failed);
                }
                self.tell_notes(route);
                let (provisional, candidate) = (Vec::new(), None);
                self.go_on(id, Outcome { commit, provisional, candidate, next, budget, invalid: 0 });
            }
        }
    }
}

/// Turn hand-offs into `Stay`. Returns how many there were.
fn stay_instead(decisions: &mut [Decision]) -> u64 {
    let handoffs = decisions.iter_mut().filter(|d| matches!(d.kind(), Some(DecisionKind::To(_))));
    handoffs.map(|decision| *decision = Decision::STAY).count() as u64
}
