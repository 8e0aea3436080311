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

/// `1 / (1 + e^-x)` of every element.
pub fn sigmoid(x: &mut [f32]) {
    Arch::new().dispatch(|| x.iter_mut().for_each(|x| *x = logistic(*x)));
}

/// `x * sigmoid(x)` of every element.
pub fn silu(x: &mut [f32]) {
    Arch::new().dispatch(|| x.iter_mut().for_each(|x| *x *= logistic(*x)));
}

/// `max(x, 0)` of every element; NaN stays.
pub fn relu(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x });
}

/// Hyperbolic tangent of every element.
pub fn tanh(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = x.tanh());
}

/// `x * Φ(x)` of every element, with the normal distribution function itself, not its tanh approximation.
pub fn gelu(x: &mut [f32]) {
    Arch::new().dispatch(|| {
        x.iter_mut().for_each(|x| *x *= 0.5 * (1.0 + erf(*x * std::f32::consts::FRAC_1_SQRT_2)));
    });
}

#[inline(always)]
fn logistic(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The error function to 1.5e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
#[inline(always)]
fn erf(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let mut p = 1.061_405_4;
    p = p * t - 1.453_152_1;
    p = p * t + 1.421_413_8;
    p = p * t - 0.284_496_72;
    p = p * t + 0.254_829_6;
    (1.0 - p * t * exp(-x * x)).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(apply: fn(&mut [f32]), want: fn(f64) -> f64, tolerance: f64) {
        let arguments: Vec<f32> = (-1200..=1200).map(|i| i as f32 * 0.01).collect();
        let mut values = arguments.clone();
        apply(&mut values);
        for (x, value) in arguments.iter().zip(values) {
            let want = want(f64::from(*x));
            assert!((f64::from(value) - want).abs() <= tolerance * (1.0 + want.abs()), "at {x}: {value}, not {want}");
        }
    }

    /// The error function by its series, and 1 where the series has converged to it.
    fn erf_series(x: f64) -> f64 {
        if x.abs() > 5.0 {
            return x.signum();
        }
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    }

    #[test]
    fn functions_agree_with_their_definitions() {
        assert_close(sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 1e-6);
        assert_close(silu, |x| x / (1.0 + (-x).exp()), 1e-6);
        assert_close(relu, |x| x.max(0.0), 0.0);
        let mut none = [f32::NAN];
        relu(&mut none);
        assert!(none[0].is_nan(), "no signal must stay none");
        assert_close(tanh, f64::tanh, 1e-6);
        assert_close(gelu, |x| x * 0.5 * (1.0 + erf_series(x / std::f64::consts::SQRT_2)), 1e-6);
    }
}
