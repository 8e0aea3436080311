//! Plugins by name or path, whatever their kind.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::native::NativePlugin;
use super::wasm::WasmPlugin;
use super::{PolicyFactory, native, wasm};

/// No directory has the plugin.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    #[error("plugin `{0}` is not a bare name; give a path with a `/`, or a name of letters, digits, `-` and `_`")]
    NotBare(String),
    #[error("plugin `{name}` cannot be found: plugin_dirs is empty; add the directory that holds {file}")]
    NoDirectories { name: String, file: String },
    #[error("plugin `{name}` is in none of these places: {}; build it, or add its directory to plugin_dirs", list(.looked_at))]
    NotFound { name: String, looked_at: Vec<PathBuf> },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// The plugin with this bare name, in the first directory that has it: `librstitch.so` for `rstitch`, and
/// `rstitch.wasm` for `rstitch.wasm`.
pub fn find(name: &str, plugin_dirs: &[PathBuf]) -> Result<PathBuf, FindError> {
    let stem = name.strip_suffix(".wasm");
    let bare = stem.unwrap_or(name);
    if bare.is_empty() || !bare.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_') {
        return Err(FindError::NotBare(name.to_owned()));
    }
    // Cargo names libraries with `_`.
    let file = if stem.is_some() { name.to_owned() } else { format!("lib{}.so", name.replace('-', "_")) };
    let looked_at: Vec<PathBuf> = plugin_dirs.iter().map(|dir| dir.join(&file)).collect();
    if looked_at.is_empty() {
        return Err(FindError::NoDirectories { name: name.to_owned(), file });
    }
    // What exists but is broken is reported by the load; no later directory stands in for it.
    match looked_at.iter().find(|path| path.symlink_metadata().is_ok()) {
        Some(path) => Ok(path.clone()),
        None => Err(FindError::NotFound { name: name.to_owned(), looked_at }),
    }
}

/// Why a plugin was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Native(#[from] native::LoadError),
    #[error(transparent)]
    Wasm(#[from] wasm::LoadError),
    /// It was opened before and could not be used.
    #[error("plugin `{}`: {why}", path.display())]
    Before { path: PathBuf, why: String },
    #[error(
        "plugin `{}`: {most} different native plugins have been loaded since the start, and they stay in memory; restart the server to load another",
        path.display()
    )]
    TooMany { path: PathBuf, most: usize },
}

/// Whether the name says that it is a WebAssembly module.
pub(super) fn is_wasm(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "wasm")
}

/// A loaded plugin, and where it came from.
pub struct Plugin {
    pub policy: Arc<dyn PolicyFactory>,
    pub version: String,
    pub path: PathBuf,
    /// Of its file, in hexadecimal.
    pub sha256: String,
}

impl Plugin {
    /// Load the plugin at `path`: a WebAssembly module if the name ends so, else a library. With `sha256`,
    /// only if its content has that hash.
    pub fn load(path: &Path, sha256: Option<&str>) -> Result<Self, LoadError> {
        if is_wasm(path) {
            let plugin = WasmPlugin::load(path, sha256)?;
            let (version, sha256) = (plugin.version().to_owned(), plugin.sha256().to_owned());
            Ok(Self { policy: Arc::new(plugin), version, path: path.to_owned(), sha256 })
        } else {
            let plugin = NativePlugin::load(path, sha256)?;
            let (version, sha256) = (plugin.version().to_owned(), plugin.sha256().to_owned());
            Ok(Self { policy: Arc::new(plugin), version, path: path.to_owned(), sha256 })
        }
    }
}
