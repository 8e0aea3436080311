//! Provisional tokens from end to end: drafts verified by another model, and drafts rolled back by
//! their own.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokenrouter::engine::Engine;
use tokenrouter::request::{Event, NewRequest, RequestId, SamplingParams, TokenId};
use tokenrouter::subserver::observe::{Evaluation, Observer, Wanted};
use tokenrouter_plugin_api::DecisionKind;

use crate::demo::{Answer, Route, Setup, answers, observed, pair, root};

/// The prompts of some reference traces.
fn prompts() -> Vec<Vec<TokenId>> {
    let names = ["collm-1", "collm-2", "r2r-1", "r2r-2", "citer-1", "rstitch-1", "glimprouter-1", "me-2"];
    names.map(|name| ids(&trace(name)["prompt_ids"])).to_vec()
}

fn trace(name: &str) -> Value {
    let path = root().join(format!("tests/fixtures/goldens/traces/{name}.json"));
    serde_json::from_slice(&std::fs::read(path).expect("a trace")).expect("JSON")
}

fn ids(value: &Value) -> Vec<TokenId> {
    value.as_array().expect("ids").iter().map(|v| v.as_u64().expect("an id") as TokenId).collect()
}

/// The answer to each prompt on `route`, all at once.
fn ask(engine: &Engine, route: &str, max_tokens: u32) -> Vec<Answer> {
    let route = engine.find_route(route).expect("a route");
    let request = |prompt| NewRequest {
        route,
        prompt,
        max_tokens,
        sampling: SamplingParams::greedy(),
        return_signals: false,
        cache_salt: None,
    };
    answers(engine, prompts().into_iter().map(request).collect())
}

fn tokens(answers: &[Answer]) -> Vec<Vec<TokenId>> {
    answers.iter().map(|answer| answer.tokens.iter().map(|t| t.token).collect()).collect()
}

/// How many drafts each verification accepted.
#[derive(Default)]
struct Accepted {
    lengths: Mutex<BTreeSet<usize>>,
    /// Of the verification whose rows are being reported: accepted so far, and whether one was not.
    visit: Mutex<(usize, bool)>,
}

impl Observer for Accepted {
    fn wanted(&self) -> Wanted {
        Wanted::default()
    }
    fn evaluated(&self, e: &Evaluation<'_>) {
        if e.model.0 != 2 {
            return;
        }
        let mut visit = self.visit.lock().expect("not poisoned");
        visit.1 |= e.decision.and_then(|d| d.kind()) != Some(DecisionKind::Accept);
        visit.0 += usize::from(!visit.1);
        // The last row of a verification has no draft.
        if e.draft.is_none() {
            self.lengths.lock().expect("not poisoned").insert(std::mem::take(&mut *visit).0);
        }
    }
    fn submitted(&self, _: RequestId, _: &NewRequest) {}
    fn event(&self, _: RequestId, _: &Event) {}
    fn cancelled(&self, _: RequestId) {}
}

fn verify(drafts: u32) -> Route {
    pair(&format!("verify-{drafts}"), "verify", json!({ "draft_tokens": drafts }))
}

#[test]
fn verified_drafts_are_the_large_models_own_answer() {
    let accepted = Arc::new(Accepted::default());
    for setup in [Setup::default(), Setup { pages: 31, min_batch: vec![3], ..Setup::default() }] {
        let engine = observed(&setup, &[1, 4, 7].map(verify), Some(accepted.clone()));
        // The last limits end within a round of drafts.
        for max_tokens in [150, 9, 2, 1] {
            let alone = tokens(&ask(&engine, "large", max_tokens));
            accepted.lengths.lock().expect("not poisoned").clear();
            for drafts in [1, 4, 7] {
                assert_eq!(tokens(&ask(&engine, &format!("verify-{drafts}"), max_tokens)), alone, "{setup:?}");
            }
            if max_tokens == 150 {
                let lengths = accepted.lengths.lock().expect("not poisoned").clone();
                assert_eq!(lengths, (0..=7).collect(), "each number of drafts was accepted somewhere");
            }
        }
    }
}

#[test]
fn blocks_of_collm_are_rolled_back_to_the_first_deferral() {
    let name = |strategy: &str, block: u32| format!("{strategy}-{block}");
    let routes: Vec<Route> = ["defer", "compose"]
        .iter()
        .flat_map(|strategy| [1, 3, 10].map(|block| (strategy, block)))
        .map(|(strategy, block)| {
            let settings = json!({ "threshold": 0.15, "strategy": strategy, "tokens_per_call": block });
            pair(&name(strategy, block), "collm", settings)
        })
        .collect();
    let engine = observed(&Setup::default(), &routes, None);
    for strategy in ["defer", "compose"] {
        for max_tokens in [150, 7] {
            let written = |answers: Vec<Answer>| -> Vec<Vec<(TokenId, u32)>> {
                answers.iter().map(|a| a.tokens.iter().map(|t| (t.token, t.model.0)).collect()).collect()
            };
            let one = written(ask(&engine, &name(strategy, 1), max_tokens));
            assert!(one.iter().flatten().any(|(_, model)| *model == 2), "the large model wrote nothing");
            for block in [3, 10] {
                assert_eq!(written(ask(&engine, &name(strategy, block), max_tokens)), one, "blocks of {block}");
            }
        }
    }
    let reference = trace("collm-1");
    let answer = &ask(&engine, "defer-10", 300)[0];
    assert_eq!(answer.tokens.iter().map(|t| t.token).collect::<Vec<_>>(), ids(&reference["token_ids"]));
}
