//! What was refused or broken off at the door.

use std::fmt::Write;
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

    /// In the text format of Prometheus.
    pub fn write(&self, text: &mut String, connections: usize, queued: usize) {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "# HELP tokenrouter_connections Open connections.\n# TYPE tokenrouter_connections gauge\n\
             tokenrouter_connections {connections}\n\
             # HELP tokenrouter_queued_requests Requests that wait for their turn.\n\
             # TYPE tokenrouter_queued_requests gauge\ntokenrouter_queued_requests {queued}\n\
             # HELP tokenrouter_refused_total Requests and connections refused or broken off, by reason.\n\
             # TYPE tokenrouter_refused_total counter\n"
        );
        for (refusal, reason) in ALL {
            let _ = writeln!(text, "tokenrouter_refused_total{{reason=\"{reason}\"}} {}", self.get(refusal));
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
        let mut text = String::new();
        counters.write(&mut text, 3, 0);
        assert!(text.contains("tokenrouter_connections 3\n"), "{text}");
        assert!(
            text.contains("{reason=\"stalled_reader\"} 1\n") && text.contains("{reason=\"deadline\"} 0\n"),
            "{text}"
        );
    }
}
