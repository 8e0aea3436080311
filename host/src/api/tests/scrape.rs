//! GET /metrics after requests of all kinds.

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use serde_json::json;

use super::fixture::{Options, Server, chat, completion, post, scrape, text_of};

#[tokio::test]
async fn a_request_is_counted_under_its_route_and_its_models() {
    let server = Server::saying("one two three four");
    let tokens = server.ok("/v1/chat/completions", chat()).await["usage"]["completion_tokens"].as_f64().unwrap();
    let seen = scrape(&server).await;
    for (name, value) in [
        (r#"vllm:request_success_total{model_name="pair",finished_reason="stop"}"#, 1.0),
        (r#"vllm:request_success_total{model_name="pair",finished_reason="abort"}"#, 0.0),
        (r#"vllm:request_success_total{model_name="small",finished_reason="stop"}"#, 0.0),
        (r#"vllm:generation_tokens_total{model_name="pair"}"#, tokens),
        (r#"vllm:time_to_first_token_seconds_count{model_name="pair"}"#, 1.0),
        (r#"vllm:request_queue_time_seconds_count{model_name="pair"}"#, 1.0),
        (r#"vllm:inter_token_latency_seconds_count{model_name="pair"}"#, tokens - 1.0),
        (r#"vllm:request_generation_tokens_sum{model_name="pair"}"#, tokens),
        (r#"vllm:num_requests_running{model_name="pair"}"#, 0.0),
        (r#"vllm:num_requests_waiting{model_name="pair"}"#, 0.0),
        // The models take turns.
        (r#"tokenrouter_visit_tokens_sum{route="pair",model="small"}"#, (tokens / 2.0).ceil()),
        (r#"tokenrouter_visit_tokens_bucket{route="pair",model="small",le="1"}"#, (tokens / 2.0).ceil()),
        (r#"tokenrouter_tokens_total{route="pair",model="large"}"#, (tokens / 2.0).floor()),
        (r#"tokenrouter_tokens_total{route="large",model="large"}"#, 0.0),
        (r#"tokenrouter_handoffs_total{from="small",to="large"}"#, (tokens / 2.0).floor()),
        (r#"tokenrouter_handoff_seconds_count{model="large"}"#, (tokens / 2.0).floor()),
        (r#"tokenrouter_model_up{model="large"}"#, 1.0),
        (r#"tokenrouter_kv_pages{model="large"}"#, 1024.0),
        (r#"vllm:cache_config_info{model_name="large",block_size="16",num_gpu_blocks="1024"}"#, 1.0),
        (r#"tokenrouter_http_requests_total{path="/v1/chat/completions",status="200"}"#, 1.0),
        (r#"tokenrouter_http_requests_total{path="/generate",status="200"}"#, 0.0),
        ("tokenrouter_client_aborts_total", 0.0),
    ] {
        assert_eq!(seen.get(name), Some(&value), "{name}");
    }
    assert!(seen[r#"tokenrouter_batch_requests_count{model="small"}"#] >= (tokens / 2.0).floor());
}

/// Its models have not ended it, but its text has.
#[tokio::test]
async fn a_stop_string_breaks_nothing_off() {
    let server = Server::with("one two three four", Options { pause: Duration::from_millis(2), ..Options::default() });
    let mut body = completion();
    body["stop"] = json!("two");
    assert_eq!(server.ok("/v1/completions", body).await["choices"][0]["stop_reason"], "two");
    server.idle().await;
    let of = |how: &str| format!(r#"vllm:request_success_total{{model_name="pair",finished_reason="{how}"}}"#);
    // The request ends a moment before it is counted.
    while scrape(&server).await[&of("stop")] == 0.0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(scrape(&server).await[&of("abort")], 0.0);
}

#[tokio::test]
async fn clients_that_leave_are_counted() {
    let server = Server::with(&"one ".repeat(60), Options { pause: Duration::from_millis(5), ..Options::default() });
    let mut body = completion();
    body["stream"] = true.into();
    let mut response = server.post("/v1/completions", body).await;
    // Not a comment, which may come before the first step.
    loop {
        let frame = response.body_mut().frame().await.unwrap().unwrap();
        if frame.data_ref().is_some_and(|data| data.starts_with(b"data: ")) {
            break;
        }
    }
    let during = scrape(&server).await;
    assert_eq!(during["tokenrouter_live_requests"], 1.0);
    assert_eq!(during[r#"vllm:num_requests_running{model_name="pair"}"#], 1.0);
    drop(response);
    server.idle().await;
    let aborted = r#"vllm:request_success_total{model_name="pair",finished_reason="abort"}"#;
    while scrape(&server).await[aborted] == 0.0 {
        tokio::task::yield_now().await;
    }
    let seen = scrape(&server).await;
    assert_eq!(seen["tokenrouter_client_aborts_total"], 1.0);
    assert_eq!(seen[r#"tokenrouter_http_requests_total{path="/v1/completions",status="499"}"#], 1.0);
    assert_eq!(seen[r#"vllm:num_requests_running{model_name="pair"}"#], 0.0);
}

#[tokio::test]
async fn failures_are_counted() {
    let server = Server::with("one two three four", Options { breaks_at: Some(1), ..Options::default() });
    assert_eq!(server.json("/v1/completions", completion()).await.0, 500);
    let seen = scrape(&server).await;
    assert_eq!(seen[r#"vllm:corrupted_requests_total{model_name="pair"}"#], 1.0);
    assert_eq!(seen[r#"vllm:request_success_total{model_name="pair",finished_reason="error"}"#], 1.0);
    assert_eq!(seen[r#"tokenrouter_http_requests_total{path="/v1/completions",status="500"}"#], 1.0);
    let mut streamed = completion();
    streamed["stream"] = true.into();
    assert!(text_of(server.post("/v1/completions", streamed).await).await.contains("not_finite"));
    let seen = scrape(&server).await;
    assert_eq!(seen[r#"tokenrouter_http_requests_total{path="/v1/completions",status="500"}"#], 2.0);
}

#[tokio::test]
async fn clients_cannot_choose_paths_and_models() {
    let server = Server::saying("one");
    text_of(server.send(Request::get("/secret").body(Body::empty()).unwrap()).await).await;
    text_of(server.send(Request::get("/v1/models/secret").body(Body::empty()).unwrap()).await).await;
    text_of(server.send(post("/v1/completions", r#"{"model": "secret", "prompt": "x"}"#)).await).await;
    let seen = scrape(&server).await;
    assert_eq!(seen[r#"tokenrouter_http_requests_total{path="other",status="404"}"#], 1.0);
    assert_eq!(seen[r#"tokenrouter_http_requests_total{path="/v1/models/{*id}",status="404"}"#], 1.0);
    assert!(seen.keys().all(|name| !name.contains("secret")));
    let mut body = completion();
    body["strange"] = 1.into();
    server.ok("/v1/completions", body).await;
    assert_eq!(scrape(&server).await[r#"tokenrouter_unknown_fields_total{field="strange"}"#], 1.0);
}
