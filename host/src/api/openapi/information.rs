//! Bodies of what the server tells of itself, and of what the operator asks for.

use serde_json::{Value, json};

use super::schema::{
    Field, about, any_number, any_of, boolean, constant, count, list, object, one_of, or_null, string,
};

/// Schemas of these answers, by name.
pub fn schemas() -> Vec<Field> {
    let lists = |names: [&'static str; 5]| names.map(|name| (name, list(string())));
    let mut reloaded = vec![("reloaded", json!({"type": "boolean", "const": true}))];
    reloaded.extend(lists(["added", "changed", "removed", "unchanged", "models"]));
    vec![
        (
            "ModelList",
            object(vec![("object", constant("list")), ("data", list(super::schema::named("Model")))], vec![]),
        ),
        ("Model", model()),
        ("Version", object(vec![("version", string())], vec![])),
        ("ServerInfo", server_info()),
        ("ModelInfo", model_info()),
        ("Load", object(vec![("server_load", about(count(), "Requests under way."))], vec![])),
        ("Health", object(vec![("status", constant("ok"))], vec![])),
        ("Ready", ready()),
        ("Steps", steps()),
        ("Flushed", object(vec![("flushed", json!({"type": "boolean", "const": true}))], vec![])),
        ("Aborted", object(vec![("aborted", about(count(), "How many prompts' answers were told to end."))], vec![])),
        ("Reloaded", object(reloaded, vec![])),
        ("KnownRoutes", object(vec![("routes", list(known_route()))], vec![])),
    ]
}

/// A policy; a bare model has none.
fn plugin(name: &'static str) -> Field {
    (name, or_null(string()))
}

fn overrides() -> Field {
    ("overrides", about(list(string()), "Settings that requests may give in `routing.settings`."))
}

fn model() -> Value {
    let part = vec![
        ("name", string()),
        ("role", string()),
        ("entry", about(boolean(), "Requests begin here.")),
        ("description", string()),
        ("max_model_len", count()),
    ];
    let required = vec![
        ("id", string()),
        ("object", constant("model")),
        ("created", count()),
        ("owned_by", string()),
        ("root", about(string(), "As `id`.")),
        ("max_model_len", or_null(count())),
        plugin("policy"),
        overrides(),
        ("models", list(object(part, vec![]))),
    ];
    object(required, vec![])
}

fn server_info() -> Value {
    let model = vec![
        ("name", string()),
        ("description", string()),
        ("max_model_len", count()),
        ("vocab_size", count()),
        ("eos", list(count())),
        ("weight_bytes", count()),
        ("kv_pages", count()),
        ("kv_page_bytes", count()),
        ("kv_pages_in_use", count()),
        ("kv_pages_cached", count()),
        ("min_batch", or_null(count())),
    ];
    let part = vec![("name", string()), ("role", string()), ("entry", boolean())];
    let route = vec![
        ("name", string()),
        ("max_model_len", count()),
        ("vocab_size", count()),
        plugin("plugin"),
        plugin("version"),
        plugin("sha256"),
        ("disabled", boolean()),
        overrides(),
        ("variants", about(count(), "With settings of requests.")),
        ("max_variants", count()),
        ("models", list(object(part, vec![]))),
    ];
    let required = vec![
        ("version", string()),
        ("uptime_seconds", count()),
        ("config_sha256", string()),
        ("batching", one_of(&["online", "fixed"])),
        ("max_requests", count()),
        ("max_body_bytes", count()),
        ("live_requests", count()),
        ("models", list(object(model, vec![]))),
        ("routes", list(object(route, vec![]))),
    ];
    object(required, vec![])
}

fn model_info() -> Value {
    let required = vec![
        ("model_path", string()),
        ("served_model_name", string()),
        ("tokenizer_path", or_null(string())),
        ("is_generation", boolean()),
        ("max_model_len", count()),
        ("vocab_size", count()),
    ];
    about(object(required, vec![]), "The first route, as SGLang tells of its model.")
}

fn ready() -> Value {
    let disabled = object(vec![("route", string()), ("reason", string())], vec![]);
    object(vec![("status", constant("ready")), ("live_requests", count())], vec![("disabled_routes", list(disabled))])
}

fn steps() -> Value {
    let counts = || list(count());
    let size = vec![("requests", count()), ("steps", count()), ("mean_ms", any_number()), ("overlap_ms", any_number())];
    let model = vec![
        ("name", string()),
        ("tokens", count()),
        ("steps", count()),
        ("mean_batch", any_number()),
        ("steps_by_batch", list(object(size, vec![]))),
        ("prompt_steps", object(vec![("steps", count()), ("mean_ms", any_number())], vec![])),
    ];
    let load = vec![
        ("entry", or_null(count())),
        ("begun", counts()),
        ("handoffs", count()),
        ("models", list(object(model, vec![]))),
        ("transitions", list(counts())),
        ("last_steps", counts()),
    ];
    let online = vec![
        ("changes", count()),
        ("thin", boolean()),
        ("fault", or_null(string())),
        ("ended", boolean()),
        ("stretch", list(any_number())),
        ("routing", list(list(any_number()))),
        ("search_seconds", any_number()),
        ("longest_search_seconds", any_number()),
    ];
    let batching = object(
        vec![
            ("mode", one_of(&["fixed", "online"])),
            ("models", list(string())),
            ("live_requests", count()),
            ("min_batch", counts()),
        ],
        vec![("online", object(online, vec![]))],
    );
    object(vec![("loads", list(object(load, vec![]))), ("batching", batching)], vec![])
}

fn known_route() -> Value {
    let part = object(vec![("name", string()), ("role", string())], vec![]);
    let required = vec![
        ("name", string()),
        ("id", about(count(), "Never given twice in the life of a server.")),
        ("state", one_of(&["serving", "draining"])),
        ("requests", count()),
        ("settings", about(json!({"type": ["object", "null"]}), "Those of requests, in place of the route's own.")),
        plugin("plugin"),
        plugin("version"),
        plugin("sha256"),
        ("models", list(part)),
    ];
    object(required, vec![])
}

/// An answer that is one or many.
pub fn one_or_many(name: &str) -> Value {
    any_of([super::schema::named(name), list(super::schema::named(name))])
}
