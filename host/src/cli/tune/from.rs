//! Step times and routes from the JSON of `tokenrouter bench`, or of a server. Pure.

use std::collections::BTreeMap;

use serde::Deserialize;
use tokenrouter_batching::connected::connected;
use tokenrouter_batching::system::interpolate;
use tokenrouter_batching::{Model, System};

/// Largest batch of a step that a configuration allows.
const LARGEST_BATCH: u32 = 1 << 16;

/// What is read of it; there is more.
#[derive(Debug, Deserialize)]
struct Bench {
    #[serde(default)]
    loads: Vec<Load>,
}

#[derive(Debug, Deserialize)]
struct Load {
    /// Where most requests begin: the first model if it is not said.
    entry: Option<usize>,
    /// By model: requests that began there. `None`: all at the entry.
    begun: Option<Vec<u64>>,
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
    /// Those whose step times are known.
    models: Vec<Model>,
    /// Where steps lead, and what they write. `None`: it was not told apart for more than two models.
    routes: Option<Routes>,
    /// One line for each model without step times.
    without_times: Vec<String>,
}

/// Among some of the models.
#[derive(Debug, PartialEq)]
struct Routes {
    members: Vec<usize>,
    entry: usize,
    routing: Vec<Vec<f64>>,
    commits: Vec<Vec<f64>>,
}

/// What is to be tuned, and a line for each model with steps that is not in it.
pub type WithNotes<T> = (T, Vec<String>);

/// From the JSON of a load on a route, or of a server. Errors are one line, without the file's name.
pub fn measured(text: &str) -> Result<Measured, String> {
    let bench: Bench = serde_json::from_str(text).map_err(|e| format!("is not the JSON of tokenrouter bench: {e}"))?;
    let Some(first) = bench.loads.first() else {
        return Err("loads: there are none; give the JSON of `tokenrouter bench CONFIG --route …`".into());
    };
    let of = |model: usize| bench.loads.iter().filter_map(move |load| load.models.get(model));
    let (mut timed, mut models, mut without_times) = (Vec::new(), Vec::new(), Vec::new());
    // A server may have models that no request comes to.
    for (index, Loaded { name, .. }) in first.models.iter().enumerate().filter(|(i, _)| of(*i).any(|m| m.steps > 0)) {
        let steps = || of(index).flat_map(|model| &model.steps_by_batch);
        if let Some(step) = steps().find(|step| step.requests > LARGEST_BATCH) {
            let requests = step.requests;
            return Err(format!(
                "loads: {name:?} has steps of {requests} requests; at most {LARGEST_BATCH} are possible, measure again"
            ));
        }
        let step_ms = by_batch(steps());
        if step_ms.is_empty() {
            without_times.push(format!("{name} has no steps_by_batch: it computed prompts only, or bench is too old"));
        } else {
            timed.push(index);
            models.push(Model::new(name.clone(), step_ms));
        }
    }
    if models.is_empty() {
        let message = without_times.into_iter().next();
        return Err(format!("loads: {}", message.unwrap_or("no model ran a step; measure under load".into())));
    }
    let routes = transitions(&bench.loads, &timed).or_else(|| handoffs(&bench.loads, &timed));
    Ok(Measured { models, routes, without_times })
}

impl Measured {
    /// All models whose step times are known, without routes.
    pub fn models(&self) -> WithNotes<Vec<Model>> {
        (self.models.clone(), self.without_times.clone())
    }

    /// With the routes that were measured, of the models among which requests go round.
    pub fn system(self) -> Option<WithNotes<System>> {
        let Routes { members, entry, routing, commits } = self.routes?;
        let (mut models, mut notes) = (Vec::new(), self.without_times);
        for (place, model) in self.models.into_iter().enumerate() {
            if members.contains(&place) {
                models.push(model);
            } else {
                notes.push(format!("no requests go round between {} and the others", model.name));
            }
        }
        Some((System { routing, commits, models, sigma: Vec::new(), entry }, notes))
    }
}

/// Requests in all steps of a model together.
fn ends(loads: &[Load], model: usize) -> f64 {
    let models = loads.iter().filter_map(|load| load.models.get(model));
    models.map(|model| model.steps as f64 * model.mean_batch).sum()
}

/// Tokens that a model wrote.
fn tokens(loads: &[Load], model: usize) -> f64 {
    loads.iter().filter_map(|load| load.models.get(model)).map(|model| model.tokens as f64).sum()
}

/// Where every load tells transitions: from them. Where requests end, others begin.
fn transitions(loads: &[Load], timed: &[usize]) -> Option<Routes> {
    let sum = |of: &dyn Fn(&Load) -> Option<u64>| -> Option<f64> {
        loads.iter().map(|load| of(load).map(|count| count as f64)).sum()
    };
    let cell = |cells: &Option<Vec<Vec<u64>>>, from: usize, to: usize| cells.as_ref()?.get(from)?.get(to).copied();
    let entry = loads.first()?.entry.unwrap_or(0);
    let count = loads.first()?.models.len();
    let begun = |model: usize| sum(&|load| load.begun.as_ref()?.get(model).copied());
    let begun: Option<Vec<f64>> = (0..count).map(begun).collect();
    let begun = begun.filter(|begun| begun.iter().any(|begun| *begun > 0.0));
    let begun = begun.unwrap_or_else(|| (0..count).map(|model| f64::from(u8::from(model == entry))).collect());
    let all_begun: f64 = begun.iter().sum();
    let (mut counts, mut commits) = (Vec::new(), Vec::new());
    for &from in timed {
        let steps = |to: usize| sum(&|load| cell(&load.transitions, from, to));
        let steps: Vec<f64> = (0..count).map(steps).collect::<Option<_>>()?;
        let last = sum(&|load| load.last_steps.as_ref()?.get(from).copied())?;
        let gain = tokens(loads, from) / (steps.iter().sum::<f64>() + last).max(1.0);
        let written = |&to: &usize| match sum(&|load| cell(&load.commits, from, to)) {
            Some(tokens) if steps[to] > 0.0 => tokens / steps[to],
            Some(_) => 0.0,
            None => gain,
        };
        commits.push(timed.iter().map(written).collect::<Vec<f64>>());
        let onward = |&to: &usize| steps[to] + last * begun[to] / all_begun;
        counts.push(timed.iter().map(onward).collect::<Vec<f64>>());
    }
    let members = connected(&counts);
    let among = |rows: &[Vec<f64>]| -> Vec<Vec<f64>> {
        members.iter().map(|&from| members.iter().map(|&to| rows[from][to]).collect()).collect()
    };
    let mut routing = among(&counts);
    for row in &mut routing {
        let all: f64 = row.iter().sum();
        row.iter_mut().for_each(|steps| *steps /= all);
    }
    // Where most begin, of those that are there.
    let entry = (0..members.len()).rev().max_by(|a, b| {
        let begun = |place: &usize| begun[timed[members[*place]]];
        begun(a).total_cmp(&begun(b))
    })?;
    Some(Routes { entry, routing, commits: among(&commits), members })
}

/// Two models: every request that leaves one comes back to it, but for what its last visit leaves open.
fn handoffs(loads: &[Load], timed: &[usize]) -> Option<Routes> {
    let &[first, second] = timed else { return None };
    let each = loads.iter().map(|load| load.handoffs as f64).sum::<f64>() / 2.0;
    let [there, back] = [first, second].map(|model| (each / ends(loads, model)).min(1.0));
    let routing = vec![vec![1.0 - there, there], vec![back, 1.0 - back]];
    let commits = [first, second].map(|model| vec![tokens(loads, model) / ends(loads, model); 2]).to_vec();
    Some(Routes { members: vec![0, 1], entry: 0, routing, commits })
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
    fn numbers_that_nothing_measures() {
        let one = |handoffs: u64, steps: u64, batch: u32| {
            let models =
                json!([model("s", steps, 1.0, json!([by(batch, 6.0, 1)])), model("l", 1, 1.0, json!([by(1, 6.0, 1)]))]);
            json!({"handoffs": handoffs, "models": models})
        };
        let most = json!({"loads": [one(u64::MAX, u64::MAX, 1), one(u64::MAX, u64::MAX, 1)]});
        assert!(measured(&most.to_string()).unwrap().system().is_some());
        let wide = json!({"loads": [one(1, 1, u32::MAX)]});
        assert_eq!(
            measured(&wide.to_string()).unwrap_err(),
            "loads: \"s\" has steps of 4294967295 requests; at most 65536 are possible, measure again"
        );
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
        let system = measured(&text.to_string()).unwrap().system().unwrap().0;
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
        let system = |load: &Value| measured(&json!({"loads": [load]}).to_string()).unwrap().system().unwrap().0;
        let told = system(&load);
        assert_eq!(told.routing, [[0.5, 0.3, 0.2], [0.8, 0.2, 0.0], [0.5, 0.5, 0.0]]);
        assert_eq!((told.entry, told.models[2].name.as_str(), &told.commits[2]), (1, "c", &vec![1.25; 3]));
        load["commits"] = json!([[5, 0, 0, 1], [0, 0, 0, 0], [8, 0, 6, 0], [4, 0, 0, 0]]);
        assert_eq!(system(&load).commits, [[1.0, 0.0, 0.5], [1.0, 3.0, 0.0], [1.0, 0.0, 0.0]]);
    }

    /// A server with a route of two, a bare model, one that computed prompts only, and one that was never left.
    #[test]
    fn requests_of_a_server_begin_where_they_did() {
        let models = ["s", "l", "bare", "prompts", "stuck"].map(|name| match name {
            "prompts" => model(name, 3, 2.0, json!([])),
            _ => model(name, 90, 3.0, json!([by(2, 5.0, 10)])),
        });
        let mut load = json!({
            "entry": 0,
            "begun": [30, 0, 10, 0, 1],
            "handoffs": 80,
            "models": models,
            "transitions": [[100, 40, 0, 0, 0], [40, 0, 0, 0, 0], [0, 0, 50, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 70]],
            "last_steps": [40, 0, 10, 0, 0],
        });
        let of = |load: &Value| measured(&json!({"loads": [load]}).to_string()).unwrap();
        let (system, notes) = of(&load).system().unwrap();
        let names: Vec<&str> = system.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!((&names[..], system.entry), (&["s", "l", "bare"][..], 0));
        assert_eq!(
            notes,
            [
                "prompts has no steps_by_batch: it computed prompts only, or bench is too old",
                "no requests go round between stuck and the others",
            ]
        );
        // 40 of 180 end, and a quarter of those that begin do so at the bare model.
        let system = system.checked().unwrap();
        assert!((system.routing[0][2] - 10.0 / 180.0).abs() < 2e-3, "{:?}", system.routing);
        assert_eq!((system.routing[1][0], system.routing[2][1]), (1.0, 0.0));
        // 90 tokens of 180 evaluations, prompts or not.
        assert_eq!(system.commits[0], [0.5; 3]);
        assert_eq!(of(&load).models().0.len(), 4);
        load["begun"] = Value::Null;
        assert_eq!(of(&load).system().unwrap().0.len(), 2);
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
