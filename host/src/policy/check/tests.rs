//! What the kit finds in a policy with one fault at a time.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Deserialize;
use tokenrouter_plugin_api::host::float_mode;
use tokenrouter_plugin_api::{Context, Handoff, PerRequest, Policy, PolicyError, RequestView, Side, Slot, random};

use super::*;
use crate::policy::Linked;
use crate::policy::check::{CHECKS, Status, parse_roles, run};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    fault: String,
}

/// Hands over what it doubts, thrice a request, and has the fault that its settings name.
pub(crate) struct Fickle {
    side: Side,
    fault: String,
    handed_over: PerRequest<u32>,
}

static CALLS: AtomicU64 = AtomicU64::new(0);

impl Policy for Fickle {
    const NAME: &'static str = "fickle";
    const SETTINGS_SCHEMA: &'static str = r#"{
        "type": "object", "additionalProperties": false, "required": ["fault"],
        "properties": { "fault": { "type": "string", "maxLength": 10 } }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        if settings.contains("no_such_setting") && settings.contains("create") {
            panic!("an unknown setting");
        }
        let Settings { fault } = serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        Ok(Self { side: ctx.side_from_small(Self::NAME)?, fault, handed_over: PerRequest::new() })
    }

    fn requirements(&self) -> Requirements {
        let mut wanted = Requirements::signals(SignalSet::TOP1_PROB);
        wanted.top_k = if self.fault == "topk" { 2 * VOCABULARY } else { 0 };
        wanted
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        match self.fault.as_str() {
            "empty" => assert!(!batch.is_empty(), "no rows"),
            "large" => assert!(batch.len() < 200, "too many rows"),
            "nan" => assert!(batch.signals.top1_prob.iter().all(|p| !p.is_nan()), "a NaN"),
            "float" => float_mode::set(float_mode::get() ^ 0x8000),
            _ => {}
        }
        for (row, decision) in out.iter_mut().enumerate() {
            let handed_over = self.handed_over.get(batch.slots[row]);
            let Side::Small { large } = self.side else { continue };
            let doubt = match self.fault.as_str() {
                "clock" => random::uniform(0, CALLS.fetch_add(1, Ordering::Relaxed), 1 << 20) < 0.3,
                "batch" => batch.len() > 3,
                _ => batch.signals.top1_prob[row] < 0.5,
            };
            if doubt && *handed_over < 3 {
                *handed_over += 1;
                *decision = Decision::to(if self.fault == "model" { 9 } else { large });
            }
        }
    }

    fn send(&mut self, _request: &RequestView<'_>, _to: ModelIndex) -> Handoff {
        assert_ne!(self.fault, "send", "told to");
        Handoff::drop_candidate().budget(1)
    }

    fn finished(&mut self, slot: Slot) {
        if self.fault != "leak" {
            self.handed_over.forget(slot);
        }
    }
}

fn findings(settings: Value, roles: &str) -> Vec<Finding> {
    let models = parse_roles(roles).unwrap();
    let setup = Setup { factory: &Linked::<Fickle>::default(), models: &models, settings: &settings };
    let mut all = Vec::new();
    let mut begun = Vec::new();
    let begins = |number| {
        begun.push(number);
        Ok::<_, ()>(())
    };
    let found = |finding| {
        all.push(finding);
        Ok(())
    };
    run(&setup, 0, begins, found).unwrap();
    assert_eq!(begun, (0..all.len()).collect::<Vec<_>>());
    all
}

/// Those that failed, or else warned; what a call costs depends on the machine.
fn bad(fault: &str) -> Vec<(String, Status)> {
    let all = findings(json!({ "fault": fault }), "small=slm,large=llm");
    let bad = all.iter().filter(|f| f.status != Status::Ok && f.check != "cost");
    bad.map(|f| (f.check.clone(), f.status)).collect()
}

#[test]
fn a_good_policy_passes() {
    let all = findings(json!({ "fault": "" }), "small=slm,large=llm");
    assert_eq!(all.len(), CHECKS.len());
    assert_eq!(bad(""), []);
    let handoffs: usize = all[5].what.split(' ').nth(2).unwrap().parse().unwrap();
    assert!(handoffs > 256, "{:?}", all[5]);
}

#[test]
fn each_fault_is_found_where_it_is() {
    let failed = |checks: &[&str]| checks.iter().map(|c| (c.to_string(), Status::Failed)).collect::<Vec<_>>();
    let with_lives =
        ["one request", "256 requests", "hostile signals", "repeatable", "alone or together", "reused slots"];
    let all_lives = [&with_lives[..], &["floating point"]].concat();
    assert_eq!(bad("topk"), failed(&["create"]));
    assert_eq!(bad("create"), failed(&["wrong settings"]));
    assert_eq!(bad("empty"), failed(&["no rows"]));
    assert_eq!(bad("large"), failed(&["256 requests", "hostile signals"]));
    assert_eq!(bad("nan"), failed(&["hostile signals"]));
    assert_eq!(bad("float"), failed(&["floating point"]));
    assert_eq!(bad("leak"), failed(&["reused slots"]));
    assert_eq!(bad("batch"), [("alone or together".to_owned(), Status::Warning)]);
    assert_eq!(bad("model"), failed(&all_lives));
    assert_eq!(bad("send"), failed(&all_lives));
    assert!(bad("clock").contains(&("repeatable".to_owned(), Status::Failed)));
}

#[test]
fn findings_say_what_and_what_to_do() {
    let find = |fault: &str, check: &str| {
        let all = findings(json!({ "fault": fault }), "small=slm,large=llm");
        all.into_iter().find(|f| f.check == check).unwrap()
    };
    let model = find("model", "one request");
    assert!(model.what.starts_with("route at model `small` answers Decision"), "{model:?}");
    assert!(model.what.ends_with("it hands over to model 9 of 2") && model.remedy == BUG, "{model:?}");
    let send = find("send", "one request").what;
    assert!(send.starts_with("policy `fickle` failed in send: panicked"), "{send}");
    assert_eq!(find("float", "floating point").what, "changed by route");
    let leak = find("leak", "reused slots").what;
    assert!(leak.starts_with("not so: request ") && leak.contains(" against request "), "{leak}");
}

#[test]
fn nothing_is_run_on_what_cannot_be_made() {
    let all = findings(json!({ "fault": "" }), "a,b");
    assert_eq!((all.len(), all[1].status), (2, Status::Failed));
    assert!(all[1].what.contains("fickle needs exactly two models, with the roles"), "{:?}", all[1]);
    let all = findings(json!({}), "small=slm,large=llm");
    assert_eq!(all.len(), 1);
    assert_eq!(all[0].what, "settings/fault: required but missing");
    assert_eq!(all[0].remedy, "Give settings that fit with --settings.");
}
