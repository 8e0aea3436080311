//! How sure a measured proportion is.

/// Two-sided 95 % quantile of the normal distribution.
const Z: f64 = 1.959_963_984_540_054;

/// The 95 % Wilson score interval of `hits` out of `trials` (Wilson 1927): unlike the plain normal
/// interval it holds near 0 and 1 too. (0, 1) without trials.
pub fn wilson(hits: usize, trials: usize) -> (f64, f64) {
    if trials == 0 {
        return (0.0, 1.0);
    }
    let n = trials as f64;
    let p = hits as f64 / n;
    let (centre, width) = (p + Z * Z / (2.0 * n), Z * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt());
    let scale = 1.0 + Z * Z / n;
    // Rounding must not leave the ends of [0, 1], nor the measured value.
    (((centre - width) / scale).clamp(0.0, p), ((centre + width) / scale).clamp(p, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values were computed apart from this, by the formula, in Python.
    #[test]
    fn known_intervals() {
        for (hits, trials, low, high) in [
            (491, 500, 0.966_148_3, 0.990_501_8),
            (5, 10, 0.236_593_1, 0.763_406_9),
            (0, 10, 0.0, 0.277_532_8),
            (10, 10, 0.722_467_2, 1.0),
        ] {
            let interval = wilson(hits, trials);
            assert!((interval.0 - low).abs() < 1e-6 && (interval.1 - high).abs() < 1e-6, "{interval:?}");
        }
        assert_eq!(wilson(0, 0), (0.0, 1.0));
    }

    #[test]
    fn holds_the_proportion() {
        for trials in 1..60 {
            for hits in 0..=trials {
                let (low, high) = wilson(hits, trials);
                let p = hits as f64 / trials as f64;
                assert!(0.0 <= low && low <= p && p <= high && high <= 1.0 && low < high, "{hits} {trials}");
            }
        }
    }
}
