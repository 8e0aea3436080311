//! The decode loop: gives a sub-server its thread, its inbox and the time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::gate::{Gate, gate};
use super::{Counters, Effect, Message, SubServer};
use crate::request::RequestError;

/// What a worker needs of the world around it.
pub trait Surroundings: Send + Sync {
    /// Carry out one effect.
    fn carry_out(&self, effect: Effect);
    /// Requests that must be ready at this model before it starts.
    fn threshold(&self) -> u32;
}

/// A model's state as last published by its worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    pub ready: usize,
    pub replicas: usize,
    pub pages_in_use: usize,
    /// Pages that no request holds, kept for one that begins with their tokens.
    pub pages_cached: usize,
    pub pages_total: usize,
    pub policy_slots: usize,
    pub counters: Counters,
}

/// Where a worker publishes its state.
#[derive(Debug, Default)]
pub struct Board(Mutex<Snapshot>);

impl Board {
    pub fn read(&self) -> Snapshot {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sub-server is gone, and all it held with it.
    pub fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Snapshot::default();
    }

    fn publish(&self, server: &SubServer) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Snapshot {
            ready: server.ready(),
            replicas: server.replicas(),
            pages_in_use: server.pool().in_use(),
            pages_cached: server.pool().cached(),
            pages_total: server.pool().total(),
            policy_slots: server.open_slots(),
            counters: server.counters(),
        };
    }
}

/// Run `server` until [`Message::Shutdown`] comes or every sender of `inbox` is gone.
pub fn run(
    server: &mut SubServer,
    inbox: &Receiver<Message>,
    surroundings: &dyn Surroundings,
    board: &Arc<Board>,
    max_wait: Duration,
) {
    let start = Instant::now();
    let mut waiting_since = None;
    let mut next = None;
    loop {
        // The inbox is empty before each batch is formed.
        while let Some(message) = next.take().or_else(|| inbox.try_recv().ok()) {
            if matches!(message, Message::Shutdown) {
                server.fail_all(&RequestError::ShuttingDown);
                server.effects().for_each(|effect| surroundings.carry_out(effect));
                board.publish(server);
                return;
            }
            server.take(message);
        }
        server.effects().for_each(|effect| surroundings.carry_out(effect));
        board.publish(server);
        let now = start.elapsed();
        waiting_since = (server.ready() > 0).then(|| waiting_since.unwrap_or(now));
        let message = match gate(server.ready(), surroundings.threshold(), waiting_since, max_wait, now) {
            Gate::Open => {
                server.step();
                waiting_since = None;
                server.effects().for_each(|effect| surroundings.carry_out(effect));
                continue;
            }
            Gate::Closed(None) => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Gate::Closed(Some(moment)) => inbox.recv_timeout(moment - now),
        };
        match message {
            Ok(message) => next = Some(message),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
