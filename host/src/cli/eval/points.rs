//! Which points are evaluated.

use serde_json::{Value, json};

use super::super::build::Prepared;
use super::super::output::Failure;
use super::super::record::Served;
use super::args::Eval;
use crate::config::RouteConfig;
use crate::engine::{OnError, RouteSetup};
use crate::eval::bisect::Search;
use crate::eval::summary::Point;
use crate::eval::sweep::{Sweep, bounds, combinations, set, shown};
use crate::policy::validate_settings;

/// Points of the routes and models `names`, in this order. Their settings fit the plugins' schemas.
pub fn listed(names: &[&str], sweeps: &[Sweep], prepared: &Prepared) -> Result<Vec<Point>, Failure> {
    let mut points = Vec::new();
    for name in names {
        match prepared.config.routes.iter().position(|route| route.name == *name) {
            Some(index) => points.extend(of_route(index, sweeps, prepared)?),
            None => points.push(bare(name)),
        }
    }
    if !sweeps.is_empty() && points.iter().all(Point::is_bare) {
        return Err(Failure::input("--sweep: none of the routes has a policy, so there is nothing to set"));
    }
    Ok(points)
}

fn bare(model: &str) -> Point {
    Point {
        name: model.into(),
        route: model.into(),
        label: String::new(),
        settings: Value::Null,
        models: vec![model.into()],
    }
}

fn of_route(index: usize, sweeps: &[Sweep], prepared: &Prepared) -> Result<Vec<Point>, Failure> {
    let route = &prepared.config.routes[index];
    let combinations = combinations(&route.settings, sweeps)
        .map_err(|e| Failure::input(format!("--sweep: route `{}`: {e}", route.name)))?;
    let point = |(label, settings)| checked(point(route, label, settings, prepared), index, "--sweep", prepared);
    combinations.into_iter().map(point).collect()
}

fn point(route: &RouteConfig, label: String, settings: Value, prepared: &Prepared) -> Point {
    // Names in a configuration have no brackets, so no route or model is called the same.
    let name = if label.is_empty() { route.name.clone() } else { format!("{}[{label}]", route.name) };
    let models = route.models.iter().map(|(model, _)| prepared.config.models[*model].name.clone()).collect();
    Point { name, route: route.name.clone(), label, settings, models }
}

fn checked(point: Point, index: usize, flag: &str, prepared: &Prepared) -> Result<Point, Failure> {
    validate_settings(prepared.plugins[index].policy.settings_schema(), &point.settings)
        .map_err(|e| Failure::input(format!("{flag}: point {}: {e}", point.name)))?;
    if let Some(setup) = route(&point, prepared) {
        prepared.check(&setup)?;
    }
    Ok(point)
}

/// The point as a route of the engine; `None` for a model alone, which the engine has anyway. Answers that
/// went on without their policy would measure something else, so a policy that fails ends the evaluation.
pub fn route(point: &Point, prepared: &Prepared) -> Option<RouteSetup> {
    let index = prepared.config.routes.iter().position(|route| route.name == point.route)?;
    Some(RouteSetup {
        name: point.name.clone(),
        settings: point.settings.to_string(),
        on_error: OnError::FailRequest,
        ..prepared.route(index)
    })
}

/// The points with a policy, for a recording.
pub fn served(points: &[Point], prepared: &Prepared) -> Vec<Served> {
    let served = points.iter().filter_map(|point| {
        let index = prepared.config.routes.iter().position(|route| route.name == point.route)?;
        Some(Served { name: point.name.clone(), settings: point.settings.clone(), index })
    });
    served.collect()
}

/// The search that `--target-share` asks for.
pub struct Target<'a> {
    prepared: &'a Prepared,
    pub setting: &'a str,
    integer: bool,
    pub search: Search,
}

impl<'a> Target<'a> {
    /// `share`: the one that is wanted.
    pub fn new(share: f64, arguments: &'a Eval, prepared: &'a Prepared) -> Result<Self, Failure> {
        let setting = arguments.setting.as_str();
        let fault = |message: String| Failure::input(format!("--target-share: {message}"));
        if arguments.routes.len() != 1 {
            return Err(fault(format!("works on one route, but {} are given", arguments.routes.len())));
        }
        let [route] = prepared.config.routes.as_slice() else {
            return Err(fault(format!("`{}` is a model alone; give a route with a policy", arguments.routes[0])));
        };
        // A name that the schema does not know is refused as such, not for its bounds.
        let mut named = route.settings.clone();
        set(&mut named, setting, json!(0)).map_err(|e| fault(e.to_string()))?;
        let known = bounds(prepared.plugins[0].policy.settings_schema(), setting);
        if let Err(unknown) = validate_settings(prepared.plugins[0].policy.settings_schema(), &named)
            && unknown.contains("no such setting")
        {
            return Err(fault(unknown));
        }
        let range = match (arguments.range, known.minimum, known.maximum) {
            (Some(range), ..) => range,
            (None, Some(minimum), Some(maximum)) => (minimum, maximum),
            _ => {
                return Err(fault(format!(
                    "the schema of plugin `{}` does not bound `{setting}` on both sides; give --range LOW,HIGH",
                    route.plugin
                )));
            }
        };
        let search = Search::new(range, known.integer, share, arguments.tolerance)
            .map_err(|e| Failure::input(format!("--range: {e}")))?;
        let target = Self { prepared, setting, integer: known.integer, search };
        // Both ends show before anything is loaded.
        for end in target.search.range() {
            target.point(end)?;
        }
        Ok(target)
    }

    /// The point with this value.
    pub fn point(&self, value: f64) -> Result<Point, Failure> {
        let route = &self.prepared.config.routes[0];
        let value = if self.integer { json!(value as i64) } else { json!(value) };
        let label = format!("{}={}", self.setting, shown(&value));
        let mut settings = route.settings.clone();
        set(&mut settings, self.setting, value).map_err(|e| Failure::input(format!("--{e}")))?;
        checked(point(route, label, settings, self.prepared), 0, "--target-share", self.prepared)
    }
}
