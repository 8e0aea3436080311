//! The checks, in their order.

use serde_json::{Value, json};
use tokenrouter_plugin_api::{Decision, ModelIndex, NO_TOKEN, Requirements, RouteBatch, SignalSet, TokenId};

use super::play::{Event, Play};
use super::rows::{Row, Rows, Signals, meaning};
use super::setup::VOCABULARY;
use super::watched::Watched;
use super::wrong_settings::{UNKNOWN, refused};
use super::{Check, Finding, Setup, cost};
use crate::policy::validate_settings;

/// Largest batch that is tried.
const MOST: u64 = 256;
/// How many requests live together where answers are compared.
const FEW: u64 = 16;

pub(super) const BUG: &str = "Mend the hook: it must take everything that a server may bring.";

pub const CHECKS: [Check; 12] = [
    Check { name: "schema", needed: true, run: schema },
    Check { name: "create", needed: true, run: create },
    Check { name: "wrong settings", needed: false, run: wrong_settings },
    Check { name: "no rows", needed: false, run: no_rows },
    Check { name: "one request", needed: false, run: |setup| lives(setup, 1) },
    Check { name: "256 requests", needed: false, run: |setup| lives(setup, MOST) },
    Check { name: "hostile signals", needed: false, run: hostile },
    Check { name: "repeatable", needed: false, run: repeatable },
    Check { name: "alone or together", needed: false, run: together },
    Check { name: "reused slots", needed: false, run: reused },
    Check { name: "floating point", needed: false, run: floating_point },
    Check { name: "cost", needed: false, run: cost::cost },
];

fn schema(setup: &Setup<'_>) -> Finding {
    let text = setup.factory.settings_schema();
    if let Err(e) = validate_settings(text, setup.settings) {
        let remedy = match serde_json::from_str::<Value>(text) {
            Err(_) => "Make SETTINGS_SCHEMA a JSON Schema (2020-12).",
            Ok(_) => "Give settings that fit with --settings.",
        };
        return Finding::failed(e.replace('\n', "; "), remedy);
    }
    let parsed: Value = serde_json::from_str(text).unwrap_or_default();
    let names: Vec<&str> = match parsed.get("properties").and_then(Value::as_object) {
        Some(properties) => properties.keys().map(String::as_str).collect(),
        None => Vec::new(),
    };
    let what = if names.is_empty() { "no settings".to_owned() } else { format!("settings {}", names.join(", ")) };
    if validate_settings(text, &json!({ UNKNOWN: 1 })).is_ok() {
        return Finding::warning(
            format!("{what}; a mistyped one is not refused"),
            "Say \"type\": \"object\" and \"additionalProperties\": false.",
        );
    }
    Finding::ok(what)
}

fn create(setup: &Setup<'_>) -> Finding {
    let team = match setup.team() {
        Ok(team) => team,
        Err(e) => {
            let remedy = "Give what it asks for with --settings and --roles, or mend create.";
            return Finding::failed(e.to_string(), remedy);
        }
    };
    for (model, instance) in setup.models.iter().zip(&team) {
        if let Err(e) = possible(instance.requirements()) {
            return Finding::failed(format!("at model `{}` {e}", model.name), "Mend requirements.");
        }
    }
    let asks = |(model, instance): (&tokenrouter_plugin_api::ModelDescription, &Watched)| {
        format!("{} {}", model.name, asks_for(instance.requirements()))
    };
    Finding::ok(setup.models.iter().zip(&team).map(asks).collect::<Vec<_>>().join("; "))
}

/// Whether a server can do what is asked.
fn possible(wanted: &Requirements) -> Result<(), String> {
    if wanted.top_k > VOCABULARY {
        return Err(format!("it asks for the top {} logits of {VOCABULARY}", wanted.top_k));
    }
    match wanted.masked_tokens.iter().chain(&wanted.token_logits).find(|&&id: &&TokenId| id >= VOCABULARY) {
        Some(id) => Err(format!("it asks for token {id} of {VOCABULARY}")),
        None => Ok(()),
    }
}

fn asks_for(wanted: &Requirements) -> String {
    let names = [
        (SignalSet::ENTROPY, "entropy"),
        (SignalSet::ENTROPY_NORM, "entropy_norm"),
        (SignalSet::TOP1_PROB, "top1_prob"),
        (SignalSet::MARGIN, "margin"),
        (SignalSet::LOGSUMEXP, "logsumexp"),
        (SignalSet::CANDIDATE_PROB, "candidate_prob"),
    ];
    let asked = names.iter().filter(|(signal, _)| wanted.signals.contains(*signal));
    let mut asks: Vec<String> = asked.map(|(_, name)| name.to_string()).collect();
    let counts =
        [("top", wanted.top_k as usize), ("token_logits", wanted.token_logits.len()), ("nets", wanted.nets.len())];
    asks.extend(counts.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{name} {n}")));
    if asks.is_empty() { "asks for no signal".to_owned() } else { format!("asks for {}", asks.join(", ")) }
}

/// A server refuses them by the schema. A policy that is linked into a program meets them itself.
fn wrong_settings(setup: &Setup<'_>) -> Finding {
    let all = refused(setup.factory.settings_schema(), setup.settings);
    let (mut taken, mut errors) = (0, 0);
    for settings in &all {
        match setup.create_with(0, &settings.to_string()) {
            Ok(_) => taken += 1,
            Err(e) if e.message.starts_with("panicked") => {
                return Finding::failed(format!("settings {settings}: {e}"), "Answer with a PolicyError.");
            }
            Err(_) => errors += 1,
        }
    }
    Finding::ok(format!("{} are refused by the schema; create itself refuses {errors}, takes {taken}", all.len()))
}

fn no_rows(setup: &Setup<'_>) -> Finding {
    judged("answered", || {
        for instance in &mut team(setup)? {
            instance.route(&RouteBatch::default(), &mut []).map_err(|e| e.to_string())?;
        }
        Ok(())
    })
}

fn lives(setup: &Setup<'_>, requests: u64) -> Finding {
    match play(setup, &mut team(setup), Signals::Plain, 0..requests) {
        Ok(events) => {
            let count = |what: &str| events.iter().filter(|event| event.what.starts_with(what)).count();
            Finding::ok(format!("{} decisions, {} hand-offs", count("token"), count("hand-off")))
        }
        Err(e) => Finding::failed(e, BUG),
    }
}

/// All of a batch's numbers at their ends, at every model, in one large batch and alone; then whole lives.
fn hostile(setup: &Setup<'_>) -> Finding {
    judged("NaN, infinities, tiny and huge numbers, ends of ranges: every decision makes sense", || {
        for (model, instance) in team(setup)?.iter_mut().enumerate() {
            let row = |at: usize| Row {
                seed: if at.is_multiple_of(2) { u64::MAX } else { 0 },
                position: if at.is_multiple_of(3) { 1 << 20 } else { 0 },
                candidate: if at.is_multiple_of(2) { VOCABULARY - 1 } else { 0 },
                draft: if at.is_multiple_of(5) { VOCABULARY - 1 } else { NO_TOKEN },
                remaining: if at.is_multiple_of(2) { 1 } else { u32::MAX },
                ..Row::first(at)
            };
            let rows: Vec<Row> = (0..MOST as usize).map(row).collect();
            for rows in rows[..9].chunks(1).chain([&rows[..]]) {
                let columns = Rows::new(rows, model as ModelIndex, instance.requirements(), Signals::Hostile);
                let mut out = vec![Decision::STAY; rows.len()];
                instance.route(&columns.batch(), &mut out).map_err(|e| e.to_string())?;
                for decision in out {
                    let name = &setup.models[model].name;
                    meaning(decision, setup.models)
                        .map_err(|e| format!("route at model `{name}` answers {decision:?}: {e}"))?;
                }
            }
        }
        play(setup, &mut team(setup), Signals::Hostile, 0..FEW).map(drop)
    })
}

fn repeatable(setup: &Setup<'_>) -> Finding {
    let once = || play(setup, &mut team(setup), Signals::Plain, 0..FEW);
    compared(
        once(),
        once(),
        "two instances answer alike",
        Finding::failed,
        "Draw by random::uniform; read no clock; iterate no HashMap.",
    )
}

/// What a request gets must not depend on who shares its batches.
fn together(setup: &Setup<'_>) -> Finding {
    let together = play(setup, &mut team(setup), Signals::Plain, 0..FEW).map(|mut events| {
        events.sort_by_key(|event| event.request);
        events
    });
    let alone =
        (0..FEW).map(|id| play(setup, &mut team(setup), Signals::Plain, id..id + 1)).collect::<Result<Vec<_>, _>>();
    let remedy = "Decide about each row by its own request: answers that depend on the batch cannot be repeated.";
    compared(
        together,
        alone.map(|all| all.concat()),
        "a request is answered alike in any batch",
        Finding::warning,
        remedy,
    )
}

fn reused(setup: &Setup<'_>) -> Finding {
    let mut used = team(setup);
    let before = play(setup, &mut used, Signals::Plain, MOST..MOST + FEW);
    let again = before.and_then(|_| play(setup, &mut used, Signals::Plain, 0..FEW));
    let fresh = play(setup, &mut team(setup), Signals::Plain, 0..FEW);
    compared(
        fresh,
        again,
        "nothing of a finished request is left",
        Finding::failed,
        "Clear the slot's state in finished (PerRequest::forget; tr_finished of a module).",
    )
}

fn floating_point(setup: &Setup<'_>) -> Finding {
    let mut team = team(setup);
    if let Err(e) = play(setup, &mut team, Signals::Plain, 0..FEW) {
        return Finding::failed(e, BUG);
    }
    let team = team.unwrap_or_default();
    let mut hooks: Vec<&str> = team.iter().flat_map(|instance| instance.changed_float_mode.iter().copied()).collect();
    hooks.sort_unstable();
    hooks.dedup();
    match hooks[..] {
        [] => Finding::ok(format!("as before after each of {} calls", team.iter().map(|i| i.calls).sum::<u64>())),
        _ => Finding::failed(
            format!("changed by {}", hooks.join(", ")),
            "Leave rounding and the treatment of tiny numbers as they are; build C code without -ffast-math.",
        ),
    }
}

type Team = Result<Vec<Watched>, String>;

fn team(setup: &Setup<'_>) -> Team {
    setup.team().map_err(|e| e.to_string())
}

fn play(setup: &Setup<'_>, team: &mut Team, signals: Signals, ids: std::ops::Range<u64>) -> Result<Vec<Event>, String> {
    let team = team.as_mut().map_err(|e| e.clone())?;
    Play::new(team, setup.models, signals).run(ids)
}

fn judged(what: &str, body: impl FnOnce() -> Result<(), String>) -> Finding {
    match body() {
        Ok(()) => Finding::ok(what),
        Err(e) => Finding::failed(e, BUG),
    }
}

/// The same events, or the first that differs as `otherwise` has it.
fn compared(
    first: Result<Vec<Event>, String>,
    second: Result<Vec<Event>, String>,
    what: &str,
    otherwise: fn(String, &str) -> Finding,
    remedy: &str,
) -> Finding {
    let (first, second) = match (first, second) {
        (Ok(first), Ok(second)) => (first, second),
        (Err(e), _) | (_, Err(e)) => return Finding::failed(e, BUG),
    };
    if first == second {
        return Finding::ok(what);
    }
    let at = first.iter().zip(&second).position(|(a, b)| a != b).unwrap_or(first.len().min(second.len()));
    let side = |events: &[Event]| match events.get(at) {
        Some(event) => format!("request {}, {}", event.request, event.what),
        None => "nothing".to_owned(),
    };
    otherwise(format!("not so: {} against {}", side(&first), side(&second)), remedy)
}

#[cfg(test)]
#[path = "tests.rs"]
pub(super) mod tests;
