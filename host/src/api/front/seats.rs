//! How many connections are open, in all and by peer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::client::Peer;

#[derive(Debug, Default)]
pub struct Seats(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    all: usize,
    by_peer: HashMap<Peer, usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSeat {
    All,
    Peer,
}

impl Seats {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in between can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn taken(&self) -> usize {
        self.state().all
    }

    /// A seat for a connection of `peer`, if fewer than `most` are taken, and by it fewer than `of_peer`.
    pub fn take(self: &Arc<Self>, peer: Peer, most: usize, of_peer: Option<usize>) -> Result<Seat, NoSeat> {
        let mut state = self.state();
        if state.all >= most {
            return Err(NoSeat::All);
        }
        let has = state.by_peer.get(&peer).copied().unwrap_or(0);
        if of_peer.is_some_and(|of_peer| has >= of_peer) {
            return Err(NoSeat::Peer);
        }
        state.all += 1;
        state.by_peer.insert(peer, has + 1);
        Ok(Seat { seats: self.clone(), peer })
    }
}

/// An open connection, until dropped.
#[derive(Debug)]
pub struct Seat {
    seats: Arc<Seats>,
    peer: Peer,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.seats.state();
        state.all -= 1;
        if let Some(has) = state.by_peer.get_mut(&self.peer) {
            *has -= 1;
            if *has == 0 {
                state.by_peer.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seats_are_given_back() {
        let seats = Arc::new(Seats::default());
        let peer = |last| Peer::from(std::net::IpAddr::from([10, 0, 0, last]));
        let one = seats.take(peer(1), 2, Some(1)).unwrap();
        assert_eq!(seats.take(peer(1), 2, Some(1)).unwrap_err(), NoSeat::Peer);
        let two = seats.take(peer(2), 2, Some(1)).unwrap();
        assert_eq!(seats.take(peer(3), 2, Some(1)).unwrap_err(), NoSeat::All);
        drop(one);
        assert_eq!(seats.taken(), 1);
        drop((seats.take(peer(1), 2, Some(1)).unwrap(), two));
        assert_eq!((seats.taken(), seats.state().by_peer.len()), (0, 0));
    }
}
