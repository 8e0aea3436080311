//! Traces at a collector.

use std::io::{ErrorKind, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, Response, StatusCode};
use axum::routing::post as posted;
use http_body_util::BodyExt;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value as Any};
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span, status::StatusCode as SpanStatus};
use prost::Message;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::fixture::{Options, Server, completion, scrape, text_of};
use crate::api::{Destination, TraceSettings, Traces};

/// More than a flush takes on a machine that is not stuck.
const PATIENCE: Duration = Duration::from_secs(60);
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// Takes spans as a collector does.
struct Collector {
    endpoint: Destination,
    messages: UnboundedReceiver<ExportTraceServiceRequest>,
    /// What it answers.
    status: Arc<AtomicU16>,
    /// What it has answered.
    answers: UnboundedReceiver<u16>,
}

impl Collector {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Destination::parse(&format!("http://{}/base/", listener.local_addr().unwrap())).unwrap();
        let (sender, messages) = unbounded_channel();
        let status = Arc::new(AtomicU16::new(200));
        let now = status.clone();
        let (answered, answers) = unbounded_channel();
        let take = async move |headers: HeaderMap, body: Body| {
            assert_eq!(headers["content-type"], "application/x-protobuf");
            let bytes: Bytes = body.collect().await.unwrap().to_bytes();
            let status = StatusCode::from_u16(now.load(Ordering::SeqCst)).unwrap();
            let message = ExportTraceServiceRequest::decode(bytes).unwrap();
            // A test that has ended takes no more.
            let _ = answered.send(status.as_u16());
            if status.is_success() {
                let _ = sender.send(message);
            }
            status
        };
        let router = Router::new().route("/base/v1/traces", posted(take));
        tokio::spawn(async move { axum_serve(listener, router).await });
        Self { endpoint, messages, status, answers }
    }

    fn settings(&self) -> TraceSettings {
        TraceSettings { endpoint: self.endpoint.clone(), sample: 1.0, service_name: "here".into() }
    }

    /// All spans that came, after what was to come has come.
    fn spans(&mut self) -> Vec<Span> {
        let mut all = Vec::new();
        while let Ok(message) = self.messages.try_recv() {
            for ResourceSpans { resource, scope_spans, .. } in message.resource_spans {
                assert_eq!(attribute(&resource.unwrap().attributes, "service.name"), json!("here"));
                all.extend(scope_spans.into_iter().flat_map(|scope| scope.spans));
            }
        }
        all
    }
}

/// `axum::serve` is not among the features that the server has.
async fn axum_serve(listener: TcpListener, router: Router) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let service = hyper_util::service::TowerToHyperService::new(router.clone());
        let stream = hyper_util::rt::TokioIo::new(stream);
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(stream, service));
    }
}

fn attribute(all: &[KeyValue], key: &str) -> Value {
    fn json_of(value: Any) -> Value {
        match value {
            Any::StringValue(text) => json!(text),
            Any::BoolValue(value) => json!(value),
            Any::IntValue(value) => json!(value),
            Any::DoubleValue(value) => json!(value),
            Any::ArrayValue(list) => list.values.into_iter().filter_map(|one| one.value).map(json_of).collect(),
            other => panic!("{other:?}"),
        }
    }
    let found = all.iter().find(|one| one.key == key).and_then(|one| one.value.clone()?.value);
    found.map_or(Value::Null, json_of)
}

fn of(span: &Span, key: &str) -> Value {
    attribute(&span.attributes, key)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn traced(text: &str, options: Options, settings: &TraceSettings) -> Server {
    let mut server = Server::with(text, options);
    Arc::get_mut(&mut server.state).unwrap().traces = Traces::start(settings);
    server
}

/// How many spans were lost at it.
async fn flush(server: &Server) -> u64 {
    server.state.traces.as_ref().unwrap().flush(PATIENCE).await
}

async fn ask(server: &Server, path: &str, body: &Value, traceparent: &str) -> Response<Body> {
    let request = Request::post(path).header("traceparent", traceparent).header("x-request-id", "mine");
    server.send(request.body(body.to_string().into()).unwrap()).await
}

#[tokio::test]
async fn a_request_and_its_visits() {
    let mut collector = Collector::start().await;
    let server = traced("one two three four", Options::default(), &collector.settings());
    let mut body = completion();
    body["n"] = 2.into();
    let response = ask(&server, "/v1/completions", &body, &format!("00-{TRACE}-{PARENT}-01")).await;
    let answer: Value = serde_json::from_str(&text_of(response).await).unwrap();
    flush(&server).await;
    let spans = collector.spans();
    let [request, visits @ ..] = spans.as_slice() else { panic!("no spans") };
    assert_eq!((request.name.as_str(), hex(&request.parent_span_id).as_str()), ("POST /v1/completions", PARENT));
    let usage = &answer["usage"];
    for (key, value) in [
        ("gen_ai.operation.name", json!("text_completion")),
        ("gen_ai.request.model", json!("pair")),
        ("gen_ai.response.id", answer["id"].clone()),
        ("gen_ai.response.finish_reasons", json!(["stop"])),
        ("gen_ai.usage.input_tokens", usage["prompt_tokens"].clone()),
        ("gen_ai.usage.output_tokens", usage["completion_tokens"].clone()),
        ("http.response.status_code", json!(200)),
        ("tokenrouter.handoffs", usage["handoffs"].clone()),
        ("tokenrouter.policy", json!("ping-pong")),
        ("tokenrouter.request_id", json!("mine")),
    ] {
        assert_eq!(of(request, key), value, "{key}");
    }
    let first = of(request, "gen_ai.latency.time_to_first_token").as_f64().unwrap();
    let total = (request.end_time_unix_nano - request.start_time_unix_nano) as f64 / 1e9;
    assert!(0.0 < first && first <= total, "{first} of {total}");
    // Each token is another model's than the one before.
    let tokens = usage["completion_tokens"].as_u64().unwrap() as usize;
    assert_eq!(visits.len(), tokens);
    for choice in 0..2 {
        let own: Vec<&Span> = visits.iter().filter(|span| of(span, "tokenrouter.visit.choice") == choice).collect();
        assert_eq!(own.len() * 2, tokens);
        let mut before = request.start_time_unix_nano;
        for (place, visit) in own.into_iter().enumerate() {
            let model = ["small", "large"][place % 2];
            assert_eq!(visit.name, format!("visit {model}"));
            assert_eq!((&visit.trace_id, &visit.parent_span_id), (&request.trace_id, &request.span_id));
            assert_eq!(of(visit, "tokenrouter.visit.first_token"), place);
            assert_eq!(of(visit, "tokenrouter.visit.tokens"), 1);
            assert_eq!(of(visit, "tokenrouter.visit.handoff"), place > 0);
            assert!(before <= visit.start_time_unix_nano && visit.start_time_unix_nano <= visit.end_time_unix_nano);
            before = visit.end_time_unix_nano;
        }
        assert!(before <= request.end_time_unix_nano);
    }
    assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE));
}

#[tokio::test]
async fn whom_the_client_and_the_share_leave_out() {
    let mut collector = Collector::start().await;
    let settings = TraceSettings { sample: 0.0, ..collector.settings() };
    let server = traced("one", Options::default(), &settings);
    let body = completion();
    for parent in [&format!("00-{TRACE}-{PARENT}-00"), &format!("00-{TRACE}-{PARENT}-01"), "nonsense"] {
        text_of(ask(&server, "/v1/completions", &body, parent).await).await;
    }
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let probe = Request::get("/health").header("traceparent", &parent).body(Body::empty()).unwrap();
    text_of(server.send(probe).await).await;
    // Whoever is refused decides nothing.
    let refused = ask(&server, "/v1/completions", &json!({"model": "none", "prompt": "x"}), &parent).await;
    assert_eq!(refused.status(), StatusCode::NOT_FOUND);
    text_of(refused).await;
    let found = scrape(&server).await;
    assert_eq!(found["tokenrouter_trace_spans_total{outcome=\"dropped\"}"], 0.0);
    flush(&server).await;
    let requests: Vec<Span> = collector.spans().into_iter().filter(|span| !span.name.starts_with("visit")).collect();
    let [only] = requests.as_slice() else { panic!("{requests:?}") };
    assert_eq!(hex(&only.trace_id), TRACE);
}

#[tokio::test]
async fn errors_and_clients_that_leave() {
    let mut collector = Collector::start().await;
    let options = Options { breaks_at: Some(2), pause: Duration::from_millis(2), ..Options::default() };
    let server = traced("one two three four", options, &collector.settings());
    let mut body = completion();
    text_of(ask(&server, "/v1/completions", &json!({"model": "none", "prompt": "x"}), "").await).await;
    text_of(ask(&server, "/v1/completions", &json!({"model": "pair", "prompt": 1.5}), "").await).await;
    body["stream"] = true.into();
    text_of(ask(&server, "/v1/completions", &body, "").await).await;
    let mut left = ask(&server, "/v1/completions", &body, "").await;
    assert!(left.body_mut().frame().await.is_some());
    drop(left);
    server.idle().await;
    flush(&server).await;
    let spans = collector.spans();
    let requests = spans.iter().filter(|span| !span.name.starts_with("visit"));
    let seen: Vec<_> = requests
        .map(|span| {
            let status = span.status.as_ref().map(|status| status.code());
            (of(span, "http.response.status_code"), of(span, "error.type"), status.unwrap())
        })
        .collect();
    let expected = [
        (json!(404), json!("model_not_found"), SpanStatus::Unset),
        (json!(400), json!("invalid_type"), SpanStatus::Unset),
        (json!(200), json!("not_finite"), SpanStatus::Error),
        (json!(499), json!("client_left"), SpanStatus::Unset),
    ];
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn a_collector_that_is_down_disturbs_nobody() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = Destination::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    drop(listener);
    let settings = TraceSettings { endpoint, sample: 1.0, service_name: "here".into() };
    let server = traced("one two", Options::default(), &settings);
    let usage = server.ok("/v1/completions", completion()).await["usage"].clone();
    let lost = flush(&server).await;
    let found = scrape(&server).await;
    let spans = 1.0 + usage["completion_tokens"].as_f64().unwrap();
    assert_eq!(found["tokenrouter_trace_spans_total{outcome=\"dropped\"}"], spans);
    assert_eq!(lost as f64, spans);
    assert_eq!(found["tokenrouter_trace_spans_total{outcome=\"sent\"}"], 0.0);
    assert_eq!(found["tokenrouter_trace_spans_waiting"], 0.0);
    // After the last spans there are no more, and still answers.
    server.ok("/v1/completions", completion()).await;
    assert_eq!(scrape(&server).await["tokenrouter_trace_spans_total{outcome=\"dropped\"}"], 2.0 * spans);
}

#[tokio::test]
async fn a_collector_that_is_busy_is_asked_again() {
    let mut collector = Collector::start().await;
    collector.status.store(503, Ordering::SeqCst);
    let server = traced("one", Options::default(), &collector.settings());
    server.ok("/v1/completions", completion()).await;
    assert_eq!(collector.answers.recv().await, Some(503));
    collector.status.store(200, Ordering::SeqCst);
    while collector.answers.recv().await.unwrap() != 200 {}
    flush(&server).await;
    assert!(collector.spans().len() > 1);
    assert_eq!(scrape(&server).await["tokenrouter_trace_spans_total{outcome=\"dropped\"}"], 0.0);
}

#[tokio::test]
async fn a_collector_that_refuses_is_not_asked_again() {
    let mut collector = Collector::start().await;
    collector.status.store(400, Ordering::SeqCst);
    let server = traced("one", Options::default(), &collector.settings());
    server.ok("/v1/completions", completion()).await;
    assert_eq!(collector.answers.recv().await, Some(400));
    collector.status.store(200, Ordering::SeqCst);
    flush(&server).await;
    assert!(scrape(&server).await["tokenrouter_trace_spans_total{outcome=\"dropped\"}"] > 1.0);
    assert!(collector.answers.try_recv().is_err() && collector.spans().is_empty());
}

#[tokio::test]
async fn an_answer_that_is_too_long_is_an_answer() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = Destination::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    let router = Router::new().route("/v1/traces", posted(async || "x".repeat(100_000)));
    tokio::spawn(axum_serve(listener, router));
    let settings = TraceSettings { endpoint, sample: 1.0, service_name: "here".into() };
    let server = traced("one", Options::default(), &settings);
    server.ok("/v1/completions", completion()).await;
    assert_eq!(flush(&server).await, 0);
    assert!(scrape(&server).await["tokenrouter_trace_spans_total{outcome=\"sent\"}"] > 1.0);
}

#[tokio::test]
async fn the_end_does_not_wait_for_a_collector_that_hangs() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = Destination::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    let settings = TraceSettings { endpoint, sample: 1.0, service_name: "here".into() };
    let server = traced("one", Options::default(), &settings);
    server.ok("/v1/completions", completion()).await;
    // It takes the connection and answers nothing.
    let mut stream = listener.accept().await.unwrap().0.into_std().unwrap();
    assert!(scrape(&server).await["tokenrouter_trace_spans_waiting"] > 1.0);
    server.state.traces.as_ref().unwrap().flush(Duration::from_millis(10)).await;
    // The message may be there, but not its end, with which the sender would have given up by itself.
    let mut part = [0; 4096];
    let end = loop {
        match stream.read(&mut part) {
            Ok(0) => break None,
            Ok(_) => {}
            Err(error) => break Some(error.kind()),
        }
    };
    assert_eq!(end, Some(ErrorKind::WouldBlock), "the end waited for the collector");
    let found = scrape(&server).await;
    assert!(found["tokenrouter_trace_spans_total{outcome=\"dropped\"}"] > 1.0);
    assert_eq!(found["tokenrouter_trace_spans_waiting"], 0.0);
}
