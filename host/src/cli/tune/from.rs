//! Step times and routes from the JSON of `tokenrouter bench`. Pure.

use std::collections::BTreeMap;

use serde::Deserialize;
use tokenrouter_batching::system::interpolate;
use tokenrouter_batching::{Model, System};

/// What is read of it; there is more.
#[derive(Debug, Deserialize)]
struct Bench {
    #[serde(default)]
    loads: Vec<Load>,
}

#[derive(Debug, Deserialize)]
struct Load {
    handoffs: u64,
    models: Vec<Loaded>,
}

#[derive(Debug, Deserialize)]
struct Loaded {
    name: String,
    tokens: u64,
    steps: u64,
    mean_batch: f64,
    #[serde(default)]
    steps_by_batch: Vec<ByBatch>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct ByBatch {
    requests: u32,
    p50_ms: f64,
    steps: u64,
}

/// What was measured.
#[derive(Debug, PartialEq)]
pub struct Measured {
    pub models: Vec<Model>,
    /// With two models: how probably a step of each hands over.
    pub handoffs: Option<[f64; 2]>,
    /// By model: tokens that a step writes for each request.
    pub tokens: Vec<f64>,
}

/// From the JSON of a load on a route. Errors are one line, without the file's name.
pub fn measured(text: &str) -> Result<Measured, String> {
    let bench: Bench = serde_json::from_str(text).map_err(|e| format!("is not the JSON of tokenrouter bench: {e}"))?;
    let Some(first) = bench.loads.first() else {
        return Err("loads: there are none; give the JSON of `tokenrouter bench CONFIG --route …`".into());
    };
    let mut models = Vec::new();
    for (index, model) in first.models.iter().enumerate() {
        let all = bench.loads.iter().filter_map(|load| load.models.get(index)).flat_map(|model| &model.steps_by_batch);
        let step_ms = by_batch(all.copied());
        if step_ms.is_empty() {
            return Err(format!("loads: {} has no steps_by_batch: it ran no step, or bench is too old", model.name));
        }
        models.push(Model::new(model.name.clone(), step_ms));
    }
    let ends = |model: usize| -> f64 {
        let models = bench.loads.iter().filter_map(|load| load.models.get(model));
        models.map(|model| model.steps as f64 * model.mean_batch).sum()
    };
    // Every request that leaves a model comes back to it, but for what its last visit leaves open.
    let each = bench.loads.iter().map(|load| load.handoffs).sum::<u64>() as f64 / 2.0;
    let handoffs = (models.len() == 2).then(|| [0, 1].map(|model| (each / ends(model)).min(1.0)));
    let tokens = |model: usize| {
        let models = bench.loads.iter().filter_map(|load| load.models.get(model));
        models.map(|model| model.tokens).sum::<u64>() as f64 / ends(model)
    };
    let tokens = (0..models.len()).map(tokens).collect();
    Ok(Measured { models, handoffs, tokens })
}

impl Measured {
    /// Two models with the routes that were measured; none with more, for which hand-offs are not told apart.
    pub fn system(self) -> Option<System> {
        let [there, back] = self.handoffs?;
        Some(System {
            routing: vec![vec![1.0 - there, there], vec![back, 1.0 - back]],
            commits: self.tokens.iter().map(|&tokens| vec![tokens; 2]).collect(),
            models: self.models,
            sigma: Vec::new(),
            entry: 0,
        })
    }
}

/// Milliseconds for each batch size up to the largest one seen: the mean of the loads' medians, each counted as
/// often as it has steps.
fn by_batch(all: impl Iterator<Item = ByBatch>) -> Vec<f64> {
    let mut sums: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
    for step in all.filter(|step| step.requests > 0 && step.steps > 0) {
        let (sum, count) = sums.entry(step.requests as usize).or_default();
        *sum += step.p50_ms * step.steps as f64;
        *count += step.steps as f64;
    }
    let known: Vec<(usize, f64)> = sums.into_iter().map(|(batch, (sum, count))| (batch, sum / count)).collect();
    interpolate(&known)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_load_of_two_models() {
        let model = |name: &str, steps: u64, mean: f64, by: serde_json::Value| json!({"name": name, "tokens": steps, "steps": steps, "mean_batch": mean, "share": 0.5, "steps_by_batch": by});
        let by = |batch: u32, p50: f64, steps: u64| json!({"requests": batch, "p50_ms": p50, "steps": steps});
        let text = json!({"route": "r", "loads": [
            {"handoffs": 70, "requests": 1, "models": [
                model("s", 100, 1.0, json!([by(1, 6.0, 100)])), model("l", 35, 1.0, json!([by(2, 20.0, 35)])),
            ]},
            {"handoffs": 70, "requests": 2, "models": [
                model("s", 50, 2.0, json!([by(1, 8.0, 100), by(3, 9.0, 1)])), model("l", 35, 1.0, json!([by(4, 30.0, 1)])),
            ]},
        ]});
        let measured = measured(&text.to_string()).unwrap();
        assert_eq!(measured.models[0].step_ms, [7.0, 8.0, 9.0]);
        assert_eq!(measured.models[1].step_ms, [20.0, 20.0, 25.0, 30.0]);
        assert_eq!((measured.handoffs, &measured.tokens[..]), (Some([0.35, 1.0]), &[0.75, 1.0][..]));
        assert_eq!(measured.system().unwrap().routing, [[0.65, 0.35], [1.0, 0.0]]);
    }

    #[test]
    fn other_files_are_refused() {
        for (text, message) in [
            ("{", "is not the JSON of tokenrouter bench"),
            ("{\"steps\": []}", "there are none"),
            (
                r#"{"loads": [{"handoffs": 0, "models": [{"name": "a", "tokens": 0, "steps": 0, "mean_batch": 0}]}]}"#,
                "ran no step",
            ),
        ] {
            assert!(measured(text).unwrap_err().contains(message), "{text}");
        }
    }
}
