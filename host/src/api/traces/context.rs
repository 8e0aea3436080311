//! The client's span, from the headers of W3C Trace Context. Pure.

use axum::http::{HeaderMap, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

/// Bytes of `tracestate`. What is longer is left out, as a whole.
const LONGEST_STATE: usize = 512;

/// The client's span. `None` where there is none, or nothing that can be read.
pub fn parent(headers: &HeaderMap) -> Option<SpanContext> {
    let mut all = headers.get_all("traceparent").iter();
    let (first, second) = (all.next()?, all.next());
    let (trace_id, span_id, flags) = second.is_none().then(|| parse(first.to_str().ok()?))??;
    let context = SpanContext::new(trace_id, span_id, flags, true, state(headers));
    context.is_valid().then_some(context)
}

fn parse(text: &str) -> Option<(TraceId, SpanId, TraceFlags)> {
    let mut parts = text.trim().split('-');
    let mut part = |digits| parts.next().filter(|part| is_hex(part, digits));
    let (version, trace_id, span_id, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
    // Later versions may have more behind it.
    if version == "ff" || (version == "00" && parts.next().is_some()) {
        return None;
    }
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
    Some((TraceId::from_hex(trace_id).ok()?, SpanId::from_hex(span_id).ok()?, flags))
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Several headers are one list.
fn state(headers: &HeaderMap) -> TraceState {
    let all: Result<Vec<&str>, _> = headers.get_all("tracestate").iter().map(HeaderValue::to_str).collect();
    let joined = all.unwrap_or_default().join(",");
    let short = Some(joined).filter(|joined| joined.len() <= LONGEST_STATE);
    short.and_then(|joined| joined.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    fn read(headers: &[(&'static str, &str)]) -> Option<SpanContext> {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        parent(&headers.collect())
    }

    #[test]
    fn spans_of_clients() {
        for (text, sampled) in [
            (format!("00-{TRACE}-{SPAN}-01"), true),
            (format!("00-{TRACE}-{SPAN}-00"), false),
            (format!("00-{TRACE}-{SPAN}-fe"), false),
            (format!("cc-{TRACE}-{SPAN}-03-more-to-come"), true),
        ] {
            let context = read(&[("traceparent", &text)]).unwrap();
            assert_eq!((context.trace_id().to_string(), context.span_id().to_string()), (TRACE.into(), SPAN.into()));
            assert_eq!((context.is_sampled(), context.is_remote()), (sampled, true), "{text}");
        }
    }

    #[test]
    fn what_is_nearly_a_span() {
        let zeros = "0".repeat(32);
        for text in [
            String::new(),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("0-{TRACE}-{SPAN}-01"),
            format!("+0-{TRACE}-{SPAN}-01"),
            format!("00-{TRACE}-{SPAN}-01-x"),
            format!("00-{TRACE}-{SPAN}-01-"),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{TRACE}-{SPAN}-1"),
            format!("00-{TRACE}-{SPAN}-+1"),
            format!("00-{TRACE}-{SPAN}-0g"),
            format!("00-{}-{SPAN}-01", &TRACE[1..]),
            format!("00-+{}-{SPAN}-01", &TRACE[1..]),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{TRACE}-{}-01", &SPAN[1..]),
            format!("00-{TRACE}-{SPAN}0-01"),
            format!("00-{zeros}-{SPAN}-01"),
            format!("00-{TRACE}-{}-01", &zeros[..16]),
        ] {
            assert_eq!(read(&[("traceparent", &text)]), None, "{text}");
        }
        let good = format!("00-{TRACE}-{SPAN}-01");
        assert_eq!(read(&[("traceparent", &good), ("traceparent", &good)]), None);
    }

    #[test]
    fn states_are_one_short_list() {
        let state = |values: &[&str]| {
            let good = format!("00-{TRACE}-{SPAN}-01");
            let mut headers = vec![("traceparent", good.as_str())];
            headers.extend(values.iter().map(|value| ("tracestate", *value)));
            read(&headers).unwrap().trace_state().header()
        };
        assert_eq!(state(&[]), "");
        assert_eq!(state(&["a=1,b=2", "c=3"]), "a=1,b=2,c=3");
        assert_eq!(state(&["no list"]), "");
        let longest = format!("a={},b={}", "x".repeat(253), "x".repeat(254));
        assert_eq!(longest.len(), 512);
        assert_eq!(state(&[&longest]), longest);
        assert_eq!(state(&[&format!("{longest}x")]), "");
    }
}
