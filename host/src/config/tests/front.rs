use super::*;
use crate::api::{Limits, MetricsAccess};

fn front(text: &str) -> super::super::FrontConfig {
    parse(&format!("[server]\n{text}\n{BASE}")).unwrap().server.front
}

#[test]
fn keys_of_clients() {
    let text = "api_keys = [\"0123456789abcdef\", { name = \"ann\", key = \"fedcba9876543210\" }]";
    let keys = front(text).api_keys;
    let pairs: Vec<_> = keys.iter().map(|key| (key.name.as_str(), key.expose())).collect();
    assert_eq!(pairs, [("key-1", "0123456789abcdef"), ("ann", "fedcba9876543210")]);
    assert!(!format!("{keys:?}").contains("0123"));
    let variables = [("TOKENROUTER__SERVER__API_KEYS".to_string(), "0123456789abcdef,fedcba9876543210".to_string())];
    let config = Config::parse(BASE, "t.toml".as_ref(), &variables.into()).unwrap();
    assert_eq!(config.server.front.api_keys.len(), 2);
}

#[test]
fn everything_at_the_door() {
    let front = front(
        "metrics_access = \"open\"\nmax_connections = 7\nmax_requests_per_client = 3\nmax_queued_requests = 0\n\
         max_queued_tokens = 9\nrequest_timeout_s = 1.5\nunix_socket = \"s\"\nunix_socket_mode = \"600\"\n\
         tcp = false\ndrain_grace_s = 2\ncors_origins = [\"https://a.b\"]",
    );
    assert_eq!(front.metrics, MetricsAccess::Open);
    assert_eq!(front.unix_socket, Some(("s".into(), 0o600)));
    assert_eq!((front.tcp, front.drain_grace), (false, Duration::from_secs(2)));
    let expected = Limits {
        connections: 7,
        requests_per_client: Some(3),
        queued_requests: 0,
        queued_tokens: Some(9),
        request_timeout: Some(Duration::from_millis(1500)),
        ..Limits::default()
    };
    assert_eq!(front.limits, expected);
    let cors = front.cors.unwrap();
    assert_eq!((cors.origins.unwrap(), cors.credentials), (vec!["https://a.b".parse().unwrap()], false));
}

#[test]
fn what_does_not_go_together() {
    for (line, message) in [
        ("api_keys = []", "server.api_keys = []: must have at least one key; leave it out for none"),
        ("api_keys = [{ name = \"a\" }]", "server.api_keys[0]: needs `name` and `key`"),
        (
            "api_keys = [{ name = \"a b\", key = \"0123456789abcdef\" }]",
            "server.api_keys[0].name = \"a b\": must be 1 to 64 letters, digits or - _ . and nothing else",
        ),
        (
            "api_keys = [{ name = \"a\", key = \"0123456789abcdef\" }, { name = \"a\", key = \"0123456789abcdeg\" }]",
            "server.api_keys: two keys have the name `a`; give each client its own",
        ),
        (
            "metrics_access = \"admin_key\"",
            "server.metrics_access = \"admin_key\": there is none; set server.admin_key",
        ),
        (
            "cors_origins = [\"*\"]\ncors_credentials = true",
            "server.cors_origins = [\"*\"]: with cors_credentials every page could act for its visitors; list the origins",
        ),
        ("cors_headers = [\"x\"]", "server.cors_headers = [\"x\"]: goes with server.cors_origins, which is not set"),
        (
            "cors_origins = [\"https://a.b/\"]",
            "server.cors_origins[0] = \"https://a.b/\": must be an origin as browsers send it, for example \"https://chat.example.com\"",
        ),
        ("tcp = false", "server.tcp = false: then set server.unix_socket"),
        ("unix_socket_mode = \"660\"", "server.unix_socket_mode = \"660\": there is no socket; set server.unix_socket"),
        (
            "unix_socket = \"s\"\nunix_socket_mode = \"999\"",
            "server.unix_socket_mode = \"999\": must be a mode such as \"660\"",
        ),
        ("tls = { cert = \"c\" }", "[server.tls]: needs `cert` and `key`, files in PEM"),
        ("max_headers = 3", "server.max_headers = 3: must be from 16 to 4096"),
    ] {
        let error = error(&format!("[server]\n{line}\n{BASE}"));
        let (_, told) = error.split_once(": ").unwrap();
        assert_eq!(told, message);
        assert!(!error.contains("0123456789"), "{error}");
    }
}

#[test]
fn a_file_of_keys() {
    let keys = key_file("# clients\n\n0123456789abcdef\n  ann\tfedcba9876543210  \r\n", 1).unwrap();
    let pairs: Vec<_> = keys.iter().map(|key| (key.name.as_str(), key.expose())).collect();
    assert_eq!(pairs, [("key-2", "0123456789abcdef"), ("ann", "fedcba9876543210")]);
    for (text, message) in [
        ("short", "line 1: must be a string of 16 to 256 letters, digits and signs without spaces"),
        ("# x\na b c", "line 2: must be `KEY` or `NAME KEY`"),
        ("a! 0123456789abcdef", "line 1: the name must be 1 to 64 letters"),
        ("# none", "has no key; write one a line, as `KEY` or `NAME KEY`"),
    ] {
        let error = key_file(text, 0).unwrap_err();
        assert!(error.starts_with(message), "{error}");
        assert!(!error.contains("short") && !error.contains("0123"), "{error}");
    }
}
