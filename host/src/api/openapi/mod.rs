//! GET /openapi.json: the interface as an OpenAPI 3.1 document.
//!
//! The document is put together by hand, in one place. Generators such as utoipa derive schemas from structs that
//! serde reads, and there are none: bodies go through a tolerant reader field by field, with ranges that depend on
//! the endpoint, and answers are written as JSON values. Structs written only to derive a document from would be a
//! second description of everything, which nothing keeps true. Here limits are the readers' own constants, and
//! tests hold the document against the router, against the fields that the readers ask for, against what they accept,
//! and against every answer that the tests of the interface get.

mod answers;
mod errors;
mod examples;
mod information;
mod operations;
mod requests;
mod sampling;
mod schema;

use std::sync::LazyLock;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde_json::{Map, Value, json};

const DESCRIPTION: &str = "Routes and models are both asked for in the `model` field: a route is a policy over some \
    models, a model name gets that model alone. Schemas describe the canonical form of bodies; the server also takes \
    numerals for numbers (`\"5\"`), whole floats for integers (`5.0`), and 0, 1 and words for booleans. Unknown paths \
    are 404 `not_found`, other methods 405 `method_not_allowed`; where there is GET there is HEAD. Keys are asked for \
    where the configuration has some.";

/// The document.
pub fn document() -> Value {
    let schemas: Map<String, Value> = requests::schemas()
        .into_iter()
        .chain(answers::schemas())
        .chain(information::schemas())
        .chain([("Error", errors::schema())])
        .map(|(name, schema)| (name.to_owned(), schema))
        .collect();
    let id = json!({
        "name": "X-Request-Id",
        "in": "header",
        "required": false,
        "schema": schema::string(),
        "description": "Comes back with the answer if it has 1 to 128 printable ASCII characters without spaces; \
                        else one is made up.",
    });
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "TokenRouter",
            "summary": env!("CARGO_PKG_DESCRIPTION"),
            "description": DESCRIPTION,
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "MIT OR Apache-2.0", "identifier": env!("CARGO_PKG_LICENSE")},
        },
        "servers": [{"url": "/"}],
        "paths": operations::paths(),
        "components": {
            "schemas": schemas,
            "responses": errors::responses(),
            "parameters": {"RequestId": id},
            "headers": {
                "RequestId": {"description": "The request's id, as in the log.", "schema": schema::string()},
                "RetryAfter": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "An API key."},
                "admin": {"type": "http", "scheme": "bearer", "description": "A key of server.admin_key."},
            },
        },
    })
}

/// GET /openapi.json
pub async fn handle() -> Response {
    static TEXT: LazyLock<Bytes> = LazyLock::new(|| document().to_string().into());
    let mut response = Response::new(Body::from(TEXT.clone()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
