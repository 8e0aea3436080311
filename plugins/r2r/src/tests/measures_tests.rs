use crate::measures::{digamma, uncertainty};

#[test]
fn digamma_has_its_known_values() {
    // Abramowitz and Stegun, 6.3 and table 6.1; the last two by the recurrence from ψ(1/2).
    let known = [
        (1.0, -0.577_215_664_901_532_9),
        (2.0, 0.422_784_335_098_467_1),
        (0.5, -1.963_510_026_021_423_5),
        (1.5, 0.036_489_973_978_576_52),
        (0.25, -4.227_453_533_376_265),
        (10.0, 2.251_752_589_066_721),
        (100.0, 4.600_161_852_738_087),
        (-0.5, 0.036_489_973_978_576_52),
        (-1.5, 0.703_156_640_645_243_2),
    ];
    for (x, value) in known {
        let got = digamma(x);
        assert!((got - value).abs() < 1e-14 * value.abs().max(1.0), "digamma({x}) = {got}, not {value}");
    }
    assert!(digamma(0.0).is_nan() && digamma(-3.0).is_nan() && digamma(f64::NAN).is_nan());
}

#[test]
fn digamma_keeps_its_recurrence() {
    for x in [0.1, 0.7, 3.3, 9.99, 10.01, 57.0, 1e4, -0.3, -7.6] {
        let error = digamma(x + 1.0) - digamma(x) - 1.0 / x;
        assert!(error.abs() < 1e-12, "{x}: {error}");
    }
}

/// For whole logits ψ(n + 1) - ψ(s + 1) is a difference of harmonic numbers.
#[test]
fn uncertainty_by_harmonic_numbers() {
    let harmonic = |n: u32| (1..=n).map(|i| 1.0 / f64::from(i)).sum::<f64>();
    let logits: Vec<u32> = (11..=20).rev().collect();
    let sum: u32 = logits.iter().sum();
    let expected: f64 = logits.iter().map(|&x| f64::from(x) / f64::from(sum) * (harmonic(sum) - harmonic(x))).sum();
    let (aleatoric, epistemic) = uncertainty(&logits.iter().map(|&x| x as f32).collect::<Vec<_>>());
    assert!((aleatoric - expected).abs() < 1e-12, "{aleatoric} {expected}");
    assert!((epistemic - 10.0 / (155.0 + 10.0)).abs() < 1e-15);
}

#[test]
fn uncertainty_without_a_value_is_nan() {
    assert!(uncertainty(&[0.0; 10]).0.is_nan());
    assert!(uncertainty(&[f32::NAN; 10]).0.is_nan());
    let mut cut = [5.0; 10];
    cut[9] = f32::NEG_INFINITY;
    assert!(uncertainty(&cut).0.is_nan());
}
