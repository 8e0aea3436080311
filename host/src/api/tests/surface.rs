//! Endpoints beside those for answers.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::fixture::{Options, Server, json_of, post};
use crate::api::{Access, admin_router};

async fn get(server: &Server, path: &str) -> (u16, Value) {
    json_of(server.send(Request::get(path).body(Body::empty()).unwrap()).await).await
}

#[tokio::test]
async fn tokens_and_back() {
    let server = Server::saying("ok");
    let text = "The answer is 한국어.";
    let ids = server.tokenizer.encode(text).unwrap();
    for path in ["/tokenize", "/v1/tokenize"] {
        let answer = server.ok(path, json!({"model": "pair", "prompt": text})).await;
        let expected = json!({"count": ids.len(), "max_model_len": 256, "tokens": ids, "token_strs": null});
        assert_eq!(answer, expected);
    }
    let strings = server.ok("/tokenize", json!({"model": "pair", "prompt": "a b", "return_token_strs": true})).await;
    assert_eq!(strings["token_strs"], json!(["a", " b"]));
    let batch = server.ok("/tokenize", json!({"model": "pair", "prompt": [text, ""]})).await;
    assert_eq!((&batch["tokens"], &batch["count"]), (&json!([ids, []]), &json!([ids.len(), 0])));
    for path in ["/detokenize", "/v1/detokenize"] {
        let answer = server.ok(path, json!({"model": "pair", "tokens": ids})).await;
        assert_eq!(answer, json!({"prompt": text, "text": text}));
    }
    let batch = server.ok("/detokenize", json!({"model": "pair", "tokens": [ids, [ids[0]]]})).await;
    assert_eq!(batch["text"], json!([text, "The"]));
    let empty = server.ok("/detokenize", json!({"model": "pair", "tokens": []})).await;
    assert_eq!(empty["prompt"], "");
}

#[tokio::test]
async fn tokens_of_a_conversation() {
    let server = Server::saying("ok");
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let whole = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    let ids = server.tokenizer.encode(whole).unwrap();
    let answer = server.ok("/tokenize", json!({"model": "pair", "messages": messages})).await;
    assert_eq!((&answer["tokens"], &answer["count"]), (&json!(ids), &json!(ids.len())));
    let continued = json!({"model": "pair", "messages": messages, "continue_final_message": true});
    let answer = server.ok("/tokenize", continued).await;
    assert_eq!(answer["tokens"], json!(server.tokenizer.encode("<|im_start|>user\nHi").unwrap()));
    let back =
        |skip: bool| server.ok("/detokenize", json!({"model": "pair", "tokens": ids, "skip_special_tokens": skip}));
    assert_eq!(back(false).await["text"], whole);
    assert_eq!(back(true).await["text"], "user\nHi\nassistant\n");
}

#[tokio::test]
async fn wrong_tokens() {
    let server = Server::saying("ok");
    for (path, body, param) in [
        ("/tokenize", json!({"model": "pair"}), "prompt"),
        ("/tokenize", json!({"model": "pair", "prompt": [1, 2]}), "prompt"),
        ("/tokenize", json!({"model": "pair", "prompt": 5}), "prompt"),
        ("/tokenize", json!({"model": "pair", "messages": []}), "messages"),
        ("/detokenize", json!({"model": "pair"}), "tokens"),
        ("/detokenize", json!({"model": "pair", "tokens": [5000]}), "tokens"),
        ("/detokenize", json!({"model": "pair", "tokens": "text"}), "tokens"),
        ("/detokenize", json!({"tokens": [1]}), "model"),
    ] {
        let (status, error) = server.json(path, body).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)), "{error}");
    }
}

#[tokio::test]
async fn what_the_server_is() {
    let mut server = Server::saying("ok");
    let state = Arc::get_mut(&mut server.state).unwrap();
    state.access = Access::new(false, ["0123456789abcdef-one"]);
    state.config_sha256.store(Arc::new("5c1f".into()));
    assert_eq!(get(&server, "/version").await, (200, json!({"version": env!("CARGO_PKG_VERSION")})));
    assert_eq!(get(&server, "/load").await, (200, json!({"server_load": 0})));
    assert_eq!(get(&server, "/health_generate").await, (200, json!({"status": "ok"})));
    assert_eq!(get(&server, "/ping").await, (200, json!({"status": "ok"})));
    for path in ["/model_info", "/get_model_info"] {
        let (status, info) = get(&server, path).await;
        assert_eq!((status, &info["model_path"], &info["is_generation"]), (200, &json!("pair"), &json!(true)));
    }
    let (status, info) = get(&server, "/server_info").await;
    assert_eq!((status, &info["config_sha256"]), (200, &json!("5c1f")));
    assert_eq!(info["models"][1]["name"], "large");
    assert_eq!((&info["models"][0]["kv_pages"], &info["models"][0]["min_batch"]), (&json!(1024), &json!(1)));
    assert_eq!((&info["routes"][0]["name"], &info["routes"][0]["plugin"]), (&json!("pair"), &json!("ping-pong")));
    assert_eq!(info["routes"][0]["models"][1], json!({"name": "large", "role": "llm", "entry": false}));
    assert!(!info.to_string().contains("0123456789abcdef"), "no keys");
}

/// A server that says a long text slowly.
fn slow() -> Server {
    Server::with(&"word ".repeat(200), Options { pause: Duration::from_millis(2), ..Options::default() })
}

#[tokio::test]
async fn answers_are_aborted_by_name() {
    let server = slow();
    let completion = json!({"model": "small", "prompt": "Hi", "max_tokens": 200, "request_id": "mine"});
    let native =
        json!({"model": "small", "text": ["Hi", "Ho"], "rid": ["a", "b"], "sampling_params": {"max_new_tokens": 200}});
    let abort = |body: Value| {
        let server = &server;
        async move {
            // Until both are under way there is nothing to abort.
            loop {
                let answer = server.ok("/abort_request", body.clone()).await;
                if answer["aborted"] != 0 {
                    return answer;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    };
    let (answer, aborted) =
        tokio::join!(server.ok("/v1/completions", completion), abort(json!({"request_ids": ["cmpl-mine"]})));
    assert_eq!(aborted["aborted"], 1);
    assert_eq!((&answer["id"], &answer["choices"][0]["finish_reason"]), (&json!("cmpl-mine"), &json!("abort")));
    let (answers, _) = tokio::join!(server.ok("/generate", native), abort(json!({"rid": "a"})));
    assert_eq!(answers[0]["meta_info"]["finish_reason"]["type"], "abort");
    assert_eq!(answers[1]["meta_info"]["finish_reason"]["type"], "length");
    server.idle().await;
    let none = server.ok("/abort_requests", json!({"request_ids": ["cmpl-mine"]})).await;
    assert_eq!(none, json!({"aborted": 0}), "it has ended");
    let (status, error) = server.json("/abort_request", json!({})).await;
    assert_eq!((status, &error["error"]["code"]), (400, &json!("missing_required_parameter")));
}

#[tokio::test]
async fn only_the_operator_aborts_all_and_empties_caches() {
    let server = slow();
    for (path, body) in [("/abort_request", json!({"abort_all": true})), ("/flush_cache", json!({}))] {
        let (status, _) = server.json(path, body.clone()).await;
        assert_eq!(status, 404, "{path}: the admin endpoints are off");
        let own = admin_router(server.state.clone());
        let answer = own.oneshot(post(path, body.to_string())).await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
    }
    let prompt: Vec<u32> = (0..100).collect();
    let ask = json!({"model": "small", "prompt": prompt, "max_tokens": 1});
    let cached = || async {
        server.ok("/v1/completions", ask.clone()).await["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    assert_eq!((cached().await, cached().await), (json!(0), json!(96)));
    server.idle().await;
    server.state.engine.flush_prefix_caches();
    assert_eq!(cached().await, 0);
}
