//! The interface's document says what the server does.

mod agree;
mod check;

use std::collections::BTreeSet;

use axum::body::Body;
use axum::http::{Request, header};
use serde_json::{Value, json};

use super::fixture::{Options, Server, post};
use crate::api::openapi::document;
use crate::api::{admin_endpoints, asked, endpoints};
pub use check::{check, check_events, validator};

/// Endpoints with a body, and one that asks for all that has fields of its own.
fn bodies() -> Vec<(&'static str, Vec<Value>)> {
    let format = json!({"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}});
    let openai = |name: &str, prompt: Value| {
        json!({"model": "small", name: prompt, "response_format": format, "structured_outputs": {}, "routing": {},
               "stream": true, "stream_options": {}, "max_tokens": 1})
    };
    let params = json!({"max_new_tokens": 1, "response_format": format, "structured_outputs": {}});
    let outside =
        json!({"model": "small", "text": "Hi", "response_format": format, "structured_outputs": {}, "routing": {}});
    let messages = json!([{"role": "user", "content": "Hi"}]);
    vec![
        ("/v1/chat/completions", vec![openai("messages", messages.clone())]),
        ("/v1/completions", vec![openai("prompt", "Hi".into())]),
        (
            "/generate",
            vec![
                outside,
                json!({"model": "small", "text": "Hi", "sampling_params": params}),
                json!({"model": "small", "text": ["Hi"], "sampling_params": [params]}),
            ],
        ),
        ("/tokenize", vec![json!({"model": "small", "prompt": "Hi"}), json!({"model": "small", "messages": messages})]),
        ("/detokenize", vec![json!({"model": "small", "tokens": [1]})]),
        ("/abort_request", vec![json!({"rid": "a"})]),
    ]
}

/// Fields that have no reader: those of parts of a message are looked at in place, and others have no effect.
const WITHOUT_READER: [&str; 5] = [
    "messages[].content[].type",
    "messages[].content[].text",
    "response_format.json_schema.name",
    "response_format.json_schema.description",
    "response_format.json_schema.strict",
];

/// Names of all fields in a schema, as the readers name them.
fn names(document: &Value, schema: &Value, place: &str, found: &mut BTreeSet<String>) {
    if let Some(name) = schema["$ref"].as_str() {
        let target = document.pointer(name.trim_start_matches('#')).unwrap();
        names(document, target, place, found);
    }
    for choice in schema["anyOf"].as_array().into_iter().flatten() {
        names(document, choice, place, found);
    }
    if schema["items"].is_object() {
        names(document, &schema["items"], &format!("{place}[]"), found);
    }
    let dot = if place.is_empty() { "" } else { "." };
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let full = format!("{place}{dot}{name}");
        names(document, field, &full, found);
        found.insert(full);
    }
    for name in schema["x-refused-fields"].as_array().into_iter().flatten() {
        found.insert(format!("{place}{dot}{}", name.as_str().unwrap()));
    }
}

#[tokio::test]
async fn its_fields_are_those_that_the_readers_ask_for() {
    let (server, document) = (Server::saying("7"), document());
    // Places in a list are the client's.
    let place = regex::Regex::new(r"\[\d+\]").unwrap();
    for (path, bodies) in bodies() {
        asked::take();
        for body in bodies {
            // The other kind of format has a place of its own for the schema.
            let other = body.to_string().replace(r#""type":"json_schema""#, r#""type":"json_object""#);
            server.post(path, body).await;
            server.post(path, serde_json::from_str(&other).unwrap()).await;
        }
        let asked: BTreeSet<String> =
            asked::take().iter().map(|name| place.replace_all(name, "[]").into_owned()).collect();
        let schema = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        let mut told = BTreeSet::new();
        names(&document, schema, "", &mut told);
        told.retain(|name| !WITHOUT_READER.iter().any(|other| name.ends_with(other)));
        let untold: Vec<_> = asked.difference(&told).collect();
        let unasked: Vec<_> = told.difference(&asked).collect();
        assert!(untold.is_empty() && unasked.is_empty(), "{path}: not in it {untold:?}; not read {unasked:?}");
    }
}

#[tokio::test]
async fn its_endpoints_are_those_of_the_router() {
    let (server, document) = (Server::saying("7"), document());
    let mut routed = BTreeSet::new();
    for (template, _) in endpoints().into_iter().chain(admin_endpoints()) {
        let path = template.replace("{*id}", "{id}");
        let wrong = Request::delete(path.replace("{id}", "small")).body(Body::empty()).unwrap();
        let answer = server.send(wrong).await;
        assert_eq!(answer.status(), 405, "{path}");
        let methods = answer.headers()[header::ALLOW].to_str().unwrap().to_lowercase();
        // Where there is GET there is HEAD.
        let methods = methods.split(',').filter(|method| *method != "head").map(str::to_owned);
        routed.extend(methods.map(|method| (path.clone(), method)));
    }
    let paths = document["paths"].as_object().unwrap().iter();
    let told: BTreeSet<_> = paths
        .flat_map(|(path, item)| item.as_object().unwrap().keys().map(move |method| (path.clone(), method.clone())))
        .collect();
    assert_eq!(routed, told);
    let ids: BTreeSet<_> =
        told.iter().map(|(path, method)| document["paths"][path][method]["operationId"].as_str()).collect();
    assert_eq!(ids.len(), told.len(), "names of operations are unique");
}

#[tokio::test]
async fn its_examples_are_accepted_and_have_answers_as_it_says() {
    let document = document();
    for (path, item) in document["paths"].as_object().unwrap() {
        let content = &item["post"]["requestBody"]["content"]["application/json"];
        for (name, example) in content["examples"].as_object().into_iter().flatten() {
            let body = &example["value"];
            let schema = validator(&document, &content["schema"], false);
            assert!(schema.is_valid(body), "{path} {name}");
            let server = Server::saying(if body["response_format"].is_object() { r#"{"answer":7}"# } else { "7" });
            if body["stream"] == true {
                server.events(path, body.clone()).await;
            } else {
                server.ok(path, body.clone()).await;
            }
        }
    }
}

#[tokio::test]
async fn what_the_server_tells_of_itself_is_as_it_says() {
    let server = Server::saying("ok");
    server.ok("/v1/completions", json!({"model": "pair", "prompt": "Hi"})).await;
    let document = document();
    let mut seen = 0;
    for (path, item) in document["paths"].as_object().unwrap().iter().filter(|(_, item)| item["get"].is_object()) {
        let schemas = &item["get"]["responses"]["200"]["content"];
        let path = path.replace("{id}", "pair");
        let answer = server.send(Request::get(&path).body(Body::empty()).unwrap()).await;
        assert!(answer.headers().contains_key("x-request-id"), "{path}");
        if schemas["application/json"].is_object() {
            let (status, body) = super::fixture::json_of(answer).await;
            check("get", &path, status, &body);
            seen += usize::from(status == 200);
        }
    }
    // All but /metrics, which is text, and /admin/routes, which is off.
    let gets = document["paths"].as_object().unwrap().values().filter(|item| item["get"].is_object()).count();
    assert_eq!(seen, gets - 2);
}

#[tokio::test]
async fn failures_within_a_stream_are_events_as_it_says() {
    let server = Server::with("one two three four", Options { breaks_at: Some(2), ..Options::default() });
    for (path, body) in [
        ("/v1/chat/completions", super::fixture::chat()),
        ("/v1/completions", super::fixture::completion()),
        ("/generate", json!({"model": "pair", "text": "Hi"})),
    ] {
        let events = server.events(path, body).await;
        assert_eq!(events.last().unwrap()["error"]["code"], "not_finite", "{path}");
    }
}

#[tokio::test]
async fn it_is_served_as_json_and_is_a_document() {
    let server = Server::saying("ok");
    let answer = server.send(Request::get("/openapi.json").body(Body::empty()).unwrap()).await;
    assert_eq!(answer.headers()["content-type"], "application/json");
    let (status, served) = super::fixture::json_of(answer).await;
    assert_eq!((status, &served), (200, &document()));
    // Each schema is one, and everything that is referred to is there.
    for schema in served["components"]["schemas"].as_object().unwrap().values() {
        jsonschema::meta::validate(schema).unwrap();
        validator(&served, schema, false);
    }
    let text = served.to_string();
    let references = regex::Regex::new(r##""\$ref":"#([^"]+)""##).unwrap();
    for found in references.captures_iter(&text) {
        assert!(served.pointer(&found[1]).is_some(), "{}", &found[1]);
    }
}

#[tokio::test]
async fn keys_are_asked_for_where_it_says() {
    use crate::api::{Access, KeyRing};

    let mut server = Server::saying("ok");
    let state = std::sync::Arc::get_mut(&mut server.state).unwrap();
    state.front.keys.set(KeyRing::new([("ann", "key-of-ann-0123456789")]));
    state.access = Access::new(false, ["admin-key-0123456789"]);
    let document = document();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let schemes: BTreeSet<&str> = operation["security"]
                .as_array()
                .unwrap()
                .iter()
                .flat_map(|way| way.as_object().unwrap().keys().map(String::as_str))
                .collect();
            let ask = |key: Option<(&str, &str)>| {
                let request = match method.as_str() {
                    "get" => Request::get(path.replace("{id}", "pair")).body(Body::empty()).unwrap(),
                    _ => post(path, "{}"),
                };
                let (mut parts, body) = request.into_parts();
                if let Some((name, value)) = key {
                    parts.headers.insert(name.parse::<header::HeaderName>().unwrap(), value.parse().unwrap());
                }
                server.send(Request::from_parts(parts, body))
            };
            let open = ask(None).await.status() != 401;
            assert_eq!(open, schemes.is_empty(), "{method} {path}");
            for (scheme, header, value) in [
                ("bearer", "authorization", "Bearer key-of-ann-0123456789"),
                ("apiKey", "x-api-key", "key-of-ann-0123456789"),
                ("admin", "authorization", "Bearer admin-key-0123456789"),
            ] {
                // Whether the admin key opens the metrics is a setting.
                if schemes.is_empty() || (scheme == "admin" && schemes.len() > 1) {
                    continue;
                }
                let taken = ask(Some((header, value))).await.status() != 401;
                assert_eq!(taken, schemes.contains(scheme), "{method} {path} {scheme}");
            }
        }
    }
}
