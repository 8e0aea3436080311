//! A model that goes down while the server runs.

use std::net::TcpStream;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use super::connections::{exchange, request, start};
use super::fixture::{Options, Server, chat, completion, json_of};
use crate::request::ModelId;

const TEXT: &str = "one two three four five six";
/// The first position that the second model of the route writes.
const LOST_AT: usize = 5;

fn server() -> Server {
    let pause = Duration::from_millis(10);
    Server::with(TEXT, Options { large_lost_at: Some(LOST_AT), pause, ..Options::default() })
}

fn of(model: &str) -> Value {
    let mut body = chat();
    body["model"] = model.into();
    body
}

#[tokio::test]
async fn the_streams_of_its_routes_end_with_an_error_and_others_go_on() {
    let server = server();
    let hit = server.events("/v1/chat/completions", chat());
    let whole = server.json("/v1/chat/completions", chat());
    let other = server.events("/v1/chat/completions", of("small"));
    let (hit, (status, whole), other) = tokio::join!(hit, whole, other);

    let error = &hit.last().unwrap()["error"];
    assert_eq!((&error["code"], &error["type"]), (&json!("model_down"), &json!("server_error")));
    assert_eq!(error["message"], "model `large` is down: the device is gone; restart the server");
    assert!(hit.len() > 2, "the stream was under way: {hit:?}");
    assert_eq!((status, &whole["error"]), (503, error));
    let text: String = other.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!((text.as_str(), &other.last().unwrap()["choices"][0]["finish_reason"]), (TEXT, &json!("stop")));
}

#[tokio::test]
async fn it_is_refused_and_the_server_is_not_ready_until_a_restart() {
    let server = server();
    let get = |path: &str| server.send(Request::get(path).body(Body::empty()).unwrap());
    assert_eq!(get("/ready").await.status(), 200);
    server.json("/v1/completions", completion()).await;

    let response = get("/ready").await;
    assert!(!response.headers().contains_key("retry-after"), "waiting does not help");
    let (status, body) = json_of(response).await;
    assert_eq!((status, &body["models"], &body["error"]["code"]), (503, &json!(["large"]), &json!("model_down")));
    assert_eq!(get("/health").await.status(), 200);

    for model in ["pair", "large"] {
        for stream in [false, true] {
            let mut body = of(model);
            body["stream"] = stream.into();
            let (status, refused) = server.json("/v1/chat/completions", body).await;
            assert_eq!((status, &refused["error"]), (503, &body_error()));
        }
    }
    let answer = server.ok("/v1/chat/completions", of("small")).await;
    assert_eq!(answer["choices"][0]["message"]["content"], TEXT);

    server.idle().await;
    for model in [0, 1].map(ModelId) {
        let board = loop {
            let board = server.state.engine.snapshot(model);
            if board.replicas == 0 {
                break board;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        assert_eq!((board.ready, board.pages_in_use, board.policy_slots), (0, 0, 0));
    }
}

fn body_error() -> Value {
    json!({
        "message": "model `large` is down: the device is gone; restart the server",
        "type": "server_error",
        "param": null,
        "code": "model_down",
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_signal_to_stop_drains_and_ends_as_ever() {
    let server = server();
    let (address, stop, serving) = start(&server).await;
    server.json("/v1/completions", completion()).await;
    let mut body = of("small");
    body["stream"] = true.into();
    let mut running = TcpStream::connect(address).unwrap();
    let head = exchange(&mut running, &request("/v1/chat/completions", &body.to_string()), "\"role\"");
    stop.send(()).unwrap();
    let rest = tokio::task::spawn_blocking(move || exchange(&mut running, "", "\0")).await.unwrap();
    let answer = head + &rest;
    assert!(answer.contains("\"finish_reason\":\"stop\"") && answer.contains("data: [DONE]"), "{answer}");
    serving.await.unwrap().unwrap();
}
