//! One forward of a sub-server: plan → forward → policy → resolve → effects.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use tokenrouter_plugin_api::{Decision, DecisionKind, Handoff, SignalSet};

use super::attachment::{Attachment, RouteRow};
use super::observe::Evaluation;
use super::pages::pages_for;
use super::plan::{Pending, Plan, Ready, Run, plan};
use super::replica::{Computed, Replica};
use super::resolve::{Leave, Next, Outcome, Situation, leave};
use super::{Effect, MAX_IDLE_HANDOFFS, SubServer, Terms};
use crate::request::{Committed, Event, RequestError, RequestId};
use crate::runner::{PAGE_TOKENS, RowBatch, RowOutputs, Rows, RunnerError, SignalRequest};

impl SubServer {
    /// Run one forward. Returns the rows computed; 0 when there was nothing to do.
    pub fn step(&mut self) -> usize {
        self.adopt();
        let plan = self.plan();
        for id in plan.retract.iter().chain(&plan.preempt) {
            if let Some(replica) = self.replicas.get_mut(id) {
                replica.retract();
            }
        }
        self.counters.retractions += plan.retract.len() as u64;
        self.counters.preemptions += plan.preempt.len() as u64;
        let runs = self.allocate(plan.run);
        if runs.is_empty() {
            return 0;
        }
        let signals = self.signals(&runs);
        let rows = runs.iter().map(|run| run.end - run.start).sum();
        self.counters.steps += 1;
        self.counters.rows += rows as u64;
        self.counters.batched += runs.len() as u64;
        for run in &runs {
            self.counters.evaluated += u64::from(run.sampled > 0);
            // A single row that is sampled is the last one.
            if run.sampled == 0 || run.end - run.start > 1 {
                let prompt = self.replicas.get(&run.id).map_or(0, |r| r.prompt_len().saturating_sub(1));
                self.counters.prompt_rows += prompt.min(run.end).saturating_sub(run.start) as u64;
            }
        }
        match self.forward(&runs, &signals) {
            Ok(outputs) => self.settle(&runs, &outputs, &signals),
            Err(error) if error.fatal => self.go_down(error.message),
            Err(error) => {
                for run in &runs {
                    let model = self.runner.info().name.clone();
                    self.fail(run.id, RequestError::Model { model, message: error.message.clone() });
                }
            }
        }
        rows
    }

    /// Take from the cache what owned requests lack, the oldest first, as far as they then fit.
    fn adopt(&mut self) {
        let Self { replicas, owned, pool, counters, .. } = self;
        // Pages that older requests still need, and those that pending replicas could give.
        let (mut promised, mut pending) = (0, None);
        for (place, id) in owned.iter().enumerate() {
            let lacking = |r: &Replica| pages_for(r.tokens.len()).saturating_sub(r.pages.ids().len());
            if replicas.get(id).is_some_and(Replica::lacks_a_page) {
                let held = |r: &Replica| if r.owned { 0 } else { r.pages.ids().len() };
                let pending = *pending.get_or_insert_with(|| replicas.values().map(held).sum::<usize>());
                let Some(replica) = replicas.get_mut(id) else { continue };
                let enters = replica.pages.ids().is_empty();
                let (queried, found) = replica.adopt();
                // One that waits for room must not keep pages from others meanwhile, nor may younger ones.
                if enters && place > 0 && promised + lacking(replica) > pool.available() + pending {
                    replica.retract();
                    break;
                }
                counters.prefix_queried += queried as u64;
                counters.prefix_found += found as u64;
            }
            promised += replicas.get(id).map_or(0, lacking);
        }
    }

    fn plan(&self) -> Plan {
        let owned: Vec<&Replica> = self.owned.iter().filter_map(|id| self.replicas.get(id)).collect();
        let free = self.pool.available();
        let wanted: usize = owned.iter().map(|r| pages_for(r.tokens.len()).saturating_sub(r.pages.ids().len())).sum();
        if wanted <= free {
            let ready: Vec<Ready> = owned.iter().map(|r| r.ready(0)).collect();
            return plan(&ready, &[], free, self.limits);
        }
        let mut others: Vec<&Replica> =
            self.replicas.values().filter(|r| !r.owned && !r.pages.ids().is_empty()).collect();
        others.sort_unstable_by_key(|r| std::cmp::Reverse(r.spec.id));
        // In the order in which they would give up their pages.
        let order = others.iter().chain(owned.iter().rev());
        let mut freed = self.pool.freed(order.map(|r| &r.pages)).into_iter();
        let pending: Vec<Pending> =
            others.iter().zip(&mut freed).map(|(r, freed)| Pending { id: r.spec.id, freed }).collect();
        let mut ready: Vec<Ready> = owned.iter().rev().zip(freed).map(|(r, freed)| r.ready(freed)).collect();
        ready.reverse();
        plan(&ready, &pending, free, self.limits)
    }

    /// Give each run its pages. The plan counted them, so all runs get theirs.
    fn allocate(&mut self, runs: Vec<Run>) -> Vec<Run> {
        let replicas = &mut self.replicas;
        let fits = |run: &Run| replicas.get_mut(&run.id).is_some_and(|r| r.pages.grow_to(pages_for(run.end)));
        runs.into_iter().filter(fits).collect()
    }

    /// Everything that the routes of the sampled requests ask for.
    fn signals(&self, runs: &[Run]) -> SignalRequest {
        let mut request = SignalRequest::default();
        for run in runs.iter().filter(|run| run.sampled > 0) {
            let Some(replica) = self.replicas.get(&run.id) else { continue };
            if let Some(attachment) = self.routes.get(replica.spec.new.route.index()).and_then(Option::as_ref) {
                request.add(attachment.requirements());
            }
            if replica.spec.new.return_signals {
                request.scalars = SignalSet::ALL;
            }
        }
        if let Some(observer) = &self.observer {
            let wanted = observer.wanted();
            request.scalars = request.scalars | wanted.scalars;
            request.top_k = request.top_k.max(wanted.top_k.min(self.runner.info().vocab_size));
        }
        request
    }

    fn forward(&mut self, runs: &[Run], signals: &SignalRequest) -> Result<RowOutputs, RunnerError> {
        let mut sequences = Vec::with_capacity(runs.len());
        for run in runs {
            let Some(replica) = self.replicas.get(&run.id) else { continue };
            debug_assert!(run.start >= replica.pages.shared() * PAGE_TOKENS, "a row would be written to a shared page");
            let attachment = self.routes.get(replica.spec.new.route.index()).and_then(Option::as_ref);
            sequences.push(Rows {
                context: &replica.tokens,
                start: run.start,
                end: run.end,
                pages: replica.pages.ids(),
                sampled: run.sampled,
                sampling: &replica.spec.new.sampling,
                prompt_len: replica.prompt_len(),
                masked: attachment.map_or(&[], |a| &a.masked),
                nets: attachment.map_or(&[], Attachment::nets),
            });
        }
        let hidden = self.observer.as_ref().is_some_and(|observer| observer.wanted().hidden);
        let batch = RowBatch { sequences, signals: signals.clone(), hidden };
        let sampled = batch.sampled();
        let runner = &mut self.runner;
        let outputs = catch_unwind(AssertUnwindSafe(|| runner.forward(&batch)))
            .unwrap_or_else(|_| Err(RunnerError::new("the runner panicked; see the log")))?;
        if outputs.samples.len() != sampled {
            return Err(RunnerError::new(format!("{} samples for {sampled} sampled rows", outputs.samples.len())));
        }
        Ok(outputs)
    }

    /// Turn a forward's outputs into commits and hand-offs.
    fn settle(&mut self, runs: &[Run], outputs: &RowOutputs, signals: &SignalRequest) {
        // Where each run's samples begin.
        let mut firsts = Vec::with_capacity(runs.len());
        let mut samples = 0;
        for run in runs {
            firsts.push(samples);
            samples += run.sampled;
            if let Some(replica) = self.replicas.get_mut(&run.id) {
                replica.kv_len = run.end;
                // Only the model that computes the prompt first answers for it.
                if replica.computed == Computed::Never && replica.handoffs == 0 && run.start > 0 {
                    self.effects.push(Effect::Event(run.id, Event::PromptCached { tokens: run.start as u32 }));
                }
                replica.computed = Computed::Held;
            }
        }
        let mut alive: Vec<(usize, &Run)> = Vec::with_capacity(runs.len());
        for (&first, run) in firsts.iter().zip(runs) {
            let bad = (0..run.sampled).find(|&i| !outputs.samples[first + i].finite);
            if let Some(i) = bad {
                let model = self.runner.info().name.clone();
                // Whatever spoilt the row may have spoilt pages that it read; none of them is found again.
                self.pool.forget_cached();
                if let Some(replica) = self.replicas.get_mut(&run.id) {
                    replica.retract();
                }
                self.fail(run.id, RequestError::NotFinite { model, position: run.end - run.sampled + i + 1 });
            } else if run.sampled > 0 {
                alive.push((first, run));
            }
        }
        let answers = self.route(&alive, outputs, signals);
        self.observe(&alive, &answers, outputs, signals);
        let mut decisions: Vec<_> = answers.into_iter().map(|answer| answer.unwrap_or(Decision::STAY)).collect();
        for (first, run) in alive {
            let decisions = &mut decisions[first..first + run.sampled];
            self.settle_one(run, first, decisions, outputs, signals);
        }
        for run in runs {
            if let Some(replica) = self.replicas.get_mut(&run.id) {
                replica.publish();
            }
        }
    }

    /// Ask the policies. One decision a sample; `None` where nobody is asked, which means `Stay`.
    fn route(
        &mut self,
        runs: &[(usize, &Run)],
        outputs: &RowOutputs,
        signals: &SignalRequest,
    ) -> Vec<Option<Decision>> {
        let mut decisions = vec![None; outputs.samples.len()];
        let mut by_route: BTreeMap<usize, Vec<RouteRow>> = BTreeMap::new();
        for &(first, run) in runs {
            let Some(replica) = self.replicas.get(&run.id) else { continue };
            let Some(slot) = replica.slot else { continue };
            // The last token of a budget goes back whatever it is; no policy is called for it.
            if replica.budget == Some(1) && !replica.verify {
                continue;
            }
            let rows = by_route.entry(replica.spec.new.route.index()).or_default();
            let drafts = if replica.verify { replica.provisional.as_slice() } else { &[] };
            let next = replica.tokens.len() - drafts.len() - replica.prompt_len();
            for i in 0..run.sampled {
                // What holds if the policy fails.
                decisions[first + i] = Some(Decision::STAY);
                rows.push(RouteRow {
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
        for (route, rows) in by_route {
            let Some(attachment) = self.routes.get_mut(route).and_then(Option::as_mut) else { continue };
            let routed = attachment.route(&rows, &outputs.signals, signals);
            if attachment.missing_score() {
                let message = "a router network gave a score that is no number; the policy takes it as no signal. Are the \
                               weights damaged, or of another model?";
                self.effects.push(Effect::PolicyMisled { route: route as u32, message: message.into() });
            }
            match routed {
                Ok(out) => rows.iter().zip(out).for_each(|(row, decision)| decisions[row.sample] = Some(decision)),
                Err(failed) => {
                    let mut ids: Vec<RequestId> = rows.iter().map(|row| row.id).collect();
                    ids.dedup();
                    self.policy_failed(&ids, failed);
                }
            }
        }
        decisions
    }

    /// Show the observer each sampled row with its decision.
    fn observe(
        &self,
        runs: &[(usize, &Run)],
        decisions: &[Option<Decision>],
        outputs: &RowOutputs,
        computed: &SignalRequest,
    ) {
        let Some(observer) = &self.observer else { return };
        let width = outputs.hidden.len() / outputs.samples.len().max(1);
        for &(first, run) in runs {
            let Some(replica) = self.replicas.get(&run.id) else { continue };
            let route = replica.spec.new.route;
            let Some(attachment) = self.routes.get(route.index()).and_then(Option::as_ref) else { continue };
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

    fn settle_one(
        &mut self,
        run: &Run,
        first: usize,
        decisions: &mut [Decision],
        outputs: &RowOutputs,
        computed: &SignalRequest,
    ) {
        let id = run.id;
        let Some(replica) = self.replicas.get(&id) else { return };
        let Some(attachment) = self.routes.get_mut(replica.spec.new.route.index()).and_then(Option::as_mut) else {
            return;
        };
        let info = self.runner.info();
        let candidates: Vec<Committed> = (first..first + run.sampled)
            .map(|row| {
                let sample = &outputs.samples[row];
                Committed {
                    token: sample.token,
                    model: self.id,
                    eos: info.eos.binary_search(&sample.token).is_ok(),
                    logprob: sample.logprob,
                    top_logprobs: sample.top_logprobs.clone(),
                    signals: replica
                        .spec
                        .new
                        .return_signals
                        .then(|| Box::new(attachment.named_signals(&outputs.signals, computed, row))),
                }
            })
            .collect();
        let round = if replica.idle_handoffs >= MAX_IDLE_HANDOFFS { stay_instead(decisions) } else { 0 };
        let situation = Situation {
            generated: replica.generated(),
            max_tokens: replica.spec.new.max_tokens,
            provisional: &replica.provisional,
            verify: replica.verify,
            candidates: &candidates,
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
        if (round > 0 || outcome.invalid > 0) && attachment.warns() {
            let route = replica.spec.new.route.0;
            let message = if round > 0 {
                format!(
                    "the policy handed request {id} round {MAX_IDLE_HANDOFFS} times without a token; it stays for one"
                )
            } else {
                let decision = decisions.iter().find(|d| **d != Decision::STAY && **d != Decision::ACCEPT);
                let decision = decision.copied().unwrap_or(Decision::ACCEPT);
                format!("the policy answered {decision:?}, which has no meaning here and was taken as Stay")
            };
            self.effects.push(Effect::PolicyMisled { route, message });
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
        let Some(attachment) = self.routes.get_mut(replica.spec.new.route.index()).and_then(Option::as_mut) else {
            return;
        };
        let mut view = replica.view();
        view.candidate = outcome.candidate.as_ref().map_or(view.candidate, |c| c.token);
        let answer = attachment.send(&view, to);
        let budget = replica.budget.map(|budget| budget.saturating_sub(1));
        let (generated, max_tokens) = (replica.generated(), replica.spec.new.max_tokens);
        let ends = replica.ends();
        match answer {
            Ok(Some(handoff)) => {
                let left = leave(outcome, &handoff, generated, max_tokens, ends);
                let terms = Terms { budget: handoff.budget, payload: Arc::from(&*handoff.payload), counted: true };
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
