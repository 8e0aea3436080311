//! Admin settings, and what a reload can take over.

use super::*;

const SERVED: &str = r#"
plugin_dirs = ["a"]
[server]
port = 8000
admin_key = "0123456789abcdef"
[models.small]
path = "small"
[models.large]
path = "large"
device = "cpu"
min_batch = [1, 2]
[routes.r]
plugin = "p"
roles = { small = "slm", large = "llm" }
[record]
directory = "d"
routes = ["r"]
"#;

#[test]
fn admin_settings() {
    let server = |text: &str| parse(&format!("[server]\n{text}{BASE}")).unwrap().server;
    let one = server("admin = \"127.0.0.1:8081\"\nadmin_key = \"0123456789abcdef\"\n");
    assert_eq!(one.admin, Some("127.0.0.1:8081".parse().unwrap()));
    assert_eq!(one.admin_keys.iter().map(AdminKey::expose).collect::<Vec<_>>(), ["0123456789abcdef"]);
    let two = server("admin_keys = [\"0123456789abcdef\", \"fedcba9876543210\"]\n");
    assert_eq!((two.admin, two.admin_keys.len()), (None, 2));
    assert!(!format!("{two:?}").contains("0123456789"), "{two:?}");
    let variable = parse_with(BASE, &[("TOKENROUTER__SERVER__ADMIN_KEY", "0123456789abcdef")]).unwrap();
    assert_eq!(variable.server.admin_keys[0].expose(), "0123456789abcdef");
}

#[test]
fn messages_about_admin_settings() {
    let of = |text: &str| error(&format!("[server]\n{text}\n{BASE}"));
    let remedy = "must be a string of 16 to 256 letters, digits and signs without spaces, for example what \
                  `openssl rand -hex 32` prints";
    assert_eq!(
        of("admin = \"localhost\""),
        "dir/t.toml:2: server.admin = \"localhost\": must be an IP address with a port, for example \"127.0.0.1:8081\""
    );
    assert_eq!(
        of("admin = \"127.0.0.1:30000\""),
        "dir/t.toml:2: server.admin = \"127.0.0.1:30000\": is where everything else is served; choose another port"
    );
    // None of them shows what was written.
    assert_eq!(of("admin_key = \"a short secret\""), format!("dir/t.toml:2: server.admin_key: {remedy}"));
    assert_eq!(of("admin_key = 1234567890123456"), format!("dir/t.toml:2: server.admin_key: {remedy}"));
    let second = "admin_keys = [\"0123456789abcdef\", \"with a space in it\"]";
    assert_eq!(of(second), format!("dir/t.toml:2: server.admin_keys[1]: {remedy}"));
    assert_eq!(of("admin_keys = \"0123456789abcdef\""), "dir/t.toml:2: server.admin_keys: must be an array of strings");
    assert_eq!(
        of("admin_keys = []"),
        "dir/t.toml:2: server.admin_keys = []: must have at least one key; leave it out for none"
    );
    assert_eq!(
        of("admin_key = \"0123456789abcdef\"\nadmin_keys = [\"0123456789abcdef\"]"),
        "dir/t.toml:3: server.admin_keys: `admin_key` gives the key already; keep one of them, a list for several keys"
    );
    assert_eq!(of("admin_kye = \"x\""), "dir/t.toml:2: unknown key `server.admin_kye`: did you mean `admin_key`?");
}

/// What a server of [`SERVED`] makes of it with `old` replaced by `new`.
fn taken_over(old: &str, new: &str) -> Result<Config, String> {
    assert!(SERVED.contains(old), "{old}");
    let served = parse(SERVED).unwrap();
    parse(&SERVED.replace(old, new)).unwrap().taken_over(&served).map_err(|e| e.to_string())
}

#[test]
fn what_a_reload_takes_over() {
    let good = |old: &str, new: &str| taken_over(old, new).unwrap();
    assert_eq!(good("[\"a\"]", "[\"b\"]").plugin_dirs, Some(vec!["b".into()]));
    assert_eq!(good("plugin = \"p\"", "plugin = \"q\"\non_error = \"fail_request\"").routes[0].plugin, "q");
    assert_eq!(good("min_batch = [1, 2]", "min_batch = 1\nhold_ms = 3").models[1].min_batch, [1]);
    assert_eq!(good("[record]", "[routes.s]\nplugin = \"s\"\nmodels = [\"small\"]\n[record]").routes.len(), 2);
}

#[test]
fn models_are_taken_over_in_their_order() {
    let served = parse(SERVED).unwrap();
    let small = "[models.small]\npath = \"small\"\n";
    let moved = SERVED.replace(small, "").replace("[record]", &format!("{small}[record]"));
    let moved = parse(&moved).unwrap();
    assert_eq!(moved.models[0].name, "large");
    let taken = moved.taken_over(&served).unwrap();
    let names: Vec<&str> = taken.models.iter().map(|m| m.name.as_str()).collect();
    assert_eq!(names, ["small", "large"]);
    assert_eq!(taken.routes[0].models, [(0, "slm".to_string()), (1, "llm".to_string())]);
}

#[test]
fn what_needs_a_restart() {
    let refused = |old: &str, new: &str| {
        let message = taken_over(old, new).unwrap_err();
        assert!(!message.contains('\n') && message.ends_with("; restart to change it"), "{message}");
        message
    };
    assert_eq!(
        refused("port = 8000", "port = 8001"),
        "dir/t.toml:4: server.port = 8001: the server runs with 8000; restart to change it"
    );
    for (old, new, says) in [
        (
            "port = 8000",
            "port = 8000\nhost = \"0.0.0.0\"",
            "server.host = \"0.0.0.0\": the server runs with \"127.0.0.1\"",
        ),
        (
            "port = 8000",
            "port = 8000\ndrain_timeout = 5",
            "t.toml:5: server.drain_timeout = 5: the server runs with 30",
        ),
        ("port = 8000", "port = 8000\ntls = { cert = \"c\", key = \"k\" }", "t.toml:5: server.tls = some: the server"),
        ("[models.small]", "[batching]\n[models.small]\npages = 9", "t.toml:8: models.small.pages = 9: the server"),
        ("port = 8000", "port = 8000\nadmin = \"[::1]:9\"", "server.admin = \"[::1]:9\": the server runs with none"),
        ("0123456789abcdef", "fedcba9876543210", "server.admin_keys = 1 keys that are not shown"),
        ("path = \"small\"", "path = \"tiny\"", "models.small.path = \"tiny\": the server runs with \"small\""),
        ("device = \"cpu\"", "device = \"cuda:1\"", "models.large.device = \"cuda:1\": the server runs with \"cpu\""),
        ("device = \"cpu\"", "device = \"cpu\"\npages = 9", "models.large.pages = 9: the server runs with none"),
        ("device = \"cpu\"", "device = \"cpu\"\nmasked_tokens = [\"x\"]", "models.large.masked_tokens = [\"x\"]"),
        ("[record]", "[models.more]\npath = \"m\"\n[record]", "[models] = [\"small\", \"large\", \"more\"]"),
        ("[models.small]", "[batching]\nschedule = \"eager\"\n[models.small]", "batching.schedule = \"eager\""),
        (
            "[models.small]",
            "[batching]\nmode = \"online\"\n[models.small]",
            "batching.mode = \"online\": the server runs with \"fixed\"",
        ),
        ("[models.small]", "[gpu]\ngraphs = false\n[models.small]", "gpu.graphs = false: the server runs with true"),
        ("directory = \"d\"", "directory = \"e\"", "record.directory = \"e\": the server runs with \"d\""),
        ("directory = \"d\"", "directory = \"d\"\nhidden = true", "record.hidden = true: the server runs with false"),
        (
            "[record]\ndirectory = \"d\"\nroutes = [\"r\"]\n",
            "",
            "t.toml: record.directory = none: the server runs with \"d\"",
        ),
    ] {
        let message = refused(old, new);
        assert!(message.contains(says), "{message}");
    }
    let online = SERVED.replace("[models.small]", "[batching]\nmode = \"online\"\n[models.small]");
    let other = parse(&online.replace("[1, 2]", "[1, 1]")).unwrap().taken_over(&parse(&online).unwrap());
    assert!(other.unwrap_err().to_string().contains("models.large.min_batch = [1, 1]: the server runs with [1, 2]"));
}
