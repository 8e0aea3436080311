//! States packed into a word.

use crate::grid::Grid;

/// A model in a state: requests that wait, those of the running batch (0 = idle), grains left of its step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    pub waiting: u32,
    pub batch: u32,
    pub left: u32,
}

/// Bits of a packed state: of a count of requests, and by model of its grains. The batch of model 0 follows from
/// the rest, as all requests are somewhere.
pub(super) struct Layout<const M: usize> {
    requests: u32,
    pub count_bits: u32,
    grain_bits: [u32; M],
}

impl<const M: usize> Layout<M> {
    pub fn new(requests: usize, grid: &Grid) -> Option<Self> {
        let count_bits = usize::BITS - requests.leading_zeros();
        let grain_bits = std::array::from_fn(|model| u32::BITS - grid.longest(model).leading_zeros());
        let bits = (2 * M as u32 - 1) * count_bits + grain_bits.iter().sum::<u32>();
        (bits <= u64::BITS).then_some(Self { requests: requests as u32, count_bits, grain_bits })
    }

    /// What parts of a batch change, the requests that wait, is in the lowest bits, so that the states reached
    /// from one lie close together in the table.
    pub fn pack(&self, places: &[Place; M]) -> u64 {
        let push = |key: u64, value: u32, bits: u32| key << bits | u64::from(value);
        let key = places.iter().zip(self.grain_bits).fold(0, |key, (place, bits)| push(key, place.left, bits));
        let key = places[1..].iter().fold(key, |key, place| push(key, place.batch, self.count_bits));
        places.iter().fold(key, |key, place| push(key, place.waiting, self.count_bits))
    }

    pub fn unpack(&self, mut key: u64) -> [Place; M] {
        let mut places = [Place::default(); M];
        let mut take = |bits: u32| {
            let value = key & ((1 << bits) - 1);
            key >>= bits;
            value as u32
        };
        let mut rest = self.requests;
        for place in places.iter_mut().rev() {
            place.waiting = take(self.count_bits);
            rest -= place.waiting;
        }
        for place in places[1..].iter_mut().rev() {
            place.batch = take(self.count_bits);
            rest -= place.batch;
        }
        places[0].batch = rest;
        for (place, bits) in places.iter_mut().zip(self.grain_bits).rev() {
            place.left = take(bits);
        }
        places
    }
}
