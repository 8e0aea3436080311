//! Linear layers.

use crate::tile::{PANEL, by_width, dots, row_tiles, store};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// Multiply-adds below which a product is not shared between threads.
const PARALLEL_WORK: usize = 1 << 21;
/// Rows that are taken through all panels together, so that they stay in the cache.
const ROW_CHUNK: usize = 96;

/// A weight matrix `[outputs, inputs]`, stored in panels of 16 outputs: `[outputs / 16][inputs][16]`.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    data: Vec<[f32; PANEL]>,
    outputs: usize,
    inputs: usize,
}

impl PackedMatrix {
    /// A matrix of zeros.
    pub fn zeros(outputs: usize, inputs: usize) -> Self {
        Self { data: vec![[0.0; PANEL]; outputs.div_ceil(PANEL) * inputs], outputs, inputs }
    }

    /// A matrix from its rows, one an output.
    pub fn from_rows(inputs: usize, rows: &[f32]) -> Self {
        let mut matrix = Self::zeros(rows.len() / inputs, inputs);
        matrix.set_rows(0, rows);
        matrix
    }

    /// Append outputs of zeros.
    pub fn grow(&mut self, outputs: usize) {
        self.outputs += outputs;
        self.data.resize(self.outputs.div_ceil(PANEL) * self.inputs, [0.0; PANEL]);
    }

    /// Overwrite the weights of outputs `first..`, as many as `rows` holds.
    pub fn set_rows(&mut self, first: usize, rows: &[f32]) {
        assert!(first * self.inputs + rows.len() <= self.outputs * self.inputs, "rows beyond the matrix");
        for (i, row) in rows.chunks_exact(self.inputs).enumerate() {
            let output = first + i;
            let panel = &mut self.data[output / PANEL * self.inputs..][..self.inputs];
            for (cell, &value) in panel.iter_mut().zip(row) {
                cell[output % PANEL] = value;
            }
        }
    }

    /// Copy the weights of one output.
    pub fn copy_row(&self, output: usize, to: &mut [f32]) {
        assert!(output < self.outputs, "row {output} of {}", self.outputs);
        let panel = &self.data[output / PANEL * self.inputs..][..self.inputs];
        for (value, cell) in to.iter_mut().zip(panel) {
            *value = cell[output % PANEL];
        }
    }

    /// Width of the result.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Width of the argument.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.data.len() * PANEL * size_of::<f32>()
    }
}

/// `y[r] = w · x[r]` for all rows of `x`. `scratch` is working memory.
pub fn linear(w: &PackedMatrix, x: &[f32], y: &mut [f32], scratch: &mut Vec<[f32; PANEL]>) {
    let rows = x.len() / w.inputs;
    assert!(x.len() == rows * w.inputs && y.len() == rows * w.outputs, "shapes of a linear layer");
    let panels = w.outputs.div_ceil(PANEL);
    if rows == 0 {
        return;
    }
    scratch.resize(panels * rows, [0.0; PANEL]);
    let arch = Arch::new();
    let threads = rayon::current_num_threads();
    if threads > 1 && panels > 1 && rows * w.inputs * w.outputs >= PARALLEL_WORK {
        let each = panels.div_ceil(threads * 4).next_multiple_of(4);
        scratch
            .par_chunks_mut(each * rows)
            .zip(w.data.par_chunks(each * w.inputs))
            .for_each(|(out, w_part)| arch.dispatch(Panels { w: w_part, inputs: w.inputs, x, rows, out }));
    } else {
        arch.dispatch(Panels { w: &w.data, inputs: w.inputs, x, rows, out: scratch });
    }
    for (r, row) in y.chunks_exact_mut(w.outputs).enumerate() {
        for (p, part) in row.chunks_mut(PANEL).enumerate() {
            part.copy_from_slice(&scratch[p * rows + r][..part.len()]);
        }
    }
}

/// The product of all rows with consecutive panels; `out` is `[panel][row]`.
struct Panels<'a> {
    w: &'a [[f32; PANEL]],
    inputs: usize,
    x: &'a [f32],
    rows: usize,
    out: &'a mut [[f32; PANEL]],
}

impl WithSimd for Panels<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Panels { w, inputs, x, rows, out } = self;
        let panels = w.len() / inputs;
        match rows {
            1 => {
                let wide = panels / 4 * 4;
                for p in (0..wide).step_by(4) {
                    by_width!(S, tile::<1, 4>(simd, inputs, x, w, rows, out, 0, p));
                }
                for p in wide..panels {
                    by_width!(S, tile::<1, 1>(simd, inputs, x, w, rows, out, 0, p));
                }
            }
            2 => {
                let wide = panels / 2 * 2;
                for p in (0..wide).step_by(2) {
                    by_width!(S, tile::<2, 2>(simd, inputs, x, w, rows, out, 0, p));
                }
                for p in wide..panels {
                    by_width!(S, tile::<2, 1>(simd, inputs, x, w, rows, out, 0, p));
                }
            }
            _ => {
                for chunk in (0..rows).step_by(ROW_CHUNK) {
                    let in_chunk = (rows - chunk).min(ROW_CHUNK);
                    for p in 0..panels {
                        for range in row_tiles(in_chunk) {
                            let row = chunk + range.start;
                            match range.len() {
                                1 => by_width!(S, tile::<1, 1>(simd, inputs, x, w, rows, out, row, p)),
                                2 => by_width!(S, tile::<2, 1>(simd, inputs, x, w, rows, out, row, p)),
                                3 => by_width!(S, tile::<3, 1>(simd, inputs, x, w, rows, out, row, p)),
                                4 => by_width!(S, tile::<4, 1>(simd, inputs, x, w, rows, out, row, p)),
                                5 => by_width!(S, tile::<5, 1>(simd, inputs, x, w, rows, out, row, p)),
                                _ => by_width!(S, tile::<6, 1>(simd, inputs, x, w, rows, out, row, p)),
                            }
                        }
                    }
                }
            }
        }
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn tile<S: Simd, const N: usize, const R: usize, const P: usize>(
    simd: S,
    inputs: usize,
    x: &[f32],
    w: &[[f32; PANEL]],
    rows: usize,
    out: &mut [[f32; PANEL]],
    row: usize,
    panel: usize,
) {
    let xs: [&[f32]; R] = std::array::from_fn(|r| &x[(row + r) * inputs..][..inputs]);
    let ws: [&[[f32; PANEL]]; P] = std::array::from_fn(|p| &w[(panel + p) * inputs..][..inputs]);
    let sums = dots::<S, N, R, P>(simd, xs, ws);
    for (r, panels) in sums.iter().enumerate() {
        for (p, sum) in panels.iter().enumerate() {
            store::<S, N>(&mut out[(panel + p) * rows + row + r], sum);
        }
    }
}
