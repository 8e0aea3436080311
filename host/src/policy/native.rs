//! Policies in shared libraries.
//!
//! A native plugin has the rights of this process, from the moment it is opened: checks come first
//! ([`gate`]). What is opened is a private copy of the bytes that were checked, so that a file
//! replaced in the meantime, or overwritten later, changes nothing.
#![allow(unsafe_code)] // One system call has no safe wrapper in the dependencies.

pub mod gate;
mod instance;

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::path::{Path, PathBuf};

use tokenrouter_plugin_api::Context;
use tokenrouter_plugin_api::host::{self, AbiVersion, Library, Metadata};

use super::{PluginFile, PolicyFactory, PolicyFailure, PolicyInstance};
use gate::GateError;

/// Why a plugin was not loaded: one line with the path, what is wrong and what to do.
#[derive(Debug, thiserror::Error)]
#[error("plugin `{}`: {reason}", path.display())]
pub struct LoadError {
    pub path: PathBuf,
    pub reason: Reason,
}

#[derive(Debug, thiserror::Error)]
pub enum Reason {
    #[error(transparent)]
    Gate(#[from] GateError),
    #[error("cannot be copied to private memory ({0}); a native plugin needs memfd_create and memory for its size")]
    Copy(std::io::Error),
    #[error(transparent)]
    Library(#[from] host::LoadError),
}

/// What the plugin at `path` says of itself. None of its code runs.
pub fn inspect(path: &Path) -> Result<Metadata, LoadError> {
    let checked = gate::check(path, None);
    checked.map(|checked| checked.metadata).map_err(|e| LoadError { path: path.into(), reason: e.into() })
}

/// A loaded plugin. It stays in memory as long as the process runs.
#[derive(Debug)]
pub struct NativePlugin {
    path: PathBuf,
    metadata: Metadata,
    sha256: String,
    library: Library,
}

impl NativePlugin {
    /// Load the plugin at `path`; with `sha256`, only if its content has that hash.
    pub fn load(path: &Path, sha256: Option<&str>) -> Result<Self, LoadError> {
        let checked = gate::check(path, sha256).map_err(|e| LoadError { path: path.into(), reason: e.into() })?;
        Self::open(path, checked)
    }

    /// Load a plugin that passed the gate.
    pub(super) fn open(path: &Path, checked: gate::Checked) -> Result<Self, LoadError> {
        let plugin = Self::try_open(path, checked).map_err(|reason| LoadError { path: path.into(), reason })?;
        let Self { metadata, sha256, library, .. } = &plugin;
        let path = path.display();
        tracing::info!(name = metadata.name, version = metadata.version, abi = %metadata.abi, %path, sha256, "plugin loaded");
        if library.changed_float_mode() {
            tracing::warn!(%path, "the plugin changes how tiny numbers are computed when it is loaded (built with -ffast-math?); this was undone");
        }
        Ok(plugin)
    }

    fn try_open(path: &Path, checked: gate::Checked) -> Result<Self, Reason> {
        let gate::Checked { bytes, metadata, sha256 } = checked;
        host::check_version(&metadata)?;
        let copy = private_copy(&metadata.name, &bytes).map_err(Reason::Copy)?;
        let library = Library::load(&copy, &metadata).inspect_err(|e| {
            if let Some(detail) = e.detail() {
                tracing::debug!(path = %path.display(), "{detail}");
            }
        })?;
        Ok(Self { path: path.into(), metadata, sha256, library })
    }

    /// Where it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// Version of the plugin's crate.
    pub fn version(&self) -> &str {
        &self.metadata.version
    }
    /// The plugin ABI that it was built with.
    pub fn abi(&self) -> AbiVersion {
        self.metadata.abi
    }
    /// SHA-256 of its file, in hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}

impl PolicyFactory for NativePlugin {
    fn name(&self) -> &str {
        &self.metadata.name
    }
    fn settings_schema(&self) -> &str {
        self.library.settings_schema()
    }
    fn file(&self) -> Option<PluginFile<'_>> {
        Some(PluginFile { version: self.version(), sha256: self.sha256() })
    }
    fn create(&self, context: &Context<'_>, settings: &str) -> Result<Box<dyn PolicyInstance>, PolicyFailure> {
        Ok(Box::new(instance::NativeInstance::create(&self.metadata.name, &self.library, context, settings)?))
    }
}

/// An unnamed file in memory with these bytes, and the path that opens it.
///
/// Its descriptor stays open: the dynamic linker remembers libraries by path, and would answer a reused
/// descriptor number with the earlier library.
fn private_copy(name: &str, bytes: &[u8]) -> std::io::Result<PathBuf> {
    let name = CString::new(format!("tokenrouter-plugin-{name}"))?;
    // SAFETY: `name` is a C string that outlives the call.
    let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else owns it.
    let mut file = unsafe { File::from_raw_fd(descriptor) };
    file.write_all(bytes)?;
    let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: sealing changes the file only: nobody can write to it or cut it off any more.
    if unsafe { libc::fcntl(descriptor, libc::F_ADD_SEALS, seals) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(PathBuf::from(format!("/proc/self/fd/{}", file.into_raw_fd())))
}
