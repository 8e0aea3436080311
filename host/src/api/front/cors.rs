//! Which web pages may ask.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Browsers need not ask again for so long.
const MAX_AGE: Duration = Duration::from_secs(600);

#[derive(Clone, Debug, PartialEq)]
pub struct Cors {
    /// `None`: pages of every origin, without credentials.
    pub origins: Option<Vec<HeaderValue>>,
    pub headers: Vec<HeaderName>,
    pub methods: Vec<Method>,
    /// Whether browsers may send what they keep of the server, such as cookies or certificates.
    pub credentials: bool,
}

impl Cors {
    pub(in crate::api) fn layer(&self) -> CorsLayer {
        let layer = CorsLayer::new()
            .allow_headers(AllowHeaders::list(self.headers.iter().cloned()))
            .allow_methods(self.methods.clone())
            .expose_headers([HeaderName::from_static("x-request-id"), axum::http::header::RETRY_AFTER])
            .max_age(MAX_AGE);
        match &self.origins {
            None => layer.allow_origin(AllowOrigin::any()),
            Some(origins) => {
                layer.allow_origin(AllowOrigin::list(origins.iter().cloned())).allow_credentials(self.credentials)
            }
        }
    }
}
