//! Ways to serve a route that are measured.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::cli::build::{self, Prepared};
use crate::cli::output::Failure;
use crate::cli::select::{self, Selection};
use crate::config::{self, Config};

/// How the models are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// One engine routes between its models
    Routed,
    /// Each model is a server of its own, and a dispatcher outside calls one for each token over HTTP, with
    /// the whole sequence
    StandardServing,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Routed => "routed",
            Self::StandardServing => "standard-serving",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant {
    pub name: String,
    pub file: PathBuf,
    pub mode: Mode,
    /// Keys of the configuration that differ from the file, as environment variables.
    pub keys: BTreeMap<String, String>,
}

impl Variant {
    pub fn new(file: &Path, mode: Mode) -> Self {
        let name = match mode {
            Mode::Routed => file.display().to_string(),
            Mode::StandardServing => format!("{}:{}", mode.name(), file.display()),
        };
        Self { name, file: file.to_owned(), mode, keys: BTreeMap::new() }
    }

    /// `FILE`, or `standard-serving:FILE`.
    pub fn parse(text: &str) -> Self {
        match text.strip_prefix("standard-serving:") {
            Some(file) => Self::new(Path::new(file), Mode::StandardServing),
            None => Self::new(Path::new(text), Mode::Routed),
        }
    }

    /// From what is done without a router to all that the engine has, each with one thing more than the one before.
    /// `models`: those of the route.
    pub fn ablation(file: &Path, models: &[String]) -> Vec<Self> {
        let key = |path: &[&str]| format!("{}{}", config::ENV_PREFIX, path.join("__").to_uppercase());
        let caches = |on: bool| {
            models.iter().map(move |model| (key(&["models", model, "prefix_cache"]), on.to_string())).collect()
        };
        let schedule = |name: &str| [(key(&["batching", "schedule"]), name.to_owned())].into();
        let of = |name: &str, mode, keys| Self { name: name.into(), file: file.to_owned(), mode, keys };
        vec![
            of("standard serving", Mode::StandardServing, caches(false)),
            of("+ prefix cache", Mode::StandardServing, caches(true)),
            of("+ resident K/V", Mode::Routed, schedule("step-sync")),
            of("+ asynchrony", Mode::Routed, schedule("eager")),
            of("+ delayed batching", Mode::Routed, schedule("delayed")),
        ]
    }

    /// The part of the configuration that `route` needs.
    pub fn selection(&self, route: &str) -> Result<Selection, Failure> {
        let mut keys = config::environment();
        keys.extend(self.keys.clone());
        let config = Config::load(&self.file, &keys).map_err(Failure::input)?;
        select::known(&config, route)?;
        Ok(select::only(config, &[route]))
    }

    /// All but the weights.
    pub fn prepare(&self, route: &str) -> Result<Prepared, Failure> {
        build::prepare(self.selection(route)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ablation_adds_one_thing_at_a_time() {
        let variants = Variant::ablation(Path::new("a.toml"), &["small".into(), "large".into()]);
        let [bare, cached, resident, eager, delayed] = variants.as_slice() else { panic!("{variants:?}") };
        assert_eq!(
            (bare.mode, cached.mode, resident.mode),
            (Mode::StandardServing, Mode::StandardServing, Mode::Routed)
        );
        assert_eq!(bare.keys["TOKENROUTER__MODELS__LARGE__PREFIX_CACHE"], "false");
        assert_eq!((bare.keys.len(), cached.keys["TOKENROUTER__MODELS__SMALL__PREFIX_CACHE"].as_str()), (2, "true"));
        let schedules = [resident, eager, delayed].map(|v| v.keys["TOKENROUTER__BATCHING__SCHEDULE"].as_str());
        assert_eq!(schedules, ["step-sync", "eager", "delayed"]);
    }

    #[test]
    fn as_written() {
        for (text, file, mode) in
            [("a.toml", "a.toml", Mode::Routed), ("standard-serving:b.toml", "b.toml", Mode::StandardServing)]
        {
            let variant = Variant::parse(text);
            assert_eq!((variant.name.as_str(), variant.file.as_path(), variant.mode), (text, Path::new(file), mode));
        }
    }
}
