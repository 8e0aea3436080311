//! One message to a collector.

use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::Destination;
use crate::plain::{plain, short};

/// For everything from the connection to the last byte of the answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Of an answer.
const MOST_BYTES: usize = 64 << 10;

/// Why a message did not arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsent {
    pub why: String,
    /// It may arrive if it is sent again.
    pub again: bool,
    /// When, as the collector wishes.
    pub after: Option<Duration>,
}

impl Unsent {
    fn unreached(error: impl std::fmt::Display) -> Self {
        Self { why: error.to_string(), again: true, after: None }
    }
}

/// What a collector did not take of a message that arrived.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rejected {
    pub spans: usize,
    pub why: String,
}

/// Send `body`, on a connection of its own.
pub async fn post(endpoint: &Destination, body: Bytes) -> Result<Rejected, Unsent> {
    let deadline = Instant::now() + PATIENCE;
    let late = |_| Unsent::unreached(format_args!("no answer within {} s", PATIENCE.as_secs()));
    let request = Request::post(endpoint.path.as_str())
        .header(header::HOST, endpoint.authority.as_str())
        .header(header::CONTENT_TYPE, "application/x-protobuf")
        .header(header::USER_AGENT, concat!("tokenrouter/", env!("CARGO_PKG_VERSION")))
        .header(header::CONNECTION, "close")
        .body(Full::new(body))
        .map_err(|error| Unsent { why: error.to_string(), again: false, after: None })?;
    let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port));
    let stream = timeout_at(deadline, stream).await.map_err(late)?.map_err(Unsent::unreached)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(Unsent::unreached)?;
    let answer = async {
        let answer = timeout_at(deadline, sender.send_request(request)).await.map_err(late)?;
        let (head, body) = answer.map_err(Unsent::unreached)?.into_parts();
        judge(head.status, &head.headers)?;
        // The message was taken, so it is not sent again even if the rest cannot be read.
        let body = timeout_at(deadline, Limited::new(body, MOST_BYTES).collect()).await;
        let body = body.ok().and_then(Result::ok).map(|body| body.to_bytes());
        Ok(rejected(&body.unwrap_or_default()))
    };
    let mut answer = std::pin::pin!(answer);
    // The connection may be over as soon as all of the answer is there. Its error is the answer's, too.
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        _ = connection => answer.await,
    }
}

/// What the protocol says of an answer by its head.
fn judge(status: StatusCode, headers: &HeaderMap) -> Result<(), Unsent> {
    if status.is_success() {
        return Ok(());
    }
    let again = matches!(status.as_u16(), 429 | 502 | 503 | 504);
    let after = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    Err(Unsent { why: format!("status {}", status.as_u16()), again, after: after.map(Duration::from_secs) })
}

/// What it says by its body, where the message was taken.
fn rejected(answer: &[u8]) -> Rejected {
    let partial = ExportTraceServiceResponse::decode(answer).ok().and_then(|answer| answer.partial_success);
    partial.map_or_else(Rejected::default, |partial| Rejected {
        spans: usize::try_from(partial.rejected_spans).unwrap_or(0),
        why: short(&plain(&partial.error_message)),
    })
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::collector::trace::v1::ExportTracePartialSuccess;

    use super::*;

    #[test]
    fn what_answers_mean() {
        assert_eq!(rejected(b""), Rejected::default());
        // Some collectors answer in JSON whatever they were asked in.
        assert_eq!(rejected(b"{}"), Rejected::default());
        let partial = ExportTracePartialSuccess { rejected_spans: 3, error_message: "o\nld".into() };
        let answer = ExportTraceServiceResponse { partial_success: Some(partial) }.encode_to_vec();
        assert_eq!(rejected(&answer), Rejected { spans: 3, why: "o\\nld".into() });
        let judged = |status: u16, headers| judge(StatusCode::from_u16(status).unwrap(), &headers);
        assert_eq!(judged(202, HeaderMap::new()), Ok(()));
        for (status, again) in [(429, true), (503, true), (400, false), (404, false), (500, false)] {
            let unsent = Unsent { why: format!("status {status}"), again, after: None };
            assert_eq!(judged(status, HeaderMap::new()), Err(unsent));
        }
        for (value, after) in [("7", Some(7)), ("Mon, 02 Jan 2023 00:00:00 GMT", None), ("-1", None)] {
            let headers = [(header::RETRY_AFTER, value.parse().unwrap())].into_iter().collect();
            assert_eq!(judged(503, headers).unwrap_err().after, after.map(Duration::from_secs), "{value}");
        }
    }
}
