//! `routing` of a request: settings for the policy of its route.

use axum::http::StatusCode;

use super::error::{ApiError, PLUGIN_HUNG};
use super::reader::{Fields, nothing};
use super::state::{AppState, Route};
use crate::engine::{OverrideError, OwnSettings, ServedRoute, VariantError};

const FIELD: &str = "routing";

/// The settings in force for a request that changes those of its route, as JSON.
pub fn settings(fields: &mut Fields, route: &ServedRoute) -> Result<Option<OwnSettings>, ApiError> {
    let Some(mut routing) = fields.object(FIELD)? else { return Ok(None) };
    let place = routing.name("settings");
    let settings = routing.object("settings")?;
    for name in routing.names_with_prefix("") {
        routing.refuse(&name, nothing, "give `settings` there, and name the route in `model`")?;
    }
    let Some(settings) = settings else { return Ok(None) };
    route.settings_with(settings.entries()).map_err(|error| match &error {
        OverrideError::NotAllowed { key, .. } => {
            let message = format!("{error}.");
            ApiError::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).param(format!("{place}.{key}"))
        }
        OverrideError::TooLarge { .. } => ApiError::value(&*place, format!("`{place}` {error}.")),
        OverrideError::Invalid(_) => ApiError::value(&*place, format!("`{place}`: {error}.")),
    })
}

impl AppState {
    /// The route as `route` has it: with the settings of the request, if there are some.
    pub(super) async fn served(&self, route: &Route) -> Result<std::sync::Arc<ServedRoute>, ApiError> {
        let Some(settings) = &route.settings else { return Ok(route.served.clone()) };
        let variant = self.engine.variant(&route.served, settings).await;
        variant.map_err(|error| match &error {
            VariantError::Full { .. } | VariantError::Leaving { .. } | VariantError::NotTaken { .. } => {
                ApiError::overloaded(error)
            }
            VariantError::Refused(_) => ApiError::value("routing.settings", format!("`routing.settings`: {error}.")),
            VariantError::Hung { .. } => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, PLUGIN_HUNG, format!("{error}."))
            }
            VariantError::Stopping => ApiError::shutting_down(),
            VariantError::Failed { .. } => ApiError::internal(format!("{error}.")),
        })
    }
}
