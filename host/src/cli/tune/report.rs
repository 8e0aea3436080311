//! The answer as a table, as lines of a configuration, and as JSON. Pure.

use serde_json::{Map, Value, json};
use tokenrouter_batching::search::{Method, Point};

use super::super::plan::table;
use crate::config::DEFAULT_MAX_WAIT;

/// What a configuration has where it says nothing.
const MAX_WAIT_MS: f64 = DEFAULT_MAX_WAIT.as_millis() as f64;

/// The best setting for a number of requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub requests: usize,
    pub best: Point,
    /// With thresholds of 1 and no holds.
    pub eager: Point,
}

fn joined<T>(values: &[T], text: impl Fn(&T) -> String) -> String {
    values.iter().map(text).collect::<Vec<_>>().join(" / ")
}

fn method(point: &Point) -> String {
    match &point.method {
        Method::Chain { .. } => "exact".into(),
        Method::Simulation { standard_error, .. } => {
            format!("simulated ±{:.2} %", 100.0 * standard_error / point.rates.throughput)
        }
    }
}

/// A row for each number of requests, and a line for each reason why some were simulated.
pub fn text(names: &[String], steps: &[Step]) -> String {
    let held = steps.iter().any(|step| step.best.setting.hold_ms.iter().any(|hold| *hold > 0.0));
    let names = names.join(" / ");
    let head = ["N", "min_batch", "hold ms", "tokens/s", "vs eager", "mean batch", "method"].map(String::from);
    let rows = steps.iter().map(|step| {
        let Point { setting, rates, .. } = &step.best;
        [
            step.requests.to_string(),
            joined(&setting.min_batch, u32::to_string),
            if held { joined(&setting.hold_ms, |hold| format!("{hold:.2}")) } else { "-".into() },
            format!("{:.1}", rates.throughput),
            format!("{:+.1} %", 100.0 * (rates.throughput / step.eager.rates.throughput - 1.0)),
            joined(&rates.mean_batch, |batch| format!("{batch:.2}")),
            method(&step.best),
        ]
    });
    let rows: Vec<_> = std::iter::once(head).chain(rows).collect();
    let mut text = format!("by model: {names}\n{}", table(&rows, 0));
    let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
    for step in steps {
        if let Method::Simulation { reason, .. } = &step.best.method {
            let (reason, n) = (reason.to_string(), step.requests.to_string());
            match reasons.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, all)) => all.push(n),
                None => reasons.push((reason, vec![n])),
            }
        }
    }
    for (reason, requests) in reasons {
        text += &format!("simulated for N = {}: {reason}\n", requests.join(", "));
    }
    text
}

/// By model: one value for each number of requests from 1. What was not asked for takes the value of the
/// next smaller number, or `least`; a single number of requests stands for all.
fn ladders<T: Copy>(steps: &[Step], models: usize, least: T, of: impl Fn(&Step, usize) -> T) -> Vec<Vec<T>> {
    let all = match steps {
        [one] => one.requests..=one.requests,
        _ => 1..=steps.last().map_or(0, |step| step.requests),
    };
    let value = |n: usize, model: usize| {
        steps.iter().rev().find(|step| step.requests <= n).map_or(least, |step| of(step, model))
    };
    (0..models).map(|model| all.clone().map(|n| value(n, model)).collect()).collect()
}

fn holds(names: &[String], steps: &[Step]) -> Vec<Vec<f64>> {
    ladders(steps, names.len(), 0.0, |step, model| step.best.setting.hold_ms[model])
}

fn min_batches(names: &[String], steps: &[Step]) -> Vec<Vec<u32>> {
    ladders(steps, names.len(), 1, |step, model| step.best.setting.min_batch[model])
}

/// A ladder whose steps are all the same is a number.
fn ladder<T: PartialEq>(steps: &[T], text: impl Fn(&T) -> String) -> String {
    match steps {
        [first, rest @ ..] if rest.iter().all(|step| step == first) => text(first),
        _ => format!("[{}]", steps.iter().map(text).collect::<Vec<_>>().join(", ")),
    }
}

/// Lines to paste into a configuration.
pub fn toml(names: &[String], steps: &[Step]) -> String {
    let mut text = String::new();
    for ((name, batches), holds) in names.iter().zip(min_batches(names, steps)).zip(holds(names, steps)) {
        text += &format!("[models.{}]\nmin_batch = {}\n", key(name), ladder(&batches, u32::to_string));
        let longest = holds.iter().copied().fold(0.0, f64::max);
        if longest > 0.0 {
            // A configuration has one hold: that of the most requests, for which it matters most.
            let hold = holds.last().copied().unwrap_or(0.0);
            let varies = holds.iter().any(|other| *other != hold);
            let note = if varies {
                format!("   # by N: {}", ladder(&holds, |hold| format!("{hold:?}")))
            } else {
                String::new()
            };
            text += &format!("hold_ms = {hold:?}{note}\n");
            if longest > MAX_WAIT_MS {
                text += &format!("max_wait_ms = {:.0}   # a hold counts up to it\n", longest.ceil());
            }
        }
    }
    text
}

/// A name as a key of TOML.
fn key(name: &str) -> String {
    let bare = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    if bare { name.into() } else { toml::Value::from(name).to_string() }
}

/// Everything.
pub fn json(names: &[String], steps: &[Step]) -> Value {
    let point = |point: &Point| {
        let mut fields = Map::new();
        fields.insert("B".into(), json!(point.setting.min_batch));
        fields.insert("hold_ms".into(), json!(point.setting.hold_ms));
        fields.insert("throughput_tok_per_s".into(), json!(point.rates.throughput));
        fields.insert("step_rate_per_s".into(), json!(point.rates.step_rate));
        fields.insert("mean_batch".into(), json!(point.rates.mean_batch));
        match &point.method {
            Method::Chain { states } => {
                fields.extend([("method".into(), json!("chain")), ("states".into(), json!(states))])
            }
            Method::Simulation { standard_error, reason } => fields.extend([
                ("method".into(), json!("simulation")),
                ("simulated_rel_se".into(), json!(standard_error / point.rates.throughput)),
                ("reason".into(), json!(reason.to_string())),
            ]),
        }
        Value::Object(fields)
    };
    let each =
        steps.iter().map(|step| json!({"N": step.requests, "best": point(&step.best), "eager": point(&step.eager)}));
    let min_batch: Map<String, Value> =
        names.iter().cloned().zip(min_batches(names, steps).into_iter().map(|ladder| json!(ladder))).collect();
    let hold_ms: Map<String, Value> =
        names.iter().cloned().zip(holds(names, steps).into_iter().map(|ladder| json!(ladder))).collect();
    json!({"models": names, "min_batch": min_batch, "hold_ms": hold_ms, "concurrency": each.collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use tokenrouter_batching::Setting;
    use tokenrouter_batching::chain::{ChainError, Rates};

    use super::*;

    fn step(requests: usize, min_batch: [u32; 2], hold: f64, method: Method) -> Step {
        let rates = |throughput| Rates { throughput, step_rate: vec![1.0; 2], mean_batch: vec![1.5, 2.0] };
        let setting = Setting { min_batch: min_batch.to_vec(), hold_ms: vec![hold, 0.0] };
        let eager =
            Point { setting: Setting::new(vec![1; 2]), rates: rates(100.0), method: Method::Chain { states: 9 } };
        Step { requests, best: Point { setting, rates: rates(112.5), method }, eager }
    }

    fn names() -> Vec<String> {
        vec!["small".into(), "l.0".into()]
    }

    #[test]
    fn a_ladder() {
        let exact = Method::Chain { states: 3 };
        let simulated = Method::Simulation { standard_error: 0.225, reason: ChainError::TooLarge(7) };
        let steps = [step(2, [1, 2], 0.0, exact.clone()), step(4, [1, 3], 4.5, simulated)];
        let lines = "[models.small]\nmin_batch = 1\nhold_ms = 4.5   # by N: [0.0, 0.0, 0.0, 4.5]\n[models.\"l.0\"]\nmin_batch = [1, 2, 2, 3]\n";
        assert_eq!(toml(&names(), &steps), lines);
        let text = text(&names(), &steps);
        for part in ["1 / 3", "4.50 / 0.00", "112.5", "+12.5 %", "1.50 / 2.00", "exact", "simulated ±0.20 %"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.ends_with("simulated for N = 4: the chain has more than 7 states\n"), "{text}");
        let json = json(&names(), &steps);
        assert_eq!(json["min_batch"], json!({"small": [1, 1, 1, 1], "l.0": [1, 2, 2, 3]}));
        assert_eq!(json["concurrency"][1]["best"]["simulated_rel_se"], 0.002);
        assert_eq!(json["hold_ms"], json!({"small": [0.0, 0.0, 0.0, 4.5], "l.0": [0.0, 0.0, 0.0, 0.0]}));
        let long = toml(&names(), &[step(8, [1, 5], 80.25, exact.clone())]);
        assert!(long.contains("hold_ms = 80.25\nmax_wait_ms = 81   # a hold counts up to it\n"), "{long}");
        assert_eq!(
            toml(&names(), &[step(8, [1, 5], 0.0, exact)]),
            "[models.small]\nmin_batch = 1\n[models.\"l.0\"]\nmin_batch = 5\n"
        );
    }
}
