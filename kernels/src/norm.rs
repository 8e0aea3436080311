//! Normalisation of rows.

use crate::tile::PANEL;
use pulp::Arch;

/// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight` for rows as wide as `weight`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "lengths of a norm");
    let width = weight.len();
    Arch::new().dispatch(|| {
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            let scale = 1.0 / (sum_of_squares(x) / width as f32 + eps).sqrt();
            for ((out, &x), &w) in out.iter_mut().zip(x).zip(weight) {
                *out = x * scale * w;
            }
        }
    });
}

/// [`rms_norm`] that overwrites its argument.
pub fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let width = weight.len();
    Arch::new().dispatch(|| {
        for x in x.chunks_exact_mut(width) {
            let scale = 1.0 / (sum_of_squares(x) / width as f32 + eps).sqrt();
            for (x, &w) in x.iter_mut().zip(weight) {
                *x = *x * scale * w;
            }
        }
    });
}

/// `out[r] = (x[r] - mean) / sqrt(variance + eps) * weight + bias` for rows as wide as `weight`.
pub fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == out.len() && weight.len() == bias.len(), "lengths of a norm");
    let width = weight.len();
    Arch::new().dispatch(|| {
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            let mean = sum(x) / width as f32;
            out.iter_mut().zip(x).for_each(|(out, &x)| *out = x - mean);
            let scale = 1.0 / (sum_of_squares(out) / width as f32 + eps).sqrt();
            for ((out, &w), &b) in out.iter_mut().zip(weight).zip(bias) {
                *out = *out * scale * w + b;
            }
        }
    });
}

#[inline(always)]
fn sum(x: &[f32]) -> f32 {
    sum_by(x, |v| v)
}

#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    sum_by(x, |v| v * v)
}

/// The sum of `of` over a row, always in the same order.
#[inline(always)]
fn sum_by(x: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let (chunks, rest) = x.as_chunks::<PANEL>();
    let mut sums = [0.0f32; PANEL];
    for chunk in chunks {
        for (sum, &v) in sums.iter_mut().zip(chunk) {
            *sum += of(v);
        }
    }
    for (sum, &v) in sums.iter_mut().zip(rest) {
        *sum += of(v);
    }
    fold(sums)
}

/// The sum of 16 numbers, by halves.
#[inline(always)]
pub(crate) fn fold(mut sums: [f32; PANEL]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::layer_norm;

    #[test]
    fn layer_norm_centres_and_scales_each_row() {
        let x: Vec<f32> = (0..2 * 37).map(|i| ((i * 31 % 17) as f32 - 5.0) * 0.7).collect();
        let weight: Vec<f32> = (0..37).map(|i| 1.0 + i as f32 * 0.01).collect();
        let bias: Vec<f32> = (0..37).map(|i| i as f32 * 0.1).collect();
        let mut out = vec![0.0; x.len()];
        layer_norm(&x, &weight, &bias, 1e-5, &mut out);
        for (x, out) in x.chunks(37).zip(out.chunks(37)) {
            let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / 37.0;
            let variance = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / 37.0;
            for i in 0..37 {
                let want =
                    (f64::from(x[i]) - mean) / (variance + 1e-5).sqrt() * f64::from(weight[i]) + f64::from(bias[i]);
                assert!((f64::from(out[i]) - want).abs() < 1e-5, "{} is not {want}", out[i]);
            }
        }
    }
}
