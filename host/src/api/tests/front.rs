//! Who is let in, and how much of them, over real connections.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::connections::{exchange, request, start};
use super::fixture::{Options, Server, chat, completion, json_of, post, text_of};
use crate::api::front::Refusal;
use crate::api::{Access, Cors, KeyRing, Limits, Listener, MetricsAccess, UnixSocket, serve};

const KEY: &str = "0123456789abcdef";
const ADMIN: &str = "admin-admin-admin";

/// A server with keys for ann and bob.
fn guarded(metrics: MetricsAccess) -> Server {
    let mut server = Server::saying("ok");
    let state = Arc::get_mut(&mut server.state).unwrap();
    state.front.keys.set(KeyRing::new([("ann", KEY), ("bob", "fedcba9876543210")]));
    state.front.metrics = metrics;
    state.access = Access::new(false, [ADMIN]);
    server
}

fn limited(limits: Limits) -> Server {
    let pause = Duration::from_millis(20);
    let mut server = Server::with("one two three four", Options { pause, ..Options::default() });
    Arc::get_mut(&mut server.state).unwrap().front.limits = limits;
    server
}

fn get(path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let request = Request::get(path);
    headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).body(Body::empty()).unwrap()
}

async fn status(server: &Server, request: Request<Body>) -> u16 {
    server.send(request).await.status().as_u16()
}

#[tokio::test]
async fn keys_guard_all_but_probes() {
    let server = guarded(MetricsAccess::ApiKey);
    for path in ["/v1/models", "/metrics", "/metrics/steps", "/nowhere"] {
        let response = server.send(get(path, &[])).await;
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        let (status, body) = json_of(response).await;
        assert_eq!((status, &body["error"]["code"]), (401, &json!("invalid_api_key")), "{path}");
    }
    for path in ["/health", "/ready"] {
        assert_eq!(status(&server, get(path, &[])).await, 200, "{path}");
    }
    for (name, value, expected) in [
        ("authorization", format!("Bearer {KEY}"), 200),
        ("authorization", format!("bEARER {KEY}"), 200),
        ("x-api-key", KEY.into(), 200),
        ("authorization", format!("Basic {KEY}"), 401),
        ("authorization", format!("Bearer {}", KEY.to_uppercase()), 401),
        ("authorization", format!("Bearer {ADMIN}"), 401),
        ("x-api-key", String::new(), 401),
    ] {
        assert_eq!(status(&server, get("/v1/models", &[(name, &value)])).await, expected, "{name}: {value}");
    }
    assert_eq!(server.state.front.counters.get(Refusal::Unauthorized), 8);
    // Other keys at once, as by a reload.
    server.state.front.keys.set(KeyRing::new([("eve", "another-key-of-hers")]));
    assert_eq!(status(&server, get("/v1/models", &[("x-api-key", KEY)])).await, 401);
    // The admin endpoints ask for their own.
    assert_eq!(status(&server, get("/admin/routes", &[("authorization", &format!("Bearer {ADMIN}"))])).await, 200);
    assert_eq!(status(&server, get("/admin/routes", &[("x-api-key", "another-key-of-hers")])).await, 401);
}

#[tokio::test]
async fn all_answers_are_aborted_with_both_keys() {
    let server = guarded(MetricsAccess::ApiKey);
    for (bearer, key, expected) in [(ADMIN, Some(KEY), 200), (KEY, Some(KEY), 401), (ADMIN, None, 401)] {
        let mut request = post("/abort_request", json!({"abort_all": true}).to_string());
        request.headers_mut().insert("authorization", format!("Bearer {bearer}").parse().unwrap());
        if let Some(key) = key {
            request.headers_mut().insert("x-api-key", key.parse().unwrap());
        }
        assert_eq!(status(&server, request).await, expected, "{bearer} {key:?}");
    }
}

#[tokio::test]
async fn who_reads_metrics_is_a_setting() {
    let open = guarded(MetricsAccess::Open);
    assert_eq!(status(&open, get("/metrics", &[])).await, 200);
    let admin = guarded(MetricsAccess::AdminKey);
    assert_eq!(status(&admin, get("/metrics", &[("x-api-key", KEY)])).await, 401);
    let response = admin.send(get("/metrics", &[("authorization", &format!("Bearer {ADMIN}"))])).await;
    assert!(text_of(response).await.contains("tokenrouter_refused_total{reason=\"unauthorized\"} 1\n"));
}

#[tokio::test]
async fn pages_of_other_origins() {
    let preflight = |origin: &str| {
        let request = Request::options("/v1/chat/completions").header("origin", origin);
        let request = request.header("access-control-request-method", "POST");
        request.header("access-control-request-headers", "authorization").body(Body::empty()).unwrap()
    };
    // Off: no header says yes.
    let server = guarded(MetricsAccess::ApiKey);
    assert!(!server.send(preflight("https://a.b")).await.headers().contains_key("access-control-allow-origin"));

    let mut server = guarded(MetricsAccess::ApiKey);
    let cors = Cors {
        origins: Some(vec!["https://a.b".parse().unwrap()]),
        headers: vec!["authorization".parse().unwrap()],
        methods: vec!["POST".parse().unwrap()],
        credentials: true,
    };
    Arc::get_mut(&mut server.state).unwrap().front.cors = Some(cors);
    let response = server.send(preflight("https://a.b")).await;
    assert_eq!(response.status(), 200, "no key is needed to ask");
    for (name, value) in
        [("origin", "https://a.b"), ("credentials", "true"), ("headers", "authorization"), ("methods", "POST")]
    {
        assert_eq!(response.headers()[format!("access-control-allow-{name}")], value);
    }
    let other = server.send(preflight("https://evil.example")).await;
    assert!(!other.headers().contains_key("access-control-allow-origin"));
    // A page may read why it was refused.
    let refused = server.send(get("/v1/models", &[("origin", "https://a.b")])).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["access-control-allow-origin"]),
        (401, &"https://a.b".parse().unwrap())
    );
}

/// What a server answers to these bytes, until it closes.
async fn told(server: &Server, bytes: Vec<u8>) -> String {
    let (address, _stop, _serving) = start(server).await;
    let answer = tokio::task::spawn_blocking(move || {
        let mut connection = TcpStream::connect(address).unwrap();
        // The server may have closed before everything was written.
        let _ = connection.write_all(&bytes);
        let mut answer = Vec::new();
        let mut part = [0; 4096];
        while let Ok(read @ 1..) = connection.read(&mut part) {
            answer.extend_from_slice(&part[..read]);
        }
        String::from_utf8(answer).unwrap()
    });
    answer.await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_that_are_refused() {
    let server = Server::saying("ok");
    let long = |bytes| "x".repeat(bytes);
    let body = completion().to_string();
    let chunks = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let many: String = (0..200).map(|n| format!("h{n}: x\r\n")).collect();
    for (head, expected, code) in [
        ("GET /health HTTP/1.1\r\n\r\n".into(), 400, "invalid_request"),
        ("GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n".into(), 400, "invalid_request"),
        (
            "POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
                .into(),
            400,
            "invalid_request",
        ),
        (
            "POST /generate HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n"
                .into(),
            400,
            "invalid_request",
        ),
        (
            "\r\nPOST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
                .into(),
            400,
            "invalid_request",
        ),
        (
            "GET /health HTTP/1.1\r\nhost: a\r\n\r\n\
             POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
                .into(),
            400,
            "invalid_request",
        ),
        (
            format!("POST /generate HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n{chunks}"),
            501,
            "unsupported_transfer_encoding",
        ),
        (
            format!(
                "POST /generate HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n{chunks}"
            ),
            501,
            "unsupported_transfer_encoding",
        ),
        (format!("POST /generate HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n{chunks}"), 400, ""),
        ("POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc".into(), 400, ""),
        (format!("GET /{} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", long(9000)), 414, "url_too_long"),
        (format!("GET /{} HTTP/1.1\r\nhost: a\r\n\r\n", long(100_000)), 414, ""),
        (format!("GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{many}\r\n"), 431, "headers_too_large"),
        (
            format!("GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: {}\r\n\r\n", long(70_000)),
            431,
            "headers_too_large",
        ),
        (format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", long(1 << 20)), 431, ""),
    ] {
        let answer = told(&server, head.clone().into_bytes()).await;
        let shown: String = head.chars().take(80).collect();
        assert!(answer.starts_with(&format!("HTTP/1.1 {expected}")), "{shown}: {answer}");
        assert!(answer.contains("connection: close") || code.is_empty(), "{shown}: {answer}");
        assert!(answer.contains(&format!("\"code\":\"{code}\"")) || code.is_empty(), "{shown}: {answer}");
    }
    let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: Chunked\r\n\r\n";
    // One that has not been told to stop yet.
    let answer = told(&Server::saying("ok"), format!("{head}{chunks}").into_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // HTTP/1.0 has no Host.
    assert!(told(&server, b"GET /health HTTP/1.0\r\n\r\n".into()).await.starts_with("HTTP/1.0 200"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_send_slowly() {
    let short = Duration::from_millis(50);
    let server = limited(Limits { header_timeout: short, body_timeout: short, ..Limits::default() });
    assert_eq!(told(&server, b"GET /health HTTP/1.1\r\nhos".into()).await, "");
    assert_eq!(server.state.front.counters.get(Refusal::SlowHead), 1);
    for path in ["/generate", "/abort_request"] {
        let head = format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{{");
        let answer = told(&server, head.into()).await;
        assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("connection: close"), "{path}: {answer}");
    }
    // A slow head after a good request, and silence between requests, which is not slow.
    let (address, _stop, _serving) = start(&server).await;
    let answers = tokio::task::spawn_blocking(move || {
        let mut connection = TcpStream::connect(address).unwrap();
        let head = "GET /health HTTP/1.1\r\nhost: a\r\n\r\n";
        let first = exchange(&mut connection, head, "ok\"}");
        std::thread::sleep(short * 4);
        let second = exchange(&mut connection, head, "ok\"}");
        let rest = exchange(&mut connection, "GET /he", "\0");
        [first, second, rest]
    });
    let [first, second, rest] = answers.await.unwrap();
    assert!(first.starts_with("HTTP/1.1 200") && second.starts_with("HTTP/1.1 200"), "{first} {second}");
    assert_eq!(rest, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_answers_and_expectations() {
    let server = guarded(MetricsAccess::ApiKey);
    // Refused by its head: nobody is told to go on, and the connection ends.
    let head = "POST /generate HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n";
    let answer = told(&server, head.into()).await;
    assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("connection: close"), "{answer}");
    // A body that nobody reads is not taken for the next request.
    let smuggled = "GET /health HTTP/1.1\r\nhost: a\r\n\r\n";
    let head = format!("POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{smuggled}", smuggled.len());
    let answer = told(&server, head.into()).await;
    assert!(answer.starts_with("HTTP/1.1 401") && answer.matches("HTTP/1.1").count() == 1, "{answer}");

    let server = Server::saying("ok");
    let (address, _stop, _serving) = start(&server).await;
    let body = completion().to_string();
    let answers = tokio::task::spawn_blocking(move || {
        let mut connection = TcpStream::connect(address).unwrap();
        let length = body.len();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
        );
        [exchange(&mut connection, &head, "\r\n\r\n"), exchange(&mut connection, &body, "\0")]
    });
    let [go_on, answer] = answers.await.unwrap();
    assert!(go_on.starts_with("HTTP/1.1 100 Continue"), "{go_on}");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelined_requests_are_answered_in_order() {
    let server = Server::saying("ok");
    let two = "GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /nowhere HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    let answer = told(&server, two.into()).await;
    let statuses: Vec<&str> = answer.split("HTTP/1.1 ").skip(1).map(|part| &part[..3]).collect();
    assert_eq!(statuses, ["200", "404"], "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_without_a_seat() {
    for (limits, status, code, refusal) in [
        (Limits { connections: 1, ..Limits::default() }, 503, "server_overloaded", Refusal::Connections),
        (
            Limits { connections_per_peer: Some(1), ..Limits::default() },
            429,
            "rate_limit_exceeded",
            Refusal::ConnectionsOfPeer,
        ),
    ] {
        let server = limited(limits);
        let (address, _stop, _serving) = start(&server).await;
        let mut first = TcpStream::connect(address).unwrap();
        let health = "GET /health HTTP/1.1\r\nhost: a\r\n\r\n";
        exchange(&mut first, health, "ok\"}");
        let answer = exchange(&mut TcpStream::connect(address).unwrap(), "", "\0");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains("retry-after: 1"), "{answer}");
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let body: Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"]["code"], code);
        assert_eq!(server.state.front.counters.get(refusal), 1);
        // Its seat is free once it has gone.
        drop(first);
        while server.state.front.seats.taken() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let answer = exchange(&mut TcpStream::connect(address).unwrap(), health, "ok\"}");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

#[tokio::test]
async fn a_client_with_too_many_answers() {
    let mut server = limited(Limits { requests_per_client: Some(2), ..Limits::default() });
    let keys = KeyRing::new([("ann", KEY), ("bob", "fedcba9876543210")]);
    Arc::get_mut(&mut server.state).unwrap().front.keys.set(keys);
    let ask = |key: &'static str, n: u32| {
        let mut body = completion();
        (body["n"], body["stream"]) = (n.into(), true.into());
        let mut request = post("/v1/completions", body.to_string());
        request.headers_mut().insert("x-api-key", key.parse().unwrap());
        request
    };
    let held = server.send(ask(KEY, 2)).await;
    assert_eq!(held.status(), 200);
    let refused = server.send(ask(KEY, 1)).await;
    assert_eq!(refused.headers()["retry-after"], "1");
    let (status_, body) = json_of(refused).await;
    assert_eq!((status_, &body["error"]["code"]), (429, &json!("rate_limit_exceeded")));
    assert_eq!(status(&server, ask("fedcba9876543210", 1)).await, 200, "others are not concerned");
    let probe = Request::get("/health_generate").header("x-api-key", KEY).body(Body::empty()).unwrap();
    assert_eq!(status(&server, probe).await, 200, "the server asks for itself");
    assert!(text_of(held).await.ends_with("data: [DONE]\n\n"));
    server.idle().await;
    while status(&server, ask(KEY, 2)).await != 200 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn requests_wait_for_their_turn() {
    let mut server = limited(Limits { queued_requests: 1, ..Limits::default() });
    Arc::get_mut(&mut server.state).unwrap().max_requests = 1;
    let (first, second) = (server.json("/v1/completions", completion()), server.json("/v1/completions", completion()));
    let third = async {
        while !text_of(server.send(get("/metrics", &[])).await).await.contains("tokenrouter_queued_requests 1\n") {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        server.json("/v1/completions", completion()).await
    };
    let (first, second, third) = tokio::join!(first, second, third);
    assert_eq!((first.0, second.0), (200, 200));
    assert_eq!((third.0, &third.1["error"]["code"]), (503, &json!("server_overloaded")));
    assert_eq!(server.state.front.counters.get(Refusal::QueueFull), 1);
}

#[tokio::test]
async fn answers_that_take_too_long() {
    let server = limited(Limits { request_timeout: Some(Duration::from_millis(60)), ..Limits::default() });
    let mut body = chat();
    (body["ignore_eos"], body["max_tokens"]) = (true.into(), 200.into());
    let (status, answer) = server.json("/v1/chat/completions", body.clone()).await;
    assert_eq!((status, &answer["error"]["code"]), (504, &json!("timeout")), "{answer}");
    body["stream"] = true.into();
    let text = text_of(server.post("/v1/chat/completions", body.clone()).await).await;
    assert!(text.contains("\"code\":\"timeout\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
    server.idle().await;
    assert_eq!(server.state.front.counters.get(Refusal::Deadline), 2);
}

#[tokio::test]
async fn an_answer_that_nobody_reads_gives_its_place_up_in_time() {
    let mut server = limited(Limits { request_timeout: Some(Duration::from_millis(60)), ..Limits::default() });
    Arc::get_mut(&mut server.state).unwrap().max_requests = 1;
    let mut body = chat();
    (body["ignore_eos"], body["max_tokens"], body["stream"]) = (true.into(), 200.into(), true.into());
    let held = server.post("/v1/chat/completions", body).await;
    server.idle().await;
    let slots = tokio::time::timeout(Duration::from_secs(5), server.state.enter(1, 1)).await;
    assert!(slots.is_ok_and(|entered| entered.is_ok()), "the place is still taken");
    let text = text_of(held).await;
    assert!(text.contains("\"code\":\"timeout\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
}

#[tokio::test]
async fn one_that_is_aborted_while_it_waits_leaves_the_line() {
    let mut server = limited(Limits::default());
    Arc::get_mut(&mut server.state).unwrap().max_requests = 1;
    let held = server.state.enter(1, 1).await.unwrap();
    let asked = server.json("/generate", json!({"model": "pair", "text": "Hi", "rid": "mine"}));
    let abort = async {
        while !text_of(server.send(get("/metrics", &[])).await).await.contains("tokenrouter_queued_requests 1\n") {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        server.json("/abort_request", json!({"rid": "mine"})).await
    };
    let ((status, answer), (aborted, _)) = tokio::join!(asked, abort);
    assert_eq!((status, aborted), (200, 200), "{answer}");
    assert_eq!(
        (&answer["text"], &answer["meta_info"]["finish_reason"]["type"]),
        (&json!(""), &json!("abort")),
        "{answer}"
    );
    assert!(text_of(server.send(get("/metrics", &[])).await).await.contains("tokenrouter_queued_requests 0\n"));
    drop(held);
}

#[tokio::test]
async fn one_that_waits_too_long_leaves_the_line() {
    let mut server = limited(Limits { request_timeout: Some(Duration::from_millis(60)), ..Limits::default() });
    Arc::get_mut(&mut server.state).unwrap().max_requests = 1;
    let held = server.state.enter(1, 1).await.unwrap();
    let (status, answer) = server.json("/v1/chat/completions", chat()).await;
    assert_eq!((status, &answer["error"]["code"]), (504, &json!("timeout")), "{answer}");
    assert!(text_of(server.send(get("/metrics", &[])).await).await.contains("tokenrouter_queued_requests 0\n"));
    drop(held);
    server.idle().await;
}

#[tokio::test]
async fn who_waits_hears_that_the_server_stops() {
    let mut server = limited(Limits::default());
    Arc::get_mut(&mut server.state).unwrap().max_requests = 1;
    let mut body = chat();
    (body["ignore_eos"], body["max_tokens"], body["stream"]) = (true.into(), 200.into(), true.into());
    let held = server.post("/v1/chat/completions", body).await;
    let stop = async {
        while !text_of(server.send(get("/metrics", &[])).await).await.contains("tokenrouter_queued_requests 1\n") {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        server.state.start_draining();
    };
    let ((status, answer), ()) = tokio::join!(server.json("/v1/chat/completions", chat()), stop);
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("shutting_down")), "{answer}");
    drop(held);
    server.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unix_socket_beside_tcp() {
    let server = Server::saying("ok");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = tcp.local_addr().unwrap();
    let listener =
        Listener { tcp: Some(tcp), unix: Some(UnixSocket::bind(&path, 0o600).unwrap()), ..Listener::default() };
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(serve(listener, server.state.clone(), async { drop(stopped.await) }));
    let mut connection = UnixStream::connect(&path).unwrap();
    let body = completion().to_string();
    connection
        .write_all(request("/v1/completions", &body).replace("host: x", "host: x\r\nconnection: close").as_bytes())
        .unwrap();
    let mut answer = String::new();
    tokio::task::block_in_place(|| connection.read_to_string(&mut answer)).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let answer =
        exchange(&mut TcpStream::connect(address).unwrap(), "GET /health HTTP/1.1\r\nhost: a\r\n\r\n", "ok\"}");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    stop.send(()).unwrap();
    serving.await.unwrap().unwrap();
    assert!(!path.exists());
}
