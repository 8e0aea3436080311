//! The process and its HTTP interface.

use crate::api::state::AppState;
use crate::metrics::text::Exposition;

pub fn write(out: &mut Exposition, state: &AppState) {
    out.gauge("tokenrouter_build_info", "1, with the version of the server.")
        .sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    out.gauge("process_start_time_seconds", "When the server was up, in seconds since 1970.")
        .sample(&[], state.started);
    process(out);
    out.gauge("tokenrouter_live_requests", "Requests that have neither ended nor been cancelled.")
        .sample(&[], state.engine.live_requests());
    let counts = &state.counts;
    out.counter("tokenrouter_http_requests_total", "HTTP requests by path and status; 499: the client left.");
    for ((path, status), count) in counts.requests() {
        out.sample(&[("path", &path), ("status", &status.to_string())], count);
    }
    out.counter("tokenrouter_client_aborts_total", "HTTP requests whose client left before the answer was complete.")
        .sample(&[], counts.client_aborts.read());
    state.front.write_metrics(out);
    if let Some(traces) = &state.traces {
        traces.write_metrics(out);
    }
    out.counter("tokenrouter_unknown_fields_total", "Fields of requests that were ignored, by name.");
    for (field, count) in state.warned.counts() {
        out.sample(&[("field", &field)], count);
    }
    if let Some(reload) = &state.reload {
        let [applied, refused] = reload.outcomes();
        out.counter("tokenrouter_config_reloads_total", "Reloads of the configuration by what they came to.")
            .sample(&[("outcome", "applied")], applied)
            .sample(&[("outcome", "refused")], refused);
    }
}

/// Memory and files of the process, under the names that Prometheus' own clients use. A plugin that leaks shows here.
fn process(out: &mut Exposition) {
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
            out.gauge(name, help).sample(&[], value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_is_measured() {
        let mut out = Exposition::default();
        process(&mut out);
        let text = out.into_text();
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.unwrap_or_else(|| panic!("{name} in {text}")).parse::<u64>().unwrap()
        };
        assert!(value("process_resident_memory_bytes") > 1 << 20);
        // Its output and its errors at least.
        assert!(value("process_open_fds") >= 2);
    }
}
