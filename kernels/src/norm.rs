//! Root-mean-square normalisation.

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

#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<PANEL>();
    let mut sums = [0.0f32; PANEL];
    for chunk in chunks {
        for (sum, v) in sums.iter_mut().zip(chunk) {
            *sum += v * v;
        }
    }
    for (sum, v) in sums.iter_mut().zip(rest) {
        *sum += v * v;
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
