//! A server in this process, and the simplest of clients.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokenrouter::api::{AppState, SamplingDefaults, serve};
use tokenrouter::engine::Engine;
use tokenrouter::text::ModelText;

use crate::demo::{MODELS, root};

/// Serve `engine` on a port of its own until the returned sender is dropped.
pub fn start(engine: &Arc<Engine>) -> Running {
    start_with(engine, |_| {})
}

/// Where a server is, what keeps it, and its thread.
type Running = (SocketAddr, tokio::sync::oneshot::Sender<()>, std::thread::JoinHandle<()>);

/// The same, with a state that `change` has seen to.
pub fn start_with(engine: &Arc<Engine>, change: impl FnOnce(&mut AppState)) -> Running {
    let load = |name: &&str| Arc::new(ModelText::load(&root().join("models/demo").join(name)).expect("a tokenizer"));
    let texts = MODELS.iter().map(load).collect();
    let defaults = MODELS.iter().map(|_| SamplingDefaults::default()).collect();
    let mut state = AppState::new(engine.clone(), texts, defaults);
    change(&mut state);
    let state = Arc::new(state);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let (report, address) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
            report.send(listener.local_addr().expect("an address")).expect("the test waits");
            serve(listener, state, async { drop(stopped.await) }).await.expect("served");
        });
    });
    (address.recv().expect("the server starts"), stop, thread)
}

/// Send a chat completion; the answer is to be read.
pub fn send(address: SocketAddr, body: &Value) -> TcpStream {
    send_to(address, "/v1/chat/completions", body)
}

/// Send a request to `path`; the answer is to be read.
pub fn send_to(address: SocketAddr, path: &str, body: &Value) -> TcpStream {
    let body = body.to_string();
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout");
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).expect("sent");
    stream.write_all(body.as_bytes()).expect("sent");
    stream
}

/// Samples of GET /metrics, by name and labels as written.
pub fn scrape(address: SocketAddr) -> Vec<(String, f64)> {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
    assert!(head.starts_with("HTTP/1.1 200") && !head.contains("chunked"), "{head}");
    let lines = body.lines().filter(|line| !line.starts_with('#'));
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ').expect("a value");
        (name.to_owned(), value.parse().expect("a number"))
    };
    lines.map(sample).collect()
}
