//! Connections.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower::ServiceExt;

use super::state::AppState;

/// How long a connection may take for its headers; this is also how long an idle one stays open. Below
/// the idle time of common clients, they would meet connections that were just closed.
const HEADER_TIMEOUT: Duration = Duration::from_secs(120);
const MAX_HEADERS: usize = 256;
/// Pause after an accept that failed for want of file descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time that connections have after the last answer to send what is in their buffers.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// Serve until `shutdown`, then until the last answer that was admitted is delivered. Meanwhile new
/// connections are still taken, to tell probes and clients that the server is going. Connections without
/// an answer, such as one with half a request, are not waited for. Drop the future to break all off.
pub async fn serve(listener: TcpListener, state: Arc<AppState>, shutdown: impl Future<Output = ()>) -> io::Result<()> {
    let (close, closing) = watch::channel(false);
    let admissions = state.admissions.clone();
    let drained = async {
        shutdown.await;
        state.start_draining();
        close.send_replace(true);
        admissions.over().await;
    };
    let mut connections = accept(listener, super::router(Arc::clone(&state)), closing, drained).await;
    let flushed = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(FLUSH_TIME, flushed).await.is_err() {
        tracing::debug!(connections = connections.len(), "connections without an answer are closed");
    }
    Ok(())
}

/// Serve the admin endpoints at an address of their own until `end`.
pub async fn serve_admin(listener: TcpListener, state: Arc<AppState>, end: impl Future<Output = ()>) {
    let (_open, closing) = watch::channel(false);
    accept(listener, super::admin_router(state), closing, end).await.shutdown().await;
}

/// Take connections until `end`; answers with those that are open then.
async fn accept(
    listener: TcpListener,
    router: axum::Router,
    closing: watch::Receiver<bool>,
    end: impl Future<Output = ()>,
) -> JoinSet<()> {
    let mut connections = JoinSet::new();
    let mut end = std::pin::pin!(end);
    loop {
        tokio::select! {
            () = &mut end => return connections,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, router.clone(), closing.clone()));
                }
                Err(error) if concerns_one_connection(&error) => {}
                Err(error) => {
                    let address = listener.local_addr().ok();
                    tracing::warn!(%error, ?address, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
}

async fn connection(stream: TcpStream, router: axum::Router, mut closing: watch::Receiver<bool>) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY could not be set");
    }
    let service = router.map_request(|request: Request<Incoming>| request.map(Body::new));
    let draining = *closing.borrow();
    let connection = http1::Builder::new()
        // Shutting down a connection that has read nothing would close it unanswered.
        .keep_alive(!draining)
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_headers(MAX_HEADERS)
        // A client that closes its side has gone: its requests are cancelled.
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

fn concerns_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
