mod front;
mod reload;

use super::*;
use crate::online::Settings;
use crate::subserver::gate::Schedule;
use proptest::prelude::*;

const BASE: &str = r#"
[models.small]
path = "small"
[models.large]
path = "large"
"#;

fn variables(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
}

fn parse_with(text: &str, pairs: &[(&str, &str)]) -> Result<Config, String> {
    Config::parse(text, Path::new("dir/t.toml"), &variables(pairs)).map_err(|e| e.to_string())
}

fn parse(text: &str) -> Result<Config, String> {
    parse_with(text, &[])
}

/// The error of `text`, which must be one line.
fn error(text: &str) -> String {
    let message = parse(text).unwrap_err();
    assert!(!message.contains('\n'), "{message:?}");
    message
}

/// The error of `text` behind [`BASE`], whose 5 lines come before it.
fn more(text: &str) -> String {
    error(&format!("{BASE}{text}"))
}

#[test]
fn everything_that_can_be_written() {
    let config = parse(
        r#"
plugin_dirs = ["lib", "/opt/policies"]
[batching]
schedule = "model-sync"
[server]
host = "::1"
port = 8080
max_body_bytes = 4096
max_requests = 7
drain_timeout = 2.5
abort_on_hung_plugin_s = 12.5
[models.small]
path = "models/small"
device = "auto"
min_batch = 3
pages = 100
[models.large]
path = "Org/Large"
device = "cpu"
min_batch = [1, 2, 2]
max_wait_ms = 7
hold_ms = 2.5
kv_memory = "1.5GiB"
max_rows = 64
prefill_chunk = 16
prefix_cache = false
context = 512
[models."x/y-1.5:z"]
path = "x"
kv_tokens = 4096
[routes.r]
plugin = "./lib/libr.so"
sha256 = "ABCDEF0123456789abcdef0123456789abcdef0123456789abcdef0123456789"
roles = { small = "slm", large = "llm" }
entry = "large"
on_error = "fail_request"
budget_us = 350
overrides = ["threshold", 'list."a.b"']
max_variants = 3
[routes.r.settings]
threshold = 0.5
list = [1, "two", { three = true }]
[routes.q]
plugin = "q"
on_error = "disable_route"
models = ["large", "small"]
[record]
directory = "recordings/a"
max_bytes = "2MiB"
shard_rows = 1024
hidden = true
top_k = 100
routes = ["q", "large"]
sample = 0.25
requests = true
"#,
    )
    .unwrap();
    assert_eq!(config.server.host, "::1".parse::<IpAddr>().unwrap());
    assert_eq!(config.server.port, 8080);
    assert_eq!(config.batching.schedule, Schedule::ModelSync);
    assert_eq!((config.models[0].hold, config.models[1].hold), (Duration::ZERO, Duration::from_micros(2500)));
    assert_eq!(config.server.max_body_bytes, 4096);
    assert_eq!(config.server.max_requests, 7);
    assert_eq!(config.server.drain_timeout, Duration::from_millis(2500));
    assert_eq!(config.server.abort_on_hung_plugin, Some(Duration::from_millis(12_500)));
    assert_eq!(config.plugin_dirs, Some(vec!["lib".into(), "/opt/policies".into()]));
    let names: Vec<&str> = config.models.iter().map(|m| m.name.as_str()).collect();
    assert_eq!(names, ["small", "large", "x/y-1.5:z"]);
    assert_eq!((config.models[0].pool, &config.models[0].min_batch), (Some(Pool::Pages(100)), &vec![3]));
    let large = &config.models[1];
    assert_eq!((large.pool, large.context), (Some(Pool::Bytes(3 << 29)), Some(512)));
    assert_eq!((large.max_rows, large.prefill_chunk), (Some(64), Some(16)));
    assert_eq!((config.models[0].prefix_cache, large.prefix_cache), (true, false));
    assert_eq!((large.max_wait, &large.min_batch), (Duration::from_millis(7), &vec![1, 2, 2]));
    assert_eq!(config.models[2].pool, Some(Pool::Tokens(4096)));
    let route = &config.routes[0];
    assert_eq!(route.models, [(0, "slm".to_string()), (1, "llm".to_string())]);
    assert_eq!((route.entry, route.on_error), (1, OnError::FailRequest));
    assert_eq!(route.budget, Duration::from_micros(350));
    let (overrides, origin) = route.overrides.as_ref().unwrap();
    assert_eq!((overrides.names(), origin), (vec!["threshold".into(), "list.\"a.b\"".into()], &Origin::Line(38)));
    assert_eq!(overrides.max_variants, 3);
    assert_eq!(route.sha256.as_deref(), Some("abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789"));
    assert_eq!(route.settings.to_string(), r#"{"threshold":0.5,"list":[1,"two",{"three":true}]}"#);
    let route = &config.routes[1];
    assert_eq!(route.models, [(1, "large".to_string()), (0, "small".to_string())]);
    assert_eq!((route.entry, route.on_error, route.settings.to_string()), (0, OnError::DisableRoute, "{}".into()));
    let record = config.record.unwrap();
    assert_eq!((record.directory.to_str(), record.origin), (Some("recordings/a"), Origin::Line(48)));
    assert_eq!((record.max_bytes, record.shard_rows, record.top_k), (2 << 20, 1024, 100));
    assert_eq!((record.hidden, record.requests, record.sample), (true, true, 0.25));
    assert_eq!(record.routes, Some(vec!["q".into(), "large".into()]));
}

#[test]
fn defaults() {
    let config = parse(BASE).unwrap();
    assert_eq!(config.server, ServerConfig::default());
    assert_eq!((config.server.host.to_string(), config.server.port), ("127.0.0.1".into(), 30000));
    let model = &config.models[0];
    assert_eq!((model.device, &model.min_batch, model.context), (DeviceChoice::Auto, &vec![1], None));
    assert_eq!((model.dtype, model.weights, model.pool), (DtypeChoice::Auto, Weights::Directory, None));
    assert_eq!(config.gpu, GpuConfig { memory_fraction: 0.92, graphs: true });
    assert_eq!((config.batching.schedule, model.hold), (Schedule::Delayed, Duration::ZERO));
    assert!(config.routes.is_empty());
    assert_eq!(config.record, None);
    let record = parse(&format!("{BASE}[record]\ndirectory = 'r'\n")).unwrap().record.unwrap();
    assert_eq!((record.max_bytes, record.shard_rows, record.top_k), (1 << 30, 65536, 0));
    assert_eq!((record.hidden, record.requests, record.sample, record.routes), (false, false, 1.0, None));
}

/// Roles keep the order of the file, which is not that of the alphabet.
#[test]
fn the_digest_tells_settings_apart_and_not_keys() {
    let digest = |server: &str| parse(&format!("[server]\n{server}\n{BASE}")).unwrap().sha256();
    let plain = digest("max_requests = 7");
    assert_eq!((plain.len(), &digest("max_requests = 7")), (64, &plain));
    assert_ne!(digest("max_requests = 8"), plain);
    let keyed = |key: &str| digest(&format!("admin_key = '0123456789abcdef-{key}'"));
    assert_eq!(keyed("a"), keyed("b"));
}

#[test]
fn order_of_roles() {
    let text = format!("{BASE}[routes.r]\nplugin = 'p'\n[routes.r.roles]\nsmall = 'a'\nlarge = 'b'\n");
    assert_eq!(parse(&text).unwrap().routes[0].models, [(0, "a".to_string()), (1, "b".to_string())]);
    let text = format!("{BASE}[routes.r]\nplugin = 'p'\n[routes.r.roles]\nlarge = 'b'\nsmall = 'a'\n");
    assert_eq!(parse(&text).unwrap().routes[0].models, [(1, "b".to_string()), (0, "a".to_string())]);
}

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
        ("port = 99999999999999999999", "the integer 99999999999999999999 is too large"),
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
fn messages_about_models() {
    let fault = |line: &str| error(&format!("[models.m]\npath = 'm'\n{line}\n"));
    for (line, message) in [
        ("pth = 1", "unknown key `models.m.pth`: did you mean `path`?"),
        (
            "device = 'tpu'",
            "models.m.device = \"tpu\": must be \"auto\", \"cpu\", \"cuda\", or \"cuda:N\" with the number of the device",
        ),
        (
            "device = 'cuda:+1'",
            "models.m.device = \"cuda:+1\": must be \"auto\", \"cpu\", \"cuda\", or \"cuda:N\" with the number of the device",
        ),
        ("dtype = 'f16'", "models.m.dtype = \"f16\": must be \"auto\", \"bf16\" or \"f32\""),
        (
            "dtype = 'bf16'\ndevice = 'cpu'",
            "models.m.dtype = \"bf16\": the CPU computes in f32; use \"f32\" or \"auto\", or device = \"cuda\"",
        ),
        (
            "shape = 'qwen3-8b'",
            "models.m.shape = \"qwen3-8b\": `path` gives the weights already; keep `path`, or `shape` with `tokenizer`",
        ),
        (
            "tokenizer = 't'",
            "models.m.tokenizer = \"t\": goes with `shape`; a model with a `path` has the tokenizer of that directory",
        ),
        ("min_batch = 0", "models.m.min_batch = 0: must be from 1 to 4096"),
        ("min_batch = []", "models.m.min_batch = []: must have at least one step, for example [1, 2, 2, 3]"),
        ("min_batch = [1, 0]", "models.m.min_batch[1] = 0: must be from 1 to 4096"),
        ("min_batch = [1, 3]", "models.m.min_batch[1] = 3: with 2 active requests a batch of 3 never fills; at most 2"),
        ("min_batch = true", "models.m.min_batch = true: must be an integer, not a boolean"),
        ("hold_ms = -1", "models.m.hold_ms = -1: must be from 0 to 60000"),
        ("max_wait_ms = -0.5", "models.m.max_wait_ms = -0.5: must be from 0 to 60000"),
        ("pages = 0", "models.m.pages = 0: must be from 1 to 1073741824"),
        (
            "kv_memory = '512'",
            "models.m.kv_memory = \"512\": must be a size with its unit, for example \"512MiB\" or \"2GiB\"",
        ),
        (
            "kv_memory = '0MiB'",
            "models.m.kv_memory = \"0MiB\": must be a size with its unit, for example \"512MiB\" or \"2GiB\"",
        ),
        ("kv_memory = 512", "models.m.kv_memory = 512: must be a string, not an integer"),
        ("max_rows = 0", "models.m.max_rows = 0: must be from 1 to 65536"),
        ("multiprocessors = 0", "models.m.multiprocessors = 0: must be from 1 to 1024"),
        ("context = 0", "models.m.context = 0: must be from 1 to 1073741824"),
        ("path = 'again'", "not valid TOML: `path` is given twice; leave one of them"),
    ] {
        assert_eq!(fault(line), format!("dir/t.toml:3: {message}"));
    }
    assert_eq!(
        fault("device = 'cpu'\nmultiprocessors = 16"),
        "dir/t.toml:4: models.m.multiprocessors = 16: the CPU has none; use device = \"cuda\", or leave it out"
    );
    assert_eq!(
        fault("max_rows = 8\nprefill_chunk = 9"),
        "dir/t.toml:4: models.m.prefill_chunk = 9: must not be above max_rows (8)"
    );
    assert_eq!(
        fault("pages = 8\nkv_tokens = 9"),
        "dir/t.toml:4: models.m.kv_tokens = 9: `pages` gives the size of the K/V pool already; keep one of them"
    );
    assert_eq!(
        error("\n[models.m]\ndevice = 'cpu'"),
        "dir/t.toml:2: [models.m]: has no `path`; add `path = \"DIRECTORY\"` or `path = \"ORG/NAME\"`"
    );
    assert_eq!(error(""), "dir/t.toml: no model is configured; add a table [models.NAME] with `path = \"DIRECTORY\"`");
    assert_eq!(error("models.a = 1"), "dir/t.toml:1: models.a = 1: must be a table, not an integer");
    assert_eq!(
        error("[models.'a b']\npath = 'x'"),
        "dir/t.toml:1: [models.\"a b\"]: a name has 1 to 128 letters, digits or - _ . : / @ + and nothing else"
    );
    assert_eq!(error("[model.a]\npath = 'x'"), "dir/t.toml:1: unknown key `model`: did you mean `models`?");
}

#[test]
fn devices_and_shapes() {
    for (device, choice) in
        [("cuda", DeviceChoice::Cuda(0)), ("cuda:3", DeviceChoice::Cuda(3)), ("auto", DeviceChoice::Auto)]
    {
        let text = format!("[models.m]\nshape = 'qwen3-32b'\ntokenizer = 't'\ndtype = 'f32'\ndevice = '{device}'\n");
        let model = &parse(&text).unwrap().models[0];
        assert_eq!((model.device, model.dtype, model.path.as_str()), (choice, DtypeChoice::F32, "t"));
        let Weights::Random(shape) = model.weights else { panic!("{:?}", model.weights) };
        assert_eq!((shape.name, &model.origin), ("qwen3-32b", &Origin::Line(2)));
    }
    let shaped = |line: &str| error(&format!("[models.m]\ntokenizer = 't'\n{line}\n"));
    assert_eq!(
        shaped("shape = 'qwen3-33b'"),
        "dir/t.toml:3: models.m.shape = \"qwen3-33b\": is not a known shape: did you mean `qwen3-32b`?"
    );
    assert!(shaped("shape = 'gpt'").contains("is not a known shape: known are qwen3-0.6b, qwen3-1.7b, "));
    assert_eq!(
        shaped("shape = 'qwen3-8b'\ndevice = 'cpu'"),
        "dir/t.toml:4: models.m.device = \"cpu\": a model with random weights (`shape`) runs on CUDA only; use device = \"cuda\""
    );
    assert_eq!(
        error("[models.m]\nshape = 'qwen3-8b'"),
        "dir/t.toml:2: models.m.shape = \"qwen3-8b\": needs a tokenizer; add `tokenizer = \"DIRECTORY\"` with a tokenizer.json"
    );
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
fn messages_about_routes() {
    let route = "[routes.r]\nplugin = 'p'\nmodels = ['small', 'large']\n";
    for (line, message) in [
        ("entry = 'smal'", "routes.r.entry = \"smal\": is not a model of this route: did you mean `small`?"),
        (
            "on_error = 'retry'",
            "routes.r.on_error = \"retry\": must be \"stay_local\", \"fail_request\" or \"disable_route\"",
        ),
        ("budget_us = 0", "routes.r.budget_us = 0: must be from 1 to 10000000"),
        ("budget_us = 'fast'", "routes.r.budget_us = \"fast\": must be an integer, not a string"),
        ("sha256 = 'abc'", "routes.r.sha256 = \"abc\": must be 64 hexadecimal digits, as `sha256sum` prints them"),
        (
            "roles = { small = 'x' }",
            "routes.r.models = [\"small\", \"large\"]: `roles` names the models already; keep one of them",
        ),
        ("overrides = 'threshold'", "routes.r.overrides = \"threshold\": must be an array of strings, not a string"),
        ("overrides = []", "routes.r.overrides = []: must name at least one setting; leave it out for none"),
        ("overrides = ['a', 'b', 'a']", "routes.r.overrides[2] = \"a\": is listed twice"),
        (
            "overrides = ['a', 'b..c']",
            "routes.r.overrides[1] = \"b..c\": must be a setting of the policy, for example \"threshold\" or \
             \"probabilities.large\"",
        ),
        ("max_variants = 3", "routes.r.max_variants = 3: goes with `overrides`; leave it out, or name settings there"),
        ("max_variants = 0\noverrides = ['a']", "routes.r.max_variants = 0: must be from 1 to 256"),
        (
            "overrides = ['a']\n[record]\ndirectory = 'd'",
            "routes.r.overrides: the route is recorded under [record], and a recording has one table of settings for \
             each route; leave it out, or list the routes to record under record.routes without this one",
        ),
        ("settings = 3", "routes.r.settings = 3: must be a table, not an integer"),
        ("settings.x = nan", "routes.r.settings.x = NaN: must be a finite number: settings are handed over as JSON"),
        (
            "settings.x = [-inf]",
            "routes.r.settings.x[0] = -inf: must be a finite number: settings are handed over as JSON",
        ),
        (
            "settings.x = 12:00:00",
            "routes.r.settings.x = 12:00:00: dates are not supported in settings; write a string",
        ),
    ] {
        let line_number = if line.starts_with("roles") { 8 } else { 9 };
        assert_eq!(more(&format!("{route}{line}\n")), format!("dir/t.toml:{line_number}: {message}"));
    }
    for (text, message) in [
        (
            "[routes.r]\nplugin = 'p'\nroles = { tiny = 'x' }",
            "8: routes.r.roles: there is no model `tiny`: known are small, large",
        ),
        (
            "[routes.r]\nplugin = 'p'\nmodels = ['small', 'lrage']",
            "8: routes.r.models[1]: there is no model `lrage`: did you mean `large`?",
        ),
        ("[routes.r]\nplugin = 'p'\nmodels = ['small', 'small']", "8: routes.r.models[1] = \"small\": is listed twice"),
        ("[routes.r]\nplugin = 'p'\nmodels = []", "8: routes.r.models = []: must name at least one model"),
        (
            "[routes.r]\nplugin = 'p'",
            "6: [routes.r]: names no models; add `roles = { MODEL = \"ROLE\", … }` or `models = [\"MODEL\", …]`",
        ),
        (
            "[routes.r]\nmodels = ['small']",
            "6: [routes.r]: has no `plugin`; add `plugin = \"NAME\"` or a path to a library",
        ),
        (
            "[routes.small]\nplugin = 'p'",
            "6: [routes.small]: a model has this name and is a route by itself; choose another name",
        ),
        ("[routes.r]\nplugin = 'p'\n[routes.r]", "8: not valid TOML: `r` is given twice; leave one of them"),
    ] {
        assert_eq!(more(text), format!("dir/t.toml:{message}"));
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

#[test]
fn messages_about_syntax() {
    assert_eq!(
        error("[server]\nport = \n"),
        "dir/t.toml:2: not valid TOML: string values must be quoted, expected literal string"
    );
    assert!(error("[server\n").starts_with("dir/t.toml:1: not valid TOML: "));
}

#[test]
fn the_environment_overrides() {
    let text = format!("{BASE}[routes.my-route]\nplugin='p'\nmodels=['small']\n[routes.my-route.settings]\nt = 1.0\n");
    let config = parse_with(
        &text,
        &[
            ("TOKENROUTER__SERVER__PORT", "1234"),
            ("TOKENROUTER__MODELS__SMALL__MIN_BATCH", "1,2"),
            ("TOKENROUTER__MODELS__LARGE__PATH", "77"),
            ("TOKENROUTER__ROUTES__MY_ROUTE__SETTINGS__T", "0.25"),
            ("TOKENROUTER__ROUTES__MY_ROUTE__SETTINGS__MODE", "fast"),
            ("TOKENROUTER__PLUGIN_DIRS", "a,b"),
            ("PATH", "/bin"),
        ],
    )
    .unwrap();
    assert_eq!(config.server.port, 1234);
    assert_eq!(config.models[0].min_batch, [1, 2]);
    assert_eq!(config.models[1].path, "77");
    assert_eq!(config.routes[0].settings.to_string(), r#"{"t":0.25,"mode":"fast"}"#);
    assert_eq!(config.plugin_dirs, Some(vec!["a".into(), "b".into()]));
    for (name, value, message) in [
        ("TOKENROUTER__SERVER__PORT", "x", "server.port = \"x\": must be an integer"),
        ("TOKENROUTER__SERVER__PROT", "1", "unknown key `server.prot`: did you mean `port`?"),
        ("TOKENROUTER__SRVER__PORT", "1", "unknown key `srver`: did you mean `server`?"),
        ("TOKENROUTER__MODELS__TINY__PATH", "x", "[models] has no `tiny`: known are small, large"),
        ("TOKENROUTER__MODELS__SMALL", "x", "`models.small` is a table; name one of its keys"),
        ("TOKENROUTER__MODELS__SMALL__PATH__X", "x", "`MODELS.SMALL.PATH` is not a table"),
        ("TOKENROUTER__", "x", "must name a key, with `__` between its parts"),
    ] {
        let message = format!("environment variable {name}: {message}");
        assert_eq!(parse_with(BASE, &[(name, value)]).unwrap_err(), message);
    }
}

#[test]
fn files_that_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let load = |name: &str| Config::load(&dir.path().join(name), &BTreeMap::new()).unwrap_err().to_string();
    assert!(
        load("none.toml").ends_with(
            "none.toml: there is no such file; give the path of a configuration, for example config/demo.toml"
        )
    );
    std::fs::write(dir.path().join("latin.toml"), b"# one\n# caf\xe9\n").unwrap();
    assert!(load("latin.toml").ends_with("latin.toml:2: is not UTF-8 text; a configuration is a TOML file"));
    assert!(load("").contains(": is not a regular file; "));
}

#[test]
fn models_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let at = |p: &str| dir.path().join(p);
    let cache = HubCache::from_env(|name| (name == "HF_HOME").then(|| at("hf")));
    let find = |path: &str| {
        let text = format!("[models.m]\npath = {path:?}\n");
        let config = Config::parse(&text, &at("conf/c.toml"), &BTreeMap::new()).unwrap();
        model_directory(&config, &config.models[0], &cache).map_err(|e| e.to_string())
    };
    std::fs::create_dir_all(at("conf/here/model")).unwrap();
    std::fs::write(at("conf/file"), "").unwrap();
    assert_eq!(find("here/model").unwrap(), at("conf/here/model"));
    let shown = |p: &str| at(p).display().to_string();
    assert_eq!(
        find("../not/there").unwrap_err(),
        format!(
            "{}:2: models.m.path = \"../not/there\": there is no directory {}; paths are relative to the configuration file",
            shown("conf/c.toml"),
            shown("conf/../not/there")
        )
    );
    assert!(find("file").unwrap_err().ends_with("is not a directory; give the directory that holds it"));
    assert_eq!(
        find("Org/Name").unwrap_err(),
        format!(
            "{}:2: models.m.path = \"Org/Name\": neither the directory {} nor {} in the hub cache exists; get it with `hf download Org/Name`",
            shown("conf/c.toml"),
            shown("conf/Org/Name"),
            shown("hf/hub/models--Org--Name")
        )
    );
    let snapshot = at("hf/hub/models--Org--Name/snapshots/abc123");
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(at("hf/hub/models--Org--Name/refs")).unwrap();
    std::fs::write(at("hf/hub/models--Org--Name/refs/main"), "abc123\n").unwrap();
    assert_eq!(find("Org/Name").unwrap(), snapshot);
}

#[test]
fn where_the_hub_cache_is() {
    let cache = |set: &'static [(&str, &str)]| {
        HubCache::from_env(|name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
    };
    assert_eq!(cache(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/h")]), HubCache("/c".into()));
    assert_eq!(cache(&[("HF_HOME", "/h"), ("HOME", "/u")]), HubCache("/h/hub".into()));
    assert_eq!(cache(&[("HF_HOME", ""), ("HOME", "/u")]), HubCache("/u/.cache/huggingface/hub".into()));
}

#[test]
fn plugins_are_looked_up() {
    let config = parse(BASE).unwrap();
    let expected: [PathBuf; 2] = ["/bin".into(), "dir/plugins".into()];
    assert_eq!(plugin_directories(&config, Some(Path::new("/bin/tokenrouter"))), expected);
    let config = parse(&format!("plugin_dirs = ['x', '/y']{BASE}")).unwrap();
    let expected: [PathBuf; 2] = ["dir/x".into(), "/y".into()];
    assert_eq!(plugin_directories(&config, None), expected);
}

/// Every configuration that the project ships is valid.
#[test]
fn shipped_configurations() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config");
    let files = std::fs::read_dir(directory).unwrap().map(|e| e.unwrap().path());
    let files: Vec<PathBuf> = files.filter(|f| f.extension().is_some_and(|e| e == "toml")).collect();
    assert!(files.iter().any(|f| f.ends_with("demo.toml")));
    for file in files {
        let config = Config::load(&file, &BTreeMap::new()).unwrap();
        assert!(!config.routes.is_empty(), "{}", file.display());
    }
}

proptest! {
    #[test]
    fn no_text_panics(text in any::<String>()) {
        let _ = parse(&text);
    }

    /// Texts made of the words of configurations come further than arbitrary ones.
    #[test]
    fn no_words_panic(words in prop::collection::vec(prop::sample::select(vec![
        "[", "]", "[[", "]]", "{", "}", "=", ".", ",", "\n", " ", "\"", "'", "\"\"\"", "#", "-1", "0", "1", "1e999", "nan",
        "0x", "9223372036854775808", "2020-01-01", "true", "server", "port", "host", "models", "routes", "small", "path",
        "plugin", "roles", "settings", "min_batch", "kv_memory", "\"1GiB\"", "entry", "é", "\u{0}",
        "[models.small]\npath = 'x'\n", "[routes.r]\nplugin = 'p'\nmodels = ['small']\n",
    ]), 0..40)) {
        if let Err(message) = parse(&words.concat()) {
            prop_assert!(!message.contains('\n'), "{message:?}");
        }
    }

    #[test]
    fn no_variable_panics(name in "[A-Z_]{0,30}", value in any::<String>()) {
        let _ = parse_with(BASE, &[(&format!("TOKENROUTER__{name}"), &value)]);
    }
}

/// Nesting cannot exhaust the stack.
#[test]
fn deep_nesting() {
    let _ = parse(&format!("a = {}", "[".repeat(200_000)));
    let _ = parse(&format!("{}a = 1", "a.".repeat(200_000)));
    let _ = parse(&format!("[{}a]", "a.".repeat(200_000)));
}

#[test]
fn what_is_no_file_of_a_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let error = |path: &Path| Config::load(path, &BTreeMap::new()).unwrap_err().to_string();
    assert!(error(directory.path()).ends_with("is not a regular file; give the path of a configuration"));
    assert!(error(Path::new("/dev/zero")).ends_with("is not a regular file; give the path of a configuration"));
    let path = directory.path().join("large.toml");
    std::fs::File::create(&path).unwrap().set_len((16 << 20) + 1).unwrap();
    assert!(error(&path).ends_with("has 16777217 bytes, more than the 16777216 allowed; give a TOML file"));
}
