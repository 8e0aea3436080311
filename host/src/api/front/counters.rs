//! What was refused or broken off at the door.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    Unauthorized,
    Malformed,
    ClientLimit,
    QueueFull,
    Deadline,
    Connections,
    ConnectionsOfPeer,
    Handshake,
    SlowHead,
    Stalled,
}

const ALL: [(Refusal, &str); 10] = [
    (Refusal::Unauthorized, "unauthorized"),
    (Refusal::Malformed, "malformed"),
    (Refusal::ClientLimit, "client_limit"),
    (Refusal::QueueFull, "queue_full"),
    (Refusal::Deadline, "deadline"),
    (Refusal::Connections, "connections"),
    (Refusal::ConnectionsOfPeer, "connections_of_peer"),
    (Refusal::Handshake, "tls_handshake"),
    (Refusal::SlowHead, "slow_head"),
    (Refusal::Stalled, "stalled_reader"),
];

#[derive(Debug, Default)]
pub struct Counters([AtomicU64; ALL.len()]);

impl Counters {
    pub fn add(&self, refusal: Refusal) {
        self.0[refusal as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn get(&self, refusal: Refusal) -> u64 {
        self.0[refusal as usize].load(Ordering::Relaxed)
    }

    /// Each reason with its count.
    pub fn by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> {
        ALL.into_iter().map(|(refusal, reason)| (reason, self.get(refusal)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_own_count() {
        for (place, (refusal, _)) in ALL.into_iter().enumerate() {
            assert_eq!(refusal as usize, place);
        }
        let counters = Counters::default();
        counters.add(Refusal::Stalled);
        let counted: Vec<_> = counters.by_reason().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, [("stalled_reader", 1)]);
    }
}
