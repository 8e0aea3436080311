//! Policies in WebAssembly modules, by authors who are not trusted.
//!
//! A module has no imports: it computes numbers from numbers in its own memory. [`gate`] decides what is
//! compiled, [`compile`] how, [`guest`] bounds each call, [`layout`] is the block that both sides share.
//! The ABI is described in docs/policies.md.

pub(crate) mod compile;
mod exports;
mod gate;
mod guest;
mod instance;
mod layout;
pub(crate) mod manifest;
mod restarts;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenrouter_plugin_api::Context;
use wasmtime::Module;

use super::file::{self, FileError};
use super::{PluginFile, PolicyFactory, PolicyFailure, PolicyInstance};
use manifest::Manifest;

/// Why a module was not loaded: one line with the path, what is wrong and what to do.
#[derive(Debug, thiserror::Error)]
#[error("plugin `{}`: {reason}", path.display())]
pub struct LoadError {
    pub path: PathBuf,
    pub reason: Reason,
}

#[derive(Debug, thiserror::Error)]
pub enum Reason {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Gate(#[from] gate::GateError),
    #[error(transparent)]
    Compile(#[from] compile::CompileError),
}

/// A compiled module.
pub struct WasmPlugin {
    manifest: Arc<Manifest>,
    settings_schema: String,
    sha256: String,
    module: Module,
}

impl WasmPlugin {
    /// Load the module at `path`; with `sha256`, only if its content has that hash.
    pub fn load(path: &Path, sha256: Option<&str>) -> Result<Self, LoadError> {
        let bytes = Self::read(path).map_err(|e| LoadError { path: path.into(), reason: e.into() })?;
        Self::compile(path, bytes, sha256)
    }

    /// The content of the file at `path`.
    pub(super) fn read(path: &Path) -> Result<Vec<u8>, FileError> {
        Ok(file::read(path, gate::MAX_BYTES)?.0)
    }

    /// Check and compile the content of the file at `path`.
    pub(super) fn compile(path: &Path, bytes: Vec<u8>, sha256: Option<&str>) -> Result<Self, LoadError> {
        let plugin = Self::from_bytes(bytes, sha256).map_err(|reason| LoadError { path: path.into(), reason })?;
        let Self { manifest, sha256, .. } = &plugin;
        tracing::info!(name = manifest.name, version = manifest.version, path = %path.display(), sha256, "WASM policy loaded");
        Ok(plugin)
    }

    /// Check and compile a module.
    pub fn from_bytes(bytes: Vec<u8>, sha256: Option<&str>) -> Result<Self, Reason> {
        let sha256 = file::digest(&bytes, sha256)?;
        let manifest = gate::check(&bytes)?;
        let settings_schema = manifest.settings_schema();
        Ok(Self { manifest: Arc::new(manifest), settings_schema, sha256, module: compile::compile(bytes.into())? })
    }

    /// As the module states it.
    pub fn version(&self) -> &str {
        &self.manifest.version
    }

    /// SHA-256 of its file, in hexadecimal.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}

impl PolicyFactory for WasmPlugin {
    fn name(&self) -> &str {
        &self.manifest.name
    }
    fn settings_schema(&self) -> &str {
        &self.settings_schema
    }
    fn file(&self) -> Option<PluginFile<'_>> {
        Some(PluginFile { version: self.version(), sha256: self.sha256() })
    }
    fn create(&self, context: &Context<'_>, settings: &str) -> Result<Box<dyn PolicyInstance>, PolicyFailure> {
        Ok(Box::new(instance::WasmInstance::create(&self.manifest, &self.module, context, settings)?))
    }
}
