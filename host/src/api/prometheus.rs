//! GET /metrics: what policies do, and what the process has, in the text format of Prometheus.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Write;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::state::AppState;
use crate::policy::monitor::{BOUNDS, Hook, HookCounts, Monitor};

const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

pub async fn metrics(State(state): State<Arc<AppState>>) -> Response {
    let rows = rows(&state.engine.policies());
    let routes = state.engine.routes();
    let disabled = routes.iter().filter(|route| route.policy.is_some());
    let disabled = disabled.map(|route| (route.name.as_str(), route.disabled().is_some()));
    let mut text = text(&rows, disabled);
    process(&mut text);
    state.front.write_metrics(&mut text);
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
}

/// Memory and files of the process, under the names that Prometheus' own clients use. A plugin that leaks shows here.
fn process(text: &mut String) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
    let resident = resident.and_then(|kilobytes| kilobytes.parse::<u64>().ok()).map(|kilobytes| kilobytes << 10);
    // The directory itself is open while it is read.
    let files = std::fs::read_dir("/proc/self/fd").ok().map(|files| files.count().saturating_sub(1) as u64);
    for (name, help, value) in [
        ("process_resident_memory_bytes", "Memory of the process that is in RAM.", resident),
        ("process_open_fds", "Open files of the process.", files),
    ] {
        if let Some(value) = value {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
        }
    }
}

/// Labels, and what was counted under them.
type Row = (String, HookCounts);

/// One row for each set of labels: while a route drains, an old instance and a new one may have the same.
fn rows(monitors: &[Arc<Monitor>]) -> Vec<Row> {
    let of = |monitor: &Arc<Monitor>, hook: Hook| {
        let names = &monitor.names;
        let [route, model, plugin] = [&names.route, &names.model, &names.plugin].map(|name| quoted(name));
        let hook_name = hook.name();
        (format!("route={route},model={model},plugin={plugin},hook=\"{hook_name}\""), monitor.counts(hook))
    };
    let mut rows: Vec<Row> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for (labels, counts) in monitors.iter().flat_map(|monitor| Hook::ALL.map(|hook| of(monitor, hook))) {
        match places.entry(labels) {
            Entry::Occupied(place) => rows[*place.get()].1 += counts,
            Entry::Vacant(place) => {
                rows.push((place.key().clone(), counts));
                place.insert(rows.len() - 1);
            }
        }
    }
    rows
}

/// A label's value.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

/// A counter: its name, its meaning, and its value in the counts.
type Counter = (&'static str, &'static str, fn(&HookCounts) -> u64);

const COUNTERS: [Counter; 6] = [
    ("calls", "Calls of the hook.", HookCounts::calls),
    ("over_budget", "Calls that took longer than the route's budget_us.", |c| c.over_budget),
    ("failures", "Calls that ended in an error; the instance is not called again.", |c| c.failures),
    ("restarts", "Fresh instances of a WASM policy after a fault.", |c| c.restarts),
    ("unknown_destinations", "Answers that name no model of the route.", |c| c.unknown_destinations),
    ("wrong_answers", "Other answers without meaning, and changed floating-point modes.", |c| c.wrong_answers),
];

fn text<'a>(rows: &[Row], disabled: impl Iterator<Item = (&'a str, bool)>) -> String {
    let mut text = String::new();
    let mut line = |arguments: std::fmt::Arguments<'_>| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{arguments}");
    };
    for (name, help, value) in COUNTERS {
        let name = format!("tokenrouter_policy_{name}_total");
        line(format_args!("# HELP {name} {help}"));
        line(format_args!("# TYPE {name} counter"));
        for (labels, counts) in rows {
            line(format_args!("{name}{{{labels}}} {}", value(counts)));
        }
    }
    let name = "tokenrouter_policy_call_seconds";
    line(format_args!("# HELP {name} Wall time of calls of the hook."));
    line(format_args!("# TYPE {name} histogram"));
    for (labels, counts) in rows {
        let mut below = 0;
        for (bound, calls) in BOUNDS.iter().zip(counts.classes) {
            below += calls;
            line(format_args!("{name}_bucket{{{labels},le=\"{}\"}} {below}", *bound as f64 / 1e9));
        }
        line(format_args!("{name}_bucket{{{labels},le=\"+Inf\"}} {}", counts.calls()));
        line(format_args!("{name}_sum{{{labels}}} {}", counts.time.as_secs_f64()));
        line(format_args!("{name}_count{{{labels}}} {}", counts.calls()));
    }
    let name = "tokenrouter_policy_route_disabled";
    line(format_args!("# HELP {name} 1 where a route takes no new requests because its policy failed."));
    line(format_args!("# TYPE {name} gauge"));
    for (route, disabled) in disabled {
        line(format_args!("{name}{{route={}}} {}", quoted(route), u8::from(disabled)));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::policy::monitor::{Monitors, Names};

    #[test]
    fn the_process_is_measured() {
        let mut text = String::new();
        process(&mut text);
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.unwrap_or_else(|| panic!("{name} in {text}")).parse::<u64>().unwrap()
        };
        assert!(value("process_resident_memory_bytes") > 1 << 20);
        // Its output and its errors at least.
        assert!(value("process_open_fds") >= 2);
    }

    #[test]
    fn rows_with_equal_labels_are_one() {
        let all = Monitors::default();
        let monitors = ["small", "large", "small"].map(|model| {
            let names = Names { route: "r".into(), model: model.into(), plugin: "p".into() };
            all.add(names, Duration::from_millis(1))
        });
        let rows = rows(&monitors);
        assert_eq!(rows.len(), 2 * Hook::ALL.len());
        let labels: std::collections::BTreeSet<_> = rows.iter().map(|(labels, _)| labels).collect();
        assert_eq!(labels.len(), rows.len());
    }

    #[test]
    fn the_text_format() {
        let mut counts = HookCounts { time: Duration::from_micros(1500), failures: 1, ..HookCounts::default() };
        (counts.classes[0], counts.classes[10]) = (3, 1);
        let labels = format!("route={}", quoted("a\"b\\c\nd"));
        let text = text(&[(labels, counts)], [("r", true)].into_iter());
        for line in [
            "# TYPE tokenrouter_policy_calls_total counter",
            r#"tokenrouter_policy_calls_total{route="a\"b\\c\nd"} 4"#,
            r#"tokenrouter_policy_failures_total{route="a\"b\\c\nd"} 1"#,
            "# TYPE tokenrouter_policy_call_seconds histogram",
            r#"tokenrouter_policy_call_seconds_bucket{route="a\"b\\c\nd",le="0.000001"} 3"#,
            r#"tokenrouter_policy_call_seconds_bucket{route="a\"b\\c\nd",le="1"} 3"#,
            r#"tokenrouter_policy_call_seconds_bucket{route="a\"b\\c\nd",le="+Inf"} 4"#,
            r#"tokenrouter_policy_call_seconds_sum{route="a\"b\\c\nd"} 0.0015"#,
            r#"tokenrouter_policy_call_seconds_count{route="a\"b\\c\nd"} 4"#,
            r#"tokenrouter_policy_route_disabled{route="r"} 1"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
