//! Element by element.

use crate::exp::exp;
use pulp::Arch;

/// `x += y`.
pub fn add(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "lengths of a sum");
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Add `bias` to every row of `x`.
pub fn add_bias(x: &mut [f32], bias: &[f32]) {
    for row in x.chunks_exact_mut(bias.len()) {
        add(row, bias);
    }
}

/// `out = silu(gate) * up`, where each row of `gate_up` is a gate followed by an up of the same width.
pub fn silu_mul(gate_up: &[f32], width: usize, out: &mut [f32]) {
    assert_eq!(gate_up.len(), 2 * out.len(), "lengths of a gated product");
    Arch::new().dispatch(|| {
        for (row, out) in gate_up.chunks_exact(2 * width).zip(out.chunks_exact_mut(width)) {
            let (gate, up) = row.split_at(width);
            for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
                *out = g / (1.0 + exp(-g)) * u;
            }
        }
    });
}
