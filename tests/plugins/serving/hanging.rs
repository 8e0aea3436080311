//! Hooks that do not come back, and what tells of them.

use serde_json::json;
use tokenrouter::engine::OnError;

use super::server::{Server, probe};

#[test]
fn case_15_a_hook_that_hangs_is_seen_while_it_lasts() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let server = Server::start(vec![probe("slow", json!({ "wait_for": go }), OnError::FailRequest)]);
    assert_eq!((server.get("/health").0, server.get("/ready").0), (200, 200));
    std::thread::scope(|scope| {
        let request = scope.spawn(|| server.text("slow"));
        server.until(|| server.get("/health").0 == 503);
        let (status, body) = server.get_json("/ready");
        assert_eq!((status, &body["error"]["code"]), (503, &json!("plugin_hung")));
        let hook = &body["hooks"][0];
        let names = ["plugin", "route", "model", "hook"].map(|name| hook[name].as_str().unwrap());
        assert_eq!(names, ["probe", "slow", "small", "route"]);
        assert!(hook["step"].as_u64().unwrap() > 0 && hook["seconds"].as_u64().unwrap() >= 1, "{hook}");
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("hook `route` of plugin `probe` has not come back for "), "{message}");
        // What a core dump would show.
        assert!(in_memory("TOKENROUTER-IN: route   of plugin probe, route slow, model small"));
        std::fs::write(&go, "").unwrap();
        request.join().unwrap();
    });
    server.until(|| server.get("/health").0 == 200 && server.get("/ready").0 == 200);
    assert!(in_memory("TOKENROUTER-IN: --------of plugin probe, route slow, model small"));
    assert!(server.counter("over_budget", &[("route", "slow"), ("hook", "route")]) >= 1);
    server.assert_unharmed();
}

/// Whether this process has `text` in memory that it may write, but for the text itself.
fn in_memory(text: &str) -> bool {
    use std::os::unix::fs::FileExt;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    let (first, rest) = text.as_bytes().split_first().unwrap();
    maps.lines().any(|line| {
        let mut fields = line.split_whitespace();
        let (range, rights) = (fields.next().unwrap(), fields.next().unwrap());
        let file = fields.nth(3).unwrap_or("[heap]");
        if !rights.starts_with("rw") || !file.starts_with("[heap") {
            return false;
        }
        let (start, end) = range.split_once('-').unwrap();
        let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).unwrap());
        let mut bytes = vec![0; (end - start) as usize];
        if memory.read_at(&mut bytes, start).is_err() {
            return false;
        }
        // Never whole anywhere else: the text is compared in two parts.
        bytes.windows(text.len()).any(|window| window[0] == *first && &window[1..] == rest)
    })
}

/// A stop does not wait for a hook that never comes back.
#[test]
fn case_15_a_server_ends_although_a_hook_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let server = Server::start(vec![probe("slow", json!({ "wait_for": go }), OnError::FailRequest)]);
    std::thread::scope(|scope| {
        let request = scope.spawn(|| server.chat("slow"));
        server.until(|| server.get("/health").0 == 503);
        server.engine.fail_all();
        assert_eq!(request.join().unwrap().0, 503);
    });
    let engine = server.engine.clone();
    drop(server);
    drop(engine);
    // The thread that is left behind may end now.
    std::fs::write(&go, "").unwrap();
}
