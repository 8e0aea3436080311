//! What was refused or broken off at the door.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::metrics::text::Exposition;

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

    pub fn write(&self, out: &mut Exposition, connections: usize, queued: usize) {
        out.gauge("tokenrouter_connections", "Open connections.").sample(&[], connections);
        out.gauge("tokenrouter_queued_requests", "Requests that wait for their turn.").sample(&[], queued);
        out.counter("tokenrouter_refused_total", "Requests and connections refused or broken off, by reason.");
        for (refusal, reason) in ALL {
            out.sample(&[("reason", reason)], self.get(refusal));
        }
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
        let mut out = Exposition::default();
        counters.write(&mut out, 3, 0);
        let text = out.into_text();
        assert!(text.contains("tokenrouter_connections 3\n"), "{text}");
        assert!(
            text.contains("{reason=\"stalled_reader\"} 1\n") && text.contains("{reason=\"deadline\"} 0\n"),
            "{text}"
        );
    }
}
