//! Tables by request id. Ids are numbers that the engine counts up, so nobody can choose them to collide, and a
//! multiplication spreads them well enough: these tables are looked into several times a token.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use crate::request::RequestId;

pub type ById<T> = HashMap<RequestId, T, BuildHasherDefault<IdHasher>>;
pub type Ids = HashSet<RequestId, BuildHasherDefault<IdHasher>>;

/// Fibonacci hashing of one number.
#[derive(Clone, Copy, Debug, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }
    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    fn finish(&self) -> u64 {
        // The table takes the lowest bits and the highest; a product's lowest bits know little of the number.
        self.0 ^ self.0 >> 32
    }
}

/// Ids in ascending order. They are gone through at every step, and come and go one at a time.
#[derive(Debug, Default)]
pub struct Ascending(Vec<RequestId>);

impl Ascending {
    pub fn insert(&mut self, id: RequestId) {
        if let Err(place) = self.0.binary_search(&id) {
            self.0.insert(place, id);
        }
    }

    pub fn remove(&mut self, id: RequestId) {
        if let Ok(place) = self.0.binary_search(&id) {
            self.0.remove(place);
        }
    }

    pub fn has(&self, id: RequestId) -> bool {
        self.0.binary_search(&id).is_ok()
    }
}

impl std::ops::Deref for Ascending {
    type Target = [RequestId];

    fn deref(&self) -> &[RequestId] {
        &self.0
    }
}
