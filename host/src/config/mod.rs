//! The configuration: a TOML file into typed, checked values. Every error is one line that names
//! place, field, value and remedy.
//!
//! Reading (`read`) is pure: text and environment in, values out. Finding things on disk (`locate`)
//! is apart from it.

pub(crate) mod batching;
pub(crate) mod error;
mod front;
mod gpu;
mod key;
mod locate;
mod places;
pub(crate) mod read;
mod record;
mod reload;
mod route;
mod traces;
pub(crate) mod tree;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use batching::BatchingConfig;
pub use error::{ConfigError, Origin};
pub use front::FrontConfig;
pub use gpu::{DeviceChoice, DtypeChoice, GpuConfig};
pub use key::{AdminKey, ApiKey, distinct, key_file};
pub use locate::{HubCache, model_directory, plugin_directories};
pub use places::Places;
pub use read::DEFAULT_MAX_WAIT;
pub use record::RecordConfig;
pub use tree::ENV_PREFIX;

use sha2::{Digest, Sha256};

use crate::api::TraceSettings;
use crate::engine::OnError;
use crate::policy::overrides::Overrides;
use crate::runner::model_config::shapes::Shape;

/// A checked configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The file, as given.
    pub file: PathBuf,
    pub server: ServerConfig,
    pub gpu: GpuConfig,
    pub batching: BatchingConfig,
    /// Where bare plugin names are looked up; `None`: the usual places.
    pub plugin_dirs: Option<Vec<PathBuf>>,
    /// At least one, in the order of the file.
    pub models: Vec<ModelConfig>,
    /// In the order of the file.
    pub routes: Vec<RouteConfig>,
    pub record: Option<RecordConfig>,
    pub traces: Option<TraceSettings>,
    /// Where all that was written.
    pub places: Places,
}

/// `[server]`
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    pub host: IpAddr,
    pub port: u16,
    /// Largest body of an HTTP request.
    pub max_body_bytes: usize,
    /// Most answers under way at once, over all clients.
    pub max_requests: usize,
    /// How long running requests may go on after the signal to stop.
    pub drain_timeout: Duration,
    /// Where the admin endpoints are served apart from all others.
    pub admin: Option<SocketAddr>,
    /// With one of these the admin endpoints are served at every address; without any, at `admin` alone.
    pub admin_keys: Vec<AdminKey>,
    /// The process ends itself when a hook of a plugin has not come back for so long. `None`: never.
    pub abort_on_hung_plugin: Option<Duration>,
    pub front: FrontConfig,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            host: IpAddr::from([127, 0, 0, 1]),
            port: 30000,
            max_body_bytes: 32 << 20,
            max_requests: 1024,
            drain_timeout: Duration::from_secs(30),
            admin: None,
            admin_keys: Vec::new(),
            abort_on_hung_plugin: None,
            front: FrontConfig::default(),
        }
    }
}

/// Where a model's weights come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Weights {
    /// The model's directory.
    Directory,
    /// Chance: numbers of the right shape, for measuring speed.
    Random(&'static Shape),
}

/// How many tokens a model's K/V pool holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    Pages(u32),
    Tokens(u64),
    Bytes(u64),
}

impl Pool {
    /// The key that gives it.
    pub fn key(self) -> &'static str {
        match self {
            Self::Pages(_) => "pages",
            Self::Tokens(_) => "kv_tokens",
            Self::Bytes(_) => "kv_memory",
        }
    }
}

/// `[models.NAME]`
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub name: String,
    /// Directory of the model or, with random weights, of a tokenizer. As written; see [`model_directory`].
    pub path: String,
    pub weights: Weights,
    pub device: DeviceChoice,
    pub dtype: DtypeChoice,
    /// Requests needed before a forward starts, indexed by active requests less one; never empty.
    pub min_batch: Vec<u32>,
    pub max_wait: Duration,
    /// Wait for other models of its routes that end within this time.
    pub hold: Duration,
    /// `None`: as the device has room.
    pub pool: Option<Pool>,
    /// `None`: by the device.
    pub max_rows: Option<u32>,
    /// `None`: by the device. Not above `max_rows`.
    pub prefill_chunk: Option<u32>,
    /// Multiprocessors of its CUDA device that are its own. Models without share what is left.
    pub multiprocessors: Option<u32>,
    /// Whether it keeps K/V for later requests that begin with the same tokens.
    pub prefix_cache: bool,
    /// Lowers the model's own context.
    pub context: Option<u32>,
    /// Texts of tokens that are never sampled.
    pub masked_tokens: Vec<String>,
}

/// `[routes.NAME]`
#[derive(Clone, Debug, PartialEq)]
pub struct RouteConfig {
    pub name: String,
    /// A bare name, or a path to a library.
    pub plugin: String,
    /// Lower-case hexadecimal digest that the library must have.
    pub sha256: Option<String>,
    /// Models as indices into [`Config::models`], with roles, in the policy's order.
    pub models: Vec<(usize, String)>,
    /// Index into `models`.
    pub entry: usize,
    pub on_error: OnError,
    /// Wall time that a call of the policy may take.
    pub budget: Duration,
    pub settings: serde_json::Value,
    /// Settings that requests may set.
    pub overrides: Option<Overrides>,
    /// Router networks that the policy cannot describe itself, as they are written.
    pub nets: Option<serde_json::Value>,
}

/// Largest file.
const MAX_BYTES: u64 = 16 << 20;

impl Config {
    /// Read and check `file`, with the overrides among `variables`.
    pub fn load(file: &Path, variables: &BTreeMap<String, String>) -> Result<Self, ConfigError> {
        let name = file.display().to_string();
        let fail = |message: String| ConfigError { file: name.clone(), origin: None, message };
        let unread = |e: std::io::Error| {
            fail(match e.kind() {
                std::io::ErrorKind::NotFound => {
                    "there is no such file; give the path of a configuration, for example config/demo.toml".into()
                }
                _ => format!("cannot be read: {e}"),
            })
        };
        // A server reads it again while it works, and must not wait for whoever writes to a pipe.
        let found = std::fs::metadata(file).map_err(unread)?;
        if !found.is_file() {
            return Err(fail("is not a regular file; give the path of a configuration".into()));
        }
        if found.len() > MAX_BYTES {
            let message = format!("has {} bytes, more than the {MAX_BYTES} allowed; give a TOML file", found.len());
            return Err(fail(message));
        }
        let bytes = std::fs::read(file).map_err(unread)?;
        let text = String::from_utf8(bytes).map_err(|e| {
            let valid = e.utf8_error().valid_up_to();
            let line = e.as_bytes()[..valid].iter().filter(|b| **b == b'\n').count() + 1;
            let message = "is not UTF-8 text; a configuration is a TOML file".into();
            ConfigError { file: name.clone(), origin: Some(Origin::Line(line)), message }
        })?;
        Self::parse(&text, file, variables)
    }

    /// Read and check `text`; `file` is its name.
    pub fn parse(text: &str, file: &Path, variables: &BTreeMap<String, String>) -> Result<Self, ConfigError> {
        read::config(text, file, variables).map_err(|fault| fault.in_file(&file.display().to_string()))
    }

    /// SHA-256 of all settings, the variables' included and keys left out. It changes with the program's version.
    pub fn sha256(&self) -> String {
        let digest = Sha256::digest(format!("{self:?}"));
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Directory that relative paths of the file start from.
    pub fn directory(&self) -> &Path {
        match self.file.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        }
    }

    /// An error at `place`, as [`Places::at`] takes it.
    pub fn error(&self, place: &str, message: impl Into<String>) -> ConfigError {
        let origin = self.places.at(place).cloned();
        ConfigError { file: self.file.display().to_string(), origin, message: message.into() }
    }

    /// An error of `model`. Where its words begin with one of the model's keys (`models.NAME.dtype = …`) it is at that
    /// key, else where the weights come from.
    pub fn model_error(&self, model: &ModelConfig, message: impl Into<String>) -> ConfigError {
        let message = message.into();
        let told = message.strip_prefix("models.").and_then(|told| told.strip_prefix(&model.name));
        let source = match model.weights {
            Weights::Directory => "path",
            Weights::Random(_) => "shape",
        };
        let key = told.and_then(|told| told.strip_prefix('.')).unwrap_or(source);
        self.model_error_at(model, key, message.as_str())
    }

    /// An error of `model`, at `place` within its table.
    pub fn model_error_at(&self, model: &ModelConfig, place: &str, message: impl Into<String>) -> ConfigError {
        self.error(&format!("/models/{}/{place}", places::escaped(&model.name)), message)
    }
}

/// The process's variables, for [`Config::load`].
pub fn environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        .filter(|(name, _)| name.starts_with(ENV_PREFIX))
        .collect()
}

#[cfg(test)]
mod tests;
