//! Step times and routes from the JSON of `tokenrouter bench`, or of a server. Pure.

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
    /// Where requests begin: the first model if it is not said.
    entry: Option<usize>,
    handoffs: u64,
    models: Vec<Loaded>,
    /// `[from][to]`: steps, and the tokens that they committed. Servers do not tell the second.
    transitions: Option<Vec<Vec<u64>>>,
    commits: Option<Vec<Vec<u64>>>,
    /// Steps that were their requests' last.
    last_steps: Option<Vec<u64>>,
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
    mean_ms: f64,
    steps: u64,
}

/// What was measured.
#[derive(Debug, PartialEq)]
pub struct Measured {
    pub models: Vec<Model>,
    /// Where steps lead, and what they write. `None`: it was not told apart for more than two models.
    routes: Option<Routes>,
}

#[derive(Debug, PartialEq)]
struct Routes {
    entry: usize,
    routing: Vec<Vec<f64>>,
    commits: Vec<Vec<f64>>,
}

/// From the JSON of a load on a route, or of a server. Errors are one line, without the file's name.
pub fn measured(text: &str) -> Result<Measured, String> {
    let bench: Bench = serde_json::from_str(text).map_err(|e| format!("is not the JSON of tokenrouter bench: {e}"))?;
    let Some(first) = bench.loads.first() else {
        return Err("loads: there are none; give the JSON of `tokenrouter bench CONFIG --route …`".into());
    };
    let of = |model: usize| bench.loads.iter().filter_map(move |load| load.models.get(model));
    // A server may have models that no request comes to.
    let members: Vec<usize> = (0..first.models.len()).filter(|&model| of(model).any(|m| m.steps > 0)).collect();
    if members.is_empty() {
        return Err("loads: no model ran a step; measure under load".into());
    }
    let mut models = Vec::new();
    for &index in &members {
        let (name, step_ms) = (&first.models[index].name, by_batch(of(index).flat_map(|model| &model.steps_by_batch)));
        if step_ms.is_empty() {
            return Err(format!("loads: {name} has no steps_by_batch: it computed prompts only, or bench is too old"));
        }
        models.push(Model::new(name.clone(), step_ms));
    }
    let routes = transitions(&bench.loads, &members).or_else(|| handoffs(&bench.loads, &members));
    Ok(Measured { models, routes })
}

impl Measured {
    /// With the routes that were measured.
    pub fn system(self) -> Option<System> {
        let Routes { entry, routing, commits } = self.routes?;
        Some(System { routing, commits, models: self.models, sigma: Vec::new(), entry })
    }
}

/// Requests in all steps of a model together.
fn ends(loads: &[Load], model: usize) -> f64 {
    let models = loads.iter().filter_map(|load| load.models.get(model));
    models.map(|model| model.steps as f64 * model.mean_batch).sum()
}

/// Tokens that a step of a model writes for each request.
fn gain(loads: &[Load], model: usize) -> f64 {
    let models = loads.iter().filter_map(|load| load.models.get(model));
    models.map(|model| model.tokens).sum::<u64>() as f64 / ends(loads, model)
}

/// Where every load tells transitions: from them. Where requests end, others begin.
fn transitions(loads: &[Load], members: &[usize]) -> Option<Routes> {
    let entry = loads.first()?.entry.unwrap_or(0);
    let entry = members.iter().position(|member| *member == entry)?;
    let sum = |of: &dyn Fn(&Load) -> Option<u64>| -> Option<f64> {
        loads.iter().map(of).sum::<Option<u64>>().map(|sum| sum as f64)
    };
    let cell = |cells: &Option<Vec<Vec<u64>>>, from: usize, to: usize| cells.as_ref()?.get(from)?.get(to).copied();
    let (mut routing, mut commits) = (Vec::new(), Vec::new());
    for &from in members {
        let steps = |&to: &usize| sum(&|load| cell(&load.transitions, from, to));
        let steps: Vec<f64> = members.iter().map(steps).collect::<Option<_>>()?;
        let tokens = |(place, &to): (usize, &usize)| match sum(&|load| cell(&load.commits, from, to)) {
            Some(tokens) if steps[place] > 0.0 => tokens / steps[place],
            Some(_) => 0.0,
            None => gain(loads, from),
        };
        commits.push(members.iter().enumerate().map(tokens).collect());
        let mut steps = steps;
        steps[entry] += sum(&|load| load.last_steps.as_ref()?.get(from).copied())?;
        let all: f64 = steps.iter().sum();
        routing.push(steps.into_iter().map(|steps| if all > 0.0 { steps / all } else { 0.0 }).collect());
    }
    Some(Routes { entry, routing, commits })
}

/// Two models: every request that leaves one comes back to it, but for what its last visit leaves open.
fn handoffs(loads: &[Load], members: &[usize]) -> Option<Routes> {
    let &[first, second] = members else { return None };
    let each = loads.iter().map(|load| load.handoffs).sum::<u64>() as f64 / 2.0;
    let [there, back] = [first, second].map(|model| (each / ends(loads, model)).min(1.0));
    let routing = vec![vec![1.0 - there, there], vec![back, 1.0 - back]];
    Some(Routes { entry: 0, routing, commits: [first, second].map(|model| vec![gain(loads, model); 2]).to_vec() })
}

/// Milliseconds for each batch size up to the largest one seen: the mean over the steps of all loads. A median would
/// leave out what a few long steps cost.
fn by_batch<'a>(all: impl Iterator<Item = &'a ByBatch>) -> Vec<f64> {
    let mut sums: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
    for step in all.filter(|step| step.requests > 0 && step.steps > 0) {
        let (sum, count) = sums.entry(step.requests as usize).or_default();
        *sum += step.mean_ms * step.steps as f64;
        *count += step.steps as f64;
    }
    let known: Vec<(usize, f64)> = sums.into_iter().map(|(batch, (sum, count))| (batch, sum / count)).collect();
    interpolate(&known)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn model(name: &str, steps: u64, mean: f64, by: Value) -> Value {
        json!({"name": name, "tokens": steps, "steps": steps, "mean_batch": mean, "share": 0.5, "steps_by_batch": by})
    }

    fn by(batch: u32, mean: f64, steps: u64) -> Value {
        json!({"requests": batch, "mean_ms": mean, "p50_ms": 1.0, "steps": steps})
    }

    #[test]
    fn a_load_of_two_models() {
        let text = json!({"route": "r", "loads": [
            {"handoffs": 70, "requests": 1, "models": [
                model("s", 100, 1.0, json!([by(1, 6.0, 100)])), model("l", 35, 1.0, json!([by(2, 20.0, 35)])),
            ]},
            {"handoffs": 70, "requests": 2, "models": [
                model("s", 50, 2.0, json!([by(1, 8.0, 100), by(3, 9.0, 1)])), model("l", 35, 1.0, json!([by(4, 30.0, 1)])),
            ]},
        ]});
        let system = measured(&text.to_string()).unwrap().system().unwrap();
        assert_eq!(system.models[0].step_ms, [7.0, 8.0, 9.0]);
        assert_eq!(system.models[1].step_ms, [20.0, 20.0, 25.0, 30.0]);
        assert_eq!((&system.routing[..], system.entry), (&[vec![0.65, 0.35], vec![1.0, 0.0]][..], 0));
        assert_eq!(system.commits, [[0.75, 0.75], [1.0, 1.0]]);
    }

    #[test]
    fn transitions_tell_the_routes_of_any_number_of_models() {
        let models = ["a", "idle", "b", "c"].map(|name| match name {
            "idle" => model(name, 0, 0.0, json!([])),
            _ => model(name, 10, 2.0, json!([by(2, 5.0, 10)])),
        });
        let mut load = json!({
            "handoffs": 9,
            "entry": 2,
            "models": models,
            "transitions": [[5, 0, 3, 2], [0, 0, 0, 0], [8, 0, 2, 0], [4, 0, 0, 0]],
            "last_steps": [0, 0, 0, 4],
        });
        let system = |load: &Value| measured(&json!({"loads": [load]}).to_string()).unwrap().system().unwrap();
        let told = system(&load);
        assert_eq!(told.routing, [[0.5, 0.3, 0.2], [0.8, 0.2, 0.0], [0.5, 0.5, 0.0]]);
        assert_eq!((told.entry, told.models[2].name.as_str(), &told.commits[2]), (1, "c", &vec![0.5; 3]));
        load["commits"] = json!([[5, 0, 0, 1], [0, 0, 0, 0], [8, 0, 6, 0], [4, 0, 0, 0]]);
        assert_eq!(system(&load).commits, [[1.0, 0.0, 0.5], [1.0, 3.0, 0.0], [1.0, 0.0, 0.0]]);
    }

    #[test]
    fn other_files_are_refused() {
        let only_prompts = json!({"loads": [{"handoffs": 0, "models": [model("a", 3, 1.0, json!([]))]}]}).to_string();
        for (text, message) in [
            ("{", "is not the JSON of tokenrouter bench"),
            ("{\"steps\": []}", "there are none"),
            (
                r#"{"loads": [{"handoffs": 0, "models": [{"name": "a", "tokens": 0, "steps": 0, "mean_batch": 0}]}]}"#,
                "no model ran a step",
            ),
            (&only_prompts, "it computed prompts only"),
        ] {
            assert!(measured(text).unwrap_err().contains(message), "{text}");
        }
    }
}
