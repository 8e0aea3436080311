//! What a server tells of its models.

use axum::body::Body;
use axum::http::Request;
use serde_json::json;

use super::fixture::{Server, chat, json_of};

#[tokio::test]
async fn steps_are_told_as_a_load() {
    let server = Server::saying("one two three four");
    let tokens = server.ok("/v1/chat/completions", chat()).await["usage"]["completion_tokens"].as_u64().unwrap();
    server.idle().await;
    let (status, body) = json_of(server.send(Request::get("/metrics/steps").body(Body::empty()).unwrap()).await).await;
    assert_eq!(status, 200);
    let load = &body["loads"][0];
    // The models take turns.
    let there = tokens / 2;
    assert_eq!(load["transitions"], json!([[0, there], [(tokens - 1) / 2, 0]]), "{load}");
    assert_eq!((&load["models"][1]["name"], &load["handoffs"]), (&json!("large"), &json!(tokens - 1)));
    assert_eq!(load["last_steps"].as_array().unwrap().iter().filter_map(|last| last.as_u64()).sum::<u64>(), 1);
    let fixed = json!({"mode": "fixed", "models": ["small", "large"], "live_requests": 0, "min_batch": [1, 1]});
    assert_eq!(body["batching"], fixed);
}
