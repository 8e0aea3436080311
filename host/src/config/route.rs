//! `[routes.NAME]`. Pure.

use std::time::Duration;

use super::error::{ConfigError, Fault, Origin};
use super::places::escaped;
use super::tree::{Field, Key as Named, Section};
use super::{Config, ModelConfig, RouteConfig};
use crate::engine::OnError;
use crate::plain::suggestion;
use crate::policy::monitor::DEFAULT_BUDGET;
use crate::policy::overrides::{Key, Overrides};

pub(super) fn route(key: Named, field: Field, models: &[ModelConfig]) -> Result<RouteConfig, Fault> {
    if models.iter().any(|m| m.name == key.name) {
        let message = format!("[{}]: a model has this name and is a route by itself; choose another name", field.name);
        return Err(Fault::at(&key.origin, message));
    }
    let mut section = field.section()?;
    let Some(plugin) = section.take("plugin") else {
        return Err(section.fault("has no `plugin`; add `plugin = \"NAME\"` or a path to a library"));
    };
    let sha256 = section.take("sha256").map(|f| digest(&f)).transpose()?;
    let members = members(&mut section, models)?;
    let entry = match section.take("entry") {
        Some(field) => {
            let entry = field.text()?;
            let names = || members.iter().map(|(m, _)| models[*m].name.as_str());
            names().position(|name| name == entry).ok_or_else(|| {
                field
                    .fault(format!("is not a model of this route: {}", suggestion(&entry, names().collect::<Vec<_>>())))
            })?
        }
        None => 0,
    };
    let on_error = match section.take("on_error") {
        None => OnError::default(),
        Some(field) => match field.text()?.as_str() {
            "stay_local" => OnError::StayLocal,
            "fail_request" => OnError::FailRequest,
            "disable_route" => OnError::DisableRoute,
            _ => return Err(field.fault("must be \"stay_local\", \"fail_request\" or \"disable_route\"")),
        },
    };
    let budget = match section.take("budget_us") {
        Some(field) => Duration::from_micros(field.integer(1..=10_000_000)? as u64),
        None => DEFAULT_BUDGET,
    };
    let settings = match section.take("settings") {
        Some(field) => {
            field.section()?;
            field.json()?
        }
        None => serde_json::Value::Object(serde_json::Map::new()),
    };
    let nets = match section.take("nets") {
        Some(field) => {
            field.section()?;
            Some(field.json()?)
        }
        None => None,
    };
    let overrides = overrides(&mut section)?;
    section.end()?;
    Ok(RouteConfig {
        name: key.name,
        plugin: plugin.text()?,
        sha256,
        models: members,
        entry,
        on_error,
        budget,
        settings,
        overrides,
        nets,
    })
}

impl Config {
    /// An error of `route`, at `place` within its table.
    pub fn route_error(&self, route: &RouteConfig, place: &str, message: impl Into<String>) -> ConfigError {
        self.error(&format!("/routes/{}{place}", escaped(&route.name)), message)
    }

    /// An error of the settings of `route`. `finding` begins with a place in them: `settings/threshold = 2: …`.
    pub fn settings_error(&self, route: &RouteConfig, finding: &str) -> ConfigError {
        let within = finding.strip_prefix("settings").unwrap_or_default();
        let message = format!("routes.{}.settings: {finding}", route.name);
        self.route_error(route, &format!("/settings{within}"), message)
    }

    /// An error of which models `route` has, and with which roles.
    pub fn members_error(&self, route: &RouteConfig, message: impl Into<String>) -> ConfigError {
        let at = |place: &str| self.places.at(&format!("/routes/{}{place}", escaped(&route.name)));
        // The one that is not written stands for the table.
        let place = if at("/roles") == at("") { "/models" } else { "/roles" };
        self.route_error(route, place, message)
    }

    /// An error of `route`, which its policy does not take: `told`. A policy that refuses to start tells in words of
    /// its own: of the roles or the entry as the plugin API does, or of the setting that it begins with.
    pub fn refused_error(&self, route: &RouteConfig, told: &str, message: impl Into<String>) -> ConfigError {
        let reason = told.split_once(" refuses to start: ").map_or(told, |(_, reason)| reason);
        let named = |key: &&String| {
            let rest = reason.strip_prefix(key.as_str());
            rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_' || c == '-'))
        };
        let settings = route.settings.as_object().into_iter().flat_map(|settings| settings.keys());
        match settings.filter(named).max_by_key(|key| key.len()) {
            Some(key) => self.route_error(route, &format!("/settings/{}", escaped(key)), message),
            None if reason.contains("; set entry = ") => self.route_error(route, "/entry", message),
            None if reason.contains(" has roles { ") => self.members_error(route, message),
            None => self.route_error(route, "/settings", message),
        }
    }
}

/// Settings that requests may set.
fn overrides(section: &mut Section) -> Result<Option<Overrides>, Fault> {
    let (keys, most) = (section.take("overrides"), section.take("max_variants"));
    let Some(field) = keys else {
        return match most {
            Some(most) => Err(most.fault("goes with `overrides`; leave it out, or name settings there")),
            None => Ok(None),
        };
    };
    let mut overrides = Overrides::default();
    for item in field.array("strings")? {
        let key = Key::parse(&item.text()?).ok_or_else(|| {
            item.fault("must be a setting of the policy, for example \"threshold\" or \"probabilities.large\"")
        })?;
        if overrides.keys.contains(&key) {
            return Err(item.fault("is listed twice"));
        }
        overrides.keys.push(key);
    }
    if overrides.keys.is_empty() {
        return Err(field.fault("must name at least one setting; leave it out for none"));
    }
    if let Some(most) = most {
        overrides.max_variants = most.integer(1..=256)? as usize;
    }
    Ok(Some(overrides))
}

/// A recording knows one table of settings of each route.
pub(super) fn refuse_recorded_overrides(config: &Config) -> Result<(), Fault> {
    let recorded = |route: &&RouteConfig| config.records(&route.name);
    let mut routes = config.routes.iter().filter(recorded);
    match routes.find(|route| route.overrides.is_some()) {
        None => Ok(()),
        Some(route) => {
            let message = format!(
                "routes.{}.overrides: the route is recorded under [record], and a recording has one table of settings \
                 for each route; leave it out, or list the routes to record under record.routes without this one",
                route.name
            );
            let ConfigError { origin, message, .. } = config.route_error(route, "/overrides", message);
            Err(Fault { origin, message })
        }
    }
}

fn digest(field: &Field) -> Result<String, Fault> {
    let digest = field.text()?.to_ascii_lowercase();
    if digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit()) {
        Ok(digest)
    } else {
        Err(field.fault("must be 64 hexadecimal digits, as `sha256sum` prints them"))
    }
}

/// The models of a route with their roles: `roles = { MODEL = "ROLE" }`, or `models = ["MODEL"]`
/// where each name is its role.
fn members(section: &mut Section, models: &[ModelConfig]) -> Result<Vec<(usize, String)>, Fault> {
    let index = |field: &Field, origin: &Origin, name: &str| {
        models.iter().position(|m| m.name == name).ok_or_else(|| {
            let known: Vec<&str> = models.iter().map(|m| m.name.as_str()).collect();
            Fault::at(origin, format!("{}: there is no model `{name}`: {}", field.name, suggestion(name, known)))
        })
    };
    let (roles, list) = (section.take("roles"), section.take("models"));
    let (place, members) = match (roles, list) {
        (Some(_), Some(list)) => {
            return Err(list.fault("`roles` names the models already; keep one of them"));
        }
        (None, None) => {
            return Err(
                section.fault("names no models; add `roles = { MODEL = \"ROLE\", … }` or `models = [\"MODEL\", …]`")
            );
        }
        (Some(roles), None) => {
            let mut members = Vec::new();
            for (key, role) in roles.section()?.rest() {
                members.push((index(&roles, &key.origin, &key.name)?, role.text()?));
            }
            (roles, members)
        }
        (None, Some(list)) => {
            let mut members: Vec<(usize, String)> = Vec::new();
            for item in list.array("strings")? {
                let name = item.text()?;
                let model = index(&item, &item.node.origin, &name)?;
                if members.iter().any(|(m, _)| *m == model) {
                    return Err(item.fault("is listed twice"));
                }
                members.push((model, name));
            }
            (list, members)
        }
    };
    if members.is_empty() {
        return Err(place.fault("must name at least one model"));
    }
    Ok(members)
}
