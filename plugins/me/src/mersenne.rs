//! The Mersenne Twister MT19937 (Matsumoto and Nishimura, "Mersenne twister", ACM TOMACS 8(1), 1998), seeded
//! and read as Python's `random.Random(seed).random()` does.

const WORDS: usize = 624;
const SHIFT: usize = 397;

/// The generator, `next` words into the current block.
#[derive(Clone, Debug)]
pub struct Mersenne {
    words: [u32; WORDS],
    next: usize,
}

impl Mersenne {
    /// Python's `random.Random(seed)` for an integer seed: the key is the seed's 32-bit words, lowest first,
    /// without leading zero words, but at least one word.
    pub fn new(seed: u64) -> Self {
        let key = [seed as u32, (seed >> 32) as u32];
        Self::from_key(if key[1] == 0 { &key[..1] } else { &key })
    }

    /// The authors' `init_by_array`. `key` has 1 to 624 words.
    fn from_key(key: &[u32]) -> Self {
        let mut words = [19_650_218_u32; WORDS];
        for at in 1..WORDS {
            words[at] = mixed(words[at - 1]).wrapping_mul(1_812_433_253).wrapping_add(at as u32);
        }
        let mut at = 1;
        let step = |words: &mut [u32; WORDS], at: &mut usize, word: u32| {
            words[*at] = word;
            *at += 1;
            if *at == WORDS {
                words[0] = words[WORDS - 1];
                *at = 1;
            }
        };
        for (j, key) in (0..key.len() as u32).zip(key).cycle().take(WORDS) {
            let word = words[at] ^ mixed(words[at - 1]).wrapping_mul(1_664_525);
            step(&mut words, &mut at, word.wrapping_add(*key).wrapping_add(j));
        }
        for _ in 1..WORDS {
            let word = words[at] ^ mixed(words[at - 1]).wrapping_mul(1_566_083_941);
            let word = word.wrapping_sub(at as u32);
            step(&mut words, &mut at, word);
        }
        words[0] = 1 << 31;
        Self { words, next: WORDS }
    }

    /// The next number in [0, 1): 27 and 26 high bits of two words.
    pub fn uniform(&mut self) -> f64 {
        let (high, low) = (u64::from(self.word() >> 5), u64::from(self.word() >> 6));
        (high << 26 | low) as f64 / (1_u64 << 53) as f64
    }

    fn word(&mut self) -> u32 {
        if self.next == WORDS {
            self.twist();
            self.next = 0;
        }
        let mut word = self.words[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= word << 7 & 0x9d2c_5680;
        word ^= word << 15 & 0xefc6_0000;
        word ^ word >> 18
    }

    /// The next block of words.
    fn twist(&mut self) {
        for at in 0..WORDS {
            let pair = self.words[at] & 1 << 31 | self.words[(at + 1) % WORDS] & !(1 << 31);
            let odd = if pair & 1 == 1 { 0x9908_b0df } else { 0 };
            self.words[at] = self.words[(at + SHIFT) % WORDS] ^ pair >> 1 ^ odd;
        }
    }
}

fn mixed(word: u32) -> u32 {
    word ^ word >> 30
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The authors' test: `init_by_array({0x123, 0x234, 0x345, 0x456})`, first words of mt19937ar.out.
    #[test]
    fn words_of_the_authors_test() {
        let mut generator = Mersenne::from_key(&[0x123, 0x234, 0x345, 0x456]);
        let words: Vec<u32> = (0..5).map(|_| generator.word()).collect();
        assert_eq!(words, [1_067_595_299, 955_945_823, 477_289_528, 4_107_218_783, 4_228_976_476]);
    }

    /// Computed by CPython 3: the first four numbers of `random.Random(seed)` and the thousandth, which lies
    /// in the fourth block of words.
    #[test]
    fn numbers_of_python() {
        let cases: [(u64, [f64; 4], f64); 4] = [
            (0, [0.8444218515250481, 0.7579544029403025, 0.420571580830845, 0.25891675029296335], 0.4804125346981437),
            (1, [0.13436424411240122, 0.8474337369372327, 0.763774618976614, 0.2550690257394217], 0.7062615472551386),
            (
                12345,
                [0.41661987254534116, 0.010169169457068361, 0.8252065092537432, 0.2986398551995928],
                0.9766427630034175,
            ),
            (
                (1 << 40) + 7,
                [0.6137037779936511, 0.8149162973309487, 0.9450115087592873, 0.5703906991004561],
                0.07764916333699712,
            ),
        ];
        for (seed, first, thousandth) in cases {
            let mut generator = Mersenne::new(seed);
            let numbers: Vec<f64> = (0..1000).map(|_| generator.uniform()).collect();
            assert_eq!((&numbers[..4], numbers[999]), (&first[..], thousandth), "seed {seed}");
        }
    }
}
