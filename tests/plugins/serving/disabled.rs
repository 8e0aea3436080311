//! `on_error = "disable_route"`.

use serde_json::json;
use tokenrouter::engine::OnError;

use super::server::{Server, probe};

#[test]
fn case_10_a_route_that_disables_itself_loses_no_request() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let settings = json!({"panic": "finished", "wait_for": go, "to": 1});
    let server = Server::start(vec![
        probe("bad", settings, OnError::DisableRoute),
        probe("fine", json!({"to": 1}), OnError::DisableRoute),
    ]);
    // Several are under way when the first of them ends, and its end fails.
    std::thread::scope(|scope| {
        let requests: Vec<_> = (0..3).map(|_| scope.spawn(|| server.text("bad"))).collect();
        server.until(|| server.engine.live_requests() == 3);
        std::fs::write(&go, "").unwrap();
        let texts: Vec<String> = requests.into_iter().map(|request| request.join().unwrap()).collect();
        assert!(texts.iter().all(|text| !text.is_empty()));
    });
    server.until(|| server.chat("bad").0 == 503);
    let (_, body) = server.chat("bad");
    let error = &body["error"];
    assert_eq!((&error["code"], &error["type"]), (&json!("route_disabled"), &json!("server_error")));
    let message = error["message"].as_str().unwrap();
    let begin = "route `bad` is disabled: hook `finished` of plugin `probe` failed at model `";
    assert!(message.starts_with(begin) && message.contains("reloads the configuration"), "{message}");
    assert!(!message.contains("told to panic"), "what a panic says is for the log alone: {message}");

    let (status, ready) = server.get_json("/ready");
    assert_eq!(
        (status, &ready["status"], &ready["disabled_routes"][0]["route"]),
        (200, &json!("ready"), &json!("bad"))
    );
    assert_eq!(ready["disabled_routes"][0]["reason"], message);
    let (_, models) = server.get_json("/v1/models");
    let ids: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["fine", "good", "small", "large"]);
    assert_eq!(server.get_json("/v1/models/bad"), (503, body));
    let metrics = server.get("/metrics").1;
    assert!(metrics.contains("tokenrouter_policy_route_disabled{route=\"bad\"} 1\n"), "{metrics}");
    assert!(metrics.contains("tokenrouter_policy_route_disabled{route=\"fine\"} 0\n"), "{metrics}");
    server.text("fine");
    server.assert_unharmed();
}
