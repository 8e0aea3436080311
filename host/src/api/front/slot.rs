//! Waiting in the line.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::client::{Client, caller};
use super::line::{Arrival, Full, Line, Load, Room, Ticket};

/// The line, and those who wait in it.
#[derive(Debug)]
pub struct Waiting(Mutex<State>);

#[derive(Debug)]
struct State {
    line: Line,
    calls: HashMap<Ticket, oneshot::Sender<()>>,
}

impl Waiting {
    pub fn new(room: Room) -> Self {
        Self(Mutex::new(State { line: Line::new(room), calls: HashMap::new() }))
    }

    /// A line for work of which `at_once` pieces are done at a time.
    pub fn for_work(at_once: usize, per_client: Option<usize>) -> Self {
        Self::new(Room { running: at_once.max(1), queued_requests: usize::MAX, queued_tokens: None, per_client })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change of it is complete before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that wait.
    pub fn queued(&self) -> usize {
        self.state().line.waiting()
    }

    /// Wait for the turn of a request of `client`. One slot for each of its answers; drop the future to leave
    /// the line.
    pub async fn enter(self: &Arc<Self>, client: &Client, load: Load) -> Result<Vec<Slot>, Full> {
        self.called(client, load).await?;
        Ok(std::iter::repeat_with(|| self.slot(client)).take(load.answers).collect())
    }

    /// Wait for the turn of one piece of work of the request at hand; drop the future to leave the line.
    pub async fn turn(self: &Arc<Self>) -> Result<Slot, Full> {
        let client = caller().client;
        self.called(&client, Load { answers: 1, prompt_tokens: 0 }).await?;
        Ok(self.slot(&client))
    }

    fn slot(self: &Arc<Self>, client: &Client) -> Slot {
        Slot { waiting: self.clone(), client: client.clone() }
    }

    /// Whoever is called has the slots of its load to give back.
    async fn called(self: &Arc<Self>, client: &Client, load: Load) -> Result<(), Full> {
        let arrival = {
            let mut state = self.state();
            match state.line.arrive(client, load)? {
                Arrival::Now => None,
                Arrival::Later(ticket) => {
                    let (call, called) = oneshot::channel();
                    state.calls.insert(ticket, call);
                    Some((Place { waiting: self.clone(), client: client.clone(), load, ticket, called: false }, called))
                }
            }
        };
        if let Some((mut place, called)) = arrival {
            // The sender goes only with a call.
            let _ = called.await;
            place.called = true;
        }
        Ok(())
    }
}

impl State {
    fn call(&mut self, tickets: Vec<Ticket>) {
        for ticket in tickets {
            if let Some(call) = self.calls.remove(&ticket) {
                // Whoever has just gone gives its answers back when its place is dropped.
                let _ = call.send(());
            }
        }
    }
}

/// A place in the line, given up when dropped.
struct Place {
    waiting: Arc<Waiting>,
    client: Client,
    load: Load,
    ticket: Ticket,
    /// The slots hold what it had.
    called: bool,
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.called {
            return;
        }
        let mut state = self.waiting.state();
        let tickets = match state.calls.remove(&self.ticket) {
            Some(_) => state.line.give_up(&self.client, self.ticket),
            // It was called, and never heard of it.
            None => state.line.leave(&self.client, self.load.answers),
        };
        state.call(tickets);
    }
}

/// An answer, or a piece of work, under way, until dropped.
#[derive(Debug)]
pub struct Slot {
    waiting: Arc<Waiting>,
    client: Client,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.waiting.state();
        let tickets = state.line.leave(&self.client, 1);
        state.call(tickets);
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::api::front::client::Peer;

    const ONE: Load = Load { answers: 1, prompt_tokens: 1 };

    #[test]
    fn a_place_is_kept_only_while_someone_waits() {
        let room = Room { running: 1, queued_requests: 2, queued_tokens: None, per_client: None };
        let waiting = Arc::new(Waiting::new(room));
        let client = Client::Peer(Peer::Local);
        let mut cx = Context::from_waker(Waker::noop());
        let enter = || {
            Box::pin({
                let (waiting, client) = (waiting.clone(), client.clone());
                async move { waiting.enter(&client, ONE).await }
            })
        };
        let Poll::Ready(Ok(first)) = enter().as_mut().poll(&mut cx) else { panic!("there is room") };
        let (mut second, mut third) = (enter(), enter());
        assert!(second.as_mut().poll(&mut cx).is_pending() && third.as_mut().poll(&mut cx).is_pending());
        assert!(matches!(enter().as_mut().poll(&mut cx), Poll::Ready(Err(Full::Requests(2)))));
        // The second is called and goes before it knows: the third is next.
        drop(first);
        assert_eq!(waiting.queued(), 1);
        drop(second);
        assert_eq!(waiting.queued(), 0);
        let Poll::Ready(Ok(slots)) = third.as_mut().poll(&mut cx) else { panic!("its turn") };
        drop((slots, third));
        let (mut last, mut waits) = (enter(), enter());
        assert!(last.as_mut().poll(&mut cx).is_ready());
        assert!(waits.as_mut().poll(&mut cx).is_ready(), "its slots were dropped with the answer of the poll");
    }
}
