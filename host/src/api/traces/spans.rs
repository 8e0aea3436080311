//! From a request that is over to its spans, and to the message with them. Pure but for the ids.
//!
//! Names are those of OpenTelemetry's conventions for HTTP servers and generative models where there are some, for times
//! those that vLLM has, else the server's own.

use std::borrow::Cow;

use axum::http::Method;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceState};
use opentelemetry::{Array, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, SpanData, SpanEvents, SpanLinks};
use prost::Message;

use super::Finished;
use super::tracer::Origin;
use crate::api::front::Client;
use crate::api::record::{CLIENT_LEFT, Facts, Record};
use crate::api::visits::{Visit, Visits};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Makes messages to a collector.
pub struct Encoder {
    resource: ResourceAttributesWithSchema,
    scope: InstrumentationScope,
}

impl Encoder {
    pub fn new(service_name: &str) -> Self {
        let attributes =
            [KeyValue::new("service.name", service_name.to_owned()), KeyValue::new("service.version", VERSION)];
        // The other builder looks into the environment.
        let resource = Resource::builder_empty().with_attributes(attributes).build();
        let scope = InstrumentationScope::builder("tokenrouter").with_version(VERSION).build();
        Self { resource: (&resource).into(), scope }
    }

    /// All spans of these requests.
    pub fn message(&self, requests: &[Finished]) -> Vec<u8> {
        let ids = RandomIdGenerator::default();
        let spans = requests.iter().flat_map(|request| self.spans(request, &ids)).collect();
        let resource_spans = group_spans_by_resource_and_scope(spans, &self.resource);
        ExportTraceServiceRequest { resource_spans }.encode_to_vec()
    }

    /// Its own span first. None for a request that is not traced.
    fn spans(&self, finished: &Finished, ids: &impl IdGenerator) -> Vec<SpanData> {
        let Some(origin) = &finished.record.trace else { return Vec::new() };
        let facts = finished.record.facts();
        let request = SpanData {
            span_context: origin.context.clone(),
            parent_span_id: if origin.parent.is_valid() { origin.parent.span_id() } else { SpanId::INVALID },
            parent_span_is_remote: origin.parent.is_valid(),
            span_kind: SpanKind::Server,
            name: name(&finished.record).into(),
            start_time: origin.wall(finished.record.began),
            end_time: origin.wall(finished.ended),
            attributes: about_request(finished, &facts, origin),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: status(finished.status, &facts),
            instrumentation_scope: self.scope.clone(),
        };
        let visit = |visits: &Visits, visit: &Visit| SpanData {
            span_context: SpanContext::new(
                origin.context.trace_id(),
                ids.new_span_id(),
                origin.context.trace_flags(),
                false,
                // The client's list is with the request's span, once.
                TraceState::NONE,
            ),
            parent_span_id: origin.context.span_id(),
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: format!("visit {}", model(visits, visit)).into(),
            start_time: origin.wall(visit.began),
            end_time: origin.wall(visit.ended),
            attributes: about_visit(visits, visit),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        };
        let visits = facts.visits.iter().flat_map(|visits| visits.kept.iter().map(|one| visit(visits, one)));
        let visits: Vec<SpanData> = visits.collect();
        std::iter::once(request).chain(visits).collect()
    }
}

/// Without what a client made up.
fn name(record: &Record) -> String {
    let method = if is_known(&record.method) { record.method.as_str() } else { "HTTP" };
    if record.known_path { format!("{method} {}", record.path) } else { method.to_owned() }
}

fn is_known(method: &Method) -> bool {
    const KNOWN: [&str; 9] = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT"];
    KNOWN.contains(&method.as_str())
}

/// What the conventions call the work of an endpoint.
fn operation(path: &str) -> Option<&'static str> {
    match path {
        "/v1/chat/completions" => Some("chat"),
        "/v1/completions" | "/generate" => Some("text_completion"),
        _ => None,
    }
}

/// A client's mistake is no error of a server's span.
fn status(status: u16, facts: &Facts) -> Status {
    // A stream that fails has a good status in its head.
    match facts.error {
        Some(code) if !(400..500).contains(&status) => Status::error(code),
        None if status >= 500 => Status::error(status.to_string()),
        _ => Status::Unset,
    }
}

fn error_type(status: u16, facts: &Facts) -> Option<Cow<'static, str>> {
    match facts.error {
        _ if status == CLIENT_LEFT => Some("client_left".into()),
        Some(code) => Some(code.into()),
        None => (status >= 400).then(|| status.to_string().into()),
    }
}

#[derive(Default)]
struct Attributes(Vec<KeyValue>);

impl Attributes {
    fn add(&mut self, key: &'static str, value: impl Into<Value>) {
        self.0.push(KeyValue::new(key, value));
    }

    /// A value that may be missing.
    fn may(&mut self, key: &'static str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.add(key, value);
        }
    }

    fn count(&mut self, key: &'static str, count: impl TryInto<i64>) {
        self.add(key, count.try_into().unwrap_or(i64::MAX));
    }
}

fn about_request(finished: &Finished, facts: &Facts, origin: &Origin) -> Vec<KeyValue> {
    let record = &finished.record;
    let mut all = Attributes::default();
    let known = is_known(&record.method);
    all.add("http.request.method", if known { record.method.to_string() } else { "_OTHER".into() });
    all.may("http.route", record.known_path.then(|| record.path.clone()));
    all.add("url.path", origin.path.clone());
    all.count("http.response.status_code", finished.status);
    all.may("error.type", error_type(finished.status, facts));
    all.add("tokenrouter.request_id", record.id.clone());
    all.may(
        "tokenrouter.client",
        match &facts.client {
            Some(Client::Key(name)) => Some(Value::from(name.clone())),
            _ => None,
        },
    );
    all.may("gen_ai.request.model", facts.model.clone());
    all.may("tokenrouter.policy", facts.policy.clone());
    let Some(operation) = operation(&record.path) else { return all.0 };
    all.add("gen_ai.operation.name", operation);
    all.add("gen_ai.provider.name", "tokenrouter");
    all.may("gen_ai.response.id", facts.answer.clone());
    if facts.prompt_tokens == 0 {
        return all.0;
    }
    all.add("tokenrouter.stream", facts.stream);
    all.count("gen_ai.usage.input_tokens", facts.prompt_tokens);
    all.count("gen_ai.usage.cache_read.input_tokens", facts.cached_tokens);
    all.count("gen_ai.usage.output_tokens", facts.completion_tokens);
    all.count("tokenrouter.handoffs", facts.handoffs);
    let reasons = facts.finish_reasons.iter().map(|&reason| StringValue::from(reason)).collect();
    all.add("gen_ai.response.finish_reasons", Value::Array(Array::String(reasons)));
    all.may("gen_ai.latency.time_in_queue", facts.queue.map(|time| time.as_secs_f64()));
    let first = facts.first_token.map(|first| first.saturating_duration_since(record.began).as_secs_f64());
    all.may("gen_ai.latency.time_to_first_token", first);
    let left_out = facts.visits.as_ref().map_or(0, |visits| visits.left_out);
    if left_out > 0 {
        all.count("tokenrouter.visits_left_out", left_out);
    }
    all.0
}

fn model<'a>(visits: &'a Visits, visit: &Visit) -> &'a str {
    visits.names.get(visit.model.index()).map_or("", String::as_str)
}

fn about_visit(visits: &Visits, visit: &Visit) -> Vec<KeyValue> {
    let mut all = Attributes::default();
    all.add("tokenrouter.visit.model", model(visits, visit).to_owned());
    all.count("tokenrouter.visit.choice", visit.choice);
    all.count("tokenrouter.visit.first_token", visit.first);
    all.count("tokenrouter.visit.tokens", visit.tokens);
    all.add("tokenrouter.visit.handoff", visit.handoff);
    all.0
}

#[cfg(test)]
mod tests;
