//! What policies do.

use std::collections::BTreeMap;

use crate::engine::Engine;
use crate::metrics::Distribution;
use crate::metrics::text::{Exposition, Unit};
use crate::policy::monitor::{BOUNDS, ByHook, Hook, HookCounts, Names};

/// Values of [`LABELS`], and what was counted under them.
type Rows = BTreeMap<[String; 4], HookCounts>;

const LABELS: [&str; 4] = ["route", "model", "plugin", "hook"];

fn rows(counts: BTreeMap<Names, ByHook>) -> Rows {
    let of_one = |(names, counts): (Names, ByHook)| {
        let label = move |hook: Hook| [&names.route[..], &names.model, &names.plugin, hook.name()].map(str::to_owned);
        Hook::ALL.map(label).into_iter().zip(counts)
    };
    counts.into_iter().flat_map(of_one).collect()
}

/// A counter: its name, its meaning, and its value in the counts.
type Counter = (&'static str, &'static str, fn(&HookCounts) -> u64);

const COUNTERS: [Counter; 6] = [
    ("tokenrouter_policy_calls_total", "Calls of the hook.", HookCounts::calls),
    ("tokenrouter_policy_over_budget_total", "Calls that took longer than the route's budget_us.", |c| c.over_budget),
    ("tokenrouter_policy_failures_total", "Calls that ended in an error; the instance is not called again.", |c| {
        c.failures
    }),
    ("tokenrouter_policy_restarts_total", "Fresh instances of a WASM policy after a fault.", |c| c.restarts),
    ("tokenrouter_policy_unknown_destinations_total", "Answers that name no model of the route.", |c| {
        c.unknown_destinations
    }),
    (
        "tokenrouter_policy_wrong_answers_total",
        "Other answers without meaning, and changed floating-point modes.",
        |c| c.wrong_answers,
    ),
];

pub fn write(out: &mut Exposition, engine: &Engine) {
    hooks(out, &rows(engine.policy_counts()));
    out.gauge("tokenrouter_policy_route_disabled", "1 where a route takes no new requests because its policy failed.");
    for route in engine.routes().iter().filter(|route| route.policy.is_some()) {
        out.sample(&[("route", &route.name)], u8::from(route.disabled().is_some()));
    }
}

fn hooks(out: &mut Exposition, rows: &Rows) {
    for (name, help, value) in COUNTERS {
        out.counter(name, help);
        for (labels, counts) in rows {
            out.sample(&pairs(labels), value(counts));
        }
    }
    out.histogram("tokenrouter_policy_call_seconds", "Wall time of calls of the hook.");
    for (labels, counts) in rows {
        let sum = u64::try_from(counts.time.as_nanos()).unwrap_or(u64::MAX);
        let seen = Distribution { bounds: &BOUNDS, classes: counts.classes.to_vec(), sum };
        out.distribution(&pairs(labels), &seen, Unit::Time);
    }
}

fn pairs(values: &[String; 4]) -> [(&str, &str); 4] {
    std::array::from_fn(|i| (LABELS[i], &values[i][..]))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::policy::monitor::Monitors;

    #[test]
    fn rows_with_equal_labels_are_one() {
        let all = Monitors::default();
        let _instances = ["small", "large", "small"].map(|model| {
            let names = Names { route: "r".into(), model: model.into(), plugin: "p".into() };
            all.add(names, Duration::from_millis(1))
        });
        assert_eq!(rows(all.counts()).len(), 2 * Hook::ALL.len());
    }

    #[test]
    fn hooks_have_counters_and_a_histogram() {
        let mut counts = HookCounts { time: Duration::from_micros(1500), failures: 1, ..HookCounts::default() };
        (counts.classes[0], counts.classes[10]) = (3, 1);
        let labels = ["a\"b", "m", "p", "route"].map(str::to_owned);
        let mut out = Exposition::default();
        hooks(&mut out, &Rows::from([(labels, counts)]));
        let text = out.into_text();
        let labels = r#"route="a\"b",model="m",plugin="p",hook="route""#;
        for line in [
            format!("tokenrouter_policy_calls_total{{{labels}}} 4"),
            format!("tokenrouter_policy_failures_total{{{labels}}} 1"),
            format!("tokenrouter_policy_call_seconds_bucket{{{labels},le=\"0.000001\"}} 3"),
            format!("tokenrouter_policy_call_seconds_bucket{{{labels},le=\"+Inf\"}} 4"),
            format!("tokenrouter_policy_call_seconds_sum{{{labels}}} 0.0015"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
