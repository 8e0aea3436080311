//! Cases 16 to 22: the events of streams.

use serde_json::{Value, json};

use super::super::fixture::{Options, Server, text_of};
use super::{CHATS, COMPLETIONS, NATIVE, ROUTES, asking, refused, with};

const TEXT: &str = "one two three 한국어 four";
const PATHS: [&str; 3] = [CHATS, COMPLETIONS, NATIVE];

/// All that is sent as a stream.
async fn raw(server: &Server, path: &str, body: Value) -> String {
    let response = server.post(path, with(body, &json!({"stream": true}))).await;
    assert_eq!(response.status(), 200);
    text_of(response).await
}

fn streams() -> impl Iterator<Item = (&'static str, Value)> {
    let bodies = PATHS.into_iter().flat_map(|path| {
        let of = move |n| ROUTES.map(|route| (path, asking(path, route, &json!({"n": n}))));
        [1, 3].into_iter().flat_map(of)
    });
    bodies.collect::<Vec<_>>().into_iter()
}

#[tokio::test]
async fn bug_16_a_stream_that_cannot_start_is_refused() {
    let server = Server::saying("ok");
    for n in [json!(0), json!(-1), json!(65)] {
        refused(&server, &json!({"n": n}), "n").await;
    }
    let body = asking(CHATS, "pair", &json!({"n": 0, "stream": true}));
    let response = server.post(CHATS, body).await;
    assert_eq!(response.headers()["content-type"], "application/json");
}

#[tokio::test]
async fn bug_17_done_comes_once_and_last() {
    for breaks_at in [None, Some(0), Some(1), Some(4)] {
        let server = Server::with(TEXT, Options { breaks_at, ..Options::default() });
        for (path, body) in streams() {
            let sent = raw(&server, path, body).await;
            assert!(sent.ends_with("\n\ndata: [DONE]\n\n"), "{path}: {sent}");
            assert_eq!(sent.matches("[DONE]").count(), 1, "{path}: {sent}");
        }
    }
}

#[tokio::test]
async fn bug_18_a_failure_is_no_end() {
    for breaks_at in 0..4 {
        let server = Server::with(TEXT, Options { breaks_at: Some(breaks_at), ..Options::default() });
        for (path, body) in streams() {
            let events = server.events(path, body.clone()).await;
            let (error, before) = events.split_last().unwrap();
            assert_eq!(error["error"]["code"], "not_finite", "{path}");
            let ended = |event: &Value| {
                let reason = event.pointer("/choices/0/finish_reason").or(event.pointer("/meta_info/finish_reason"));
                reason.is_some_and(|reason| !reason.is_null()) || event.get("error").is_some()
            };
            assert!(!before.iter().any(ended), "{path}: {before:?}");
            // What failed before the first byte is no good answer.
            let (status, whole) = server.json(path, body).await;
            assert_eq!((status, &whole["error"]), (500, &error["error"]));
        }
    }
}

#[tokio::test]
async fn bug_19_a_space_follows_data() {
    let server = Server::saying(TEXT);
    for (path, body) in streams() {
        for event in raw(&server, path, body).await.split_terminator("\n\n") {
            let data = event.strip_prefix("data: ").unwrap();
            assert!(!data.starts_with(' ') && !data.contains('\n'), "{data}");
            assert!(data == "[DONE]" || serde_json::from_str::<Value>(data).is_ok(), "{data}");
        }
    }
}

#[tokio::test]
async fn bug_21_usage_comes_between_the_last_end_and_done() {
    let server = Server::saying(TEXT);
    for (path, body) in streams().filter(|(path, _)| *path != NATIVE) {
        let body = with(body, &json!({"stream_options": {"include_usage": true}}));
        let events = server.events(path, body).await;
        let (usage, before) = events.split_last().unwrap();
        assert_eq!(usage["choices"], json!([]));
        assert!(usage["usage"]["total_tokens"].as_u64().unwrap() > 0);
        assert!(!before.last().unwrap()["choices"][0]["finish_reason"].is_null());
        assert!(before.iter().all(|event| event["choices"].as_array().unwrap().len() == 1));
        assert!(before.iter().all(|event| event.get("usage") == Some(&Value::Null)));
    }
}

#[tokio::test]
async fn bug_22_usage_is_not_sent_unasked() {
    let server = Server::saying(TEXT);
    for (path, body) in streams().filter(|(path, _)| *path != NATIVE) {
        for options in [Value::Null, json!({}), json!({"include_usage": false}), json!({"include_usage": null})] {
            let events = server.events(path, with(body.clone(), &json!({"stream_options": options}))).await;
            assert!(events.iter().all(|event| event.get("usage").is_none()), "{options}");
            assert!(events.iter().all(|event| event["choices"].as_array().unwrap().len() == 1), "{options}");
        }
    }
}
