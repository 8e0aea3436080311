//! The register tile under all matrix products: dot products of `R` rows with `P` panels of
//! [`PANEL`] outputs.
//!
//! One output element is summed in ascending order of the inner index by fused multiply-adds, in
//! blocks of [`BLOCK`] whose sums are added up in order. `R`, `P` and the width of the SIMD registers
//! choose which elements are computed together, never how one is computed.

use pulp::Simd;

/// Outputs side by side in memory.
pub(crate) const PANEL: usize = 16;
/// Length of a partial sum. Shorter sums lose less to rounding.
const BLOCK: usize = 256;

/// Sums of a tile: `N` registers are a panel.
pub(crate) type Sums<F, const N: usize, const R: usize, const P: usize> = [[[F; N]; P]; R];

/// `x[r] · w[p]` for inner lengths that all rows and panels share.
#[inline(always)]
pub(crate) fn dots<S: Simd, const N: usize, const R: usize, const P: usize>(
    simd: S,
    x: [&[f32]; R],
    w: [&[[f32; PANEL]]; P],
) -> Sums<S::f32s, N, R, P> {
    let len = x[0].len();
    let mut total = [[[simd.splat_f32s(0.0); N]; P]; R];
    let mut start = 0;
    while start < len {
        let end = (start + BLOCK).min(len);
        let part = block::<S, N, R, P>(simd, end - start, x.map(|r| &r[start..end]), w.map(|p| &p[start..end]));
        accumulate(simd, &mut total, &part);
        start = end;
    }
    total
}

/// `total += part`, element by element.
#[inline(always)]
pub(crate) fn accumulate<S: Simd, const N: usize, const R: usize, const P: usize>(
    simd: S,
    total: &mut Sums<S::f32s, N, R, P>,
    part: &Sums<S::f32s, N, R, P>,
) {
    for r in 0..R {
        for p in 0..P {
            for n in 0..N {
                total[r][p][n] = simd.add_f32s(total[r][p][n], part[r][p][n]);
            }
        }
    }
}

#[inline(always)]
fn block<S: Simd, const N: usize, const R: usize, const P: usize>(
    simd: S,
    len: usize,
    x: [&[f32]; R],
    w: [&[[f32; PANEL]]; P],
) -> Sums<S::f32s, N, R, P> {
    let x = x.map(|r| &r[..len]);
    let w = w.map(|p| &p[..len]);
    let mut sums = [[[simd.splat_f32s(0.0); N]; P]; R];
    for k in 0..len {
        for r in 0..R {
            let factor = simd.splat_f32s(x[r][k]);
            for p in 0..P {
                let (registers, _) = S::as_simd_f32s(&w[p][k]);
                for n in 0..N {
                    sums[r][p][n] = simd.mul_add_e_f32s(factor, registers[n], sums[r][p][n]);
                }
            }
        }
    }
    sums
}

/// Store a panel.
#[inline(always)]
pub(crate) fn store<S: Simd, const N: usize>(out: &mut [f32; PANEL], panel: &[S::f32s; N]) {
    let (registers, _) = S::as_mut_simd_f32s(out);
    registers[..N].copy_from_slice(panel);
}

/// Call `$f::<S, N, R, P>` with the `N` of the SIMD level.
macro_rules! by_width {
    ($simd:ty, $call:ident :: < $($rest:tt),* > ( $($arg:expr),* )) => {
        match <$simd as pulp::Simd>::F32_LANES {
            16 => $call::<$simd, 1, $($rest),*>($($arg),*),
            8 => $call::<$simd, 2, $($rest),*>($($arg),*),
            4 => $call::<$simd, 4, $($rest),*>($($arg),*),
            _ => $call::<$simd, 16, $($rest),*>($($arg),*),
        }
    };
}
pub(crate) use by_width;

/// Rows of a tile at most: with two registers a panel this fills sixteen registers.
pub(crate) const MAX_ROWS: usize = 6;

/// The sizes (at most [`MAX_ROWS`], as even as possible) in which `rows` rows are tiled.
pub(crate) fn row_tiles(rows: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let tiles = rows.div_ceil(MAX_ROWS).max(1);
    (0..tiles).map(move |t| t * rows / tiles..(t + 1) * rows / tiles)
}
