//! The endpoints.

use serde_json::{Map, Value, json};

use super::errors::{OF_ALL, OF_BODIES, response};
use super::information::one_or_many;
use super::schema::{any_of, named, string};

/// Who may use an endpoint, where keys are asked for.
#[derive(Clone, Copy)]
enum Access {
    Everyone,
    /// With an API key.
    Clients,
    /// With an API key or the admin key, as `server.metrics_access` says.
    Metrics,
    /// With the admin key.
    Operator,
}

enum Answer {
    Json(Value),
    /// JSON, or events where the request has `stream: true`.
    Streamed(Value, Value),
    Text,
}

struct Operation {
    path: &'static str,
    method: &'static str,
    summary: &'static str,
    access: Access,
    /// Name of the schema of its body, and bodies that it takes.
    body: Option<(&'static str, Vec<Value>)>,
    answer: Answer,
    /// Beyond those that all have.
    errors: Vec<u16>,
}

fn get(path: &'static str, summary: &'static str, answer: &str) -> Operation {
    let answer = Answer::Json(named(answer));
    Operation { path, method: "get", summary, access: Access::Clients, body: None, answer, errors: vec![] }
}

fn post(
    path: &'static str,
    summary: &'static str,
    body: &'static str,
    examples: Vec<Value>,
    answer: Answer,
) -> Operation {
    let errors = OF_BODIES.iter().chain(&[404, 500]).copied().collect();
    let body = Some((body, examples));
    Operation { path, method: "post", summary, access: Access::Clients, body, answer, errors }
}

impl Operation {
    fn by(self, access: Access) -> Self {
        Self { access, ..self }
    }

    fn or(mut self, errors: &[u16]) -> Self {
        self.errors.extend(errors);
        self
    }

    fn answering(self, answer: Answer) -> Self {
        Self { answer, ..self }
    }
}

fn all() -> Vec<Operation> {
    let event = |name| any_of([named(name), named("Error")]);
    let streamed = |whole, part| Answer::Streamed(named(whole), event(part));
    let json = |name| Answer::Json(named(name));
    let mut all = vec![
        post(
            "/v1/chat/completions",
            "A conversation through the model's chat template",
            "ChatRequest",
            super::examples::chats(),
            streamed("ChatCompletion", "ChatCompletionChunk"),
        )
        .or(&[504]),
        post(
            "/v1/completions",
            "A prompt as text or token ids, one or many",
            "CompletionRequest",
            super::examples::completions(),
            streamed("Completion", "CompletionChunk"),
        )
        .or(&[504]),
        post(
            "/generate",
            "The same with the field names of SGLang's native endpoint",
            "GenerateRequest",
            super::examples::generations(),
            Answer::Streamed(one_or_many("Generated"), event("GeneratedEvent")),
        )
        .or(&[504]),
        get("/v1/models", "Routes and models", "ModelList"),
        get("/v1/models/{id}", "A route or a model", "Model").or(&[404]),
        post("/abort_request", "End answers under way", "AbortRequest", super::examples::aborts(), json("Aborted")),
        post("/abort_requests", "End answers under way", "AbortRequest", super::examples::aborts(), json("Aborted")),
        get("/version", "The server's version", "Version"),
        get("/load", "Requests under way", "Load"),
        get("/ping", "The same as /health", "Health").by(Access::Everyone),
        Operation { method: "post", ..get("/ping", "The same as /health", "Health").by(Access::Everyone) },
        get("/health", "The process lives and no hook of a plugin hangs", "Health").by(Access::Everyone),
        get("/health_generate", "Every model has written a token", "Health").or(&[500, 504]),
        get("/ready", "Requests are taken", "Ready").by(Access::Everyone),
        get("/metrics", "What the server does, for Prometheus", "").answering(Answer::Text).by(Access::Metrics),
        get("/metrics/steps", "What the models' steps came to", "Steps").by(Access::Metrics),
        get("/openapi.json", "This document", "").answering(Answer::Json(json!({"type": "object"}))),
        get("/admin/routes", "Routes in service and draining", "KnownRoutes").by(Access::Operator).or(&[404]),
        Operation {
            method: "post",
            ..get("/admin/reload", "Take over the changed configuration", "Reloaded")
                .by(Access::Operator)
                .or(&[404, 409, 500])
        },
        Operation {
            method: "post",
            ..get("/flush_cache", "Empty the prefix caches", "Flushed").by(Access::Operator).or(&[404])
        },
    ];
    for path in ["/tokenize", "/v1/tokenize"] {
        let examples = super::examples::tokenizations();
        all.push(
            post(path, "Tokens of a text or a conversation", "TokenizeRequest", examples, json("Tokens")).or(&[504]),
        );
    }
    for path in ["/detokenize", "/v1/detokenize"] {
        let examples = super::examples::detokenizations();
        all.push(post(path, "Text of tokens", "DetokenizeRequest", examples, json("Text")).or(&[504]));
    }
    for path in ["/server_info", "/get_server_info"] {
        all.push(get(path, "What the server is", "ServerInfo"));
    }
    for path in ["/model_info", "/get_model_info"] {
        all.push(get(path, "The first route, as SGLang tells of its model", "ModelInfo").or(&[500]));
    }
    all
}

/// The document's `paths`.
pub fn paths() -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for operation in all() {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method] = described(&operation);
    }
    paths.into()
}

fn described(operation: &Operation) -> Value {
    let mut parameters = vec![json!({"$ref": "#/components/parameters/RequestId"})];
    if operation.path.contains("{id}") {
        parameters.push(json!({"name": "id", "in": "path", "required": true, "schema": string(),
            "description": "The name; a slash in it may be written as it is."}));
    }
    let id: String = operation.path.chars().filter(|c| !"{}".contains(*c)).collect();
    let words: Vec<&str> = id.split(['/', '.']).filter(|word| !word.is_empty()).collect();
    let mut described = json!({
        "operationId": format!("{}_{}", operation.method, words.join("_")),
        "summary": operation.summary,
        "parameters": parameters,
        "security": security(operation.access),
        "responses": responses(operation),
    });
    if let Some((schema, examples)) = &operation.body {
        let examples: Map<String, Value> =
            (1..).zip(examples).map(|(i, value): (u32, _)| (i.to_string(), json!({"value": value}))).collect();
        let content = json!({"application/json": {"schema": named(schema), "examples": examples}});
        described["requestBody"] = json!({"required": true, "content": content});
    }
    described
}

fn security(access: Access) -> Value {
    // The empty one: keys are asked for only where the configuration has some.
    match access {
        Access::Everyone => json!([]),
        Access::Clients => json!([{}, {"bearer": []}, {"apiKey": []}]),
        Access::Metrics => json!([{}, {"bearer": []}, {"apiKey": []}, {"admin": []}]),
        Access::Operator => json!([{}, {"admin": []}]),
    }
}

fn responses(operation: &Operation) -> Value {
    let content = match &operation.answer {
        Answer::Json(schema) => json!({"application/json": {"schema": schema}}),
        Answer::Text => json!({"text/plain": {"schema": string()}}),
        Answer::Streamed(whole, event) => json!({
            "application/json": {"schema": whole},
            // OpenAPI 3.1 has no schema for the events of a stream.
            "text/event-stream": {"x-event-schema": event},
        }),
    };
    let headers = json!({"X-Request-Id": {"$ref": "#/components/headers/RequestId"}});
    let mut responses = json!({"200": {"description": "The answer.", "headers": headers, "content": content}});
    let key = (!matches!(operation.access, Access::Everyone)).then_some(401);
    for status in OF_ALL.into_iter().chain(key).chain(operation.errors.iter().copied()) {
        responses[status.to_string()] = response(status);
    }
    responses
}
