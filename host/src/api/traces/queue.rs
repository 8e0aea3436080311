//! What waits to be sent, and what became of it.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::metrics::Counter;

/// Requests in the order of their ends, each with the number of its spans. The size is bounded in spans.
#[derive(Debug)]
pub struct Queue<T> {
    state: Mutex<State<T>>,
    /// Most spans that are neither sent nor dropped.
    most: usize,
    /// So many are sent at once.
    batch: usize,
    /// Something waits after nothing did, or a batch is full.
    pub more: Notify,
    pub sent: Counter,
    pub dropped: Counter,
}

#[derive(Debug)]
struct State<T> {
    waiting: VecDeque<(T, usize)>,
    /// Spans of `waiting`.
    spans: usize,
    /// Spans that were taken, and of which it is not known what becomes.
    taken: usize,
    closed: bool,
}

impl<T> Queue<T> {
    pub fn new(most: usize, batch: usize) -> Self {
        let state = State { waiting: VecDeque::new(), spans: 0, taken: 0, closed: false };
        Self {
            state: Mutex::new(state),
            most,
            batch,
            more: Notify::new(),
            sent: Counter::default(),
            dropped: Counter::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        // Each change of it is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Add a request, or drop it where there is no room. Never waits for anything.
    pub fn put(&self, item: T, spans: usize) {
        let mut state = self.state();
        if state.closed || state.spans + state.taken + spans > self.most {
            drop(state);
            return self.dropped.add(spans as u64);
        }
        let before = state.spans;
        state.waiting.push_back((item, spans));
        state.spans += spans;
        let news = before == 0 || (before < self.batch && state.spans >= self.batch);
        drop(state);
        if news {
            self.more.notify_one();
        }
    }

    /// The next batch, at least one request, with the number of its spans. [`Self::settle`] has to follow.
    pub fn take(&self) -> Option<(Vec<T>, usize)> {
        let mut state = self.state();
        let (mut items, mut spans) = (Vec::new(), 0);
        while let Some((_, next)) = state.waiting.front()
            && (items.is_empty() || spans + next <= self.batch)
        {
            spans += next;
            items.extend(state.waiting.pop_front().map(|(item, _)| item));
        }
        state.spans -= spans;
        state.taken += spans;
        (!items.is_empty()).then_some((items, spans))
    }

    /// What a batch that was taken came to.
    pub fn settle(&self, sent: usize, dropped: usize) {
        let mut state = self.state();
        // After the end they count as dropped already.
        if !state.closed {
            state.taken = state.taken.saturating_sub(sent + dropped);
            self.sent.add(sent as u64);
            self.dropped.add(dropped as u64);
        }
    }

    pub fn batch_is_full(&self) -> bool {
        self.state().spans >= self.batch
    }

    /// Spans that are neither sent nor dropped.
    pub fn open(&self) -> usize {
        let state = self.state();
        state.spans + state.taken
    }

    /// Nothing is sent any more: what is left is dropped, and what comes later.
    pub fn close(&self) {
        let mut state = self.state();
        if !state.closed {
            self.dropped.add((state.spans + state.taken) as u64);
            *state = State { waiting: VecDeque::new(), spans: 0, taken: 0, closed: true };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(queue: &Queue<char>) -> (u64, u64, usize) {
        (queue.sent.read(), queue.dropped.read(), queue.open())
    }

    #[test]
    fn every_span_is_sent_dropped_or_open() {
        let queue = Queue::new(10, 4);
        for (item, spans) in [('a', 3), ('b', 2), ('c', 5), ('d', 1)] {
            queue.put(item, spans);
        }
        assert_eq!(counts(&queue), (0, 1, 10));
        assert_eq!(queue.take(), Some((vec!['a'], 3)));
        // What is under way takes room.
        queue.put('e', 1);
        assert_eq!(counts(&queue), (0, 2, 10));
        queue.settle(2, 1);
        queue.put('f', 2);
        assert_eq!(counts(&queue), (2, 3, 9));
        assert_eq!(queue.take(), Some((vec!['b'], 2)));
        queue.settle(2, 0);
        assert!(queue.batch_is_full());
        assert_eq!(queue.take(), Some((vec!['c'], 5)), "larger than a batch, so alone");
        queue.settle(0, 5);
        assert!(!queue.batch_is_full());
        assert_eq!(queue.take(), Some((vec!['f'], 2)));
        queue.settle(2, 0);
        assert_eq!((queue.take(), counts(&queue)), (None, (6, 8, 0)));
    }

    #[test]
    fn the_end_drops_what_is_left_once() {
        let queue = Queue::new(10, 4);
        queue.put('a', 3);
        queue.put('b', 3);
        assert!(queue.take().is_some());
        queue.close();
        queue.close();
        queue.settle(3, 0);
        queue.put('c', 1);
        assert_eq!((queue.take(), counts(&queue)), (None, (0, 7, 0)));
    }
}
