//! `[routes.NAME]`. Pure.

use std::time::Duration;

use super::error::{Fault, Origin};
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
    let (settings, settings_places) = match section.take("settings") {
        Some(field) => {
            field.section()?;
            (field.json()?, field.places())
        }
        None => (serde_json::Value::Object(serde_json::Map::new()), vec![(String::new(), key.origin.clone())]),
    };
    let nets = match section.take("nets") {
        Some(field) => {
            field.section()?;
            Some((field.json()?, field.node.origin))
        }
        None => None,
    };
    let overrides = overrides(&mut section)?;
    section.end()?;
    let (name, plugin_origin) = (key.name, plugin.node.origin.clone());
    Ok(RouteConfig {
        name,
        plugin: plugin.text()?,
        sha256,
        models: members,
        entry,
        on_error,
        budget,
        settings,
        overrides,
        nets,
        origin: key.origin,
        plugin_origin,
        settings_places,
    })
}

impl RouteConfig {
    /// Where that was written of which `finding` tells, a message that begins with a place in the settings:
    /// `settings/threshold = 2: …`. Else where the settings begin; where there are none, the route.
    pub fn settings_origin(&self, finding: &str) -> &Origin {
        let told = finding.strip_prefix("settings").unwrap_or_default();
        let within = |place: &str| {
            let rest = told.strip_prefix(place);
            rest.is_some_and(|rest| [" = ", ": ", "/"].iter().any(|next| rest.starts_with(next)))
        };
        let places = self.settings_places.iter().filter(|(place, _)| place.is_empty() || within(place));
        places.max_by_key(|(place, _)| place.len()).map_or(&self.origin, |(_, origin)| origin)
    }
}

/// Settings that requests may set, and where that was written.
fn overrides(section: &mut Section) -> Result<Option<(Overrides, Origin)>, Fault> {
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
    Ok(Some((overrides, field.node.origin)))
}

/// A recording knows one table of settings of each route.
pub(super) fn refuse_recorded_overrides(config: &Config) -> Result<(), Fault> {
    let recorded = |route: &&RouteConfig| config.records(&route.name);
    let mut routes = config.routes.iter().filter(recorded);
    match routes.find_map(|route| Some((route, &route.overrides.as_ref()?.1))) {
        None => Ok(()),
        Some((route, origin)) => Err(Fault::at(
            origin,
            format!(
                "routes.{}.overrides: the route is recorded under [record], and a recording has one table of settings \
                 for each route; leave it out, or list the routes to record under record.routes without this one",
                route.name
            ),
        )),
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
