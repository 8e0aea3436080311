//! Answers other than 200.

use serde_json::{Map, Value, json};

use super::schema::{Field, about, count, list, object, one_of, or_null, string};

/// Statuses with what they say, and the codes that come with them.
pub const STATUSES: &[(u16, &str, &[&str])] = &[
    (
        400,
        "The request is wrong; `param` names the field at fault.",
        &[
            "invalid_request",
            "invalid_json",
            "invalid_body",
            "invalid_type",
            "invalid_value",
            "missing_required_parameter",
            "unsupported_parameter",
            "context_length_exceeded",
            "kv_pool_exceeded",
            "constraint_failed",
            "invalid_config",
        ],
    ),
    (401, "No key, or a wrong one.", &["invalid_api_key", "invalid_admin_key"]),
    (404, "No such model, or no such endpoint here.", &["model_not_found", "not_found"]),
    (405, "The endpoint does not have this method.", &["method_not_allowed"]),
    (408, "The body did not arrive in time.", &["timeout"]),
    (409, "Only a restart puts the change in force.", &["restart_needed"]),
    (413, "The body is too large.", &["payload_too_large"]),
    (414, "The URL is too long.", &["url_too_long"]),
    (415, "The body is not JSON, or encoded.", &["unsupported_media_type"]),
    (429, "The client has as much under way as it may.", &["rate_limit_exceeded"]),
    (431, "The headers are too large, or too many.", &["headers_too_large"]),
    (500, "The server or a model is at fault.", &["internal_error", "not_finite"]),
    (501, "The body is sent in a way that the server does not read.", &["unsupported_transfer_encoding"]),
    (
        503,
        "Not now. `Retry-After` is left out where time alone does not help: `model_down`, `route_disabled`.",
        &[
            "server_overloaded",
            "shutting_down",
            "not_ready",
            "plugin_hung",
            crate::api::error::MODEL_DOWN,
            crate::api::error::ROUTE_DISABLED,
        ],
    ),
    (504, "The answer was not complete in time.", &["timeout"]),
];

/// What every endpoint may say: limits on heads and connections.
pub const OF_ALL: [u16; 6] = [400, 414, 429, 431, 501, 503];
/// Of a body that is read.
pub const OF_BODIES: [u16; 3] = [408, 413, 415];

fn name(status: u16) -> String {
    format!("Error{status}")
}

/// A reference to the answer with this status.
pub fn response(status: u16) -> Value {
    json!({"$ref": format!("#/components/responses/{}", name(status))})
}

/// All of them, by name.
pub fn responses() -> Map<String, Value> {
    let one = |&(status, words, codes): &(u16, &str, &[&str])| {
        let mut headers = json!({"X-Request-Id": {"$ref": "#/components/headers/RequestId"}});
        match status {
            401 => headers["WWW-Authenticate"] = json!({"schema": string()}),
            405 => headers["Allow"] = json!({"schema": string()}),
            429 | 503 => headers["Retry-After"] = json!({"$ref": "#/components/headers/RetryAfter"}),
            _ => {}
        }
        let content = json!({"application/json": {"schema": error(status, codes)}});
        (name(status), json!({"description": words, "headers": headers, "content": content}))
    };
    STATUSES.iter().map(one).collect()
}

fn error(status: u16, codes: &[&str]) -> Value {
    let kind = if status < 500 { "invalid_request_error" } else { "server_error" };
    let optional = if status == 503 { probes() } else { vec![] };
    object(vec![("error", body(&[kind], codes))], optional)
}

/// What `/ready` and `/health` say beside the error.
fn probes() -> Vec<Field> {
    let hook = vec![
        ("plugin", string()),
        ("route", string()),
        ("model", string()),
        ("hook", string()),
        ("step", count()),
        ("seconds", count()),
    ];
    vec![
        ("models", about(list(string()), "Models that are down.")),
        ("hooks", about(list(object(hook, vec![])), "Hooks of plugins that hang.")),
    ]
}

fn body(kinds: &[&str], codes: &[&str]) -> Value {
    let required = vec![
        ("message", string()),
        ("type", one_of(kinds)),
        ("param", about(or_null(string()), "The field at fault.")),
        ("code", one_of(codes)),
    ];
    object(required, vec![])
}

/// The error with any code, which a stream may have as an event.
pub fn schema() -> Value {
    let codes: std::collections::BTreeSet<&str> = STATUSES.iter().flat_map(|(_, _, codes)| *codes).copied().collect();
    let codes: Vec<&str> = codes.into_iter().collect();
    object(vec![("error", body(&["invalid_request_error", "server_error"], &codes))], vec![])
}
