//! One message to a collector.

use std::time::Duration;

use axum::body::Bytes;
use axum::http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message;
use tokio::net::TcpStream;

use super::Destination;

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
}

impl Unsent {
    fn unreached(error: impl std::fmt::Display) -> Self {
        Self { why: error.to_string(), again: true }
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
    let late = |_| Unsent::unreached(format_args!("no answer within {} s", PATIENCE.as_secs()));
    let (status, answer) = tokio::time::timeout(PATIENCE, exchange(endpoint, body)).await.map_err(late)??;
    judge(status, &answer)
}

async fn exchange(endpoint: &Destination, body: Bytes) -> Result<(StatusCode, Bytes), Unsent> {
    let request = Request::post(endpoint.path.as_str())
        .header(header::HOST, endpoint.authority.as_str())
        .header(header::CONTENT_TYPE, "application/x-protobuf")
        .header(header::USER_AGENT, concat!("tokenrouter/", env!("CARGO_PKG_VERSION")))
        .header(header::CONNECTION, "close")
        .body(Full::new(body))
        .map_err(|error| Unsent { why: error.to_string(), again: false })?;
    let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port)).await.map_err(Unsent::unreached)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(Unsent::unreached)?;
    let answer = async {
        let (head, body) = sender.send_request(request).await.map_err(Unsent::unreached)?.into_parts();
        let body = Limited::new(body, MOST_BYTES).collect().await.map_err(Unsent::unreached)?;
        Ok((head.status, body.to_bytes()))
    };
    let mut answer = std::pin::pin!(answer);
    // The connection may be over as soon as all of the answer is there.
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        ended = connection => match ended {
            Ok(()) => answer.await,
            Err(error) => Err(Unsent::unreached(error)),
        },
    }
}

/// What the protocol says of an answer.
fn judge(status: StatusCode, answer: &[u8]) -> Result<Rejected, Unsent> {
    if !status.is_success() {
        let again = matches!(status.as_u16(), 429 | 502 | 503 | 504);
        return Err(Unsent { why: format!("status {}", status.as_u16()), again });
    }
    let partial = ExportTraceServiceResponse::decode(answer).ok().and_then(|answer| answer.partial_success);
    Ok(partial.map_or_else(Rejected::default, |partial| Rejected {
        spans: usize::try_from(partial.rejected_spans).unwrap_or(0),
        why: partial.error_message,
    }))
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::collector::trace::v1::ExportTracePartialSuccess;

    use super::*;

    #[test]
    fn what_answers_mean() {
        let judged = |status: u16, answer: &[u8]| judge(StatusCode::from_u16(status).unwrap(), answer);
        assert_eq!(judged(200, b""), Ok(Rejected::default()));
        // Some collectors answer in JSON whatever they were asked in.
        assert_eq!(judged(202, b"{}"), Ok(Rejected::default()));
        let partial = ExportTracePartialSuccess { rejected_spans: 3, error_message: "old".into() };
        let answer = ExportTraceServiceResponse { partial_success: Some(partial) }.encode_to_vec();
        assert_eq!(judged(200, &answer), Ok(Rejected { spans: 3, why: "old".into() }));
        for (status, again) in [(429, true), (503, true), (400, false), (404, false), (500, false)] {
            assert_eq!(judged(status, b""), Err(Unsent { why: format!("status {status}"), again }));
        }
    }
}
