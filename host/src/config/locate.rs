//! Finding models and plugins on disk.

use std::path::{Path, PathBuf};

use super::{Config, ConfigError, ModelConfig, Weights};

/// The local cache of the Hugging Face hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubCache(pub PathBuf);

impl HubCache {
    /// Where the hub's own tools put it: `HF_HUB_CACHE`, `HF_HOME/hub` or `~/.cache/huggingface/hub`.
    pub fn from_env(variable: impl Fn(&str) -> Option<PathBuf>) -> Self {
        let set = |name: &str| variable(name).filter(|v| !v.as_os_str().is_empty());
        let cache = set("HF_HUB_CACHE").or_else(|| Some(set("HF_HOME")?.join("hub"))).or_else(|| {
            let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
            Some(cache.join("huggingface").join("hub"))
        });
        Self(cache.unwrap_or_else(|| PathBuf::from(".cache/huggingface/hub")))
    }

    /// Directory of a repository.
    fn repository(&self, id: &str) -> PathBuf {
        self.0.join(format!("models--{}", id.replace('/', "--")))
    }

    /// The snapshot that `main` points to.
    fn snapshot(&self, id: &str) -> Option<PathBuf> {
        let repository = self.repository(id);
        let commit = std::fs::read_to_string(repository.join("refs").join("main")).ok()?;
        let snapshot = repository.join("snapshots").join(commit.trim());
        snapshot.is_dir().then_some(snapshot)
    }
}

/// Whether `path` reads like a repository of the hub: `ORG/NAME`.
fn hub_id(path: &str) -> bool {
    let part = |p: &str| {
        p.starts_with(|c: char| c.is_ascii_alphanumeric())
            && p.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    matches!(path.split('/').collect::<Vec<_>>().as_slice(), [org, name] if part(org) && part(name))
}

/// The directory of `model`: a path relative to the configuration file, or else a repository of the
/// hub in the local cache. With random weights it is the directory of the tokenizer.
pub fn model_directory(config: &Config, model: &ModelConfig, cache: &HubCache) -> Result<PathBuf, ConfigError> {
    let local = config.directory().join(&model.path);
    let key = match model.weights {
        Weights::Directory => "path",
        Weights::Random(_) => "tokenizer",
    };
    let field = format!("models.{}.{key} = {:?}", model.name, model.path);
    if local.is_dir() {
        return Ok(local);
    }
    if local.exists() {
        let message = format!("{field}: {} is not a directory; give the directory that holds it", local.display());
        return Err(config.model_error(model, message));
    }
    if !hub_id(&model.path) {
        let message =
            format!("{field}: there is no directory {}; paths are relative to the configuration file", local.display());
        return Err(config.model_error(model, message));
    }
    cache.snapshot(&model.path).ok_or_else(|| {
        let message = format!(
            "{field}: neither the directory {} nor {} in the hub cache exists; get it with `hf download {}`",
            local.display(),
            cache.repository(&model.path).display(),
            model.path
        );
        config.model_error(model, message)
    })
}

/// Where bare plugin names are looked up, in order.
pub fn plugin_directories(config: &Config, executable: Option<&Path>) -> Vec<PathBuf> {
    match &config.plugin_dirs {
        Some(directories) => directories.iter().map(|d| config.directory().join(d)).collect(),
        None => {
            let beside = executable.and_then(Path::parent).map(Path::to_path_buf);
            beside.into_iter().chain([config.directory().join("plugins")]).collect()
        }
    }
}
