//! When requests arrive at an open load. Pure.

use std::time::Duration;

use tokenrouter_plugin_api::random;

/// Stream of [`random::uniform`] for the gaps.
const STREAM: u64 = 0x6172;

/// The moments at which `count` requests arrive, ascending, from the start of the load. The gaps are drawn
/// from a gamma distribution with mean `1 / rate` and shape `burstiness`: 1 is a Poisson process, less has
/// bursts, more is more even, infinity is a clock. All are scaled so that the last request arrives at `count
/// / rate`, as vLLM's `bench serve` does: no seed offers more load than another. `rate`: a second, above 0; at
/// infinity all arrive at once.
pub fn moments(count: usize, rate: f64, burstiness: f64, seed: u64) -> Vec<Duration> {
    if rate.is_infinite() {
        return vec![Duration::ZERO; count];
    }
    let mut draws = Draws { seed, next: 0 };
    let mut sum = 0.0;
    let sums: Vec<f64> = (0..count)
        .map(|_| {
            sum += if burstiness.is_infinite() { 1.0 } else { draws.gamma(burstiness) };
            sum
        })
        .collect();
    // Sums are above 0: every draw is, but for rounding of the smallest shapes.
    let scale = if sum > 0.0 { count as f64 / rate / sum } else { 0.0 };
    sums.into_iter().map(|sum| Duration::from_secs_f64(sum * scale)).collect()
}

struct Draws {
    seed: u64,
    next: u64,
}

impl Draws {
    /// From (0, 1].
    fn uniform(&mut self) -> f64 {
        self.next += 1;
        1.0 - random::uniform(self.seed, self.next, STREAM)
    }

    /// Box and Muller's.
    fn normal(&mut self) -> f64 {
        let (radius, angle) = ((-2.0 * self.uniform().ln()).sqrt(), std::f64::consts::TAU * self.uniform());
        radius * angle.cos()
    }

    /// With scale 1: Marsaglia and Tsang, "A simple method for generating gamma variables", 2000.
    fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            let power = self.uniform().powf(1.0 / shape);
            return self.gamma(shape + 1.0) * power;
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && self.uniform().ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and squared coefficient of variation of the gaps.
    fn gaps(moments: &[Duration]) -> (f64, f64) {
        let gaps: Vec<f64> = moments.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        (mean, variance / (mean * mean))
    }

    #[test]
    fn gaps_have_the_mean_and_spread_of_their_distribution() {
        for burstiness in [0.25, 0.5, 1.0, 4.0, 100.0] {
            let moments = moments(40_000, 20.0, burstiness, 7);
            assert!(moments.is_sorted());
            let (mean, variation) = gaps(&moments);
            assert!((mean * 20.0 - 1.0).abs() < 1e-3, "{burstiness}: {mean}");
            // Of a gamma distribution it is 1 / shape.
            assert!((variation * burstiness - 1.0).abs() < 0.06, "{burstiness}: {variation}");
        }
    }

    #[test]
    fn the_rate_is_kept_by_every_seed() {
        for seed in 0..20 {
            let last = moments(50, 8.0, 1.0, seed)[49].as_secs_f64();
            assert!((last - 50.0 / 8.0).abs() < 1e-9, "{last}");
        }
        assert_ne!(moments(50, 8.0, 1.0, 1), moments(50, 8.0, 1.0, 2));
        assert_eq!(moments(50, 8.0, 1.0, 1), moments(50, 8.0, 1.0, 1));
    }

    #[test]
    fn without_chance() {
        assert_eq!(moments(3, f64::INFINITY, 1.0, 0), [Duration::ZERO; 3]);
        let clock = moments(3, 4.0, f64::INFINITY, 0);
        assert_eq!(clock, [250, 500, 750].map(Duration::from_millis));
        assert!(moments(0, 4.0, 1.0, 0).is_empty());
    }
}
