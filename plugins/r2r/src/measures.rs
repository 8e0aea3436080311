//! Uncertainty of the ten largest logits ("log-u"): the logits are taken as the evidence of a
//! Dirichlet distribution. Meant for positive logits, as large models have them.

/// How many of the largest logits are read.
pub const TOP: usize = 10;

/// Aleatoric and epistemic uncertainty of the largest logits: with `s` their sum,
/// `-Σ x/s (ψ(x + 1) - ψ(s + 1))` and `k / (s + k)`. NaN where that has no value.
pub fn uncertainty(largest: &[f32]) -> (f64, f64) {
    let sum: f64 = largest.iter().map(|&x| f64::from(x)).sum();
    let psi_of_sum = digamma(sum + 1.0);
    let term = |&x: &f32| f64::from(x) / sum * (digamma(f64::from(x) + 1.0) - psi_of_sum);
    let count = largest.len() as f64;
    (-largest.iter().map(term).sum::<f64>(), count / (sum + count))
}

/// The digamma function ψ, the derivative of ln Γ. NaN at its poles, which are 0, -1, -2, …
pub fn digamma(x: f64) -> f64 {
    if x <= 0.0 {
        if x == x.floor() {
            return f64::NAN;
        }
        // Reflection. tan has period π: reducing x first keeps its digits.
        let pi = std::f64::consts::PI;
        return digamma(1.0 - x) - pi / (pi * (x - x.round())).tan();
    }
    // ψ(x) = ψ(x + 1) - 1/x up to where the asymptotic series is good to the last digits.
    let (mut x, mut below) = (x, 0.0);
    while x < 10.0 {
        below += 1.0 / x;
        x += 1.0;
    }
    // ln x - 1/2x - Σ B(2k) / 2k x^2k
    const SERIES: [f64; 6] = [1.0 / 12.0, -1.0 / 120.0, 1.0 / 252.0, -1.0 / 240.0, 1.0 / 132.0, -691.0 / 32760.0];
    let inverse_square = 1.0 / (x * x);
    let series = SERIES.iter().rev().fold(0.0, |sum, term| (sum + term) * inverse_square);
    x.ln() - 0.5 / x - series - below
}
