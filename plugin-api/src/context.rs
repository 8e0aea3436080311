//! What a policy learns when it is created.

use crate::net::WeightsInfo;
use crate::{ModelIndex, PolicyError, TokenId};

/// One model of the route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelDescription {
    /// Name in the configuration, for example `small`.
    pub name: String,
    /// Role given by the route, for example `slm`; the name where the route gives none.
    pub role: String,
}

/// Severity of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Something failed.
    Error,
    /// Something unusual.
    Warn,
    /// Worth knowing at start.
    Info,
    /// For the policy's author.
    Debug,
}

/// Services of the host, valid while [`Policy::create`](crate::Policy::create) runs. The defaults are those
/// of a host without text, files or log: a test of a policy overrides what the policy asks for.
pub trait Services {
    /// The bytes that a token stands for; `None` for an id outside the vocabulary.
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        let _ = id;
        None
    }
    /// The id of the token whose text is exactly `text`.
    fn token_id(&self, text: &str) -> Option<TokenId> {
        let _ = text;
        None
    }
    /// What the weights file at `path` holds. A relative path is taken from the configuration's
    /// directory. The error is one line that says what is wrong with the file.
    fn weights(&self, path: &str) -> Result<WeightsInfo, String> {
        Err(format!("weights `{path}`: this host reads no files"))
    }
    /// Write to the host's log.
    fn log(&self, level: LogLevel, message: &str) {
        let _ = (level, message);
    }
}

/// A host without text, files or log: for tests of policies.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoServices;

impl Services for NoServices {}

/// Where an instance works: one instance for each (route, model).
pub struct Context<'a> {
    /// Name of the route.
    pub route: &'a str,
    /// The model that this instance is attached to.
    pub model: ModelIndex,
    /// All models of the route.
    pub models: &'a [ModelDescription],
    /// The model that receives new requests.
    pub entry: ModelIndex,
    /// Number of tokens that all models of the route share.
    pub vocab_size: u32,
    /// Tokens that end a request at this model.
    pub eos: &'a [TokenId],
    /// Services of the host.
    pub services: &'a dyn Services,
}

impl Context<'_> {
    /// What the weights file at `path` holds, see [`Services::weights`].
    pub fn weights(&self, path: &str) -> Result<WeightsInfo, PolicyError> {
        self.services.weights(path).map_err(PolicyError::new)
    }

    /// The model with this role or, failing that, this name.
    pub fn find(&self, role: &str) -> Option<ModelIndex> {
        let by = |f: fn(&ModelDescription) -> &str| self.models.iter().position(|m| f(m) == role);
        by(|m| &m.role).or_else(|| by(|m| &m.name)).map(|i| i as ModelIndex)
    }

    /// Role of this instance's model.
    pub fn role(&self) -> &str {
        self.models.get(self.model as usize).map_or("", |m| &m.role)
    }
}
