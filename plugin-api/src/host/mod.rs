//! The loading side: open a library, check its version and layout, make instances.
//!
//! A plugin runs with the rights of the program that loads it, from the moment it is opened. Check the
//! file first; this module checks only what needs the library open.
#![allow(unsafe_code)] // See `abi`.

mod instance;

use std::error::Error as _;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use abi_stable::{
    StableAbi,
    abi_stability::abi_checking::check_layout_compatibility,
    library::{AbiHeader, AbiHeaderRef, RootModule},
    sabi_types::VersionNumber,
};

use crate::Context;
use crate::abi::RootRef;
pub use crate::abi::metadata::{self, Metadata, MetadataError};
pub use crate::abi::{ABI_VERSION, AbiVersion};
pub use instance::Instance;

/// Why a library cannot be used as a plugin. Each is one line; [`LoadError::detail`] may have more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadError {
    /// The dynamic linker refused it.
    Open(String),
    /// It was built with another version of the ABI.
    Version {
        /// Name and version of the plugin.
        plugin: String,
        /// The lowest version of a host that it needs.
        needs: AbiVersion,
        /// The version of this host.
        host: AbiVersion,
    },
    /// The header and the metadata disagree.
    Header(String),
    /// The version is right, yet a type differs.
    Layout {
        /// The first difference.
        brief: String,
        /// Everything the check found, tens of kilobytes.
        full: String,
    },
}

impl LoadError {
    /// A longer report, for a debug log.
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Layout { full, .. } => Some(full),
            _ => None,
        }
    }
}

impl std::fmt::Display for LoadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Open(why) => write!(f, "the dynamic linker refused it: {why}"),
            Self::Version { plugin, needs, host } if needs.major == host.major => write!(
                f,
                "plugin {plugin} needs plugin ABI {needs}, this server provides {host}; update the server or rebuild \
                 the plugin with tokenrouter-plugin-api {host}"
            ),
            Self::Version { plugin, needs, host } => write!(
                f,
                "plugin {plugin} is built for plugin ABI {needs}, this server provides {host}; rebuild the plugin with \
                 tokenrouter-plugin-api {host}"
            ),
            Self::Header(why) => write!(f, "{why}; rebuild the plugin"),
            Self::Layout { brief, .. } => write!(
                f,
                "the plugin's types differ from this server's ({brief}); rebuild the plugin with an unchanged \
                 tokenrouter-plugin-api {ABI_VERSION}"
            ),
        }
    }
}

impl std::error::Error for LoadError {}

/// Whether this host can run a plugin with this record.
pub fn check_version(metadata: &Metadata) -> Result<(), LoadError> {
    let needs = AbiVersion { major: metadata.abi.major, minor: metadata.abi.minor.max(metadata.min_host_minor) };
    // The comparison is only trivial while this is version 1.0.
    #[allow(clippy::absurd_extreme_comparisons)]
    let serves = needs.minor <= ABI_VERSION.minor;
    if needs.major == ABI_VERSION.major && serves {
        return Ok(());
    }
    Err(LoadError::Version { plugin: format!("{} {}", metadata.name, metadata.version), needs, host: ABI_VERSION })
}

/// A loaded plugin. It stays loaded as long as the program runs: threads and thread-local values of a
/// library may outlive anything the host could wait for.
#[derive(Clone, Copy)]
pub struct Library {
    root: RootRef,
    changed_float_mode: bool,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl Library {
    /// Open the library at `path`, whose record is `metadata`.
    ///
    /// Code of the library runs here, before any check of its types.
    pub fn load(path: &Path, metadata: &Metadata) -> Result<Self, LoadError> {
        check_version(metadata)?;
        let before = float_mode::get();
        let opened = open(path, &metadata.symbol);
        let changed_float_mode = float_mode::get() != before;
        float_mode::set(before);
        let header = opened?;

        if !header.is_valid() {
            let AbiHeader { abi_major, abi_minor, .. } = *header;
            let ours = AbiHeader::VALUE;
            return Err(LoadError::Header(format!(
                "the plugin is built with abi_stable {abi_major}.{abi_minor}, this server with {}.{}",
                ours.abi_major, ours.abi_minor
            )));
        }
        let header = header.upgrade().map_err(|e| LoadError::Header(last_line(&e.to_string())))?;
        let number = |strings| VersionNumber::new(strings).map_err(|e| LoadError::Header(e.to_string()));
        let version = number(header.version_strings())?;
        if (version.major, version.minor) != (metadata.abi.major, metadata.abi.minor) {
            let (said, is) = (metadata.abi, format!("{}.{}", version.major, version.minor));
            return Err(LoadError::Header(format!("the plugin's metadata says ABI {said}, its header {is}")));
        }

        // The check wants every field of the first layout in the second one. A plugin of an older
        // version, or a lower patch of this one, has the smaller layout; the reader of a field that it
        // lacks gets `None`.
        let Some(theirs) = header.layout() else {
            return Err(LoadError::Header("the plugin's header has no layout".to_owned()));
        };
        let ours = number(RootRef::VERSION_STRINGS)?;
        let older = (version.minor, version.patch) <= (ours.minor, ours.patch);
        let (smaller, larger) = if older { (theirs, RootRef::LAYOUT) } else { (RootRef::LAYOUT, theirs) };
        check_layout_compatibility(smaller, larger).map_err(|e| {
            let full = e.to_string();
            LoadError::Layout { brief: layout_difference(&full), full }
        })?;
        // SAFETY: the layouts have just been found compatible.
        let root = unsafe { header.init_root_module_with_unchecked_layout::<RootRef>() }
            .map_err(|e| LoadError::Header(last_line(&e.to_string())))?;
        Ok(Self { root, changed_float_mode })
    }

    /// Name of the method.
    pub fn name(&self) -> &'static str {
        self.root.describe()().name.as_str()
    }

    /// JSON Schema of the settings.
    pub fn settings_schema(&self) -> &'static str {
        self.root.describe()().settings_schema.as_str()
    }

    /// Whether opening it changed how this thread treats tiny numbers and rounding. It was changed back.
    pub fn changed_float_mode(&self) -> bool {
        self.changed_float_mode
    }

    /// Make an instance.
    pub fn create(&self, context: &Context<'_>, settings: &str) -> Result<Instance, String> {
        Instance::create(self.root, context, settings)
    }

    /// The table of an extension, see the ABI's rules; `None` when the plugin does not have it.
    pub fn extension(&self, id: &str) -> Option<std::ptr::NonNull<()>> {
        std::ptr::NonNull::new(self.root.get_extension()(id.into()).cast_mut())
    }

    /// What the next minor version answers; `None` for a plugin that lacks the function.
    #[cfg(feature = "next-minor")]
    pub fn next(&self) -> Option<u32> {
        self.root.next().map(|next| next())
    }
}

/// Open for good.
fn open(path: &Path, symbol: &str) -> Result<AbiHeaderRef, LoadError> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    if !path.is_absolute() || path.as_os_str().as_bytes().contains(&0) {
        return Err(LoadError::Open(format!("`{}` is not an absolute path", path.display())));
    }
    // SAFETY: running the library's initialisers is what loading a plugin means; the operator trusts it.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE) }
        .map_err(|e| LoadError::Open(chain(&e)))?;
    // SAFETY: the metadata names a static of this type, and `AbiHeader` begins with a magic text that
    // is checked before anything else of it is read.
    let header = unsafe { library.get::<AbiHeaderRef>(symbol) }.map(|header| *header);
    std::mem::forget(library);
    header.map_err(|e| LoadError::Open(chain(&e)))
}

/// An error with everything behind it.
fn chain(error: &libloading::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

fn last_line(text: &str) -> String {
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("unknown").to_owned()
}

/// The last "Error: … Expected: … Found: …" of a report, on one line.
fn layout_difference(report: &str) -> String {
    let start = report.rfind("Error:").unwrap_or(0);
    let words = report[start..].split_whitespace();
    let text: String = words.flat_map(|word| [word, " "]).take(80).collect();
    text.trim_end().chars().take(400).collect()
}

/// The floating-point control word of this thread: an initialiser built with `-ffast-math`, or a hook, may
/// make it treat tiny numbers as zero or round otherwise.
#[cfg(target_arch = "x86_64")]
pub mod float_mode {
    /// The word, without the flags that any arithmetic sets.
    pub fn get() -> u32 {
        let mut word = 0u32;
        // SAFETY: stores MXCSR into `word`, nothing else.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut word, options(nostack, preserves_flags)) };
        word & !0x3f // The low six bits are sticky exception flags.
    }

    /// Set the word to what [`get`] answered before.
    pub fn set(word: u32) {
        // Reserved bits must be zero.
        let word = word & 0xffc0;
        // SAFETY: no reserved bit is set.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &word, options(nostack, preserves_flags)) };
    }
}

/// Not watched on this processor.
#[cfg(not(target_arch = "x86_64"))]
pub mod float_mode {
    /// Always 0.
    pub fn get() -> u32 {
        0
    }

    /// Nothing.
    pub fn set(_word: u32) {}
}
