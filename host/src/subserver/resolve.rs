//! What a step means for one request: samples and decisions in, commits and the next owner out. Pure.

use tokenrouter_plugin_api::{Decision, DecisionKind, Handoff, ModelIndex};

use crate::request::{Committed, FinishReason, TokenId};

/// One request after a forward.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// Committed tokens after the prompt.
    pub generated: u32,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Tokens behind the committed ones.
    pub provisional: &'a [Committed],
    /// Whether the provisional tokens are being verified; each then has its own row.
    pub verify: bool,
    /// The candidate of each sampled row.
    pub candidates: &'a [Committed],
    /// Tokens that this model may still write in this visit.
    pub budget: Option<u32>,
    pub ends: Ends<'a>,
    /// This model, among `models` of the route.
    pub own: ModelIndex,
    pub models: u32,
    /// Width of the vocabulary, for replaced candidates.
    pub vocab_size: u32,
    /// End tokens of this model, for replaced candidates. Ascending.
    pub eos: &'a [TokenId],
    /// Tokens that must not be written: not every model of the route knows them. Ascending.
    pub masked: &'a [TokenId],
}

/// What ends a request.
#[derive(Clone, Copy, Debug)]
pub struct Ends<'a> {
    pub stop: &'a [TokenId],
    pub ignore_eos: bool,
}

impl Ends<'_> {
    /// Whether `committed` ends the request: by the end tokens of the model that wrote it.
    pub(super) fn close(&self, committed: &Committed) -> bool {
        self.stop.contains(&committed.token) || (!self.ignore_eos && committed.eos)
    }
}

/// Where a request goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Stay,
    /// The policy wants another model; [`leave`] settles the rest.
    To(ModelIndex),
    /// The budget is spent: back to where the request came from.
    GiveBack,
    Finish(FinishReason),
}

/// What a step did to one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Newly committed tokens, in order.
    pub commit: Vec<Committed>,
    /// Provisional tokens from now on.
    pub provisional: Vec<Committed>,
    /// The candidate whose fate [`leave`] decides; only with [`Next::To`].
    pub candidate: Option<Committed>,
    pub next: Next,
    /// The budget from now on.
    pub budget: Option<u32>,
    /// Decisions that made no sense and were taken as `Stay`.
    pub invalid: u32,
}

/// The form of [`resolve`], so that tests can put a broken one in its place.
pub type Resolve = fn(&Situation<'_>, &[Decision]) -> Outcome;

/// Resolve one request. `decisions` has one entry a sampled row.
pub fn resolve(situation: &Situation<'_>, decisions: &[Decision]) -> Outcome {
    let s = situation;
    let stands = |&row: &usize| decisions.get(row).and_then(Decision::kind) == Some(DecisionKind::Accept);
    let accepted = if s.verify { (0..s.provisional.len()).take_while(stands).count() } else { 0 };
    let row = accepted.min(s.candidates.len().saturating_sub(1));
    let mut outcome = Outcome {
        commit: if s.verify { s.provisional[..accepted].to_vec() } else { Vec::new() },
        provisional: if s.verify { Vec::new() } else { s.provisional.to_vec() },
        candidate: None,
        next: Next::Stay,
        budget: s.budget,
        invalid: 0,
    };
    // Every accepted token is committed whatever follows, so the end may already be among them.
    if let Some(reason) = close(&mut outcome.commit, s.generated, s.max_tokens, s.ends) {
        outcome.next = Next::Finish(reason);
        return outcome;
    }
    let Some(mut candidate) = s.candidates.get(row).cloned() else { return outcome };
    let decision = decisions.get(row).copied().unwrap_or(Decision::STAY);
    if let Some(token) = decision.replacement() {
        if token < s.vocab_size && s.masked.binary_search(&token).is_err() {
            let eos = s.eos.binary_search(&token).is_ok();
            candidate = Committed { token, eos, logprob: f32::NAN, top_logprobs: Vec::new(), ..candidate };
        } else {
            outcome.invalid += 1;
        }
    }
    let mut kind = decision.kind().unwrap_or(DecisionKind::Accept);
    match kind {
        // Nothing to accept at a row without a provisional token.
        DecisionKind::Accept => (kind, outcome.invalid) = (DecisionKind::Stay, outcome.invalid + 1),
        DecisionKind::To(to) if to == s.own => kind = DecisionKind::Stay,
        DecisionKind::To(to) if to >= s.models => (kind, outcome.invalid) = (DecisionKind::Stay, outcome.invalid + 1),
        _ => {}
    }
    if let DecisionKind::To(to) = kind {
        outcome.candidate = Some(candidate);
        outcome.next = Next::To(to);
        return outcome;
    }
    outcome.budget = s.budget.map(|budget| budget.saturating_sub(1));
    let spent = outcome.budget == Some(0);
    let written = outcome.commit.len() + outcome.provisional.len() + 1;
    let full = s.generated as usize + written >= s.max_tokens as usize;
    // A draft cannot go on past the limit or the budget: it is committed there.
    if kind == DecisionKind::Stay || spent || full {
        outcome.commit.reserve_exact(outcome.provisional.len() + 1);
        outcome.commit.append(&mut outcome.provisional);
        outcome.commit.push(candidate);
    } else {
        outcome.provisional.push(candidate);
    }
    if let Some(reason) = close(&mut outcome.commit, s.generated, s.max_tokens, s.ends) {
        outcome.provisional.clear();
        outcome.next = Next::Finish(reason);
    } else if spent {
        outcome.next = Next::GiveBack;
    }
    outcome
}

/// How a request leaves after [`Next::To`].
#[derive(Clone, Debug, PartialEq)]
pub struct Leave {
    /// Committed on leaving.
    pub commit: Vec<Committed>,
    /// Provisional tokens that go along.
    pub provisional: Vec<Committed>,
    /// The request ended instead.
    pub finish: Option<FinishReason>,
}

/// Settle what becomes of the candidate and the provisional tokens of an outcome with [`Next::To`], once
/// its commits are entered. `generated` counts them.
pub fn leave(outcome: Outcome, handoff: &Handoff, generated: u32, max_tokens: u32, ends: Ends<'_>) -> Leave {
    let mut tail = outcome.provisional;
    let rollback = (handoff.rollback as usize).min(tail.len());
    tail.truncate(tail.len() - rollback);
    // A candidate behind a token that was dropped has lost its context.
    if handoff.keep_candidate && rollback == 0 {
        tail.extend(outcome.candidate);
    }
    if handoff.verify {
        return Leave { commit: Vec::new(), provisional: tail, finish: None };
    }
    let finish = close(&mut tail, generated, max_tokens, ends);
    Leave { commit: tail, provisional: Vec::new(), finish }
}

/// Cut `commit` behind the first token that ends the request, and say why it ends.
pub fn close(commit: &mut Vec<Committed>, generated: u32, max_tokens: u32, ends: Ends<'_>) -> Option<FinishReason> {
    for at in 0..commit.len() {
        let token = commit[at].token;
        let reason = if ends.close(&commit[at]) {
            FinishReason::Stop(token)
        } else if commit[at].complete {
            FinishReason::Complete
        } else if generated as usize + at + 1 >= max_tokens as usize {
            FinishReason::Length
        } else {
            continue;
        };
        commit.truncate(at + 1);
        return Some(reason);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::ModelId;

    fn token(token: u32) -> Committed {
        Committed {
            token,
            model: ModelId(0),
            eos: token == 99,
            complete: false,
            logprob: -1.0,
            top_logprobs: Vec::new(),
            signals: None,
        }
    }

    fn tokens(of: &[Committed]) -> Vec<u32> {
        of.iter().map(|t| t.token).collect()
    }

    fn leaving(s: &Situation<'_>, outcome: &Outcome, handoff: &Handoff) -> Leave {
        leave(outcome.clone(), handoff, s.generated, s.max_tokens, s.ends)
    }

    fn situation<'a>(provisional: &'a [Committed], verify: bool, candidates: &'a [Committed]) -> Situation<'a> {
        Situation {
            generated: 5,
            max_tokens: 100,
            provisional,
            verify,
            candidates,
            budget: None,
            ends: Ends { stop: &[], ignore_eos: false },
            own: 0,
            models: 2,
            vocab_size: 1000,
            masked: &[600],
            eos: &[99],
        }
    }

    #[test]
    fn stay_commits_draft_waits_to_asks() {
        let (none, one) = ([], [token(7)]);
        let s = situation(&none, false, &one);
        let stay = resolve(&s, &[Decision::STAY]);
        assert_eq!((tokens(&stay.commit), stay.next), (vec![7], Next::Stay));
        let draft = resolve(&s, &[Decision::DRAFT]);
        assert_eq!((tokens(&draft.commit), tokens(&draft.provisional), draft.next), (vec![], vec![7], Next::Stay));
        let to = resolve(&s, &[Decision::to(1)]);
        assert_eq!((to.commit.len(), to.candidate.clone(), to.next), (0, Some(token(7)), Next::To(1)));
        assert_eq!(tokens(&leaving(&s, &to, &Handoff::default()).commit), [7]);
        assert_eq!(leaving(&s, &to, &Handoff::drop_candidate()).commit, []);
    }

    #[test]
    fn stay_commits_earlier_drafts_first() {
        let (held, one) = ([token(1), token(2)], [token(3)]);
        let outcome = resolve(&situation(&held, false, &one), &[Decision::STAY]);
        assert_eq!((tokens(&outcome.commit), outcome.provisional.len()), (vec![1, 2, 3], 0));
    }

    #[test]
    fn a_prefix_of_drafts_stands() {
        let (held, rows) = ([token(1), token(2)], [token(11), token(12), token(13)]);
        let s = situation(&held, true, &rows);
        let cases = [
            ([Decision::STAY, Decision::ACCEPT, Decision::ACCEPT], vec![11]),
            ([Decision::ACCEPT, Decision::STAY, Decision::ACCEPT], vec![1, 12]),
            ([Decision::ACCEPT, Decision::ACCEPT, Decision::STAY], vec![1, 2, 13]),
            ([Decision::ACCEPT, Decision::STAY.replacing(55), Decision::STAY], vec![1, 55]),
        ];
        for (decisions, want) in cases {
            assert_eq!(tokens(&resolve(&s, &decisions).commit), want);
        }
        let bare = resolve(&s, &[Decision::ACCEPT; 3]);
        assert_eq!((tokens(&bare.commit), bare.invalid), (vec![1, 2, 13], 1));
    }

    #[test]
    fn the_end_ends() {
        let (none, eos) = ([], [token(99)]);
        let s = situation(&none, false, &eos);
        assert_eq!(resolve(&s, &[Decision::STAY]).next, Next::Finish(FinishReason::Stop(99)));
        // A routed-away end token does not count; a kept one does.
        let to = resolve(&s, &[Decision::to(1)]);
        assert_eq!(leaving(&s, &to, &Handoff::drop_candidate()).finish, None);
        assert_eq!(leaving(&s, &to, &Handoff::default()).finish, Some(FinishReason::Stop(99)));
        let ignoring = Situation { ends: Ends { ignore_eos: true, ..s.ends }, ..s };
        assert_eq!(resolve(&ignoring, &[Decision::STAY]).next, Next::Stay);
        let (held, rows) = ([token(1), token(99), token(3)], [token(5), token(5), token(5), token(5)]);
        let verified = resolve(&situation(&held, true, &rows), &[Decision::ACCEPT; 4]);
        assert_eq!((tokens(&verified.commit), verified.next), (vec![1, 99], Next::Finish(FinishReason::Stop(99))));
        let last = Situation { generated: 99, ..situation(&none, false, &rows) };
        assert_eq!(resolve(&last, &[Decision::STAY]).next, Next::Finish(FinishReason::Length));
        assert_eq!(resolve(&last, &[Decision::DRAFT]).next, Next::Finish(FinishReason::Length));
    }

    #[test]
    fn a_spent_budget_gives_back_everything() {
        let (held, one) = ([token(1)], [token(2)]);
        let s = Situation { budget: Some(1), ..situation(&held, false, &one) };
        let outcome = resolve(&s, &[Decision::DRAFT]);
        assert_eq!((tokens(&outcome.commit), outcome.next), (vec![1, 2], Next::GiveBack));
        let two = resolve(&Situation { budget: Some(2), ..s }, &[Decision::STAY]);
        assert_eq!((two.budget, two.next), (Some(1), Next::Stay));
    }

    #[test]
    fn nonsense_stays() {
        let (none, one) = ([], [token(7)]);
        let s = situation(&none, false, &one);
        for (decision, invalid) in [
            (Decision::to(0), 0),
            (Decision::to(2), 1),
            (Decision::STAY.replacing(1000), 1),
            (Decision::STAY.replacing(600), 1),
        ] {
            let outcome = resolve(&s, &[decision]);
            assert_eq!((tokens(&outcome.commit), outcome.next, outcome.invalid), (vec![7], Next::Stay, invalid));
        }
    }

    #[test]
    fn rollback_drops_the_candidate_too() {
        let (held, one) = ([token(1), token(2), token(3)], [token(4)]);
        let s = situation(&held, false, &one);
        let to = resolve(&s, &[Decision::to(1)]);
        let mut handoff = Handoff::default();
        handoff.rollback = 2;
        assert_eq!(tokens(&leaving(&s, &to, &handoff).commit), [1]);
        handoff = Handoff::default();
        handoff.verify = true;
        let left = leaving(&s, &to, &handoff);
        assert_eq!((left.commit.len(), tokens(&left.provisional)), (0, vec![1, 2, 3, 4]));
    }
}
