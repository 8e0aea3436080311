//! What crosses the library boundary.
//!
//! Rules that keep plugins of an older minor version loading:
//! * the types in `raw` never change within a major version;
//! * [`Root`] grows at its end only, and each new field says what a missing one means;
//! * what is optional goes behind an extension id, see [`Root::get_extension`].
//!
//! `unsafe` is allowed in this module and in `host`: a library boundary is raw pointers and symbols,
//! and nowhere else does an author's or the host's code see one.
#![allow(unsafe_code)]
#![cfg_attr(not(feature = "host"), allow(dead_code))] // The reading side is there for hosts alone.

pub(crate) mod glue;
mod guard;
pub mod metadata;
pub(crate) mod net;
pub(crate) mod raw;

use abi_stable::{
    StableAbi, declare_root_module_statics,
    library::RootModule,
    package_version_strings,
    sabi_types::VersionStrings,
    std_types::{RResult, RSliceMut, RStr, RString},
};

use crate::Decision;
use raw::{RawAcceptance, RawBatch, RawContext, RawEntry, RawHandoff, RawPeer, RawRequest, RawRequirements};

/// A version of the plugin ABI. A host loads plugins of its own major version whose minor version is
/// not above its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AbiVersion {
    /// Changes when older plugins can no longer run.
    pub major: u32,
    /// Changes when something is added.
    pub minor: u32,
}

impl std::fmt::Display for AbiVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The version of this crate, and so of everything built with it.
pub const ABI_VERSION: AbiVersion =
    AbiVersion { major: number(env!("CARGO_PKG_VERSION_MAJOR")), minor: number(env!("CARGO_PKG_VERSION_MINOR")) };

const fn number(digits: &str) -> u32 {
    let (bytes, mut i, mut value) = (digits.as_bytes(), 0, 0);
    while i < bytes.len() {
        value = value * 10 + (bytes[i] - b'0') as u32;
        i += 1;
    }
    value
}

/// What a plugin says of itself.
#[repr(C)]
#[derive(StableAbi)]
pub struct Description {
    pub name: RStr<'static>,
    pub settings_schema: RStr<'static>,
}

/// What a plugin exports: functions over an opaque instance.
///
/// Every function that runs an author's code answers `RErr` with one line when that code fails or
/// panics. None of them unwinds.
///
/// Safety, for all functions that take an instance: it comes from `create` of the same root and was
/// not given to `destroy`; no two calls with one instance overlap.
#[repr(C)]
#[derive(StableAbi)]
#[sabi(kind(Prefix(prefix_ref = RootRef, prefix_fields = RootPrefix)))]
pub struct Root {
    pub describe: extern "C" fn() -> Description,
    pub create: unsafe extern "C" fn(&RawContext<'_>, RStr<'_>) -> RResult<*mut (), RString>,
    pub requirements: unsafe extern "C" fn(*mut ()) -> RResult<RawRequirements, RString>,
    pub entry: unsafe extern "C" fn(*mut (), &RawRequest<'_>) -> RResult<RawEntry, RString>,
    pub route: unsafe extern "C" fn(*mut (), &RawBatch<'_>, RSliceMut<'_, Decision>) -> RResult<(), RString>,
    pub send: unsafe extern "C" fn(*mut (), &RawRequest<'_>, u32) -> RResult<RawHandoff, RString>,
    pub receive: unsafe extern "C" fn(*mut (), &RawRequest<'_>, &RawPeer<'_>) -> RResult<RawAcceptance, RString>,
    pub finished: unsafe extern "C" fn(*mut (), u32) -> RResult<(), RString>,
    pub destroy: unsafe extern "C" fn(*mut ()) -> RResult<(), RString>,
    /// A `repr(C)` table that begins with its size in bytes as a `u32`, or null for an id that this
    /// plugin does not know. An id carries its own version, for example `tokenrouter.nets/1`.
    #[sabi(last_prefix_field)]
    pub get_extension: extern "C" fn(RStr<'_>) -> *const (),
    #[cfg(feature = "next-minor")]
    #[sabi(missing_field(option))]
    pub next: extern "C" fn() -> u32,
}

impl RootModule for RootRef {
    declare_root_module_statics! {RootRef}
    const BASE_NAME: &'static str = "tokenrouter_plugin";
    const NAME: &'static str = "tokenrouter_plugin";
    const VERSION_STRINGS: VersionStrings = package_version_strings!();
}

/// Make a type a plugin: `export_policy!(MyPolicy);`, once in a crate of type `cdylib`.
///
/// The type implements [`Policy`](crate::Policy). Panics in its hooks reach the host as errors, which
/// needs unwinding: `panic = "abort"` does not compile.
#[macro_export]
macro_rules! export_policy {
    ($policy:ty) => {
        #[cfg(panic = "abort")]
        compile_error!(
            "a TokenRouter plugin needs panic = \"unwind\": with \"abort\", a panic in a hook would end the server. \
             Remove panic = \"abort\" from the profile."
        );

        // The symbols carry the crate's name, so that several policies can be linked into one test program.
        const _: () = {
            #[unsafe(export_name = concat!("tokenrouter_plugin_", env!("CARGO_CRATE_NAME")))]
            pub static HEADER: $crate::__private::LibHeader = $crate::__private::header::<$policy>();

            // Exported as well as marked used: linkers drop sections that nothing refers to.
            #[used]
            #[unsafe(export_name = concat!("tokenrouter_metadata_", env!("CARGO_CRATE_NAME")))]
            #[unsafe(link_section = ".tokenrouter")]
            pub static METADATA: [u8; $crate::__private::METADATA_BYTES] = $crate::__private::encode_metadata(
                <$policy as $crate::Policy>::NAME,
                env!("CARGO_PKG_VERSION"),
                concat!("tokenrouter_plugin_", env!("CARGO_CRATE_NAME")),
            );
        };
    };
}
