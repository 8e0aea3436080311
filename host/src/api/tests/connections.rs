//! Real connections.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::fixture::{Options, Server, chat};
use crate::api::serve;

pub fn request(path: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// Send `text` and read until the server closes or `until` came.
pub fn exchange(connection: &mut TcpStream, text: &str, until: &str) -> String {
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

pub async fn start(server: &Server) -> (SocketAddr, oneshot::Sender<()>, tokio::task::JoinHandle<std::io::Result<()>>) {
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

/// A client that writes all of its request first learns what is wrong with its head.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_for_nothing_are_taken() {
    let server = Server::saying("ok");
    let (address, _stop, _serving) = start(&server).await;
    let body = "x".repeat(8 << 20);
    for (path, status) in [("/v1/embeddings", "404 Not Found"), ("/v1/models", "405 Method Not Allowed")] {
        let request = request(path, &body);
        let answer = tokio::task::spawn_blocking(move || {
            let mut connection = TcpStream::connect(address).unwrap();
            connection.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            exchange(&mut connection, &request, "\0")
        });
        let answer = answer.await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains("connection: close"), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_draining_the_door_says_so() {
    let server = Server::with("one two three four", Options { pause: Duration::from_millis(20), ..Options::default() });
    let (address, stop, mut serving) = start(&server).await;
    let mut body = chat();
    (body["stream"], body["ignore_eos"]) = (true.into(), true.into());
    let mut running = TcpStream::connect(address).unwrap();
    exchange(&mut running, &request("/v1/chat/completions", &body.to_string()), "\"role\"");
    stop.send(()).unwrap();
    while server.state.is_ready() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for (text, status, code) in [
        ("GET /ready HTTP/1.1\r\nhost: x\r\n\r\n", "503", "not_ready"),
        (&request("/v1/chat/completions", &chat().to_string()), "503", "shutting_down"),
        ("GET /health HTTP/1.1\r\nhost: x\r\n\r\n", "200", "ok"),
    ] {
        let answer = exchange(&mut TcpStream::connect(address).unwrap(), text, "\0");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains(code), "{answer}");
        assert!(answer.contains("connection: close"), "{answer}");
    }
    // The answer under way is what the server waits for.
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut serving).await.is_err());
    drop(running);
    serving.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_request_holds_nothing_up() {
    let server = Server::saying("ok");
    let (address, stop, serving) = start(&server).await;
    let mut head = TcpStream::connect(address).unwrap();
    head.write_all(b"POST /v1/completions HT").unwrap();
    let mut body = TcpStream::connect(address).unwrap();
    body.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{").unwrap();
    // Answered after both, so both were accepted.
    exchange(&mut TcpStream::connect(address).unwrap(), "GET /health HTTP/1.1\r\nhost: x\r\n\r\n", "ok");
    stop.send(()).unwrap();
    serving.await.unwrap().unwrap();
    // The ends of their streams, or a reset.
    assert_eq!(head.read(&mut [0]).unwrap_or(0) + body.read(&mut [0]).unwrap_or(0), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_writes_first_sees_why_it_is_refused() {
    let server = Server::saying("ok");
    let (address, _stop, _serving) = start(&server).await;
    let large = request("/v1/completions", &" ".repeat(server.state.max_body_bytes + 1));
    let answer = tokio::task::spawn_blocking(move || exchange(&mut TcpStream::connect(address).unwrap(), &large, "\0"));
    assert!(answer.await.unwrap().starts_with("HTTP/1.1 413"));

    // Nobody who asks first is told to go on.
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 999999999\r\n\r\n";
    let answer = tokio::task::spawn_blocking(move || exchange(&mut TcpStream::connect(address).unwrap(), head, "\0"));
    assert!(answer.await.unwrap().starts_with("HTTP/1.1 413"));
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

/// Whether such a client still reads cannot be told: one that has gone looks the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_closes_its_side_has_gone() {
    let text = "one ".repeat(60);
    let server = Server::with(text.trim(), Options { pause: Duration::from_millis(5), ..Options::default() });
    let (address, _stop, _serving) = start(&server).await;
    for stream in [false, true] {
        let mut body = chat();
        (body["stream"], body["ignore_eos"]) = (stream.into(), true.into());
        let mut connection = TcpStream::connect(address).unwrap();
        connection.write_all(request("/v1/chat/completions", &body.to_string()).as_bytes()).unwrap();
        while server.state.engine.live_requests() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        connection.shutdown(std::net::Shutdown::Write).unwrap();
        let answer = tokio::task::spawn_blocking(move || exchange(&mut connection, "", "\0")).await.unwrap();
        assert!(!answer.contains("finish_reason\":\""), "{answer}");
        server.idle().await;
    }
}
