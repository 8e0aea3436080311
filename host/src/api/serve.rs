//! Connections.

use std::future::Future;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower::ServiceExt;

use super::admission::holding;
use super::front::{Ambiguous, Answering, Exchange, Listener, NoSeat, Peer, Refusal, Seats, Stream, Tls, Watched};
use super::state::AppState;

/// What the HTTP library takes before the limits of the door count, which answer in JSON.
const MOST_HEADERS: usize = 512;
const HEAD_ROOM: usize = 4;
/// Pause after an accept that failed for want of file descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time that connections have after the last answer to send what is in their buffers.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// Serve until `shutdown`, then until the last answer that was admitted is delivered. Meanwhile new
/// connections are still taken, to tell probes and clients that the server is going. Connections without
/// an answer, such as one with half a request, are not waited for. Drop the future to break all off.
pub async fn serve(
    listener: impl Into<Listener>,
    state: Arc<AppState>,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let (close, closing) = watch::channel(false);
    let admissions = state.admissions.clone();
    let drained = async {
        shutdown.await;
        state.start_draining();
        close.send_replace(true);
        admissions.over().await;
    };
    let seats = state.front.seats.clone();
    let door = Door { router: super::router(Arc::clone(&state)), state: state.clone(), seats, closing };
    let mut connections = accept(listener.into(), door, drained).await;
    let flushed = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(FLUSH_TIME, flushed).await.is_err() {
        tracing::debug!(connections = connections.len(), "connections without an answer are closed");
    }
    Ok(())
}

/// Serve the admin endpoints at an address of their own until `end`.
pub async fn serve_admin(listener: impl Into<Listener>, state: Arc<AppState>, end: impl Future<Output = ()>) {
    let (_open, closing) = watch::channel(false);
    // A flood of clients does not keep the operator out.
    let door = Door { router: super::admin_router(state.clone()), state, seats: Arc::default(), closing };
    accept(listener.into(), door, end).await.shutdown().await;
}

/// What a connection needs.
#[derive(Clone)]
struct Door {
    router: axum::Router,
    state: Arc<AppState>,
    seats: Arc<Seats>,
    closing: watch::Receiver<bool>,
}

/// Take connections until `end`; answers with those that are open then.
async fn accept(listener: Listener, door: Door, end: impl Future<Output = ()>) -> JoinSet<()> {
    let mut connections = JoinSet::new();
    let mut end = std::pin::pin!(end);
    let front = &door.state.front;
    loop {
        tokio::select! {
            () = &mut end => return connections,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    let limits = &front.limits;
                    match door.seats.take(peer, limits.connections, limits.connections_per_peer) {
                        Ok(seat) => {
                            let (door, tls) = (door.clone(), listener.tls.clone());
                            connections.spawn(async move {
                                door.take(stream, peer, tls).await;
                                drop(seat);
                            });
                        }
                        Err(full) => {
                            front.counters.add(match full {
                                NoSeat::All => Refusal::Connections,
                                NoSeat::Peer => Refusal::ConnectionsOfPeer,
                            });
                            turn_away(stream, full, listener.tls.is_some());
                        }
                    }
                }
                Err(error) if concerns_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
}

/// Say why, as far as that goes without waiting. Nothing can be said before a handshake.
fn turn_away(stream: Stream, full: NoSeat, tls: bool) {
    let (status, code, message) = match full {
        NoSeat::All => ("503 Service Unavailable", "server_overloaded", "The server has no connection left."),
        NoSeat::Peer => ("429 Too Many Requests", "rate_limit_exceeded", "You have too many connections open."),
    };
    let kind = if full == NoSeat::All { "server_error" } else { "invalid_request_error" };
    let body =
        serde_json::json!({"error": {"message": message, "type": kind, "param": null, "code": code}}).to_string();
    let answer = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    // Whoever does not hear it finds the connection closed.
    let _ = match stream {
        Stream::Tcp(_) if tls => return,
        Stream::Tcp(stream) => stream.into_std().and_then(|mut stream| stream.write(answer.as_bytes())),
        Stream::Unix(stream) => stream.into_std().and_then(|mut stream| stream.write(answer.as_bytes())),
    };
}

impl Door {
    async fn take(self, stream: Stream, peer: Peer, tls: Option<Arc<Tls>>) {
        match (stream, tls) {
            (Stream::Unix(stream), _) => self.http(stream, peer).await,
            (Stream::Tcp(stream), None) => self.http(without_delay(stream), peer).await,
            (Stream::Tcp(stream), Some(tls)) => {
                let front = &self.state.front;
                let handshake = tokio::time::timeout(front.limits.header_timeout, tls.accept(without_delay(stream)));
                match handshake.await {
                    Ok(Ok(stream)) => self.http(stream, peer).await,
                    failed => {
                        front.counters.add(Refusal::Handshake);
                        let error = failed.map_or_else(
                            |late| late.to_string(),
                            |shaken| match shaken {
                                Err(error) => error.to_string(),
                                Ok(_) => String::new(),
                            },
                        );
                        tracing::debug!(%peer, error, "a TLS handshake failed");
                    }
                }
            }
        }
    }

    async fn http(self, stream: impl AsyncRead + AsyncWrite + Unpin, peer: Peer) {
        let Self { router, state, mut closing, .. } = self;
        let front = &state.front;
        let exchange = Arc::new(Exchange::default());
        let stream = Watched::new(stream, exchange.clone(), front.limits.patience(), front.counters.clone());
        let service = router
            .map_request({
                let exchange = exchange.clone();
                move |request: Request<Incoming>| {
                    let mut request = request.map(Body::new);
                    request.extensions_mut().insert(peer);
                    if exchange.begin() {
                        request.extensions_mut().insert(Ambiguous);
                    }
                    request
                }
            })
            .map_response(move |response: axum::response::Response| {
                response.map(|body| holding(body, Answering(exchange.clone())))
            });
        let draining = *closing.borrow();
        let connection = http1::Builder::new()
            // Shutting down a connection that has read nothing would close it unanswered.
            .keep_alive(!draining)
            .timer(TokioTimer::new())
            // The library counts it from the end of the answer before; heads that come slowly are cut off by the stream.
            .header_read_timeout(front.limits.idle_timeout.max(front.limits.header_timeout))
            .max_headers(MOST_HEADERS.max(front.limits.headers + 1))
            .max_buf_size((front.limits.header_bytes + front.limits.url_bytes) * HEAD_ROOM)
            // A client that closes its side has gone: its requests are cancelled. One that only writes nothing more looks the
            // same until it is sent something.
            .half_close(false)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
        let mut connection = std::pin::pin!(connection);
        let result = tokio::select! {
            result = &mut connection => result,
            () = async { drop(closing.wait_for(|closing| *closing).await) }, if !draining => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = result {
            tracing::debug!(%error, "a connection ended early");
        }
    }
}

fn without_delay(stream: TcpStream) -> TcpStream {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY could not be set");
    }
    stream
}

fn concerns_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
