//! Policies in WebAssembly modules, by authors who are not trusted.
//!
//! A module has no imports: it computes numbers from numbers in its own memory. [`gate`] decides what is
//! compiled, [`compile`] how, [`guest`] bounds each call, [`layout`] is the block that both sides share.
//! The ABI is described in docs/policies.md.

pub(crate) mod compile;
mod cost;
mod exports;
mod gate;
mod guest;
mod instance;
mod layout;
pub(crate) mod manifest;
mod restarts;
pub(crate) mod text;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenrouter_plugin_api::Context;
use wasmtime::Module;

use super::file::{self, FileError};
use super::nets::HostNet;
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
    Text(#[from] text::TextError),
    #[error(transparent)]
    Gate(#[from] gate::GateError),
    #[error(transparent)]
    Compile(#[from] compile::CompileError),
    #[error("cannot be made an instance of: {0}")]
    Instance(#[from] guest::Fault),
}

/// A compiled module.
pub struct WasmPlugin {
    manifest: Arc<Manifest>,
    settings_schema: String,
    sha256: String,
    module: Module,
    /// In the order of the manifest; empty until the route's configuration has described them.
    nets: Arc<[HostNet]>,
}

impl WasmPlugin {
    /// Load the module at `path`, as text if the name ends so; with `sha256`, only if the file has that hash.
    pub fn load(path: &Path, sha256: Option<&str>) -> Result<Self, LoadError> {
        let bytes = Self::read(path).map_err(|e| LoadError { path: path.into(), reason: e.into() })?;
        Self::compile(path, bytes, sha256)
    }

    /// The content of the file at `path`.
    pub(super) fn read(path: &Path) -> Result<Vec<u8>, FileError> {
        let (most, remedy) = match text::is_text(path) {
            true => (text::MAX_BYTES, "write a smaller policy, or translate it (wat2wasm) and give the .wasm file"),
            false => (gate::MAX_BYTES, file::STRIP),
        };
        Ok(file::read(path, most, remedy)?.0)
    }

    /// Check and compile the content of the file at `path`.
    pub(super) fn compile(path: &Path, bytes: Vec<u8>, sha256: Option<&str>) -> Result<Self, LoadError> {
        let plugin =
            if text::is_text(path) { Self::from_text(&bytes, sha256) } else { Self::from_bytes(bytes, sha256) };
        let plugin = plugin.map_err(|reason| LoadError { path: path.into(), reason })?;
        let Self { manifest, sha256, .. } = &plugin;
        tracing::info!(name = manifest.name, version = manifest.version, path = %path.display(), sha256, "WASM policy loaded");
        Ok(plugin)
    }

    /// Translate, check and compile WebAssembly text. The hash is the text's.
    pub fn from_text(text: &[u8], sha256: Option<&str>) -> Result<Self, Reason> {
        let sha256 = file::digest(text, sha256)?;
        Self::checked(text::translate(text)?, sha256)
    }

    /// Check and compile a module.
    pub fn from_bytes(bytes: Vec<u8>, sha256: Option<&str>) -> Result<Self, Reason> {
        let sha256 = file::digest(&bytes, sha256)?;
        Self::checked(bytes, sha256)
    }

    fn checked(bytes: Vec<u8>, sha256: String) -> Result<Self, Reason> {
        let manifest = gate::check(&bytes)?;
        let settings_schema = manifest.settings_schema();
        let module = compile::compile(bytes.into())?;
        Ok(Self { manifest: Arc::new(manifest), settings_schema, sha256, module, nets: Arc::new([]) })
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
    fn host_nets(&self) -> &[String] {
        &self.manifest.nets
    }
    fn with_nets(&self, mut nets: Vec<HostNet>) -> Result<Arc<dyn PolicyFactory>, String> {
        let (name, wanted) = (self.name(), &self.manifest.nets);
        let place = |net: &HostNet| wanted.iter().position(|wanted| *wanted == net.net.name);
        if let Some(other) = nets.iter().find(|net| place(net).is_none()) {
            let known =
                if wanted.is_empty() { "asks for none".to_owned() } else { format!("asks for {}", wanted.join(", ")) };
            return Err(format!("policy `{name}` has no net `{}`: it {known}", other.net.name));
        }
        if let Some(missing) = wanted.iter().find(|wanted| nets.iter().all(|net| net.net.name != **wanted)) {
            return Err(format!(
                "policy `{name}` asks for the net `{missing}`; describe it in [routes.ROUTE.nets.{missing}]"
            ));
        }
        nets.sort_by_key(place);
        Ok(Arc::new(Self {
            manifest: self.manifest.clone(),
            settings_schema: self.settings_schema.clone(),
            sha256: self.sha256.clone(),
            module: self.module.clone(),
            nets: nets.into(),
        }))
    }
    fn create(&self, context: &Context<'_>, settings: &str) -> Result<Box<dyn PolicyInstance>, PolicyFailure> {
        Ok(Box::new(instance::WasmInstance::create(&self.manifest, &self.module, &self.nets, context, settings)?))
    }
}
