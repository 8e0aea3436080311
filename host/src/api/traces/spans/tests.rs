use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::trace::{TraceFlags, TraceId};

use super::*;
use crate::api::front::Peer;
use crate::request::ModelId;

const TRACE: u128 = 0xabc;

fn client_span(sampled: bool) -> SpanContext {
    let flags = TraceFlags::default().with_sampled(sampled);
    SpanContext::new(TraceId::from(TRACE), SpanId::from(7), flags, true, TraceState::default())
}

struct Asked {
    method: Method,
    path: &'static str,
    known: bool,
    status: u16,
    facts: Facts,
    parent: SpanContext,
}

impl Default for Asked {
    fn default() -> Self {
        Self {
            method: Method::POST,
            path: "/v1/chat/completions",
            known: true,
            status: 200,
            facts: Facts::default(),
            parent: client_span(true),
        }
    }
}

impl Asked {
    /// Its spans. It takes a second from `zero` on, and begins when 1970 is a thousand seconds old.
    fn spans(self, zero: Instant) -> Vec<SpanData> {
        let context = SpanContext::new(
            TraceId::from(TRACE),
            SpanId::from(9),
            TraceFlags::SAMPLED,
            false,
            TraceState::from_key_value([("k", "v")]).unwrap(),
        );
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let origin = Origin { context, parent: self.parent, at: zero, wall, path: "/as/sent".into() };
        let record = Record {
            id: "req-1".into(),
            method: self.method,
            path: self.path.into(),
            known_path: self.known,
            began: zero,
            trace: Some(origin),
            facts: Mutex::new(self.facts),
        };
        let ended = zero + Duration::from_secs(1);
        let finished = Finished { record: Arc::new(record), status: self.status, ended };
        Encoder::new("t").spans(&finished, &RandomIdGenerator::default())
    }

    /// The only span.
    fn span(self) -> SpanData {
        let [span] = self.spans(Instant::now()).try_into().unwrap();
        span
    }
}

fn attributes(span: &SpanData) -> BTreeMap<&str, String> {
    let all: BTreeMap<_, _> =
        span.attributes.iter().map(|one| (one.key.as_str(), one.value.as_str().into_owned())).collect();
    assert_eq!(all.len(), span.attributes.len(), "a key is there twice: {all:?}");
    all
}

fn millis(time: SystemTime) -> u128 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis()
}

/// Two choices: one is handed over and back, the other stays.
fn answered(zero: Instant) -> Facts {
    let at = |ms| zero + Duration::from_millis(ms);
    let mut visits = Visits::new(["small".to_owned(), "large".to_owned()].into(), ModelId(0));
    for (choice, model, ms) in [(0, 0, 100), (0, 0, 200), (1, 0, 250), (0, 1, 300), (0, 0, 400)] {
        visits.token(choice, ModelId(model), at(ms), || Some(at(50)));
    }
    Facts {
        answer: Some("chatcmpl-1".into()),
        model: Some("pair".into()),
        policy: Some("p".into()),
        stream: true,
        prompt_tokens: 12,
        cached_tokens: 4,
        completion_tokens: 5,
        handoffs: 2,
        queue: Some(Duration::from_millis(50)),
        first_token: Some(at(100)),
        finish_reasons: vec!["stop", "length"],
        client: Some(Client::Key("ann".into())),
        visits: Some(visits),
        ..Facts::default()
    }
}

#[test]
fn a_span_and_one_for_each_visit() {
    let zero = Instant::now();
    let spans = Asked { facts: answered(zero), ..Asked::default() }.spans(zero);
    let [request, visits @ ..] = spans.as_slice() else { panic!("no spans") };
    assert_eq!((&*request.name, &request.span_kind), ("POST /v1/chat/completions", &SpanKind::Server));
    assert_eq!((request.parent_span_id, request.parent_span_is_remote), (SpanId::from(7), true));
    assert_eq!((millis(request.start_time), millis(request.end_time)), (1_000_000, 1_001_000));
    assert_eq!(request.status, Status::Unset);
    let expected = [
        ("gen_ai.latency.time_in_queue", "0.05"),
        ("gen_ai.latency.time_to_first_token", "0.1"),
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.provider.name", "tokenrouter"),
        ("gen_ai.request.model", "pair"),
        ("gen_ai.response.finish_reasons", "[\"stop\",\"length\"]"),
        ("gen_ai.response.id", "chatcmpl-1"),
        ("gen_ai.usage.cache_read.input_tokens", "4"),
        ("gen_ai.usage.input_tokens", "12"),
        ("gen_ai.usage.output_tokens", "5"),
        ("http.request.method", "POST"),
        ("http.response.status_code", "200"),
        ("http.route", "/v1/chat/completions"),
        ("tokenrouter.client", "ann"),
        ("tokenrouter.handoffs", "2"),
        ("tokenrouter.policy", "p"),
        ("tokenrouter.request_id", "req-1"),
        ("tokenrouter.stream", "true"),
        ("url.path", "/as/sent"),
    ];
    assert_eq!(attributes(request), expected.map(|(key, value)| (key, value.to_owned())).into());
    let seen: Vec<_> = visits
        .iter()
        .map(|visit| {
            assert_eq!((visit.parent_span_id, visit.parent_span_is_remote), (SpanId::from(9), false));
            assert_eq!(visit.span_kind, SpanKind::Internal);
            let all = attributes(visit);
            let of = |key: &str| all[key].clone();
            assert_eq!(*visit.name, format!("visit {}", of("tokenrouter.visit.model")));
            let numbers =
                ["choice", "first_token", "tokens", "handoff"].map(|key| of(&format!("tokenrouter.visit.{key}")));
            let times = [visit.start_time, visit.end_time].map(|time| millis(time) - 1_000_000);
            (visit.name.to_string(), numbers.join(" "), times)
        })
        .collect();
    let expected = [
        ("visit small", "0 0 2 false", [50, 200]),
        ("visit small", "1 0 1 false", [50, 250]),
        ("visit large", "0 2 1 true", [200, 300]),
        ("visit small", "0 3 1 true", [300, 400]),
    ];
    assert_eq!(seen, expected.map(|(name, numbers, times)| (name.to_owned(), numbers.to_owned(), times)));
    let ids: std::collections::BTreeSet<_> = spans.iter().map(|span| span.span_context.span_id().to_bytes()).collect();
    assert_eq!(ids.len(), spans.len());
    for (place, span) in spans.iter().enumerate() {
        let context = &span.span_context;
        assert!(context.trace_id() == TraceId::from(TRACE) && context.is_sampled());
        assert_eq!(context.trace_state().header(), if place == 0 { "k=v" } else { "" });
    }
}

#[test]
fn visits_that_are_left_out_are_told_of() {
    let zero = Instant::now();
    let mut facts = answered(zero);
    facts.visits.as_mut().unwrap().left_out = 6;
    let spans = Asked { facts, ..Asked::default() }.spans(zero);
    assert_eq!(attributes(&spans[0])["tokenrouter.visits_left_out"], "6");
}

#[test]
fn errors_are_the_servers_or_the_clients() {
    let error = |status, error| {
        let span = Asked { status, facts: Facts { error, ..Facts::default() }, ..Asked::default() }.span();
        let all = attributes(&span);
        assert_eq!(all["http.response.status_code"], status.to_string());
        (all.get("error.type").cloned(), span.status)
    };
    let said = |text: &str| Some(text.to_owned());
    assert_eq!(error(200, None), (None, Status::Unset));
    assert_eq!(error(400, Some("invalid_value")), (said("invalid_value"), Status::Unset));
    assert_eq!(error(499, None), (said("client_left"), Status::Unset));
    assert_eq!(error(503, Some("model_down")), (said("model_down"), Status::error("model_down")));
    assert_eq!(error(500, None), (said("500"), Status::error("500")));
    // A stream that failed.
    assert_eq!(error(200, Some("not_finite")), (said("not_finite"), Status::error("not_finite")));
}

#[test]
fn names_have_nothing_that_a_client_made_up() {
    let asked = |method: &'static str, path, known| {
        let method = method.parse().unwrap();
        let span = Asked { method, path, known, status: 404, ..Asked::default() }.span();
        let all = attributes(&span);
        (span.name.to_string(), all["http.request.method"].clone(), all.get("http.route").cloned())
    };
    let of =
        |name: &str, method: &str, route: Option<&str>| (name.to_owned(), method.to_owned(), route.map(str::to_owned));
    assert_eq!(asked("GET", "/a/b", false), of("GET", "GET", None));
    assert_eq!(asked("BREW", "/load", true), of("HTTP /load", "_OTHER", Some("/load")));
    assert_eq!(asked("GET", "/v1/models/{*id}", true), of("GET /v1/models/{*id}", "GET", Some("/v1/models/{*id}")));
}

#[test]
fn a_trace_may_begin_here_and_an_address_stays_here() {
    let facts = Facts { client: Some(Client::Peer(Peer::Local)), ..Facts::default() };
    let span = Asked { facts, parent: SpanContext::empty_context(), ..Asked::default() }.span();
    assert_eq!((span.parent_span_id, span.parent_span_is_remote), (SpanId::INVALID, false));
    assert!(!attributes(&span).contains_key("tokenrouter.client"));
}
