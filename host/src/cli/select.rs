//! The part of a configuration that certain routes need.

use super::output::Failure;
use crate::config::Config;
use crate::request::ModelId;

/// What is loaded.
pub struct Selection {
    pub config: Config,
    /// By model: its place in the whole file. It keys the model's sampling noise, so that a seed gives the
    /// same answer whatever else is loaded.
    pub noise_keys: Vec<ModelId>,
}

impl From<Config> for Selection {
    /// All of it.
    fn from(config: Config) -> Self {
        let noise_keys = (0..config.models.len() as u32).map(ModelId).collect();
        Self { config, noise_keys }
    }
}

/// The routes and models `names`, with the models that these routes use.
pub fn only(config: Config, names: &[&str]) -> Selection {
    let Selection { mut config, noise_keys } = config.into();
    config.routes.retain(|route| names.contains(&route.name.as_str()));
    let used = |index: usize| {
        names.contains(&config.models[index].name.as_str())
            || config.routes.iter().any(|route| route.models.iter().any(|(model, _)| *model == index))
    };
    let kept: Vec<usize> = (0..config.models.len()).filter(|index| used(*index)).collect();
    for route in &mut config.routes {
        // Every model of a route is kept.
        route.models = route
            .models
            .iter()
            .filter_map(|(model, role)| Some((kept.iter().position(|k| k == model)?, role.clone())))
            .collect();
    }
    config.models = kept.iter().map(|index| config.models[*index].clone()).collect();
    Selection { config, noise_keys: kept.iter().map(|index| noise_keys[*index]).collect() }
}

/// A wrong name shows before anything is loaded.
pub fn known(config: &Config, name: &str) -> Result<(), Failure> {
    let names = all(config);
    if names.contains(&name) {
        return Ok(());
    }
    let suggestion = crate::plain::suggestion(name, names);
    Err(Failure::input(format!("--route {name:?}: {} has no such route or model: {suggestion}", config.file.display())))
}

/// Names of all routes, then of all models.
pub fn all(config: &Config) -> Vec<&str> {
    let routes = config.routes.iter().map(|route| route.name.as_str());
    routes.chain(config.models.iter().map(|model| model.name.as_str())).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::*;

    #[test]
    fn routes_keep_their_models_and_models_their_noise() {
        let text = "[models.a]\npath = 'a'\n[models.b]\npath = 'b'\n[models.c]\npath = 'c'\n[models.d]\npath = 'd'\n\
                    [routes.r]\nplugin = 'p'\nroles = { d = 'large', b = 'small' }\nentry = 'b'\n\
                    [routes.s]\nplugin = 'p'\nmodels = ['a', 'b']\n";
        let config = Config::parse(text, Path::new("c.toml"), &BTreeMap::new()).unwrap();
        let names = |selection: &Selection| -> Vec<String> {
            selection.config.models.iter().map(|model| model.name.clone()).collect()
        };
        let selection = only(config.clone(), &["r"]);
        assert_eq!(
            (names(&selection), selection.noise_keys.as_slice()),
            (vec!["b".into(), "d".into()], &[ModelId(1), ModelId(3)][..])
        );
        let route = &selection.config.routes[0];
        assert_eq!((route.models.as_slice(), route.entry), (&[(1, "large".into()), (0, "small".into())][..], 1));
        assert_eq!(selection.config.routes.len(), 1);
        assert_eq!(names(&only(config.clone(), &["c", "s"])), ["a", "b", "c"]);
        assert!(only(config.clone(), &["c"]).config.routes.is_empty());
        let whole = Selection::from(config.clone());
        assert_eq!((whole.config, whole.noise_keys.len()), (config, 4));
    }
}
