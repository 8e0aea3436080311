//! The plugins of a process that loads others while it works.
//!
//! A native library stays in memory as long as the process runs, so the same file is opened once, whatever
//! becomes of it, and only so many different ones are.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Weak};

use super::PolicyFactory;
use super::file;
use super::native::{self, NativePlugin, Reason, gate};
use super::plugin::{LoadError, Plugin, is_module};
use super::wasm::{self, WasmPlugin};

/// Most native libraries with different content in the life of a process.
const MOST_LIBRARIES: usize = 256;

/// Plugins by the SHA-256 of their files.
pub struct Store {
    most: usize,
    /// Libraries that the dynamic linker was given, or why one of them cannot be used.
    native: HashMap<String, Result<Arc<NativePlugin>, String>>,
    /// Modules that somebody uses, and whether they are WebAssembly text: its file's name says so.
    wasm: HashMap<(bool, String), Weak<WasmPlugin>>,
}

impl Default for Store {
    fn default() -> Self {
        Self::with_room(MOST_LIBRARIES)
    }
}

impl Store {
    /// A store that opens no more than so many different libraries.
    pub fn with_room(most: usize) -> Self {
        Self { most, native: HashMap::new(), wasm: HashMap::new() }
    }

    /// The plugin at `path`, as [`Plugin::load`] does it; one with the same content that is loaded already is
    /// that one.
    pub fn load(&mut self, path: &Path, sha256: Option<&str>) -> Result<Plugin, LoadError> {
        let (policy, version, sha256): (Arc<dyn PolicyFactory>, _, _) = if is_module(path) {
            let plugin = self.wasm(path, sha256)?;
            let (version, sha256) = (plugin.version().to_owned(), plugin.sha256().to_owned());
            (plugin, version, sha256)
        } else {
            let plugin = self.native(path, sha256)?;
            let (version, sha256) = (plugin.version().to_owned(), plugin.sha256().to_owned());
            (plugin, version, sha256)
        };
        Ok(Plugin { policy, version, path: path.to_owned(), sha256 })
    }

    fn native(&mut self, path: &Path, pin: Option<&str>) -> Result<Arc<NativePlugin>, LoadError> {
        let fault = |reason| LoadError::Native(native::LoadError { path: path.into(), reason });
        let checked = gate::check(path, pin).map_err(|e| fault(e.into()))?;
        match self.native.get(&checked.sha256) {
            Some(Ok(plugin)) => return Ok(plugin.clone()),
            Some(Err(why)) => return Err(LoadError::Before { path: path.into(), why: why.clone() }),
            None if self.native.len() >= self.most => {
                return Err(LoadError::TooMany { path: path.into(), most: self.most });
            }
            None => {}
        }
        let sha256 = checked.sha256.clone();
        match NativePlugin::open(path, checked) {
            Ok(plugin) => {
                let plugin = Arc::new(plugin);
                self.native.insert(sha256, Ok(plugin.clone()));
                Ok(plugin)
            }
            Err(error) => {
                if may_be_kept(&error.reason) {
                    self.native.insert(sha256, Err(error.reason.to_string()));
                }
                Err(error.into())
            }
        }
    }

    fn wasm(&mut self, path: &Path, pin: Option<&str>) -> Result<Arc<WasmPlugin>, LoadError> {
        let fault = |reason| LoadError::Wasm(wasm::LoadError { path: path.into(), reason });
        let bytes = WasmPlugin::read(path).map_err(|e| fault(e.into()))?;
        let sha256 = file::digest(&bytes, pin).map_err(|e| fault(e.into()))?;
        let key = (wasm::text::is_text(path), sha256);
        if let Some(plugin) = self.wasm.get(&key).and_then(Weak::upgrade) {
            return Ok(plugin);
        }
        self.wasm.retain(|_, plugin| plugin.strong_count() > 0);
        let plugin = Arc::new(WasmPlugin::compile(path, bytes, None)?);
        self.wasm.insert(key, Arc::downgrade(&plugin));
        Ok(plugin)
    }
}

/// Whether the dynamic linker may have kept a library that was not loaded for this reason. Otherwise it may be
/// tried again: memory and open files come back.
fn may_be_kept(reason: &Reason) -> bool {
    use tokenrouter_plugin_api::host::LoadError::{Header, Layout, Open, Version};
    match reason {
        Reason::Gate(_) | Reason::Copy(_) | Reason::Library(Version { .. }) => false,
        Reason::Library(Open(_) | Header(_) | Layout { .. }) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A module that decides nothing, as `number` of many.
    fn module(directory: &Path, number: u32) -> std::path::PathBuf {
        let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/rstitch/rstitch.wat"));
        let mut bytes = wat::parse_str(text.unwrap()).unwrap();
        // A custom section that nobody reads.
        bytes.extend([0, 6, 1, b'n']);
        bytes.extend(number.to_le_bytes());
        let path = directory.join("p.wasm");
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn what_the_linker_never_saw_is_tried_again() {
        use tokenrouter_plugin_api::host;
        assert!(!may_be_kept(&Reason::Copy(std::io::Error::from_raw_os_error(libc::EMFILE))));
        assert!(!may_be_kept(&Reason::Gate(gate::GateError::WritableByAll)));
        assert!(may_be_kept(&Reason::Library(host::LoadError::Open("no such symbol".into()))));
        assert!(may_be_kept(&Reason::Library(host::LoadError::Header("another".into()))));
    }

    #[test]
    fn a_module_is_compiled_once_while_it_is_used() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = Store::default();
        let first = store.load(&module(directory.path(), 1), None).unwrap();
        let again = store.load(&module(directory.path(), 1), Some(&first.sha256)).unwrap();
        assert!(Arc::ptr_eq(&first.policy, &again.policy));
        let other = store.load(&module(directory.path(), 2), None).unwrap();
        assert!(other.sha256 != first.sha256 && !Arc::ptr_eq(&first.policy, &other.policy));
        assert!(store.load(&module(directory.path(), 2), Some(&first.sha256)).is_err());
        // Text stays text, whatever its file is called later.
        let text = directory.path().join("p.wat");
        std::fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/../plugins/rstitch/rstitch.wat"), &text).unwrap();
        let used = store.load(&text, None).unwrap();
        let renamed = directory.path().join("q.wasm");
        std::fs::copy(&text, &renamed).unwrap();
        let refused = store.load(&renamed, None).map(|_| ()).unwrap_err().to_string();
        assert!(refused.contains("name WebAssembly text with the ending .wat"), "{refused}");
        drop(used);
        drop((first, again, other));
        store.load(&module(directory.path(), 3), None).unwrap();
        assert_eq!(store.wasm.len(), 1);
    }
}
