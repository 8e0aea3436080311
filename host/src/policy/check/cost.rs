//! What a decision costs.

use std::time::Instant;

use serde_json::json;
use tokenrouter_plugin_api::{Decision, ModelIndex};

use super::rows::{Row, Rows, Signals};
use super::{Finding, Setup};

/// Numbers of rows.
const SIZES: [usize; 3] = [1, 16, 256];
/// Most nanoseconds of a call with up to 16 rows that go unnoticed beside a step.
const LARGEST_NS: f64 = 1000.0;
/// Calls timed together, and how often: the fastest round is what the policy takes, the others what else ran.
const CALLS: u32 = 200;
const ROUNDS: usize = 15;

pub fn cost(setup: &Setup<'_>) -> Finding {
    match measure(setup) {
        Ok(by_model) => judge(setup, &by_model),
        Err(error) => Finding::failed(error, super::checks::BUG),
    }
}

/// Nanoseconds a call, by model and number of rows.
fn measure(setup: &Setup<'_>) -> Result<Vec<[f64; 3]>, String> {
    let mut team = setup.team().map_err(|e| e.to_string())?;
    let mut by_model = Vec::new();
    for (model, instance) in team.iter_mut().enumerate() {
        let mut times = [f64::INFINITY; 3];
        for (size, time) in SIZES.into_iter().zip(&mut times) {
            let rows: Vec<Row> = (0..size).map(Row::first).collect();
            let columns = Rows::new(&rows, model as ModelIndex, instance.requirements(), Signals::Plain);
            let mut out = vec![Decision::STAY; size];
            for _ in 0..ROUNDS {
                let start = Instant::now();
                for _ in 0..CALLS {
                    out.fill(Decision::STAY);
                    instance.route(&columns.batch(), &mut out).map_err(|e| e.to_string())?;
                }
                *time = time.min(start.elapsed().as_nanos() as f64 / f64::from(CALLS));
            }
        }
        by_model.push(times);
    }
    Ok(by_model)
}

fn judge(setup: &Setup<'_>, by_model: &[[f64; 3]]) -> Finding {
    let largest = |at: usize| by_model.iter().map(|times| times[at]).fold(0.0, f64::max);
    let [one, some, all] = [largest(0), largest(1), largest(2)];
    let what = format!("{one:.0} ns a call for 1 row, {some:.0} for 16, {all:.0} for 256 (the slowest model)");
    let finding = if one.max(some) > LARGEST_NS {
        // The calls of a debug build are slow themselves, and so is what it makes of modules.
        let remedy = if cfg!(debug_assertions) {
            "More than 1 µs a call for up to 16 rows, but this tokenrouter is a debug build: measure with a release build."
        } else {
            "More than 1 µs a call for up to 16 rows. Build with --release; allocate and search nothing in route."
        };
        Finding::warning(what, remedy)
    } else {
        Finding::ok(what)
    };
    let named = setup.models.iter().zip(by_model);
    let numbers = named.map(|(m, times)| json!({ "model": m.name, "rows": SIZES, "ns_per_call": times })).collect();
    Finding { numbers: Some(numbers), ..finding }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Linked;
    use crate::policy::check::checks::tests::Fickle;
    use crate::policy::check::{Status, parse_roles};

    #[test]
    fn slow_for_few_rows_is_a_warning() {
        let (models, settings) = (parse_roles("a,b").unwrap(), json!({}));
        let setup = Setup { factory: &Linked::<Fickle>::default(), models: &models, settings: &settings };
        let status = |times: [f64; 3]| judge(&setup, &[[1.0; 3], times]).status;
        assert_eq!(status([900.0, 1000.0, 90_000.0]), Status::Ok);
        assert_eq!(status([10.0, 1001.0, 2000.0]), Status::Warning);
        assert_eq!(status([1001.0, 10.0, 2000.0]), Status::Warning);
        assert!(judge(&setup, &[[1.0, 2.0, 3.0]; 2]).what.starts_with("1 ns a call for 1 row, 2 for 16, 3 for 256"));
    }
}
