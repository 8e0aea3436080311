//! Settings of requests that a plugin cannot stand: other requests are none the wiser.

use std::sync::Arc;

use serde_json::{Value, json};
use tokenrouter::engine::OnError;
use tokenrouter::policy::wasm::WasmPlugin;

use super::server::{Server, letting, probe, route};
use crate::wasm::support::{EXPORTS, MANIFEST, section, wat};

const KEYS: [&str; 4] = ["panic", "error", "create_waits_for", "to"];

fn code(body: &Value) -> &str {
    body["error"]["code"].as_str().unwrap()
}

#[test]
fn a_value_that_a_plugin_does_not_stand_costs_its_requests_alone() {
    let route = letting(probe("r", json!({"to": 1}), OnError::DisableRoute), &KEYS, 2);
    let server = Server::start(vec![route]);
    let before = server.text("r");
    for _ in 0..3 {
        let (status, body) = server.chat_with("r", &json!({"error": "not today"}));
        let says = "`routing.settings`: route `r`, model `small`: policy `probe` refuses to start: not today.";
        assert_eq!((status, body["error"]["message"].as_str()), (400, Some(says)));
        for hook in ["create", "requirements"] {
            let (status, body) = server.chat_with("r", &json!({"panic": hook}));
            let says = "route `r` could not be made with these settings; see the server's log.";
            assert_eq!((status, body["error"]["message"].as_str()), (500, Some(says)), "{hook}");
        }
    }
    // It fails at work: the request goes on, and the next one with these settings is refused.
    assert_eq!(server.chat_with("r", &json!({"panic": "send"})).0, 200);
    server.until(|| server.chat_with("r", &json!({"panic": "send"})).0 == 503);
    let (_, body) = server.chat_with("r", &json!({"panic": "send"}));
    assert_eq!(code(&body), "route_disabled");
    let says = "route `r` is disabled with these settings: hook `send` of plugin";
    assert!(body["error"]["message"].as_str().unwrap().starts_with(says), "{body}");
    assert_eq!(server.text("r"), before);
    assert_eq!(server.counter("failures", &[("route", "r"), ("hook", "send")]), 1);
    // Others make it give up its place.
    for to in [0, 1, 0] {
        assert_eq!(server.chat_with("r", &json!({"to": to, "panic": "drop"})).0, 200);
    }
    assert_eq!(server.chat_with("r", &json!({"panic": "send"})).0, 200);
    server.assert_unharmed();
}

#[test]
fn a_value_that_a_plugin_hangs_on_holds_nobody_up() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let route = letting(probe("r", json!({"to": 1}), OnError::FailRequest), &KEYS, 2);
    let server = Server::start(vec![route]);
    let own = server.text("r");
    let hangs = json!({"create_waits_for": go, "to": 0});
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..3).map(|_| scope.spawn(|| server.chat_with("r", &hangs))).collect();
        server.until(|| server.get_json("/server_info").1["routes"][0]["variants"] == 1);
        assert_eq!(server.text("r"), own);
        assert_eq!(server.chat_with("r", &json!({"to": 0})).0, 200);
        // No model stands still.
        assert_eq!((server.get("/health").0, server.get("/ready").0), (200, 200));
        // One hangs and the other makes place, once its request has let go of it.
        server.until(|| server.chat_with("r", &json!({"panic": "entry"})).0 != 503);
        assert_eq!(server.chat_with("r", &json!({"panic": "entry"})).0, 500);
        std::fs::write(&go, "").unwrap();
        for waiting in waiting {
            assert_eq!(waiting.join().unwrap().0, 200);
        }
    });
    assert_eq!(server.get_json("/server_info").1["routes"][0]["variants"], 2);
    server.assert_unharmed();
}

#[test]
fn a_stop_does_not_wait_for_a_value_that_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let server = Server::start(vec![letting(probe("r", json!({"to": 1}), OnError::FailRequest), &KEYS, 2)]);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| server.chat_with("r", &json!({"create_waits_for": go, "to": 0})));
        server.until(|| server.get_json("/server_info").1["routes"][0]["variants"] == 1);
        server.stop();
        let (status, body) = waiting.join().unwrap();
        assert_eq!((status, code(&body)), (503, "shutting_down"));
    });
    std::fs::write(&go, "").unwrap();
}

#[test]
fn a_module_that_a_value_breaks_is_refused() {
    // The rehearsal runs out of fuel where the setting says so.
    let manifest = MANIFEST.replace(r#""abi""#, r#""settings": {"threshold": {"type": "number"}}, "abi""#);
    let body = "(if (f64.gt (f64.load (i32.const 0x100)) (f64.const 0.5)) (then (loop $on (br $on))))";
    let route_export = format!("(func (export \"tr_route\") (param $rows i32) (result i32) {body} (local.get $rows))");
    let module = wat(&format!("(module {} {EXPORTS} {route_export})", section(&manifest)));
    let policy = Arc::new(WasmPlugin::from_bytes(module, None).unwrap());
    let route = letting(route("r", policy, json!({"threshold": 0.25}), OnError::FailRequest), &["threshold"], 2);
    let server = Server::start(vec![route]);
    assert_eq!(server.chat_with("r", &json!({"threshold": 0.5})).0, 200);
    let (status, body) = server.chat_with("r", &json!({"threshold": 0.75}));
    let message = body["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("used up its fuel"), "{status}: {message}");
    server.assert_unharmed();
}
