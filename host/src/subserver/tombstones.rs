//! Ids of requests that are over, so that late messages cannot revive them. Bounded.

use std::collections::VecDeque;

use super::by_id::Ids;
use crate::request::RequestId;

/// The last requests that ended here.
#[derive(Debug)]
pub struct Tombstones {
    order: VecDeque<RequestId>,
    dead: Ids,
    capacity: usize,
}

impl Tombstones {
    pub fn new(capacity: usize) -> Self {
        Self { order: VecDeque::new(), dead: Ids::default(), capacity: capacity.max(1) }
    }

    pub fn bury(&mut self, id: RequestId) {
        if self.dead.insert(id) {
            self.order.push_back(id);
            if self.order.len() > self.capacity
                && let Some(oldest) = self.order.pop_front()
            {
                self.dead.remove(&oldest);
            }
        }
    }

    pub fn is_dead(&self, id: RequestId) -> bool {
        self.dead.contains(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_forgotten() {
        let mut tombstones = Tombstones::new(2);
        for id in [1, 2, 2, 3] {
            tombstones.bury(id);
        }
        assert_eq!([1, 2, 3].map(|id| tombstones.is_dead(id)), [false, true, true]);
    }
}
