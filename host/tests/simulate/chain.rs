//! The schedulers in virtual time against the exact Markov chain of delayed batching: `chain.json` has its
//! stationary throughput for models whose requests move by chance.

use std::time::Duration;

use rayon::prelude::*;
use serde::Deserialize;
use tokenrouter::subserver::gate::Schedule;

use super::{assert_close, assert_within, closed, model, ms, summary};

/// Names of the chain's description.
#[allow(non_snake_case)]
#[derive(Deserialize)]
struct Case {
    id: String,
    N: u32,
    B: Vec<u32>,
    /// By model and batch size; one number for all sizes.
    step_ms: Vec<Vec<f64>>,
    P: Vec<Vec<f64>>,
    C: Vec<Vec<f64>>,
    /// Stretch of all models while m of them run.
    sigma: Option<Vec<f64>>,
    /// The chain counts undisturbed work, the gate time: the two agree where nothing is stretched, and where
    /// the hold is longer than any step.
    hold_ms: Option<Vec<f64>>,
    tokens_per_second: f64,
    mean_batch: Vec<f64>,
}

#[test]
fn throughput_and_batches_are_those_of_the_chain() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("chain.json")).unwrap();
    assert!(cases.len() >= 30);
    cases.par_iter().for_each(|case| {
        let planned = (0..case.B.len()).map(|i| {
            let mut commit = case.C[i].clone();
            commit[i] = 1.0;
            assert!(case.P[i][i] == 0.0 || case.C[i][i] == 1.0, "{}", case.id);
            let mut planned = model(&case.step_ms[i], case.B[i], &case.P[i], &commit);
            planned.stretch = case.sigma.as_ref().map_or(Vec::new(), |sigma| sigma[2..].to_vec());
            planned.waiting.hold = case.hold_ms.as_ref().map_or(Duration::ZERO, |hold| ms(hold[i]));
            planned
        });
        let plan = closed(planned.collect(), case.N, Schedule::Delayed);
        assert_eq!(plan.check(), Ok(()), "{}", case.id);
        let summary = summary(&plan);
        println!("{}: {:+.3} %", case.id, 100.0 * (summary.steady_tokens_per_second / case.tokens_per_second - 1.0));
        assert_close(summary.steady_tokens_per_second, case.tokens_per_second, &case.id);
        for (model, batch) in summary.models.iter().zip(&case.mean_batch) {
            // The last requests run down to none.
            assert_within(0.05, model.mean_batch, *batch, &format!("{}: batch", case.id));
        }
    });
}
