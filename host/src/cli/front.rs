//! Keys and certificates of a configuration, from their files into force.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use super::output::Failure;
use crate::api::{Certificates, Front, KeyRing, Keys, Refused, Tls, TlsFiles};
use crate::config::{self, ApiKey, Config};

/// Largest file of keys.
const MAX_BYTES: u64 = 1 << 20;

/// What the files hold.
pub struct Secrets {
    keys: KeyRing,
    certificates: Option<Certificates>,
}

impl Secrets {
    pub fn read(config: &Config) -> Result<Self, Failure> {
        let front = &config.server.front;
        let mut keys = front.api_keys.clone();
        if let Some(file) = &front.api_key_file {
            let path = config.directory().join(file);
            let fault = |message: String| {
                let message = format!("server.api_key_file = {:?}: {message}", file.display().to_string());
                Failure::input(config.error("/server/api_key_file", message))
            };
            keys.extend(key_file(&path, keys.len()).map_err(fault)?);
            config::distinct(&keys).map_err(fault)?;
        }
        let tls = front.tls.as_ref().map(|files| {
            let TlsFiles { cert, key, client_ca } = files;
            let at = |file: &Path| config.directory().join(file);
            TlsFiles { cert: at(cert), key: at(key), client_ca: client_ca.as_deref().map(at) }
        });
        let certificates = tls.map(|files| files.read()).transpose().map_err(|error| {
            Failure::input(config.error(&format!("/server/tls/{}", error.field()), error.to_string()))
        })?;
        Ok(Self { keys: KeyRing::new(keys.iter().map(|key| (key.name.as_str(), key.expose()))), certificates })
    }
}

fn key_file(path: &Path, before: usize) -> Result<Vec<ApiKey>, String> {
    let unread = |error: std::io::Error| format!("cannot be read: {error}");
    let found = fs::metadata(path).map_err(unread)?;
    if !found.is_file() || found.len() > MAX_BYTES {
        return Err(format!("is not a regular file of at most {MAX_BYTES} bytes"));
    }
    let mode = found.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        let path = path.display();
        tracing::warn!("server.api_key_file: others than its owner may use {path} (mode {mode:o}); chmod 600 it");
    }
    config::key_file(&fs::read_to_string(path).map_err(unread)?, before)
}

/// Keys and certificates in force.
#[derive(Clone)]
pub struct InForce {
    keys: Arc<Keys>,
    pub tls: Option<Arc<Tls>>,
}

impl InForce {
    pub fn new(secrets: Secrets) -> Self {
        let keys = Arc::<Keys>::default();
        keys.set(secrets.keys);
        Self { keys, tls: secrets.certificates.map(|certificates| Arc::new(Tls::new(certificates))) }
    }

    /// Refuse what would let everyone in: keys may change, but not go.
    pub fn may_become(&self, secrets: &Secrets, config: &Config) -> Result<(), Refused> {
        let held = self.keys.current().len();
        if held == 0 || !secrets.keys.is_empty() {
            return Ok(());
        }
        Err(Refused::Restart(format!(
            "{}: server.api_keys, server.api_key_file = none: the server runs with {held} API keys, and everyone could \
             ask; keep a key, or restart to serve without",
            config.file.display()
        )))
    }

    /// From now on these count. Whether there is TLS at all does not change.
    pub fn replace(&self, secrets: Secrets) {
        let (api_keys, certificates) = (secrets.keys.len(), secrets.certificates.is_some());
        if api_keys > 0 || certificates {
            tracing::info!(api_keys, certificates, "API keys and certificates taken over");
        }
        self.keys.set(secrets.keys);
        if let (Some(tls), Some(certificates)) = (&self.tls, secrets.certificates) {
            tls.set(certificates);
        }
    }

    /// The door of a server with this configuration.
    pub fn door(&self, config: &Config) -> Front {
        let front = &config.server.front;
        let mut door = Front::default();
        (door.keys, door.metrics) = (self.keys.clone(), front.metrics);
        (door.cors, door.limits) = (front.cors.clone(), front.limits);
        door
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reload_does_not_take_all_keys_away() {
        let of = |keys: &str| {
            let text = format!("[models.m]\npath = \"m\"\n[server]\n{keys}\n");
            let config = Config::parse(&text, "c.toml".as_ref(), &Default::default()).unwrap();
            (Secrets::read(&config).unwrap(), config)
        };
        let (none, one, other) = ("", "api_keys = [\"0123456789abcdef\"]", "api_keys = [\"fedcba9876543210\"]");
        for (before, after) in [(none, none), (none, one), (one, other)] {
            let (secrets, config) = of(after);
            assert_eq!(InForce::new(of(before).0).may_become(&secrets, &config), Ok(()), "{before} {after}");
        }
        let (secrets, config) = of(none);
        let Err(Refused::Restart(why)) = InForce::new(of(one).0).may_become(&secrets, &config) else {
            panic!("everyone is let in");
        };
        assert_eq!(
            why,
            "c.toml: server.api_keys, server.api_key_file = none: the server runs with 1 API keys, and everyone could \
             ask; keep a key, or restart to serve without"
        );
    }
}
