//! What waits to be sent, and what became of it.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::metrics::Counter;

/// What requests take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    pub spans: usize,
    pub bytes: usize,
}

impl Size {
    fn plus(self, more: Self) -> Self {
        Self { spans: self.spans + more.spans, bytes: self.bytes + more.bytes }
    }

    fn less(self, gone: Self) -> Self {
        Self { spans: self.spans.saturating_sub(gone.spans), bytes: self.bytes.saturating_sub(gone.bytes) }
    }

    fn fits(self, most: Self) -> bool {
        self.spans <= most.spans && self.bytes <= most.bytes
    }

    fn fills(self, most: Self) -> bool {
        self.spans >= most.spans || self.bytes >= most.bytes
    }
}

/// Requests in the order of their ends, each with its size, which is bounded.
#[derive(Debug)]
pub struct Queue<T> {
    state: Mutex<State<T>>,
    /// Most that is neither sent nor dropped.
    most: Size,
    /// So much is sent at once.
    batch: Size,
    /// Something waits after nothing did, or a batch is full.
    pub more: Notify,
    pub sent: Counter,
    pub dropped: Counter,
}

#[derive(Debug)]
struct State<T> {
    waiting: VecDeque<(T, Size)>,
    /// Of `waiting`.
    size: Size,
    /// What was taken, and of which it is not known what becomes.
    taken: Size,
    closed: bool,
}

impl<T> State<T> {
    fn new(closed: bool) -> Self {
        Self { waiting: VecDeque::new(), size: Size::default(), taken: Size::default(), closed }
    }
}

impl<T> Queue<T> {
    pub fn new(most: Size, batch: Size) -> Self {
        let state = State::new(false);
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
    pub fn put(&self, item: T, size: Size) {
        let mut state = self.state();
        if state.closed || !state.size.plus(state.taken).plus(size).fits(self.most) {
            drop(state);
            return self.dropped.add(size.spans as u64);
        }
        let before = state.size;
        state.waiting.push_back((item, size));
        state.size = before.plus(size);
        let news = before.spans == 0 || (!before.fills(self.batch) && state.size.fills(self.batch));
        drop(state);
        if news {
            self.more.notify_one();
        }
    }

    /// The next batch, at least one request, with its size. [`Self::settle`] has to follow.
    pub fn take(&self) -> Option<(Vec<T>, Size)> {
        let mut state = self.state();
        let (mut items, mut size) = (Vec::new(), Size::default());
        while let Some((_, next)) = state.waiting.front()
            && (items.is_empty() || size.plus(*next).fits(self.batch))
        {
            size = size.plus(*next);
            items.extend(state.waiting.pop_front().map(|(item, _)| item));
        }
        state.size = state.size.less(size);
        state.taken = state.taken.plus(size);
        (!items.is_empty()).then_some((items, size))
    }

    /// What a batch that was taken came to: spans of it were dropped, the others sent.
    pub fn settle(&self, taken: Size, dropped: usize) {
        let mut state = self.state();
        // After the end they count as dropped already.
        if !state.closed {
            state.taken = state.taken.less(taken);
            self.sent.add((taken.spans - dropped) as u64);
            self.dropped.add(dropped as u64);
        }
    }

    pub fn batch_is_full(&self) -> bool {
        self.state().size.fills(self.batch)
    }

    /// Spans that are neither sent nor dropped.
    pub fn open(&self) -> usize {
        let state = self.state();
        state.size.spans + state.taken.spans
    }

    /// Nothing is sent any more: what is left is dropped, and what comes later.
    pub fn close(&self) {
        let mut state = self.state();
        if !state.closed {
            self.dropped.add((state.size.spans + state.taken.spans) as u64);
            *state = State::new(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(queue: &Queue<char>) -> (u64, u64, usize) {
        (queue.sent.read(), queue.dropped.read(), queue.open())
    }

    /// Spans of ten bytes each.
    fn of(spans: usize) -> Size {
        Size { spans, bytes: 10 * spans }
    }

    #[test]
    fn every_span_is_sent_dropped_or_open() {
        let queue = Queue::new(of(10), of(4));
        for (item, spans) in [('a', 3), ('b', 2), ('c', 5), ('d', 1)] {
            queue.put(item, of(spans));
        }
        assert_eq!(counts(&queue), (0, 1, 10));
        assert_eq!(queue.take(), Some((vec!['a'], of(3))));
        // What is under way takes room.
        queue.put('e', of(1));
        assert_eq!(counts(&queue), (0, 2, 10));
        queue.settle(of(3), 1);
        queue.put('f', of(2));
        assert_eq!(counts(&queue), (2, 3, 9));
        assert_eq!(queue.take(), Some((vec!['b'], of(2))));
        queue.settle(of(2), 0);
        assert!(queue.batch_is_full());
        assert_eq!(queue.take(), Some((vec!['c'], of(5))), "larger than a batch, so alone");
        queue.settle(of(5), 5);
        assert!(!queue.batch_is_full());
        assert_eq!(queue.take(), Some((vec!['f'], of(2))));
        queue.settle(of(2), 0);
        assert_eq!((queue.take(), counts(&queue)), (None, (6, 8, 0)));
    }

    #[test]
    fn bytes_are_bounded_as_spans_are() {
        let queue = Queue::new(of(10), of(4));
        let large = |bytes| Size { spans: 1, bytes };
        for (item, bytes) in [('a', 101), ('b', 30), ('c', 20), ('d', 50), ('e', 1)] {
            queue.put(item, large(bytes));
        }
        assert_eq!(counts(&queue), (0, 2, 3));
        assert!(queue.batch_is_full());
        assert_eq!(queue.take(), Some((vec!['b'], large(30))));
        queue.put('f', large(1));
        assert_eq!(counts(&queue), (0, 3, 3), "what is under way takes room");
        queue.settle(large(30), 0);
        queue.put('g', large(30));
        assert_eq!(counts(&queue), (1, 3, 3));
    }

    #[test]
    fn the_end_drops_what_is_left_once() {
        let queue = Queue::new(of(10), of(4));
        queue.put('a', of(3));
        queue.put('b', of(3));
        assert!(queue.take().is_some());
        queue.close();
        queue.close();
        queue.settle(of(3), 0);
        queue.put('c', of(1));
        assert_eq!((queue.take(), counts(&queue)), (None, (0, 7, 0)));
    }
}
