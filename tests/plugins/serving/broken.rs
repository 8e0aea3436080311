//! Hooks that panic and answers that make no sense.

use std::sync::Arc;

use serde_json::json;
use tokenrouter::engine::OnError;
use tokenrouter::policy::wasm::WasmPlugin;

use super::server::{Server, probe, refused, route};
use crate::wasm::support::doing;

/// A module that does `body` from the sixth token of an answer on: no rehearsal gets there.
fn later(body: &str) -> Vec<u8> {
    doing(&format!("(if (i32.gt_u (local.get $first) (i32.const 4)) (then {body}))"))
}

fn module(name: &str, bytes: Vec<u8>, on_error: OnError) -> tokenrouter::engine::RouteSetup {
    route(name, Arc::new(WasmPlugin::from_bytes(bytes, None).unwrap()), json!({}), on_error)
}

#[test]
fn case_10_panics_at_work() {
    let hooks = ["entry", "route", "send", "receive", "finished", "drop"];
    let routes = hooks.map(|hook| probe(hook, json!({"panic": hook, "to": 1}), OnError::StayLocal));
    let server = Server::start(routes.into());
    for hook in hooks {
        server.text(hook);
        server.text(hook);
    }
    server.assert_unharmed();
    for hook in ["entry", "route", "send", "receive", "finished"] {
        // An instance fails once: it is not called again.
        let failures = server.counter("failures", &[("route", hook), ("hook", hook)]);
        let instances = if ["receive", "finished"].contains(&hook) { 2 } else { 1 };
        assert_eq!(failures, instances, "{hook}");
        assert_eq!(server.counter("failures", &[("route", hook)]), instances, "{hook}");
    }
    assert_eq!(server.counter("failures", &[("route", "good")]), 0);
    for hook in ["create", "requirements"] {
        let text = refused(probe("r", json!({ "panic": hook }), OnError::StayLocal));
        assert!(text.contains(&format!("the {hook} hook was told to panic")), "{text}");
    }
}

#[test]
fn case_10_a_failed_request_costs_no_other() {
    let server = Server::start(vec![probe("bad", json!({"panic": "route"}), OnError::FailRequest)]);
    for _ in 0..3 {
        let (status, body) = server.chat("bad");
        let message = body["error"]["message"].as_str().unwrap();
        assert_eq!((status, message), (500, "the policy of route `bad` failed at model `small`; see the server's log"));
    }
    server.assert_unharmed();
}

#[test]
fn case_12_wrong_lengths_at_work() {
    let lengths = [("short", "0"), ("huge", "0x80000000"), ("minus", "-1")];
    let routes = lengths
        .map(|(name, length)| module(name, later(&format!("(return (i32.const {length}))")), OnError::StayLocal));
    let server = Server::start(routes.into());
    for (name, _) in lengths {
        server.text(name);
        let count = |what| server.counter(what, &[("route", name), ("model", "small"), ("hook", "route")]);
        assert_eq!((count("restarts"), count("wrong_answers"), count("failures")), (3, 3, 1), "{name}");
    }
    server.assert_unharmed();
}

#[test]
fn case_13_destinations_that_are_none() {
    let wrong = ["model", "kind", "token", "entry"];
    let mut routes: Vec<_> =
        wrong.iter().map(|wrong| probe(wrong, json!({ "wrong": wrong }), OnError::FailRequest)).collect();
    routes.push(probe("self", json!({"to": 0}), OnError::FailRequest));
    routes.push(module("module", later("(i32.store (i32.const 0x400) (i32.const 7))"), OnError::StayLocal));
    let server = Server::start(routes);
    let plain = server.text("small");
    for route in ["model", "kind", "token", "entry", "self", "module"] {
        assert_eq!(server.text(route), plain, "{route} stays at the entry");
    }
    let count = |what, route, hook| server.counter(what, &[("route", route), ("hook", hook)]);
    let found = |route, hook| (count("unknown_destinations", route, hook), count("wrong_answers", route, hook));
    assert_eq!(found("model", "route"), (12, 0));
    assert_eq!(found("kind", "route"), (0, 12));
    assert_eq!(found("token", "route"), (0, 12));
    assert_eq!(found("entry", "entry"), (1, 0));
    assert_eq!(found("self", "route"), (0, 0));
    assert_eq!((found("module", "route"), count("failures", "module", "route")), ((3, 0), 1));
    server.assert_unharmed();
}

#[test]
fn case_14_signals_that_are_no_numbers() {
    let module = wat::parse_str(include_str!("../../../plugins/rstitch/rstitch.wat")).unwrap();
    let module: Arc<WasmPlugin> = Arc::new(WasmPlugin::from_bytes(module, None).unwrap());
    for (signal, leaves) in [(f32::NAN, false), (f32::NEG_INFINITY, false), (1e-42, false), (f32::INFINITY, true)] {
        let module = route("module", module.clone(), json!({"threshold": 0.03}), OnError::FailRequest);
        let server = Server::with_signals(vec![module], Some(signal));
        let texts = ["good", "module", "small"].map(|route| server.text(route));
        assert_eq!(texts[0], texts[1], "{signal}: the library and the module decide alike");
        assert!(leaves || texts[0] == texts[2], "{signal}: no signal is no reason to leave");
        let calls = |model| server.counter("calls", &[("route", "module"), ("model", model), ("hook", "receive")]);
        assert_eq!(calls("large") > 0, leaves, "{signal}");
        server.assert_unharmed();
    }
}

#[test]
fn case_15_and_21_modules_that_trap_or_never_end() {
    let bodies = [
        ("loop", "(loop (br 0))"),
        ("trap", "unreachable"),
        ("div", "(drop (i32.div_u (local.get $rows) (i32.const 0)))"),
    ];
    let routes = bodies.map(|(name, body)| module(name, later(body), OnError::StayLocal));
    let server = Server::start(routes.into());
    for (name, _) in bodies {
        server.text(name);
        let count = |what| server.counter(what, &[("route", name), ("model", "small"), ("hook", "route")]);
        assert_eq!((count("restarts"), count("failures")), (3, 1), "{name}");
        // Three times from the beginning, and not after its end: positions 0 to 5, once.
        assert_eq!(count("calls"), 6, "{name}");
    }
    server.assert_unharmed();
}

#[test]
fn case_18_every_request_is_finished_once_at_each_model_that_had_it() {
    let server = Server::start(vec![probe("r", json!({"to": 1}), OnError::FailRequest)]);
    for _ in 0..5 {
        server.text("r");
    }
    server.assert_unharmed();
    for model in ["small", "large"] {
        assert_eq!(server.counter("calls", &[("route", "r"), ("model", model), ("hook", "finished")]), 5, "{model}");
    }
}

#[test]
fn case_24_changed_floating_point_modes() {
    let server = Server::start(vec![probe("r", json!({"flush_to_zero": true}), OnError::FailRequest)]);
    assert_eq!(server.text("r"), server.text("small"));
    if cfg!(target_arch = "x86_64") {
        assert_eq!(server.counter("wrong_answers", &[("route", "r"), ("hook", "route")]), 12);
    }
    server.assert_unharmed();
}

#[test]
fn case_also_plans_that_go_too_far() {
    let route = |wrong: &str| probe(wrong, json!({"wrong": wrong, "to": 1}), OnError::FailRequest);
    let server = Server::start(vec![route("accept"), route("rollback")]);
    for (route, hook) in [("accept", "receive"), ("rollback", "send")] {
        server.text(route);
        assert!(server.counter("wrong_answers", &[("route", route), ("hook", hook)]) > 0, "{route}");
    }
    server.assert_unharmed();
}

#[test]
fn case_also_threads_and_floods_of_a_plugin() {
    let settings = json!({"thread": true, "log_lines": 10_000});
    let server = Server::start(vec![probe("r", settings, OnError::FailRequest)]);
    assert_eq!(server.text("r"), server.text("small"));
    server.assert_unharmed();
}
