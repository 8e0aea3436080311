//! Counter-based random numbers: a pure function of key and counter, so that batching, order and
//! retries cannot change a draw. Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy
//! as 1, 2, 3", SC 2011).

/// Ten rounds of Philox 4x32.
pub fn philox(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let (mut k, mut c) = (key, counter);
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xD251_1F53;
        let b = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// A number in [0, 1) with 53 random bits, keyed by `seed` and the pair (`position`, `stream`).
///
/// Give every use its own `stream`; streams below 2^16 belong to the host.
pub fn uniform(seed: u64, position: u64, stream: u64) -> f64 {
    let split = |x: u64| [x as u32, (x >> 32) as u32];
    let ([k0, k1], [p0, p1], [s0, s1]) = (split(seed), split(position), split(stream));
    let bits = philox([k0, k1], [p0, p1, s0, s1]);
    let word = u64::from(bits[0]) | u64::from(bits[1]) << 32;
    (word >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution (kat_vectors, philox4x32-10).
    #[test]
    fn known_answers() {
        assert_eq!(philox([0, 0], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let f = u32::MAX;
        assert_eq!(philox([f, f], [f; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0xa409_3822, 0x299f_31d0], [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_fills_the_unit_interval() {
        let mean =
            (0..10_000).map(|i| uniform(7, i, 1 << 20)).inspect(|u| assert!((0.0..1.0).contains(u))).sum::<f64>() / 1e4;
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
    }
}
