//! Every case of `data/dtmc.json`, in every field it gives.

#![allow(clippy::unwrap_used)] // Helpers of tests.

use serde_json::Value;
use tokenrouter_batching::case::Case;

/// `a` is within `tolerance` of `b`, relatively, and so are all entries of lists.
fn near(a: &Value, b: &Value, tolerance: f64, what: &str) {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => {
            assert_eq!(a.len(), b.len(), "{what}");
            a.iter().zip(b).for_each(|(a, b)| near(a, b, tolerance, what));
        }
        _ => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() <= tolerance * b.abs(), "{what}: {a} for {b}");
        }
    }
}

/// "numerator/denominator" of whole numbers below 1e308.
fn fraction(text: &str) -> f64 {
    let (numerator, denominator) = text.split_once('/').unwrap();
    numerator.parse::<f64>().unwrap() / denominator.parse::<f64>().unwrap()
}

#[test]
fn all_cases() {
    let text = include_str!("data/dtmc.json");
    let file: Value = serde_json::from_str(text).unwrap();
    let cases = file["cases"].as_array().unwrap();
    let mut seen = [0; 3];
    for given in cases {
        let id = given["id"].as_str().unwrap();
        let case: Case = serde_json::from_value(given.clone()).unwrap();
        let answer = serde_json::to_value(case.answer(2).unwrap_or_else(|e| panic!("{id}: {e}"))).unwrap();
        let field = |name: &str, tolerance: f64| near(&answer[name], &given[name], tolerance, &format!("{id} {name}"));
        assert_eq!((&answer["B"], &answer["kind"], &answer["N"]), (&given["B"], &given["kind"], &given["N"]), "{id}");
        match given["kind"].as_str().unwrap() {
            "eval" => {
                seen[0] += 1;
                field("throughput_tok_per_s", 1e-9);
                field("step_rate_per_s", 1e-9);
                field("mean_batch", 1e-9);
                assert_eq!(answer["states"], given["states"], "{id}");
                if let Some(exact) = given["throughput_exact_tok_per_grain"].as_str() {
                    let grains = 1e3 / given["delta_ms"].as_f64().unwrap();
                    let exact = Value::from(fraction(exact) * grains);
                    near(&answer["throughput_tok_per_s"], &exact, 1e-11, &format!("{id} exact"));
                }
            }
            "argmax" => {
                seen[1] += 1;
                field("throughput_tok_per_s", 1e-9);
                // Given to four digits.
                field("margin_to_second", 5e-4);
                assert_eq!(answer["feasible_B"], given["feasible_B"], "{id}");
            }
            "infeasible" => {
                seen[2] += 1;
                assert_eq!(answer["reason"], given["reason"], "{id}");
            }
            other => panic!("{id}: {other}"),
        }
    }
    assert_eq!(seen, [44, 8, 2]);
}
