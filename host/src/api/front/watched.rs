//! A connection whose other end must not take for ever: to send the head of a request, or to read an answer.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::counters::{Counters, Refusal};
use super::framing::Scanner;

/// What the bytes of a connection and its requests know of each other.
#[derive(Debug, Default)]
pub struct Exchange {
    /// Heads that were complete.
    heads: AtomicUsize,
    /// Between the end of a head and the end of its answer.
    answering: AtomicBool,
    /// A head that came, or is coming, gives the length of its body in two ways.
    ambiguous: AtomicBool,
}

impl Exchange {
    /// A head is complete. Whether its body, or that of another head here, has two lengths: heads may come together,
    /// and then it is not known which one it was.
    pub fn begin(&self) -> bool {
        self.heads.fetch_add(1, Ordering::Relaxed);
        self.answering.store(true, Ordering::Relaxed);
        self.ambiguous.load(Ordering::Relaxed)
    }
}

/// Held by an answer until it is sent or given up.
pub struct Answering(pub Arc<Exchange>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.answering.store(false, Ordering::Relaxed);
    }
}

/// Times for a connection.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// From the first byte of a head to its last.
    pub head: Duration,
    /// Without a byte taken, where some wait to be sent.
    pub write: Duration,
}

pub struct Watched<S> {
    stream: S,
    exchange: Arc<Exchange>,
    patience: Patience,
    counters: Arc<Counters>,
    /// While a head comes in: the heads before it, and when it has to be there.
    head: Option<(usize, Pin<Box<Sleep>>)>,
    scanner: Scanner,
    /// While the other end takes nothing.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> Watched<S> {
    pub fn new(stream: S, exchange: Arc<Exchange>, patience: Patience, counters: Arc<Counters>) -> Self {
        Self { stream, exchange, patience, counters, head: None, scanner: Scanner::default(), stalled: None }
    }

    /// New bytes of the other end.
    fn look(&mut self, bytes: &[u8]) {
        self.scanner.feed(bytes);
        if self.scanner.ambiguous() {
            self.exchange.ambiguous.store(true, Ordering::Relaxed);
        }
        if bytes.is_empty() || self.exchange.answering.load(Ordering::Relaxed) {
            return;
        }
        let heads = self.exchange.heads.load(Ordering::Relaxed);
        if self.head.as_ref().is_none_or(|(before, _)| *before != heads) {
            self.head = Some((heads, Box::pin(tokio::time::sleep(self.patience.head))));
        }
    }

    /// Whether a head takes too long.
    fn head_is_late(&mut self, cx: &mut Context<'_>) -> bool {
        let heads = self.exchange.heads.load(Ordering::Relaxed);
        self.head.take_if(|(before, _)| *before != heads);
        self.head.as_mut().is_some_and(|(_, late)| late.as_mut().poll(cx).is_ready())
    }

    /// What `wrote` comes to if it has gone on for so long.
    fn bounded<T>(&mut self, wrote: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if wrote.is_ready() {
            self.stalled = None;
            return wrote;
        }
        let patience = self.patience.write;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        std::task::ready!(stalled.as_mut().poll(cx));
        self.counters.add(Refusal::Stalled);
        tracing::info!(seconds = patience.as_secs_f64(), "a client that read nothing of its answer was cut off");
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        this.look(buffer.filled().get(before..).unwrap_or_default());
        if this.head_is_late(cx) {
            this.counters.add(Refusal::SlowHead);
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.bounded(wrote, cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wrote = Pin::new(&mut this.stream).poll_write_vectored(cx, bytes);
        this.bounded(wrote, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(cx);
        this.bounded(flushed, cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let shut = Pin::new(&mut this.stream).poll_shutdown(cx);
        this.bounded(shut, cx)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// Takes and gives nothing.
    struct Stuck;

    impl AsyncWrite for Stuck {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Pending
        }
        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    const SHORT: Patience = Patience { head: Duration::from_millis(1), write: Duration::from_millis(1) };

    #[tokio::test]
    async fn a_reader_that_stalls_is_cut_off_and_counted() {
        let counters = Arc::new(Counters::default());
        let mut watched = Watched::new(Stuck, Arc::default(), SHORT, counters.clone());
        let result = std::future::poll_fn(|cx| Pin::new(&mut watched).poll_write(cx, b"x")).await;
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(counters.get(Refusal::Stalled), 1);
    }

    const AMBIGUOUS: &[u8] = b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n";

    #[tokio::test]
    async fn heads_that_come_early_are_looked_at() {
        let plain: &[u8] = b"GET / HTTP/1.1\r\n\r\n";
        // Both in one read.
        let exchange = Arc::new(Exchange::default());
        let mut watched = Watched::new(Stuck, exchange.clone(), SHORT, Arc::default());
        watched.look(&[plain, AMBIGUOUS].concat());
        assert!(exchange.begin() && exchange.begin());
        // The second one during the answer to the first.
        let exchange = Arc::new(Exchange::default());
        let mut watched = Watched::new(Stuck, exchange.clone(), SHORT, Arc::default());
        watched.look(plain);
        assert!(!exchange.begin());
        watched.look(AMBIGUOUS);
        drop(Answering(exchange.clone()));
        assert!(exchange.begin());
    }

    #[tokio::test]
    async fn only_a_head_that_has_begun_can_be_late() {
        let exchange = Arc::new(Exchange::default());
        let mut watched = Watched::new(Stuck, exchange.clone(), SHORT, Arc::default());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(!watched.head_is_late(&mut cx), "an idle connection");
        watched.look(b"GET / HT");
        std::future::poll_fn(|cx| if watched.head_is_late(cx) { Poll::Ready(()) } else { Poll::Pending }).await;
        // Complete, so no longer late, and what follows is not a head.
        assert!(!exchange.begin());
        watched.look(b"body");
        assert!(!watched.head_is_late(&mut cx) && watched.head.is_none());
        drop(Answering(exchange));
        watched.look(b"P");
        assert!(watched.head.is_some());
    }
}
