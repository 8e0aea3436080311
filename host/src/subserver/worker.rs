//! The decode loop: gives a sub-server its thread, its inbox and the time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::gate::Gate;
use super::message::Status;
use super::pacer::Pacer;
use super::{Counters, Effect, Message, SubServer};
use crate::request::{ModelId, RequestError};

/// What a worker needs of the world around it.
pub trait Surroundings: Send + Sync {
    /// Carry out what a step, or taking messages, came to: all at once, so that others are woken once for
    /// it and find all that is theirs. `at`: when it had come to that.
    fn carry_out(&self, effects: &mut dyn Iterator<Item = Effect>, at: Instant);
    /// Have `model` look at its gate.
    fn wake(&self, model: ModelId);
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
    /// Routes attached to it, those that are on their way out included.
    pub routes: usize,
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
            routes: server.routes(),
            counters: server.counters(),
        };
    }
}

/// Run `server` until [`Message::Shutdown`] comes or every sender of `inbox` is gone. A letter in the inbox
/// has one message or several. `zero` is the same moment for all models of a server.
pub fn run(
    server: &mut SubServer,
    inbox: &Receiver<Vec<Message>>,
    surroundings: &dyn Surroundings,
    board: &Arc<Board>,
    mut pacer: Pacer,
    zero: Instant,
) {
    let mut next = None;
    loop {
        // The inbox is empty before each batch is formed.
        while let Some(letter) = next.take().or_else(|| inbox.try_recv().ok()) {
            for message in letter {
                if matches!(message, Message::Shutdown) {
                    server.fail_all(&RequestError::ShuttingDown);
                    surroundings.carry_out(&mut sent(server, zero.elapsed()), Instant::now());
                    board.publish(server);
                    return;
                }
                pacer.arrived(&message);
                server.take(message);
            }
        }
        let now = zero.elapsed();
        surroundings.carry_out(&mut sent(server, now), zero + now);
        board.publish(server);
        let gate = pacer.look(server.ready(), now);
        pacer.wakes().for_each(|model| surroundings.wake(model));
        let message = match gate {
            Gate::Open => {
                pacer.start(server.ready(), now);
                let stepped = server.step();
                server.begun().for_each(|spec| spec.begin(zero + now));
                let end = zero.elapsed();
                let mut effects = sent(server, end).inspect(|effect| {
                    if let Effect::Send(message) = effect
                        && matches!(message.status, Status::New | Status::Need)
                    {
                        pacer.handed_to(message.to);
                    }
                });
                surroundings.carry_out(&mut effects, zero + end);
                drop(effects);
                pacer.finish(server.ready(), stepped, server.counted(), end);
                pacer.wakes().for_each(|model| surroundings.wake(model));
                continue;
            }
            Gate::Closed(None) => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Gate::Closed(Some(moment)) => inbox.recv_timeout(moment - now),
        };
        match message {
            Ok(letter) => next = Some(letter),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// The effects, with the time `at` on what goes to peers.
fn sent(server: &mut SubServer, at: Duration) -> impl Iterator<Item = Effect> {
    server.effects().map(move |mut effect| {
        if let Effect::Send(message) = &mut effect {
            message.sent = at;
        }
        effect
    })
}
