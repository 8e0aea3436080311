//! What comes before an answer, in turns of clients: texts are read, and forms compiled.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::fixture::{Server, chat, completion};
use crate::api::Limits;
use crate::api::front::{Slot, Waiting};
use crate::constraint::{Compiler, Patience};

fn with(mut body: Value, field: &str, value: Value) -> Value {
    body[field] = value;
    body
}

/// Turns that are free.
async fn all(line: &Arc<Waiting>) -> Vec<Slot> {
    let mut turns = Vec::new();
    while let Ok(turn) = tokio::time::timeout(Duration::ZERO, line.turn()).await {
        turns.push(turn.unwrap());
    }
    turns
}

#[tokio::test]
async fn forms_wait_for_turns_and_known_ones_do_not() {
    let mut server = Server::saying("{}");
    let patience = Patience { turns: Duration::from_millis(50), compiling: Duration::from_secs(60) };
    Arc::get_mut(&mut server.state).unwrap().compiler = Compiler::new(patience);
    let object = || with(completion(), "response_format", json!({"type": "json_object"}));
    server.ok("/v1/completions", object()).await;
    let turns = all(server.state.front.forms()).await;
    assert!(!turns.is_empty());
    server.ok("/v1/completions", object()).await;
    let other = || with(completion(), "regex", "[{]}".into());
    let (status, body) = server.json("/v1/completions", other()).await;
    assert_eq!((status, &body["error"]["code"]), (503, &json!("server_overloaded")), "{body}");
    drop(turns);
    server.ok("/v1/completions", other()).await;
}

#[tokio::test]
async fn a_client_has_as_many_texts_and_forms_at_once_as_answers() {
    let mut server = Server::saying("{}");
    Arc::get_mut(&mut server.state).unwrap().front.limits =
        Limits { requests_per_client: Some(1), ..Limits::default() };
    let regex = with(completion(), "regex", "[{]}".into());
    let text = server.state.front.texts().turn().await.unwrap();
    for (path, body) in [
        ("/tokenize", json!({"model": "small", "prompt": "Hi"})),
        ("/detokenize", json!({"model": "small", "tokens": [1]})),
        ("/v1/completions", completion()),
        ("/v1/chat/completions", chat()),
    ] {
        let (status, body) = server.json(path, body).await;
        assert_eq!((status, &body["error"]["code"]), (429, &json!("rate_limit_exceeded")), "{path}: {body}");
    }
    drop(text);
    let form = server.state.front.forms().turn().await.unwrap();
    assert_eq!(server.json("/v1/completions", regex.clone()).await.0, 429);
    server.ok("/tokenize", json!({"model": "small", "prompt": "Hi"})).await;
    server.ok("/v1/completions", completion()).await;
    drop(form);
    server.ok("/v1/completions", regex).await;
}

#[tokio::test]
async fn waiting_for_a_text_ends_with_the_time_of_the_answer_and_with_the_server() {
    let mut server = Server::saying("{}");
    Arc::get_mut(&mut server.state).unwrap().front.limits =
        Limits { request_timeout: Some(Duration::from_millis(60)), ..Limits::default() };
    let texts = all(server.state.front.texts()).await;
    let forms = all(server.state.front.forms()).await;
    let tokenize = || ("/tokenize", json!({"model": "small", "prompt": "Hi"}));
    let error = |(status, body): (_, Value)| (status, body["error"]["code"].clone());
    for (path, body) in [tokenize(), ("/v1/completions", completion())] {
        assert_eq!(error(server.json(path, body).await), (504, "timeout".into()), "{path}");
    }
    drop(texts);
    let regex = || with(completion(), "regex", "[{]}".into());
    assert_eq!(error(server.json("/v1/completions", regex()).await), (504, "timeout".into()));
    drop(forms);
    let server = Server::saying("{}");
    let texts = all(server.state.front.texts()).await;
    let close = async {
        // Both are polled in turn, so the other waits by now.
        tokio::task::yield_now().await;
        server.state.admissions.close();
    };
    let (path, body) = tokenize();
    let (answer, ()) = tokio::join!(server.json(path, body), close);
    assert_eq!(error(answer), (503, "shutting_down".into()));
    drop(texts);
}

#[tokio::test]
async fn a_client_that_leaves_before_its_turn_costs_nothing() {
    let server = Server::saying("{}");
    let texts = all(server.state.front.texts()).await;
    let (ran, runs) = std::sync::mpsc::channel();
    let work = server.state.work(move || {
        ran.send(()).unwrap();
        Ok(())
    });
    assert!(tokio::time::timeout(Duration::from_millis(20), work).await.is_err());
    drop(texts);
    // In the same line.
    server.state.work(|| Ok(())).await.unwrap();
    assert!(runs.try_recv().is_err());
}

#[tokio::test]
async fn the_forms_of_a_request_have_the_bytes_of_one() {
    let mut server = Server::saying("{}");
    // Long ones take a while where others work, too.
    let patience = Patience { turns: Duration::from_secs(60), compiling: Duration::from_secs(60) };
    Arc::get_mut(&mut server.state).unwrap().compiler = Compiler::new(patience);
    let ask = async |forms: [String; 2]| {
        let sampling = forms.map(|regex| json!({"regex": regex, "max_new_tokens": 1}));
        server.json("/generate", json!({"model": "small", "text": ["a", "b"], "sampling_params": sampling})).await
    };
    let long = |letter: &str| format!("[{{{}]}}{letter}", "a".repeat(140_000));
    let (status, body) = ask([long("a"), long("b")]).await;
    assert_eq!((status, &body["error"]["param"]), (400, &json!("sampling_params[1].regex")), "{body}");
    // One for all counts once.
    assert_eq!(ask([long(""), long("")]).await.0, 200);
    assert_eq!(ask(["[{]}".into(), "[{]}|a".into()]).await.0, 200);
}

#[tokio::test]
async fn answers_of_one_form_are_apart() {
    let server = Server::saying("{\"a\": 1}");
    let body = with(with(completion(), "response_format", json!({"type": "json_object"})), "n", 4.into());
    let answer = server.ok("/v1/completions", body).await;
    for choice in answer["choices"].as_array().unwrap() {
        assert!(serde_json::from_str::<Value>(choice["text"].as_str().unwrap()).unwrap().is_object(), "{choice}");
    }
}
