//! Answers in pieces.

use std::time::Duration;

use http_body_util::BodyExt;
use serde_json::{Value, json};

use super::fixture::{Options, Server, chat, completion, text_of};

const TEXT: &str = "  The answer is 한국어 😀 ďábelské.\n\nDone.";

fn content(events: &[Value]) -> String {
    let deltas = events.iter().filter_map(|event| event["choices"].get(0));
    deltas.filter_map(|choice| choice["delta"]["content"].as_str().or(choice["text"].as_str())).collect()
}

#[tokio::test]
async fn the_shape_of_a_chat_stream() {
    let server = Server::saying(TEXT);
    let events = server.events("/v1/chat/completions", chat()).await;
    let first = &events[0];
    assert_eq!(first["object"], "chat.completion.chunk");
    assert_eq!(first["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    for event in &events {
        for field in ["id", "created", "model"] {
            assert_eq!(event[field], first[field]);
        }
        assert_eq!(event.get("usage"), None, "usage was not asked for");
    }
    assert_eq!(content(&events), TEXT);
    let (last, others) = events.split_last().unwrap();
    assert_eq!((&last["choices"][0]["delta"], &last["choices"][0]["finish_reason"]), (&json!({}), &json!("stop")));
    assert!(others.iter().all(|event| event["choices"][0]["finish_reason"].is_null()));
    assert!(events.iter().all(|event| !event.to_string().contains('\u{FFFD}')));
}

#[tokio::test]
async fn usage_comes_last_if_asked_for() {
    let server = Server::saying(TEXT);
    let mut request = chat();
    let whole = server.ok("/v1/chat/completions", request.clone()).await;
    request["stream_options"] = json!({"include_usage": true});
    let events = server.events("/v1/chat/completions", request).await;
    let (last, others) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"], whole["usage"]);
    assert!(others.iter().all(|event| event.get("usage") == Some(&Value::Null)));
}

#[tokio::test]
async fn streams_say_what_whole_answers_say() {
    let server = Server::saying(TEXT);
    let cases = [
        json!({}),
        json!({"stop": "국어 "}),
        json!({"stop": ["is 한국어 x", "Done. x"]}),
        json!({"stop": "Done", "include_stop_str_in_output": true}),
        json!({"max_tokens": 9}),
        json!({"logprobs": 1, "return_routing": true}),
    ];
    for fields in cases {
        let mut request = completion();
        for (name, value) in fields.as_object().unwrap() {
            request[name] = value.clone();
        }
        let whole = server.ok("/v1/completions", request.clone()).await;
        let events = server.events("/v1/completions", request).await;
        assert_eq!(content(&events), whole["choices"][0]["text"].as_str().unwrap(), "{fields}");
        let last = &events.last().unwrap()["choices"][0];
        for field in ["finish_reason", "stop_reason"] {
            assert_eq!(last[field], whole["choices"][0][field], "{fields}");
        }
        for column in ["/routing", "/logprobs/tokens", "/logprobs/text_offset"] {
            let of = |choice: &Value| choice.pointer(column).and_then(Value::as_array).cloned().unwrap_or_default();
            let streamed: Vec<Value> = events.iter().flat_map(|event| of(&event["choices"][0])).collect();
            assert_eq!(streamed, of(&whole["choices"][0]), "{fields} {column}");
        }
    }
}

#[tokio::test]
async fn a_stop_string_is_never_shown_in_part() {
    let server = Server::saying("UNO DUE TRE QUATTRO");
    let mut request = completion();
    request["stop"] = "TRE QUATTRO".into();
    let events = server.events("/v1/completions", request).await;
    assert_eq!(content(&events), "UNO DUE ");
    let mut request = completion();
    request["stop"] = "QUATTRO CINQUE".into();
    assert_eq!(content(&server.events("/v1/completions", request).await), "UNO DUE TRE QUATTRO");
    server.idle().await;
}

#[tokio::test]
async fn every_choice_ends_by_itself() {
    let server = Server::saying(TEXT);
    let mut request = chat();
    request["n"] = 3.into();
    let events = server.events("/v1/chat/completions", request).await;
    for index in 0..3 {
        let own: Vec<Value> = events.iter().filter(|e| e["choices"][0]["index"] == index).cloned().collect();
        assert_eq!(content(&own), TEXT);
        assert_eq!(own.last().unwrap()["choices"][0]["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_told() {
    let server = Server::with(TEXT, Options { breaks_at: Some(3), ..Options::default() });
    let events = server.events("/v1/chat/completions", chat()).await;
    assert_eq!(events.last().unwrap()["error"]["code"], "not_finite");
    assert!(events.iter().all(|event| event["choices"][0]["finish_reason"].is_null()));
    let (status, error) = server.json("/v1/chat/completions", chat()).await;
    assert_eq!((status, &error["error"]["type"]), (500, &json!("server_error")));
}

#[tokio::test]
async fn a_silent_stream_is_kept_alive() {
    let server = Server::with("ok", Options { pause: Duration::from_millis(80), ..Options::default() });
    let mut request = chat();
    request["stream"] = true.into();
    let text = text_of(server.post("/v1/chat/completions", request).await).await;
    assert!(text.contains("\n\n: keep-alive\n\n"), "{text}");
}

#[tokio::test]
async fn clients_that_leave_cancel_their_requests() {
    let server = Server::with(TEXT, Options { pause: Duration::from_millis(20), ..Options::default() });
    let mut request = chat();
    (request["stream"], request["n"], request["ignore_eos"]) = (true.into(), 4.into(), true.into());
    let mut body = server.post("/v1/chat/completions", request.clone()).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(server.state.engine.live_requests(), 4);
    drop(body);
    server.idle().await;

    request["stream"] = false.into();
    let answer = server.post("/v1/chat/completions", request);
    assert!(tokio::time::timeout(Duration::from_millis(100), answer).await.is_err(), "200 tokens take longer");
    server.idle().await;
}
