//! Statistics of the softmax of one row of logits, in two passes over it.

use crate::exp::exp;
use crate::norm::fold;
use crate::tile::PANEL;
use pulp::Arch;

/// Elements whose sum is kept in f32 before it is added to a sum in f64.
const BLOCK: usize = 64 * PANEL;

/// What a row of logits says. `-inf` is a token that cannot occur.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distribution {
    /// The largest logit.
    pub max: f32,
    /// Its index, the lowest if several are equal.
    pub argmax: usize,
    /// The largest of the others; `-inf` if there is none.
    pub second: f32,
    /// Logarithm of the sum of exponentials.
    pub log_sum_exp: f32,
    /// In nats.
    pub entropy: f32,
}

impl Distribution {
    /// `None` when a logit is NaN or +inf, or when none is above -inf.
    pub fn of(logits: &[f32]) -> Option<Self> {
        Arch::new().dispatch(|| {
            let (max, second) = largest(logits)?;
            if max == f32::NEG_INFINITY {
                return None;
            }
            let is_max = |v: &f32| *v == max;
            let chunk = logits.chunks(PANEL).position(|chunk| chunk.iter().fold(false, |any, v| any | is_max(v)))?;
            let argmax = chunk * PANEL + logits[chunk * PANEL..].iter().position(is_max)?;
            let (mut sum, mut weighted) = (0.0f64, 0.0f64);
            for block in logits.chunks(BLOCK) {
                let (s, w) = block_sums(block, max);
                sum += f64::from(s);
                weighted += f64::from(w);
            }
            Some(Self {
                max,
                argmax,
                second,
                log_sum_exp: (f64::from(max) + sum.ln()) as f32,
                entropy: (sum.ln() - weighted / sum).max(0.0) as f32,
            })
        })
    }

    /// Natural logarithm of the probability of a token with this logit.
    pub fn log_prob(&self, logit: f32) -> f32 {
        logit - self.log_sum_exp
    }
}

/// The two largest values, `-inf` for none; `None` when one is NaN or +inf.
#[inline(always)]
fn largest(logits: &[f32]) -> Option<(f32, f32)> {
    let (chunks, rest) = logits.as_chunks::<PANEL>();
    let (mut first, mut second) = ([f32::NEG_INFINITY; PANEL], [f32::NEG_INFINITY; PANEL]);
    let mut bad = [0u32; PANEL];
    let each = |first: &mut f32, second: &mut f32, bad: &mut u32, v: f32| {
        let loser = if v > *first { *first } else { v };
        *second = if loser > *second { loser } else { *second };
        *first = if v > *first { v } else { *first };
        *bad |= u32::from(v.is_nan() | (v == f32::INFINITY));
    };
    for chunk in chunks {
        for l in 0..PANEL {
            each(&mut first[l], &mut second[l], &mut bad[l], chunk[l]);
        }
    }
    for (l, &v) in rest.iter().enumerate() {
        each(&mut first[l], &mut second[l], &mut bad[l], v);
    }
    if bad.iter().any(|&b| b != 0) {
        return None;
    }
    let mut best = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for v in first.into_iter().chain(second) {
        best = if v > best.0 { (v, best.0) } else { (best.0, best.1.max(v)) };
    }
    Some(best)
}

/// Sums of `e^t` and `t * e^t` with `t = logit - max`.
#[inline(always)]
fn block_sums(block: &[f32], max: f32) -> (f32, f32) {
    let (chunks, rest) = block.as_chunks::<PANEL>();
    let (mut sums, mut weighted) = ([0.0; PANEL], [0.0; PANEL]);
    let each = |sum: &mut f32, weighted: &mut f32, v: f32| {
        let t = v - max;
        let e = exp(t);
        *sum += e;
        *weighted += if e > 0.0 { t * e } else { 0.0 };
    };
    for chunk in chunks {
        for l in 0..PANEL {
            each(&mut sums[l], &mut weighted[l], chunk[l]);
        }
    }
    for (l, &v) in rest.iter().enumerate() {
        each(&mut sums[l], &mut weighted[l], v);
    }
    (fold(sums), fold(weighted))
}

/// `out = exp((logit - max) * scale)`.
pub fn weights(logits: &[f32], max: f32, scale: f32, out: &mut Vec<f32>) {
    out.clear();
    out.resize(logits.len(), 0.0);
    Arch::new().dispatch(|| {
        for (out, &v) in out.iter_mut().zip(logits) {
            *out = exp((v - max) * scale);
        }
    });
}

/// The first index at which the running sum of `weights` exceeds the part `uniform` of their total, so
/// that an index is picked with a probability proportional to its weight; never one of weight 0.
/// `None` when the total is 0 or not finite.
pub fn pick(weights: &[f32], uniform: f64) -> Option<usize> {
    let sum = |block: &[f32]| block.iter().map(|&w| f64::from(w)).sum::<f64>();
    let sums: Vec<f64> = weights.chunks(BLOCK).map(sum).collect();
    let total: f64 = sums.iter().sum();
    if !(total > 0.0 && total.is_finite()) {
        return None;
    }
    let mut left = uniform * total;
    let mut last = None;
    for (b, (block, sum)) in weights.chunks(BLOCK).zip(sums).enumerate() {
        if left >= sum && b * BLOCK + block.len() < weights.len() {
            left -= sum;
            last = block.iter().rposition(|&w| w > 0.0).map(|i| b * BLOCK + i).or(last);
            continue;
        }
        for (i, &w) in block.iter().enumerate() {
            if w > 0.0 {
                last = Some(b * BLOCK + i);
                if left < f64::from(w) {
                    return last;
                }
                left -= f64::from(w);
            }
        }
    }
    last
}
