//! The task that sends what waits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use tokio::sync::watch;

use super::post::post;
use super::queue::{Queue, Size};
use super::spans::Encoder;
use super::{Destination, Finished, TraceSettings};

/// How long the first span of a batch waits for others.
const GATHERING: Duration = Duration::from_secs(1);
/// Before a message is sent again; each time twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Between two lines in the log.
const SILENCE: Duration = Duration::from_secs(60);

pub struct Sender {
    queue: Arc<Queue<Finished>>,
    endpoint: Destination,
    encoder: Encoder,
    ending: watch::Receiver<bool>,
    troubles: Troubles,
}

impl Sender {
    pub fn new(settings: &TraceSettings, queue: Arc<Queue<Finished>>, ending: watch::Receiver<bool>) -> Self {
        let (endpoint, encoder) = (settings.endpoint.clone(), Encoder::new(&settings.service_name));
        Self { queue, endpoint, encoder, ending, troubles: Troubles::default() }
    }

    /// Until the end, and then until nothing is left that can be sent.
    pub async fn run(mut self) {
        loop {
            self.gather().await;
            while let Some((requests, size)) = self.queue.take() {
                self.deliver(requests, size).await;
            }
            if self.is_last() {
                return;
            }
        }
    }

    /// Nothing more comes. Also where nobody is left who could say so.
    fn is_last(&self) -> bool {
        *self.ending.borrow() || self.ending.has_changed().is_err()
    }

    /// Wait for a full batch, a partial one that has waited for long enough, or the end.
    async fn gather(&mut self) {
        let queue = &self.queue;
        let batch = async {
            queue.more.notified().await;
            if queue.batch_is_full() {
                return;
            }
            tokio::select! {
                () = queue.more.notified() => {}
                () = tokio::time::sleep(GATHERING) => {}
            }
        };
        tokio::select! {
            () = batch => {}
            () = ended(&mut self.ending) => {}
        }
    }

    /// Send a batch, again and again where that may help. At the end there is one attempt.
    async fn deliver(&mut self, requests: Vec<Finished>, size: Size) {
        let body = Bytes::from(self.encoder.message(&requests));
        drop(requests);
        let mut pause = FIRST_PAUSE;
        loop {
            match post(&self.endpoint, body.clone()).await {
                Ok(rejected) => {
                    let dropped = rejected.spans.min(size.spans);
                    self.queue.settle(size, dropped);
                    let why =
                        (dropped > 0).then(|| format!("the collector rejected {dropped} spans: {}", rejected.why));
                    return self.tell(why.as_deref());
                }
                Err(unsent) => {
                    let again = unsent.again && !self.is_last();
                    if !again {
                        self.queue.settle(size, size.spans);
                    }
                    self.tell(Some(&unsent.why));
                    if !again {
                        return;
                    }
                    // With the end comes the last attempt.
                    let wished = unsent.after.filter(|after| *after <= LONGEST_PAUSE).unwrap_or_default();
                    let _ = tokio::time::timeout(pause.max(wished), ended(&mut self.ending)).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    fn tell(&mut self, error: Option<&str>) {
        let dropped = self.queue.dropped.read();
        let endpoint = &self.endpoint;
        match self.troubles.news(error.is_some(), dropped, Instant::now()) {
            None => {}
            Some(News::Trouble) => {
                let error = error.unwrap_or("more came than the collector took in time");
                tracing::warn!(%endpoint, error, dropped, "traces: not all spans are sent");
            }
            Some(News::Over) => tracing::info!(%endpoint, dropped, "traces: spans are sent again"),
        }
    }
}

/// Until nothing more comes.
async fn ended(ending: &mut watch::Receiver<bool>) {
    drop(ending.wait_for(|last| *last).await);
}

/// When the log hears of what goes wrong.
#[derive(Debug, Default)]
struct Troubles {
    /// The last line about it.
    told: Option<Instant>,
    /// It was told of an error, and not of its end.
    lasting: bool,
    /// Spans that it knows of.
    dropped: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum News {
    Trouble,
    Over,
}

impl Troubles {
    /// `failed`: the last attempt; `dropped`: all spans so far.
    fn news(&mut self, failed: bool, dropped: u64, now: Instant) -> Option<News> {
        if failed || dropped > self.dropped {
            if self.told.is_some_and(|told| now.saturating_duration_since(told) < SILENCE) {
                return None;
            }
            *self = Self { told: Some(now), lasting: failed, dropped };
            return Some(News::Trouble);
        }
        std::mem::take(&mut self.lasting).then_some(News::Over)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_a_minute() {
        let zero = Instant::now();
        let mut troubles = Troubles::default();
        for (seconds, failed, dropped, news) in [
            (0, false, 0, None),
            (1, true, 0, Some(News::Trouble)),
            (2, true, 5, None),
            (59, true, 5, None),
            (61, true, 9, Some(News::Trouble)),
            (62, false, 9, Some(News::Over)),
            (63, false, 9, None),
            // What was dropped meanwhile is told later, if not at once.
            (64, false, 10, None),
            (120, false, 10, None),
            (122, false, 10, Some(News::Trouble)),
            (500, false, 10, None),
        ] {
            let now = zero + Duration::from_secs(seconds);
            assert_eq!(troubles.news(failed, dropped, now), news, "after {seconds} s");
        }
    }
}
