//! Requests that are refused.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use super::fixture::{Server, chat, completion, json_of, post};

/// Every error has the body that OpenAI's clients read.
fn check(status: u16, body: &Value, wanted: u16, code: &str, param: Option<&str>) {
    let error = &body["error"];
    assert_eq!((status, error["code"].as_str()), (wanted, Some(code)), "{body}");
    assert_eq!(error["param"].as_str(), param, "{body}");
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
    assert_eq!(error["type"], if wanted < 500 { "invalid_request_error" } else { "server_error" });
}

#[tokio::test]
async fn http() {
    let server = Server::saying("ok");
    let get = |path: &str| Request::get(path).body(Body::empty()).unwrap();
    let cases = [
        (get("/v1/none"), 404, "not_found"),
        (get("/"), 404, "not_found"),
        (get("/v1/completions"), 405, "method_not_allowed"),
        (Request::delete("/v1/models").body(Body::empty()).unwrap(), 405, "method_not_allowed"),
        (post("/v1/completions", "{"), 400, "invalid_json"),
        (post("/v1/completions", ""), 400, "invalid_json"),
        (post("/v1/completions", "[1]"), 400, "invalid_json"),
        (post("/v1/completions", r#"{"prompt": "\ud83d"}"#), 400, "invalid_json"),
        (post("/v1/completions", "[".repeat(100_000)), 400, "invalid_json"),
        (post("/v1/completions", vec![b' '; (32 << 20) + 1]), 413, "payload_too_large"),
    ];
    for (request, status, code) in cases {
        let name = format!("{} {}", request.method(), request.uri());
        let response = server.send(request).await;
        assert!(response.headers().contains_key("x-request-id"));
        if status == 405 {
            assert!(response.headers().contains_key("allow"), "{name}");
        }
        let (got, body) = json_of(response).await;
        check(got, &body, status, code, None);
    }
}

#[tokio::test]
async fn content_types() {
    let server = Server::saying("ok");
    let send = |kind: Option<&'static str>| {
        let mut request = Request::post("/v1/completions");
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        server.send(request.body(Body::from(completion().to_string())).unwrap())
    };
    for kind in [None, Some("application/json; charset=utf-8"), Some("Application/JSON"), Some("application/x+json")] {
        assert_eq!(send(kind).await.status(), 200, "{kind:?}");
    }
    for kind in ["text/plain", "application/x-www-form-urlencoded", "", "é"] {
        let (status, body) = json_of(send(Some(kind)).await).await;
        check(status, &body, 415, "unsupported_media_type", None);
    }
}

#[tokio::test]
async fn fields() {
    let server = Server::saying("ok");
    let (chats, completions) = ("/v1/chat/completions", "/v1/completions");
    let message = |message: Value| json!([message]);
    let cases = [
        (chats, "model", json!("none"), 404, "model_not_found", "model"),
        (chats, "model", Value::Null, 400, "missing_required_parameter", "model"),
        (chats, "model", json!(5), 400, "invalid_type", "model"),
        (chats, "messages", Value::Null, 400, "missing_required_parameter", "messages"),
        (chats, "messages", json!([]), 400, "invalid_value", "messages"),
        (chats, "messages", json!("Hi"), 400, "invalid_type", "messages"),
        (chats, "messages", json!(["Hi"]), 400, "invalid_type", "messages[0]"),
        (chats, "messages", json!([123]), 400, "invalid_type", "messages[0]"),
        (chats, "messages", json!([{}]), 400, "missing_required_parameter", "messages[0].role"),
        (chats, "messages", message(json!({"role": 1, "content": ""})), 400, "invalid_type", "messages[0].role"),
        (chats, "messages", message(json!({"role": "x", "content": ""})), 400, "invalid_value", "messages[0].role"),
        (chats, "messages", message(json!({"role": "user"})), 400, "missing_required_parameter", "messages[0].content"),
        (chats, "messages", message(json!({"role": "user", "content": 5})), 400, "invalid_type", "messages[0].content"),
        (
            chats,
            "messages",
            message(json!({"role": "user", "content": [{"type": "image_url"}]})),
            400,
            "invalid_value",
            "messages[0].content[0].type",
        ),
        (chats, "stream_options", json!({"include_usage": true}), 400, "invalid_value", "stream_options"),
        (chats, "top_logprobs", json!(5), 400, "invalid_value", "top_logprobs"),
        (chats, "regex", json!("(a"), 400, "invalid_value", "regex"),
        (completions, "guided_json", json!({"type": 5}), 400, "invalid_value", "guided_json"),
        (completions, "chat_template", json!("x"), 400, "unsupported_parameter", "chat_template"),
        ("/generate", "guided_regex", json!("(a"), 400, "invalid_value", "guided_regex"),
        ("/generate", "response_format", json!({"type": "xml"}), 400, "invalid_value", "response_format.type"),
        (
            "/generate",
            "sampling_params",
            json!({"typical_p": 0.5}),
            400,
            "unsupported_parameter",
            "sampling_params.typical_p",
        ),
        (chats, "tools", json!([{"type": "function"}]), 400, "unsupported_parameter", "tools"),
        (chats, "n", json!(0), 400, "invalid_value", "n"),
        (chats, "max_tokens", json!(100_000), 400, "context_length_exceeded", "messages"),
        (completions, "prompt", Value::Null, 400, "missing_required_parameter", "prompt"),
        (completions, "prompt", json!(""), 400, "invalid_value", "prompt"),
        (completions, "prompt", json!([]), 400, "invalid_value", "prompt"),
        (completions, "prompt", json!([[]]), 400, "invalid_value", "prompt"),
        (completions, "prompt", json!([1, 2048]), 400, "invalid_value", "prompt"),
        (completions, "prompt", json!([-1]), 400, "invalid_value", "prompt"),
        (completions, "prompt", json!([1, "Hi"]), 400, "invalid_value", "prompt"),
        (completions, "prompt", json!({"a": 1}), 400, "invalid_type", "prompt"),
        (completions, "prompt", json!(vec![vec![1]; 257]), 400, "invalid_value", "prompt"),
        (completions, "prompt", json!("word ".repeat(300)), 400, "context_length_exceeded", "prompt"),
        (completions, "logprobs", json!(1_000_000_000), 400, "invalid_value", "logprobs"),
        (completions, "prompt_logprobs", json!(21), 400, "invalid_value", "prompt_logprobs"),
        (completions, "prompt_logprobs", json!("x"), 400, "invalid_type", "prompt_logprobs"),
        (completions, "truncate_prompt_tokens", json!(0), 400, "invalid_value", "truncate_prompt_tokens"),
        (completions, "truncation_side", json!("right"), 400, "unsupported_parameter", "truncation_side"),
        (
            completions,
            "kv_transfer_params",
            json!({"prompt_token_ids": [5]}),
            400,
            "unsupported_parameter",
            "kv_transfer_params",
        ),
        (completions, "max_tokens", json!(0), 400, "invalid_value", "max_tokens"),
        (completions, "return_logprob", json!(true), 400, "unsupported_parameter", "return_logprob"),
        (completions, "max_new_tokens", json!(0), 400, "unsupported_parameter", "max_new_tokens"),
        ("/generate", "logprobs", json!(0), 400, "unsupported_parameter", "logprobs"),
        (completions, "rid", json!(""), 400, "invalid_value", "rid"),
        (chats, "sampling_params", json!({"top_k": 1}), 400, "unsupported_parameter", "sampling_params"),
        ("/generate", "temperature", json!(0), 400, "unsupported_parameter", "temperature"),
        (
            "/generate",
            "sampling_params",
            json!({"max_tokens": 5}),
            400,
            "unsupported_parameter",
            "sampling_params.max_tokens",
        ),
        (completions, "request_id", json!(""), 400, "invalid_value", "request_id"),
        (chats, "route", json!("small"), 400, "unsupported_parameter", "route"),
        (completions, "policy_settings", json!({}), 400, "unsupported_parameter", "policy_settings"),
        (chats, "routing", json!(5), 400, "invalid_type", "routing"),
        (chats, "routing", json!({"settings": [1]}), 400, "invalid_type", "routing.settings"),
        (chats, "routing", json!({"route": "small"}), 400, "unsupported_parameter", "routing.route"),
        (chats, "routing", json!({"settings": {"a": {"b": 1}}}), 400, "unsupported_parameter", "routing.settings.a"),
        (completions, "routing", json!({"settings": {"a": 1}}), 400, "unsupported_parameter", "routing.settings.a"),
        (chats, "echo", json!(true), 400, "unsupported_parameter", "echo"),
        (chats, "continue_final_message", json!(3), 400, "invalid_type", "continue_final_message"),
        (completions, "suffix", json!("x"), 400, "unsupported_parameter", "suffix"),
        (
            "/generate",
            "sampling_params",
            json!({"temperature": -1}),
            400,
            "invalid_value",
            "sampling_params.temperature",
        ),
        ("/generate", "input_ids", Value::Null, 400, "missing_required_parameter", "text"),
    ];
    for (path, field, value, status, code, param) in cases {
        let mut body = match path {
            "/v1/chat/completions" => chat(),
            "/generate" if field == "input_ids" => json!({"model": "pair"}),
            "/generate" => json!({"model": "pair", "text": "Hi"}),
            _ => completion(),
        };
        body[field] = value;
        // A stream that cannot start is refused in the same way.
        for stream in [false, true] {
            if field != "stream_options" {
                body["stream"] = stream.into();
            }
            let (got, error) = server.json(path, body.clone()).await;
            check(got, &error, status, code, Some(param));
        }
    }
    assert_eq!(server.state.engine.live_requests(), 0);
}

#[tokio::test]
async fn the_words_that_clients_look_for() {
    let server = Server::saying("ok");
    let (_, error) = server.json("/v1/completions", json!({"model": "pair", "prompt": "a ".repeat(400)})).await;
    let message = error["error"]["message"].as_str().unwrap().to_lowercase();
    assert!(message.contains("this model's maximum context length is 256 tokens"), "{message}");
}

#[tokio::test]
async fn a_prompt_far_too_long_is_refused_before_it_is_tokenised() {
    let server = Server::saying("ok");
    let bytes = 4 * 257 * server.tokenizer.longest_token();
    let long = "a".repeat(bytes);
    let messages = json!([{"role": "user", "content": long}]);
    for (path, field, value) in [
        ("/v1/completions", "prompt", json!(long)),
        ("/v1/completions", "prompt", json!(["Hi", long])),
        ("/v1/chat/completions", "messages", messages),
        ("/generate", "text", json!(long)),
    ] {
        let (status, error) = server.json(path, json!({"model": "pair", field: value})).await;
        check(status, &error, 400, "context_length_exceeded", Some(field));
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("This model's maximum context length is 256 tokens."), "{message}");
        assert!(message.contains("bytes"), "refused by the length of the text: {message}");
    }
}

#[tokio::test]
async fn a_body_announced_too_large_is_refused_unread() {
    let server = Server::saying("ok");
    // Waiting for this body would never end.
    let (_sender, receiver) = tokio::sync::mpsc::channel::<()>(1);
    let body = Body::new(Silent(receiver));
    let request = Request::post("/v1/completions").header("content-length", (32 << 20) + 1).body(body).unwrap();
    let (status, body) = json_of(server.send(request).await).await;
    check(status, &body, 413, "payload_too_large", None);
}

/// A body of which nothing comes.
struct Silent(tokio::sync::mpsc::Receiver<()>);

impl axum::body::HttpBody for Silent {
    type Data = axum::body::Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
        self.0.poll_recv(cx).map(|_| None)
    }
}

#[tokio::test]
async fn content_encodings() {
    let server = Server::saying("ok");
    for (encoding, wanted) in [("identity", 200), ("Identity", 200), ("gzip", 415), ("br", 415)] {
        let mut request = post("/v1/completions", completion().to_string());
        request.headers_mut().insert("content-encoding", encoding.parse().unwrap());
        let (status, body) = json_of(server.send(request).await).await;
        assert_eq!(status, wanted, "{body}");
        if wanted == 415 {
            check(status, &body, 415, "unsupported_media_type", None);
            assert!(body["error"]["message"].as_str().unwrap().contains(encoding));
        }
    }
}

#[tokio::test]
async fn names_of_models_in_addresses() {
    let server = Server::saying("ok");
    let get = |path: &str| server.send(Request::get(path).body(Body::empty()).unwrap());
    for path in ["/v1/models/%ff", "/v1/models/%", "/v1/models/a%2Fb", "/v1/models/a/b", "/v1/models/%+1"] {
        let (status, body) = json_of(get(path).await).await;
        check(status, &body, 404, "model_not_found", Some("model"));
    }
    let (status, body) = json_of(get("/v1/models/%70air").await).await;
    assert_eq!((status, &body["id"]), (200, &json!("pair")));
}

#[test]
fn what_a_panic_says_stays_in_the_log() {
    use crate::request::RequestError;
    let failed = RequestError::Policy { route: "r".into(), model: "m".into(), message: "panicked: a secret".into() };
    let error = crate::api::error::ApiError::from(crate::api::ChoiceError::from(failed));
    assert_eq!((error.status.as_u16(), error.code), (500, "internal_error"));
    assert!(error.message.contains('r') && !error.message.contains("secret"), "{}", error.message);
}

#[tokio::test]
async fn unknown_fields_are_ignored() {
    let server = Server::saying("ok");
    let mut body = chat();
    (body["foo"], body["user"], body["messages"][0]["bar"]) = (json!(1), json!("me"), json!(2));
    server.ok("/v1/chat/completions", body).await;
    assert_eq!(server.state.warned.fields(), ["foo", "messages[].bar"]);
}

#[tokio::test]
async fn request_ids() {
    let server = Server::saying("ok");
    let mut request = post("/v1/completions", completion().to_string());
    request.headers_mut().insert("x-request-id", "mine".parse().unwrap());
    assert_eq!(server.send(request).await.headers()["x-request-id"], "mine");
}

#[tokio::test]
async fn readiness_is_not_liveness() {
    let server = Server::saying("ok");
    let get = |path: &str| server.send(Request::get(path).body(Body::empty()).unwrap());
    assert_eq!(get("/ready").await.status(), 200);
    server.state.start_draining();
    let response = get("/ready").await;
    assert!(response.headers().contains_key("retry-after"));
    let (status, body) = json_of(response).await;
    check(status, &body, 503, "not_ready", None);
    assert_eq!(get("/health").await.status(), 200);
    for (path, body) in [("/v1/completions", completion()), ("/v1/chat/completions", chat()), ("/generate", json!({}))]
    {
        let response = server.post(path, body).await;
        assert!(response.headers().contains_key("retry-after"));
        let (status, body) = json_of(response).await;
        check(status, &body, 503, "shutting_down", None);
    }
}

#[tokio::test]
async fn more_than_the_server_writes_at_once() {
    let pause = std::time::Duration::from_millis(100);
    let mut server = Server::with("a long answer", super::fixture::Options { pause, ..Default::default() });
    std::sync::Arc::get_mut(&mut server.state).unwrap().front.limits.queued_requests = 0;
    // Fill the house with slow answers, held by streams that nobody reads.
    let mut body = completion();
    (body["prompt"], body["n"], body["stream"]) = (json!(vec![vec![5]; 4]), 64.into(), true.into());
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(server.post("/v1/completions", body.clone()).await);
    }
    assert!(held.iter().all(|response| response.status() == 200));
    let refused = server.post("/v1/completions", completion()).await;
    assert!(refused.headers().contains_key("retry-after"));
    let (status, json) = json_of(refused).await;
    check(status, &json, 503, "server_overloaded", None);
    drop(held);
    server.idle().await;
    server.ok("/v1/completions", completion()).await;
}
