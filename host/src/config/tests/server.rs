//! The server, batching, devices that are shared, and recording.

use super::*;

#[test]
fn messages_about_the_server() {
    for (line, message) in [
        ("prot = 1", "unknown key `server.prot`: did you mean `port`?"),
        (
            "colour = 1",
            "unknown key `server.colour`: known are host, port, max_body_bytes, max_requests, \
             drain_timeout, admin, admin_key, admin_keys, abort_on_hung_plugin_s, api_keys, api_key_file, \
             metrics_access, cors_origins, cors_headers, cors_methods, cors_credentials, max_connections, \
             max_connections_per_peer, max_url_bytes, max_headers, max_header_bytes, max_requests_per_client, \
             max_queued_requests, max_queued_tokens, header_timeout_s, body_timeout_s, write_timeout_s, \
             request_timeout_s, tls, unix_socket_mode, unix_socket, tcp, drain_grace_s",
        ),
        ("port = \"80\"", "server.port = \"80\": must be an integer, not a string"),
        ("port = 65536", "server.port = 65536: must be from 0 to 65535"),
        ("port = -1", "server.port = -1: must be from 0 to 65535"),
        ("port = 99999999999999999999", "server.port = 99999999999999999999: must be from 0 to 65535"),
        (
            "max_requests = 0xFFFFFFFFFFFFFFFFFFFF",
            "server.max_requests = 0xFFFFFFFFFFFFFFFFFFFF: must be from 1 to 1048576",
        ),
        (
            "drain_timeout = 99999999999999999999",
            "server.drain_timeout = 99999999999999999999: must be from 0 to 86400",
        ),
        ("host = 99999999999999999999", "server.host = 99999999999999999999: must be a string, not an integer"),
        (
            "host = \"localhost\"",
            "server.host = \"localhost\": must be an IP address to listen at: \"127.0.0.1\" for this machine alone, \"0.0.0.0\" for all",
        ),
        ("host = \"\"", "server.host = \"\": must not be empty"),
        ("drain_timeout = nan", "server.drain_timeout = NaN: must be from 0 to 86400"),
        ("abort_on_hung_plugin_s = 0", "server.abort_on_hung_plugin_s = 0: must be from 1 to 86400"),
        ("drain_timeout = 2020-01-01", "server.drain_timeout = 2020-01-01: must be a number, not a date"),
    ] {
        assert_eq!(error(&format!("[server]\n{line}\n{BASE}")), format!("dir/t.toml:2: {message}"));
    }
    assert_eq!(error("server = 3"), "dir/t.toml:1: server = 3: must be a table, not an integer");
}

#[test]
fn messages_about_batching() {
    for (line, message) in [
        (
            "schedule = 'lazy'",
            "batching.schedule = \"lazy\": must be \"delayed\", \"eager\", \"model-sync\" or \"step-sync\"",
        ),
        ("mode = 'auto'", "batching.mode = \"auto\": must be \"fixed\" or \"online\""),
        (
            "mode = 'online'\nschedule = 'eager'",
            "batching.mode = \"online\": needs schedule = \"delayed\"; under \"eager\" no model waits for min_batch requests",
        ),
        (
            "p99_tpot_ms = 30",
            "batching.p99_tpot_ms = 30: has no effect without mode = \"online\"; set that or leave this out",
        ),
        (
            "interval_s = 3\nmode = 'fixed'",
            "batching.interval_s = 3: has no effect without mode = \"online\"; set that or leave this out",
        ),
        ("scedule = 'eager'", "unknown key `batching.scedule`: did you mean `schedule`?"),
    ] {
        assert_eq!(error(&format!("[batching]\n{line}\n{BASE}")), format!("dir/t.toml:2: {message}"));
    }
    for (line, message) in [
        ("p99_tpot_ms = 0", "batching.p99_tpot_ms = 0: must be from 0.001 to 10000000"),
        ("p99_ttft_ms = -5", "batching.p99_ttft_ms = -5: must be from 0.001 to 10000000"),
        ("interval_s = 0.1", "batching.interval_s = 0.1: must be from 0.5 to 3600"),
    ] {
        let text = format!("[batching]\nmode = 'online'\n{line}\n{BASE}");
        assert_eq!(error(&text), format!("dir/t.toml:3: {message}"));
    }
}

#[test]
fn ladders_that_follow_the_traffic() {
    let online = |text: &str| parse(&format!("[batching]\n{text}\n{BASE}")).unwrap().batching.online;
    assert_eq!((online(""), online("mode = 'fixed'")), (None, None));
    let settings = Settings { interval: Duration::from_secs(3), p99_tpot_ms: None, p99_ttft_ms: None };
    assert_eq!(online("mode = 'online'"), Some(settings));
    let limited = "mode = 'online'\nschedule = 'delayed'\ninterval_s = 1.5\np99_tpot_ms = 30\np99_ttft_ms = 250.5";
    let settings =
        Settings { interval: Duration::from_millis(1500), p99_tpot_ms: Some(30.0), p99_ttft_ms: Some(250.5) };
    assert_eq!(online(limited), Some(settings));
}

#[test]
fn sharing_a_gpu() {
    let config = parse(&format!("{BASE}[gpu]\nmemory_fraction = 0.5\ngraphs = false\n")).unwrap();
    assert_eq!(config.gpu, GpuConfig { memory_fraction: 0.5, graphs: false });
    for (line, message) in [
        ("memory_fraction = 1.5", "gpu.memory_fraction = 1.5: must be from 0.01 to 1"),
        ("fraction = 1", "unknown key `gpu.fraction`: known are memory_fraction, graphs"),
    ] {
        assert_eq!(more(&format!("[gpu]\n{line}\n")), format!("dir/t.toml:7: {message}"));
    }
}

#[test]
fn messages_about_recording() {
    for (line, message) in [
        (
            "dir = 'x'",
            "unknown key `record.dir`: known are directory, max_bytes, shard_rows, hidden, top_k, routes, sample, requests",
        ),
        ("hiden = true", "unknown key `record.hiden`: did you mean `hidden`?"),
        ("max_bytes = 5", "record.max_bytes = 5: must be a string, not an integer"),
        (
            "max_bytes = '5'",
            "record.max_bytes = \"5\": must be a size with its unit, for example \"512MiB\" or \"2GiB\"",
        ),
        ("max_bytes = '5000TiB'", "record.max_bytes = \"5000TiB\": must be from 1B to 1000TB"),
        ("max_bytes = '5KiB'", "record.max_bytes = \"5KiB\": must be at least 1MiB"),
        ("shard_rows = 1023", "record.shard_rows = 1023: must be from 1024 to 16777216"),
        ("hidden = 1", "record.hidden = 1: must be true or false, not an integer"),
        ("top_k = -1", "record.top_k = -1: must be from 0 to 65536"),
        ("routes = []", "record.routes = []: must name at least one route; leave it out to record all"),
        ("routes = ['smal']", "record.routes[0] = \"smal\": is neither a route nor a model: did you mean `small`?"),
        ("routes = ['small', 'small']", "record.routes[1] = \"small\": is listed twice"),
        ("sample = 0", "record.sample = 0: records nothing; leave [record] out instead"),
        ("sample = 1.5", "record.sample = 1.5: must be from 0 to 1"),
    ] {
        assert_eq!(more(&format!("[record]\ndirectory = 'r'\n{line}\n")), format!("dir/t.toml:8: {message}"));
    }
    let missing = "dir/t.toml:6: [record]: has no `directory`; add `directory = \"recordings\"`";
    assert_eq!(more("[record]\nhidden = true\n"), missing);
    assert_eq!(more("[record]\ndirectory = ''\n"), "dir/t.toml:7: record.directory = \"\": must not be empty");
    let variables = [("TOKENROUTER__RECORD__DIRECTORY", "r"), ("TOKENROUTER__RECORD__HIDDEN", "true")];
    assert!(parse_with(BASE, &variables).unwrap().record.unwrap().hidden);
    let fault = parse_with(BASE, &[variables[0], ("TOKENROUTER__RECORD__HIDDEN", "yes")]).unwrap_err();
    assert!(fault.ends_with("record.hidden = \"yes\": must be true or false"), "{fault}");
}
