//! A model that goes down while the server runs.

use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use super::connections::{exchange, request, start};
use super::fixture::{Options, Server, chat, completion, json_of};
use crate::request::ModelId;

const TEXT: &str = "one two three four five six";
/// A position that `large` writes: the models take turns, and `small` begins.
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

fn down() -> Value {
    json!({
        "message": "model `large` is down: the device is gone; restart the server",
        "type": "server_error",
        "param": null,
        "code": "model_down",
    })
}

#[tokio::test]
async fn the_streams_of_its_routes_end_with_an_error_and_others_go_on() {
    let server = server();
    let hit = server.events("/v1/chat/completions", chat());
    let whole = server.json("/v1/chat/completions", chat());
    let other = server.events("/v1/chat/completions", of("small"));
    let (hit, (status, whole), other) = tokio::join!(hit, whole, other);

    let error = &hit.last().unwrap()["error"];
    assert_eq!(error, &down());
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
            assert_eq!((status, &refused["error"]), (503, &down()));
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

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The engine has said it, from the model's thread.
#[tokio::test]
async fn its_streams_say_nothing_in_the_log() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::ERROR);
    let subscriber = subscriber.with_writer(move || writer.clone()).finish();
    // Of this thread, where all answers are.
    let _until_the_end = tracing::subscriber::set_default(subscriber);
    let lines = || String::from_utf8(log.0.lock().unwrap().clone()).unwrap().lines().count();
    let mut body = chat();
    body["n"] = 3.into();
    server().events("/v1/chat/completions", body).await;
    assert_eq!(lines(), 0);
    let options = Options { breaks_at: Some(LOST_AT), ..Options::default() };
    Server::with(TEXT, options).events("/v1/chat/completions", chat()).await;
    assert_eq!(lines(), 1, "other failures have a line for each stream");
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
