//! Errors as OpenAI's clients read them.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::choice::ChoiceError;
use super::http::json_response;
use super::record::ErrorCode;
use crate::engine::SubmitError;
use crate::plain::plain;
use crate::request::{ModelDown, RequestError, RouteDisabled};

/// Code of a request that needs a model that is down.
pub const MODEL_DOWN: &str = "model_down";

/// Code of a request to a route that takes none any more.
pub const ROUTE_DISABLED: &str = "route_disabled";
/// A hook of a plugin does not come back.
pub const PLUGIN_HUNG: &str = "plugin_hung";

/// An answer other than 200.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    /// Machine-readable, always a string.
    pub code: &'static str,
    /// The field at fault.
    pub param: Option<String>,
    pub message: String,
}

impl ApiError {
    /// What `message` quotes of a client's words stays on one line.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, param: None, message: plain(&message.into()) }
    }

    pub fn param(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// A field has a value that it cannot have.
    pub fn value(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_value", message).param(param)
    }

    /// A field has a value of the wrong type.
    pub fn wrong_type(param: &str, wanted: &str, got: &Value) -> Self {
        let kind = match got {
            Value::Null => "null",
            Value::Bool(_) => "a boolean",
            Value::Number(_) => "a number",
            Value::String(_) => "a string",
            Value::Array(_) => "a list",
            Value::Object(_) => "an object",
        };
        let message = format!("`{param}` must be {wanted}, not {kind}.");
        Self::new(StatusCode::BAD_REQUEST, "invalid_type", message).param(param)
    }

    pub fn missing(param: &str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "missing_required_parameter", message).param(param)
    }

    /// A field that would change the answer, but is not built.
    pub fn unsupported(param: &str, remedy: &str) -> Self {
        let message = format!("`{param}` is not supported by this server; {remedy}.");
        Self::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).param(param)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// No room just now.
    pub fn overloaded(why: impl std::fmt::Display) -> Self {
        let message = format!("The server is busy: {why}. Try again in a moment.");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_overloaded", message)
    }

    pub fn shutting_down() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "The server is shutting down. Try another one.")
    }

    pub fn model_down(down: &ModelDown) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, MODEL_DOWN, down.to_string())
    }

    pub fn route_disabled(disabled: &RouteDisabled) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, ROUTE_DISABLED, disabled.to_string())
    }

    /// Refused by the engine; `prompt` is the name of the field with the prompt.
    pub fn refused(error: &SubmitError, prompt: &str) -> Self {
        let bad = |code, param: &str| Self::new(StatusCode::BAD_REQUEST, code, error.to_string()).param(param);
        match error {
            SubmitError::ContextLength { .. } => bad("context_length_exceeded", prompt),
            SubmitError::Pool { .. } => bad("kv_pool_exceeded", "max_tokens"),
            SubmitError::TokenOutOfRange { .. } | SubmitError::EmptyPrompt => bad("invalid_value", prompt),
            SubmitError::NoRoute => {
                Self::new(StatusCode::NOT_FOUND, "model_not_found", error.to_string()).param("model")
            }
            SubmitError::ModelDown(down) => Self::model_down(down),
            SubmitError::RouteDisabled(disabled) => Self::route_disabled(disabled),
            SubmitError::ShuttingDown => Self::shutting_down(),
        }
    }

    /// The body: `{"error": {…}}`.
    pub fn body(&self) -> Value {
        let kind = if self.status.is_client_error() { "invalid_request_error" } else { "server_error" };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl From<ChoiceError> for ApiError {
    fn from(error: ChoiceError) -> Self {
        match &error {
            ChoiceError::Request(RequestError::ShuttingDown) => Self::shutting_down(),
            ChoiceError::Request(RequestError::ModelDown(down)) => Self::model_down(down),
            ChoiceError::Request(RequestError::NotFinite { .. }) => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "not_finite", error.to_string())
            }
            // Too costly, or a dead end: it is the form that was asked for.
            ChoiceError::Request(RequestError::Constraint { .. }) => {
                Self::new(StatusCode::BAD_REQUEST, "constraint_failed", error.to_string())
            }
            // May hold what a panic said, which is for the log alone.
            ChoiceError::Request(RequestError::Policy { route, model, .. }) => {
                tracing::error!(%error, "an answer failed");
                let message = format!("the policy of route `{route}` failed at model `{model}`; see the server's log");
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
            }
            ChoiceError::Deadline(over) => over.clone(),
            _ => Self::internal(error.to_string()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.body());
        response.extensions_mut().insert(ErrorCode(self.code));
        let headers = response.headers_mut();
        // A model that is down does not come back before a restart, nor a disabled route before a reload.
        let for_good = [MODEL_DOWN, ROUTE_DISABLED].contains(&self.code);
        let later = [StatusCode::SERVICE_UNAVAILABLE, StatusCode::TOO_MANY_REQUESTS].contains(&self.status);
        if later && !for_good {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if matches!(self.status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT) {
            // The rest of the body was not read, so the connection cannot be used again.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}
