//! What can be known of a module before it is compiled.
//!
//! A compiler is no judge of modules: some small ones take it minutes. Whatever passes here is of one
//! fixed set of features and bounded in all that costs compile time.

use wasmparser::{Encoding, Export, ExternalKind, FunctionBody, Parser, Payload, Validator, WasmFeatures};

use super::exports;
use super::layout::block_bytes;
use super::manifest::{self, Manifest, ManifestError};
use crate::plain::plain;

/// Largest file.
pub const MAX_BYTES: u64 = 64 << 10;
/// Most functions of a module.
pub const MAX_FUNCTIONS: u32 = 256;
/// Most operators of one function.
pub const MAX_FUNCTION_OPERATORS: u32 = 8 << 10;
/// Most operators of a module.
pub const MAX_OPERATORS: u32 = 64 << 10;
/// Most local variables of one function.
pub const MAX_LOCALS: u64 = 1000;
/// Bytes that a module's memory may reach.
pub const MAX_MEMORY: u64 = 2 << 20;
/// Entries that a module's table may reach.
pub const MAX_TABLE: u64 = 1024;

/// Bytes of a page of memory.
const PAGE: u64 = 64 << 10;
/// How much of a name a message quotes.
const QUOTED_CHARS: usize = 40;

/// What compilers emit by default, without what is not deterministic (relaxed SIMD), costs more to check, or makes one
/// operator the work of a thousand (several values of a block or a function).
const FEATURES: WasmFeatures = WasmFeatures::WASM1
    .union(WasmFeatures::SIGN_EXTENSION)
    .union(WasmFeatures::SATURATING_FLOAT_TO_INT)
    .union(WasmFeatures::BULK_MEMORY)
    .union(WasmFeatures::REFERENCE_TYPES)
    .union(WasmFeatures::EXTENDED_CONST)
    .union(WasmFeatures::SIMD)
    .difference(WasmFeatures::GC_TYPES);

/// Why a file is not compiled.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum GateError {
    #[error("is {0}, not a WebAssembly module; {1}")]
    NotModule(&'static str, &'static str),
    #[error("is of WebAssembly version {0}, this server reads version 1; build the module again")]
    Version(u16),
    #[error("is a damaged module ({0}); copy or build it again")]
    Damaged(String),
    #[error("uses what policies may not: {0}; build it without that feature")]
    Feature(String),
    #[error("imports {0}; a policy has no imports: {1}")]
    Imports(String, &'static str),
    #[error("has a start function; a policy has none: prepare in tr_configure")]
    Start,
    #[error("has {found} {what}, the limit is {most}; build a smaller module")]
    TooMany { what: &'static str, found: u64, most: u64 },
    #[error(
        "asks for {found} bytes of memory, the limit is {most}; ask for less, for example with -z stack-size=16384"
    )]
    Memory { found: u64, most: u64 },
    #[error("has no section `{}`; a policy says in it what it is", manifest::SECTION)]
    NoManifest,
    #[error("has {0} sections `{section}`; leave the one that says what the policy is", section = manifest::SECTION)]
    Manifests(usize),
    #[error("section tokenrouter:policy: {0}")]
    Manifest(#[from] ManifestError),
    #[error("has no export `{name}`; a policy exports {what}")]
    NoExport { name: &'static str, what: &'static str },
    #[error("export `{name}` is not {wanted}; see docs/policies.md")]
    Export { name: &'static str, wanted: &'static str },
    #[error("tr_block is {address}, but memory has {memory} bytes and the block {bytes}; reserve the block in memory")]
    Block { address: u32, memory: u64, bytes: usize },
}

/// Check a whole module.
pub fn check(bytes: &[u8]) -> Result<Manifest, GateError> {
    kind(bytes)?;
    let mut walk = Walk::default();
    for payload in Parser::new(0).parse_all(bytes) {
        walk.payload(payload.map_err(damaged)?)?;
    }
    if !walk.imports.is_empty() {
        return Err(imports(&walk.imports));
    }
    let types = Validator::new_with_features(FEATURES).validate_all(bytes).map_err(invalid)?;
    for (name, kind, what) in [
        ("memory", ExternalKind::Memory, "its memory as `memory`"),
        ("tr_block", ExternalKind::Global, "the address of the block as the constant `tr_block`"),
        ("tr_route", ExternalKind::Func, "the function `tr_route`"),
    ] {
        if !walk.exports.iter().any(|export| export.name == name && export.kind == kind) {
            return Err(GateError::NoExport { name, what });
        }
    }
    let manifest = match walk.manifests[..] {
        [] => return Err(GateError::NoManifest),
        [section] => Manifest::parse(section)?,
        _ => return Err(GateError::Manifests(walk.manifests.len())),
    };
    exports::check(&types, &walk.exports, &walk.globals, block_bytes(manifest.nets.len()))?;
    Ok(manifest)
}

/// Refuse what does not begin as a module does.
fn kind(bytes: &[u8]) -> Result<(), GateError> {
    const BUILD: &str = "build the policy as a core module (wasm32, without WASI)";
    let (what, remedy) = match bytes {
        [b'\0', b'a', b's', b'm', version @ ..] => match version {
            [1, 0, 0, 0, ..] => return Ok(()),
            [_, _, 1, 0, ..] => ("a component", "give the core module from which the component was made"),
            [low, high, 0, 0, ..] => return Err(GateError::Version(u16::from_le_bytes([*low, *high]))),
            _ => return Err(GateError::Damaged("its header is cut off or unknown".to_owned())),
        },
        // The operating system that Wasmtime writes into the ELF header of what it has compiled.
        [0x7f, b'E', b'L', b'F', _, _, _, 200, ..] => {
            ("a compiled module (.cwasm)", "give the .wasm file: compiled code is not trusted")
        }
        [0x7f, b'E', b'L', b'F', ..] => ("an ELF file", "name a native plugin with the ending .so"),
        [] => ("an empty file", BUILD),
        [b'(', ..] | [b';', b';', ..] => ("text", "name WebAssembly text with the ending .wat"),
        _ => ("some other file", BUILD),
    };
    Err(GateError::NotModule(what, remedy))
}

pub(super) fn damaged(error: wasmparser::BinaryReaderError) -> GateError {
    // It quotes names of the module.
    GateError::Damaged(plain(&format!("{} at byte {}", error.message(), error.offset())))
}

fn invalid(error: wasmparser::BinaryReaderError) -> GateError {
    let feature = ["enabled", "are disallowed", "gc feature", "feature required"];
    match feature.iter().any(|words| error.message().contains(words)) {
        true => GateError::Feature(plain(error.message())),
        false => damaged(error),
    }
}

fn imports(imports: &[String]) -> GateError {
    let remedy = if imports.iter().any(|import| import.contains("wasi")) {
        "build for wasm32-unknown-unknown, not for WASI"
    } else if imports.iter().any(|import| import.contains("env::abort")) {
        "with AssemblyScript, compile with --use abort="
    } else if imports.iter().any(|import| import.contains("wbg") || import.contains("bindgen")) {
        "do not use wasm-bindgen"
    } else {
        "define what it needs in the module itself"
    };
    let shown = 4;
    let more = imports.len().saturating_sub(shown);
    let list = imports[..shown.min(imports.len())].join(", ");
    GateError::Imports(if more > 0 { format!("{list} and {more} more") } else { list }, remedy)
}

fn quoted(name: &str) -> String {
    name.chars().take(QUOTED_CHARS).flat_map(char::escape_debug).collect()
}

#[derive(Default)]
struct Walk<'a> {
    imports: Vec<String>,
    exports: Vec<Export<'a>>,
    /// What they begin with, where that is an i32.
    globals: Vec<Option<i32>>,
    manifests: Vec<&'a [u8]>,
    operators: u64,
}

fn at_most(what: &'static str, found: u64, most: u64) -> Result<(), GateError> {
    if found > most { Err(GateError::TooMany { what, found, most }) } else { Ok(()) }
}

fn feature(name: &str) -> GateError {
    GateError::Feature(name.to_owned())
}

impl<'a> Walk<'a> {
    fn payload(&mut self, payload: Payload<'a>) -> Result<(), GateError> {
        match payload {
            Payload::Version { encoding: Encoding::Component, .. } => return Err(feature("the component model")),
            Payload::ImportSection(section) => {
                for import in section.into_imports() {
                    let import = import.map_err(damaged)?;
                    self.imports.push(format!("{}::{}", quoted(import.module), quoted(import.name)));
                }
            }
            Payload::FunctionSection(section) => {
                at_most("functions", section.count().into(), MAX_FUNCTIONS.into())?;
            }
            Payload::TableSection(section) => {
                if section.count() > 1 {
                    return Err(feature("more than one table"));
                }
                for table in section {
                    let table = table.map_err(damaged)?.ty;
                    if table.table64 {
                        return Err(feature("64-bit tables (memory64)"));
                    }
                    at_most("table entries", table.initial, MAX_TABLE)?;
                }
            }
            Payload::MemorySection(section) => {
                if section.count() > 1 {
                    return Err(feature("more than one memory"));
                }
                for memory in section {
                    let memory = memory.map_err(damaged)?;
                    if memory.memory64 {
                        return Err(feature("64-bit memory (memory64)"));
                    }
                    if memory.shared {
                        return Err(feature("shared memory (threads)"));
                    }
                    if memory.page_size_log2.is_some() {
                        return Err(feature("custom page sizes"));
                    }
                    let found = memory.initial.saturating_mul(PAGE);
                    if found > MAX_MEMORY {
                        return Err(GateError::Memory { found, most: MAX_MEMORY });
                    }
                }
            }
            Payload::TagSection(_) => return Err(feature("exceptions")),
            Payload::ExportSection(section) => {
                for export in section {
                    let export = export.map_err(damaged)?;
                    self.exports.push(export);
                }
            }
            Payload::GlobalSection(section) => {
                for global in section {
                    let value = exports::value(&global.map_err(damaged)?.init_expr, &self.globals)?;
                    self.globals.push(value);
                }
            }
            Payload::StartSection { .. } => return Err(GateError::Start),
            Payload::CodeSectionEntry(body) => self.body(&body)?,
            Payload::CustomSection(section) if section.name() == manifest::SECTION => {
                self.manifests.push(section.data());
            }
            _ => {}
        }
        Ok(())
    }

    fn body(&mut self, body: &FunctionBody<'_>) -> Result<(), GateError> {
        let mut locals = 0u64;
        for group in body.get_locals_reader().map_err(damaged)? {
            locals = locals.saturating_add(group.map_err(damaged)?.0.into());
        }
        at_most("local variables in one function", locals, MAX_LOCALS)?;
        let mut operators = 0u64;
        let mut reader = body.get_operators_reader().map_err(damaged)?;
        while !reader.eof() {
            reader.read().map_err(damaged)?;
            operators += 1;
        }
        self.operators += operators;
        at_most("operators in one function", operators, MAX_FUNCTION_OPERATORS.into())?;
        at_most("operators", self.operators, MAX_OPERATORS.into())
    }
}
