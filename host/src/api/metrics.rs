//! GET /metrics/steps

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::http::json_response;
use super::state::AppState;
use crate::request::ModelId;
use crate::subserver::observed::Observed;

/// What the models' steps came to since the start, as `tokenrouter bench --json` writes a load, and what is chosen
/// from that.
pub async fn steps(State(state): State<Arc<AppState>>) -> Response {
    let engine = &state.engine;
    let names: Vec<&str> = engine.models().iter().map(|model| model.name.as_str()).collect();
    let observed: Vec<Observed> = (0..names.len()).map(|model| engine.observed(ModelId(model as u32))).collect();
    let mut batching = json!({
        "mode": "fixed",
        "models": names,
        "live_requests": engine.live_requests(),
        "min_batch": engine.thresholds(),
    });
    if let Some(status) = engine.tuning() {
        batching["mode"] = "online".into();
        batching["online"] = json!(status);
    }
    json_response(StatusCode::OK, &json!({"loads": [load(&names, &observed)], "batching": batching}))
}

fn load(names: &[&str], observed: &[Observed]) -> Value {
    let model = |(name, seen): (&&str, &Observed)| {
        let sizes = (1..).zip(&seen.sizes).filter(|(_, size)| size.steps > 0.0);
        let sizes: Vec<Value> = sizes
            .map(|(requests, size): (u32, _)| {
                let mean_ms = (size.alone + size.overlap) / size.steps;
                let overlap_ms = size.overlap / size.steps;
                json!({"requests": requests, "steps": size.steps as u64, "mean_ms": mean_ms, "overlap_ms": overlap_ms})
            })
            .collect();
        let steps = seen.sizes.iter().map(|size| size.steps).sum::<f64>() as u64 + seen.prompts;
        let prompts = json!({"steps": seen.prompts, "mean_ms": 1e3 * seen.prompt_time.as_secs_f64() / seen.prompts.max(1) as f64});
        json!({
            "name": name,
            "tokens": seen.committed,
            "steps": steps,
            "mean_batch": seen.batched as f64 / steps.max(1) as f64,
            "steps_by_batch": sizes,
            "prompt_steps": prompts,
        })
    };
    let stayed = |seen: &Observed| seen.evaluated.saturating_sub(seen.to.iter().sum::<u64>() + seen.finished);
    let transitions = observed.iter().enumerate().map(|(own, seen)| {
        let to = seen.to.iter().enumerate().map(|(to, count)| if to == own { stayed(seen) } else { *count });
        to.collect::<Vec<u64>>()
    });
    let entry = (0..observed.len()).rev().max_by_key(|model| observed[*model].begun);
    json!({
        "entry": entry,
        "begun": observed.iter().map(|seen| seen.begun).collect::<Vec<_>>(),
        "handoffs": observed.iter().flat_map(|seen| &seen.to).sum::<u64>(),
        "models": names.iter().zip(observed).map(model).collect::<Vec<_>>(),
        "transitions": transitions.collect::<Vec<_>>(),
        "last_steps": observed.iter().map(|seen| seen.finished).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokenrouter_batching::online::Steps;

    use super::*;

    #[test]
    fn sums_have_the_form_of_a_load() {
        let two = Steps { steps: 2.0, alone: 10.0, overlap: 4.0, ..Steps::default() };
        let small = Observed {
            sizes: vec![Steps::default(), two],
            prompts: 3,
            prompt_time: Duration::from_millis(60),
            to: vec![0, 4],
            begun: 2,
            batched: 10,
            evaluated: 9,
            committed: 5,
            finished: 1,
        };
        let large = Observed { to: vec![4, 0], evaluated: 4, ..Observed::default() };
        let by_batch = json!([{"requests": 2, "steps": 2, "mean_ms": 7.0, "overlap_ms": 2.0}]);
        let expected = json!({
            "entry": 0,
            "begun": [2, 0],
            "handoffs": 8,
            "models": [
                {
                    "name": "s", "tokens": 5, "steps": 5, "mean_batch": 2.0, "steps_by_batch": by_batch,
                    "prompt_steps": {"steps": 3, "mean_ms": 20.0},
                },
                {
                    "name": "l", "tokens": 0, "steps": 0, "mean_batch": 0.0, "steps_by_batch": [],
                    "prompt_steps": {"steps": 0, "mean_ms": 0.0},
                },
            ],
            "transitions": [[4, 4], [4, 0]],
            "last_steps": [1, 0],
        });
        assert_eq!(load(&["s", "l"], &[small, large]), expected);
    }
}
