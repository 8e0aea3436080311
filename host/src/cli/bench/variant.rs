//! Ways to serve a route that are measured.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::engines::rehearse;
use crate::cli::build::{self, Prepared};
use crate::cli::output::Failure;
use crate::cli::select::{self, Selection};
use crate::config::{self, BatchingConfig, Config};
use crate::subserver::gate::Schedule;

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
    /// In place of the file's. Ladders then stay as they are, also where the file has them follow the traffic.
    pub schedule: Option<Schedule>,
    /// Its ladders are tuned from what the variant before it measured.
    pub tuned: bool,
}

/// What an ablation needs to know of the whole configuration.
#[derive(Clone, Debug)]
pub struct Whole {
    /// Models of the route.
    pub models: Vec<String>,
    /// Some model runs on a CUDA device.
    pub cuda: bool,
    /// Some model has thresholds above 1.
    pub ladder: bool,
}

impl Variant {
    pub fn new(file: &Path, mode: Mode) -> Self {
        let name = match mode {
            Mode::Routed => file.display().to_string(),
            Mode::StandardServing => format!("{}:{}", mode.name(), file.display()),
        };
        Self { name, file: file.to_owned(), mode, keys: BTreeMap::new(), schedule: None, tuned: false }
    }

    /// `FILE`, or `standard-serving:FILE`.
    pub fn parse(text: &str) -> Self {
        match text.strip_prefix("standard-serving:") {
            Some(file) => Self::new(Path::new(file), Mode::StandardServing),
            None => Self::new(Path::new(text), Mode::Routed),
        }
    }

    /// From what is done without a router to all that the engine has, each with one thing more than the one before.
    pub fn ablation(file: &Path, whole: &Whole) -> Vec<Self> {
        let key = |path: &[&str]| format!("{}{}", config::ENV_PREFIX, path.join("__").to_uppercase());
        let each = |name: &str, value: &str| -> BTreeMap<String, String> {
            whole.models.iter().map(|model| (key(&["models", model, name]), value.to_owned())).collect()
        };
        let of = |name: &str, mode, keys| {
            let file = file.to_owned();
            Self { name: name.into(), file, mode, keys, schedule: None, tuned: false }
        };
        let routed = |name: &str, schedule, keys| Self { schedule: Some(schedule), ..of(name, Mode::Routed, keys) };
        let standard = Mode::StandardServing;
        let bare = each("prefix_cache", "false");
        let mut variants = Vec::new();
        if whole.cuda {
            let graphs = (key(&["gpu", "graphs"]), "false".to_owned());
            variants.push(of("standard serving", standard, bare.clone().into_iter().chain([graphs]).collect()));
        }
        let name = if whole.cuda { "+ CUDA graphs" } else { "standard serving" };
        variants.push(of(name, standard, bare));
        variants.push(of("+ prefix cache", standard, each("prefix_cache", "true")));
        // No model goes out of its turn because requests have waited for long.
        variants.push(routed("+ resident K/V", Schedule::StepSync, each("max_wait_ms", "60000")));
        variants.push(routed("+ asynchrony", Schedule::Eager, BTreeMap::new()));
        let delayed = routed("+ delayed batching", Schedule::Delayed, BTreeMap::new());
        variants.push(Self { tuned: !whole.ladder, ..delayed });
        variants
    }

    /// The part of the configuration that `route` needs.
    pub fn selection(&self, route: &str) -> Result<Selection, Failure> {
        let mut keys = config::environment();
        keys.extend(self.keys.clone());
        let mut config = Config::load(&self.file, &keys).map_err(Failure::input)?;
        if let Some(schedule) = self.schedule {
            config.batching = BatchingConfig { schedule, online: None };
        }
        select::known(&config, route)?;
        Ok(select::only(config, &[route]))
    }

    /// All but the weights. A route that cannot be served so is refused.
    pub fn prepare(&self, route: &str) -> Result<Prepared, Failure> {
        let prepared = build::prepare(self.selection(route)?)?;
        if self.mode == Mode::StandardServing {
            rehearse(&prepared, route)?;
        }
        Ok(prepared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ablation_adds_one_thing_at_a_time() {
        let whole = Whole { models: vec!["small".into(), "large".into()], cuda: false, ladder: true };
        let variants = Variant::ablation(Path::new("a.toml"), &whole);
        let [bare, cached, resident, eager, delayed] = variants.as_slice() else { panic!("{variants:?}") };
        assert_eq!(
            (bare.mode, cached.mode, resident.mode),
            (Mode::StandardServing, Mode::StandardServing, Mode::Routed)
        );
        assert_eq!(bare.keys["TOKENROUTER__MODELS__LARGE__PREFIX_CACHE"], "false");
        assert_eq!((bare.keys.len(), cached.keys["TOKENROUTER__MODELS__SMALL__PREFIX_CACHE"].as_str()), (2, "true"));
        let schedules = variants.iter().map(|variant| variant.schedule.map(Schedule::name));
        assert!(schedules.eq([None, None, Some("step-sync"), Some("eager"), Some("delayed")]));
        assert_eq!((resident.mode, eager.keys.len()), (Mode::Routed, 0));
        let cuda = Variant::ablation(Path::new("a.toml"), &Whole { cuda: true, ladder: false, ..whole });
        assert_eq!(
            (cuda[0].name.as_str(), cuda[0].keys["TOKENROUTER__GPU__GRAPHS"].as_str()),
            (bare.name.as_str(), "false")
        );
        assert_eq!((cuda.len(), cuda[1].name.as_str(), &cuda[1].keys), (6, "+ CUDA graphs", &bare.keys));
        // Only the last has ladders, and none are given.
        assert!(cuda.iter().map(|variant| variant.tuned).eq([false, false, false, false, false, true]));
        assert!(!delayed.tuned);
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
