//! Real connections.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::fixture::{Options, Server, chat};
use crate::api::serve;

fn request(path: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// Send `text` and read until the server closes or `until` came.
fn exchange(connection: &mut TcpStream, text: &str, until: &str) -> String {
    connection.write_all(text.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let mut part = [0; 4096];
    while !String::from_utf8_lossy(&answer).contains(until) {
        match connection.read(&mut part).unwrap() {
            0 => break,
            n => answer.extend_from_slice(&part[..n]),
        }
    }
    String::from_utf8(answer).unwrap()
}

async fn start(server: &Server) -> (SocketAddr, oneshot::Sender<()>, tokio::task::JoinHandle<std::io::Result<()>>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(serve(listener, Arc::clone(&server.state), async { drop(stopped.await) }));
    (address, stop, serving)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutting_down_finishes_what_runs() {
    let server = Server::with("one two three four", Options { pause: Duration::from_millis(20), ..Options::default() });
    let (address, stop, serving) = start(&server).await;
    let mut body = chat();
    body["stream"] = true.into();
    let mut idle = TcpStream::connect(address).unwrap();
    let mut running = TcpStream::connect(address).unwrap();
    let head = exchange(&mut running, &request("/v1/chat/completions", &body.to_string()), "\"role\"");
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    stop.send(()).unwrap();
    let rest = tokio::task::spawn_blocking(move || exchange(&mut running, "", "\0")).await.unwrap();
    assert!((head + &rest).contains("data: [DONE]"), "{rest}");
    serving.await.unwrap().unwrap();
    assert_eq!(idle.read(&mut [0]).unwrap(), 0, "idle connections are closed");
    assert!(TcpStream::connect(address).is_err());
    assert!(!server.state.is_ready());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_serves_many_requests() {
    let server = Server::saying("ok");
    let (address, _stop, _serving) = start(&server).await;
    let mut body = chat();
    body["model"] = "small".into();
    let body = body.to_string();
    let answers = tokio::task::spawn_blocking(move || {
        let mut connection = TcpStream::connect(address).unwrap();
        let mut answer = || exchange(&mut connection, &request("/v1/chat/completions", &body), "\"handoffs\":0}}");
        [answer(), answer()]
    });
    for answer in answers.await.unwrap() {
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("\"content\":\"ok\""), "{answer}");
    }
}
