//! The line in the log for each request.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{self, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{Request, StatusCode};
use axum::routing::get;
use http_body_util::BodyExt;
use hyper::body::Frame;
use tower::ServiceExt;
use tracing::field::{Field, Visit};
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use super::fixture::{Options, Server, chat, completion, json_of, post, text_of};
use crate::api::record::every_request;

type Line = BTreeMap<String, String>;

/// The lines about requests, on this thread.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<Line>>>);

struct Fields(Line);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().into(), value.into());
    }
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().into(), format!("{value:?}"));
    }
}

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == "tokenrouter::request" && *event.metadata().level() == tracing::Level::INFO {
            let mut fields = Fields(Line::new());
            event.record(&mut fields);
            self.0.lock().unwrap().push(fields.0);
        }
    }
}

impl Lines {
    fn gather() -> (Self, DefaultGuard) {
        let lines = Self::default();
        let guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines.clone()));
        (lines, guard)
    }

    fn only(&self) -> Line {
        let mut lines = self.0.lock().unwrap();
        assert_eq!(lines.len(), 1, "{lines:?}");
        lines.remove(0)
    }
}

fn has(line: &Line, expected: &[(&str, &str)]) {
    for (field, value) in expected {
        assert_eq!(line.get(*field).map(String::as_str), Some(*value), "{field} of {line:?}");
    }
}

#[tokio::test]
async fn an_answer_has_one_line() {
    let (lines, _guard) = Lines::gather();
    let server = Server::saying("one two three four");
    let answer = server.ok("/v1/chat/completions", chat()).await;
    let line = lines.only();
    let usage = &answer["usage"];
    has(
        &line,
        &[
            ("path", "/v1/chat/completions"),
            ("method", "POST"),
            ("status", "200"),
            ("rid", answer["id"].as_str().unwrap()),
            ("model", "pair"),
            ("policy", "ping-pong"),
            ("stream", "false"),
            ("client", "unix"),
            ("finish_reason", "stop"),
            ("prompt_tokens", &usage["prompt_tokens"].to_string()),
            ("completion_tokens", &usage["completion_tokens"].to_string()),
            ("handoffs", &usage["handoffs"].to_string()),
        ],
    );
    assert!(["queue_ms", "ttft_ms", "total_ms"].iter().all(|time| line[*time].parse::<f64>().is_ok()), "{line:?}");
    assert!(!line.contains_key("error"), "{line:?}");
    assert!(line["tokens_by_model"].starts_with(r#"{"large": "#), "{line:?}");
    assert!(!format!("{line:?}").contains("three"), "{line:?}");
}

#[tokio::test]
async fn a_stream_has_its_line_at_its_end() {
    let (lines, _guard) = Lines::gather();
    let server = Server::saying("one two");
    let mut body = completion();
    body["stream"] = true.into();
    let request = Request::post("/v1/completions").header("x-request-id", "mine");
    let response = server.send(request.body(body.to_string().into()).unwrap()).await;
    assert_eq!(response.headers()["x-request-id"], "mine");
    assert!(lines.0.lock().unwrap().is_empty());
    text_of(response).await;
    has(&lines.only(), &[("request_id", "mine"), ("stream", "true"), ("finish_reason", "stop"), ("status", "200")]);
}

#[tokio::test]
async fn errors_and_clients_that_leave_are_named() {
    let (lines, _guard) = Lines::gather();
    let server = Server::with("one two three", Options { pause: Duration::from_millis(2), ..Options::default() });
    let response = server.send(post("/v1/completions", r#"{"model": "none", "prompt": "x"}"#)).await;
    let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
    assert_eq!(json_of(response).await.0, 404);
    has(&lines.only(), &[("request_id", &id), ("status", "404"), ("error", "model_not_found")]);
    let mut body = completion();
    body["stream"] = true.into();
    let mut response = server.post("/v1/completions", body).await;
    assert!(response.body_mut().frame().await.is_some());
    drop(response);
    has(&lines.only(), &[("status", "499"), ("model", "pair"), ("finish_reason", "")]);
    // One that waits for its whole answer.
    let answer = server.post("/v1/completions", completion());
    assert!(tokio::time::timeout(Duration::from_millis(1), answer).await.is_err());
    has(&lines.only(), &[("status", "499"), ("path", "/v1/completions")]);
}

/// A body that ends in an error.
struct Broken;

impl HttpBody for Broken {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, _: &mut task::Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        Poll::Ready(Some(Err(io::Error::other("broken"))))
    }
}

#[tokio::test]
async fn faults_of_the_server_are_no_clients_that_left() {
    async fn bug() -> StatusCode {
        panic!("a bug")
    }
    let (lines, _guard) = Lines::gather();
    let server = Server::saying("ok");
    let router = axum::Router::new()
        .route("/broken", get(|| async { Body::new(Broken) }))
        .route("/bug", get(bug))
        .layer(axum::middleware::from_fn_with_state(server.state.clone(), every_request));
    let ask = |path: &str| router.clone().oneshot(Request::get(path).body(Body::empty()).unwrap());
    let mut response = ask("/broken").await.unwrap();
    assert!(response.body_mut().frame().await.unwrap().is_err());
    drop(response);
    has(&lines.only(), &[("path", "/broken"), ("status", "500")]);
    assert!(tokio::spawn(ask("/bug")).await.unwrap_err().is_panic());
    has(&lines.only(), &[("path", "/bug"), ("status", "500")]);
    assert_eq!(server.state.counts.client_aborts.read(), 0);
}

#[tokio::test]
async fn a_stream_that_fails_names_its_error() {
    let (lines, _guard) = Lines::gather();
    let server = Server::with("one two three four", Options { breaks_at: Some(2), ..Options::default() });
    let mut body = completion();
    body["stream"] = true.into();
    assert!(text_of(server.post("/v1/completions", body).await).await.contains("not_finite"));
    has(&lines.only(), &[("status", "200"), ("error", "not_finite"), ("finish_reason", "")]);
}

#[tokio::test]
async fn strange_request_ids_are_replaced() {
    let (lines, _guard) = Lines::gather();
    let server = Server::saying("one");
    for given in ["a b", "", "ü", &"x".repeat(129)] {
        let request = Request::get("/nowhere").header("x-request-id", given.as_bytes()).body(Body::empty()).unwrap();
        let response = server.send(request).await;
        let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert!(id.starts_with("req-") && id.len() == 36, "{id}");
        text_of(response).await;
        has(&lines.only(), &[("request_id", &id), ("path", "/nowhere"), ("status", "404"), ("error", "not_found")]);
    }
    text_of(server.send(Request::get("/health").body(Body::empty()).unwrap()).await).await;
    assert!(lines.0.lock().unwrap().is_empty(), "probes are for the debug log");
}
