//! A small generator of random numbers.

/// xoshiro256++ (Blackman and Vigna).
#[derive(Clone, Debug)]
pub(crate) struct Random([u64; 4]);

impl Random {
    pub fn new(seed: u64) -> Self {
        // SplitMix64, so that no seed gives the state 0.
        let mut state = seed;
        Self(std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    /// From 0, below 1.
    pub fn uniform(&mut self) -> f64 {
        let Self([a, b, c, d]) = self;
        let word = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        (word >> 11) as f64 / (1u64 << 53) as f64
    }
}
