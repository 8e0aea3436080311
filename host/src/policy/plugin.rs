//! Plugins by name or path, whatever their kind.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::native::NativePlugin;
use super::nets::HostNet;
use super::wasm::WasmPlugin;
use super::{PolicyFactory, native, wasm};
use crate::plain::{closest, short};

/// No directory has the plugin.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    #[error(
        "plugin `{0}` is not a bare name; give a path with a `/`, or a name of at most {MAX_NAME} letters, digits, `-` and `_`"
    )]
    NotBare(String),
    #[error("plugin `{name}` cannot be found: plugin_dirs is empty; add the directory that holds {file}")]
    NoDirectories { name: String, file: String },
    #[error(
        "plugin `{name}` is in none of these places: {}; {}build it, or add its directory to plugin_dirs",
        list(.looked_at),
        meant(.near.as_deref())
    )]
    NotFound {
        name: String,
        looked_at: Vec<PathBuf>,
        /// One that is there.
        near: Option<String>,
    },
}

fn meant(near: Option<&str>) -> String {
    near.map(|near| format!("did you mean `{near}`? If not, ")).unwrap_or_default()
}

/// Names of the plugins that are in `directories`.
fn there(directories: &[PathBuf]) -> Vec<String> {
    let files = directories.iter().filter_map(|directory| directory.read_dir().ok()).flatten();
    let names = files.filter_map(|file| file.ok()?.file_name().into_string().ok());
    let plugin = |file: String| match file.strip_prefix("lib").and_then(|rest| rest.strip_suffix(".so")) {
        Some(name) => Some(name.to_owned()),
        None => is_module(Path::new(&file)).then_some(file),
    };
    let bare = |name: &String| name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    names.filter_map(plugin).filter(bare).collect()
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Longest bare name: its file has a name of at most 255 bytes.
const MAX_NAME: usize = 200;

/// Whether the file's name says that it is a WASM policy, as a module or as text.
pub fn is_module(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "wasm" || extension == "wat")
}

/// The plugin with this bare name, in the first directory that has it: `librstitch.so` for `rstitch`, and
/// `rstitch.wasm` for `rstitch.wasm`.
pub fn find(name: &str, plugin_dirs: &[PathBuf]) -> Result<PathBuf, FindError> {
    let stem = name.strip_suffix(".wasm").or_else(|| name.strip_suffix(".wat"));
    let bare = stem.unwrap_or(name);
    if bare.is_empty()
        || bare.len() > MAX_NAME
        || !bare.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    {
        return Err(FindError::NotBare(short(name)));
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
        None => {
            let there = there(plugin_dirs);
            let near = closest(name, there.iter().map(String::as_str)).map(str::to_owned);
            Err(FindError::NotFound { name: name.to_owned(), looked_at, near })
        }
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

/// A loaded plugin, and where it came from.
pub struct Plugin {
    pub policy: Arc<dyn PolicyFactory>,
    pub version: String,
    pub path: PathBuf,
    /// Of its file, in hexadecimal.
    pub sha256: String,
}

impl Plugin {
    /// For checks and replays, which have scores without nets: with made-up ones where a configuration describes them.
    pub fn with_made_up_nets(self) -> Self {
        let nets: Vec<HostNet> = self.policy.host_nets().iter().map(|name| HostNet::made_up(name)).collect();
        // All that are asked for, and no others.
        let policy = if nets.is_empty() { None } else { self.policy.with_nets(nets).ok() };
        Self { policy: policy.unwrap_or_else(|| self.policy.clone()), ..self }
    }

    /// Load the plugin at `path`: a WebAssembly module or its text if the name ends so, else a library. With
    /// `sha256`, only if the file has that hash.
    pub fn load(path: &Path, sha256: Option<&str>) -> Result<Self, LoadError> {
        if is_module(path) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_name_is_cut() {
        for name in ["x".repeat(200_000), "a/".repeat(100_000)] {
            let error = find(&name, &[PathBuf::from("d")]).unwrap_err().to_string();
            assert!(error.len() < 300 && error.contains("…` is not a bare name; give a path"), "{error}");
        }
        let directory = tempfile::tempdir().unwrap();
        for file in ["librstitch.so", "other.wat", "readme"] {
            std::fs::write(directory.path().join(file), "").unwrap();
        }
        let told = |name: &str| find(name, &[directory.path().into()]).unwrap_err().to_string();
        for (name, near) in [("r-stitch", "rstitch"), ("rstich", "rstitch"), ("othr.wat", "other.wat")] {
            assert!(told(name).contains(&format!("; did you mean `{near}`? If not, build it")), "{}", told(name));
        }
        assert!(!told("frobnicate").contains("did you mean") && !told("readmi").contains("did you mean"));
        let longest = "x".repeat(MAX_NAME);
        assert!(matches!(find(&longest, &[PathBuf::from("d")]), Err(FindError::NotFound { .. })));
    }
}
