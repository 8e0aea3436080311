mod front;
mod models;
mod reload;
mod routes;
mod server;
mod traces;

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
    let overrides = route.overrides.as_ref().unwrap();
    assert_eq!(overrides.names(), ["threshold", "list.\"a.b\""]);
    assert_eq!(overrides.max_variants, 3);
    assert_eq!(route.sha256.as_deref(), Some("abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789"));
    assert_eq!(route.settings.to_string(), r#"{"threshold":0.5,"list":[1,"two",{"three":true}]}"#);
    let route = &config.routes[1];
    assert_eq!(route.models, [(1, "large".to_string()), (0, "small".to_string())]);
    assert_eq!((route.entry, route.on_error, route.settings.to_string()), (0, OnError::DisableRoute, "{}".into()));
    let record = config.record.unwrap();
    assert_eq!(record.directory.to_str(), Some("recordings/a"));
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

#[test]
fn the_digest_tells_settings_apart_and_not_keys() {
    let digest = |server: &str| parse(&format!("[server]\n{server}\n{BASE}")).unwrap().sha256();
    let plain = digest("max_requests = 7");
    assert_eq!((plain.len(), &digest("max_requests = 7")), (64, &plain));
    assert_ne!(digest("max_requests = 8"), plain);
    let keyed = |key: &str| digest(&format!("admin_key = '0123456789abcdef-{key}'"));
    assert_eq!(keyed("a"), keyed("b"));
    // Where they are written is no setting.
    assert_eq!(digest("# seven\nmax_requests = 7"), plain);
}

/// Roles keep the order of the file, which is not that of the alphabet.
#[test]
fn order_of_roles() {
    let text = format!("{BASE}[routes.r]\nplugin = 'p'\n[routes.r.roles]\nsmall = 'a'\nlarge = 'b'\n");
    assert_eq!(parse(&text).unwrap().routes[0].models, [(0, "a".to_string()), (1, "b".to_string())]);
    let text = format!("{BASE}[routes.r]\nplugin = 'p'\n[routes.r.roles]\nlarge = 'b'\nsmall = 'a'\n");
    assert_eq!(parse(&text).unwrap().routes[0].models, [(1, "b".to_string()), (0, "a".to_string())]);
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
fn settings_know_their_lines() {
    let text = format!(
        "{BASE}[routes.r]\nplugin='p'\nmodels=['small']\n[routes.r.settings]\nt = 1.0\nth = 2\n'a/b' = 3\n\
         [routes.r.settings.inner]\nx = [1,\n2]\n"
    );
    let (config, before) = (parse(&text).unwrap(), BASE.lines().count());
    let line = |finding: &str| match config.settings_error(&config.routes[0], finding).origin {
        Some(Origin::Line(line)) => line - before,
        other => panic!("{other:?}"),
    };
    for (finding, at) in [
        ("settings/t = 1.0: no", 5),
        ("settings/th = 2: no", 6),
        ("settings/a~1b = 3: no", 7),
        ("settings/inner/x = [1,2]: no", 9),
        ("settings/inner/x/0 = 1: no", 9),
        ("settings/inner/x/1 = 2: no", 10),
        ("settings/inner: no such setting", 8),
        ("settings/tho: required but missing", 4),
        ("settings = {}: no", 4),
        ("its schema is broken", 4),
    ] {
        assert_eq!(line(finding), at, "{finding}");
    }
    let bare = parse(&format!("{BASE}[routes.r]\nplugin='p'\nmodels=['small']\n")).unwrap();
    let missing = bare.settings_error(&bare.routes[0], "settings/t: required but missing");
    assert_eq!(missing.origin, Some(Origin::Line(before + 1)));
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
    let by = Origin::Env("TOKENROUTER__ROUTES__MY_ROUTE__SETTINGS__T".into());
    let told = config.settings_error(&config.routes[0], "settings/t = 0.25: too small; settings/mode = 1: no");
    assert_eq!(told.origin, Some(by));
    assert_eq!(config.plugin_dirs, Some(vec!["a".into(), "b".into()]));
    for (name, value, message) in [
        ("TOKENROUTER__SERVER__PORT", "x", "server.port = \"x\": must be an integer"),
        (
            "TOKENROUTER__SERVER__PORT",
            "99999999999999999999",
            "server.port = \"99999999999999999999\": must be from 0 to 65535",
        ),
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
