//! What can be known of a plugin file before its code runs.
//!
//! The dynamic linker is no judge of files: it waits on a named pipe, dies of a truncated library, and
//! calls a library for another processor "no such file".

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::LittleEndian;
use object::elf::{self, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader};
use tokenrouter_plugin_api::host::{Metadata, MetadataError, metadata};

use crate::policy::file::{self, FileError};

/// Largest plugin file.
pub const MAX_BYTES: u64 = 256 << 20;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = elf::EM_X86_64.0;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = elf::EM_AARCH64.0;

/// Rights of a file or directory.
const WRITABLE_BY_ALL: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// Why a file is not opened as a plugin.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("its place cannot be looked at ({0}); check its directory's permissions")]
    Place(#[from] std::io::Error),
    #[error("may be changed by every user of this machine; take that right away (chmod o-w), or pin it with sha256")]
    WritableByAll,
    #[error(
        "lies in {}, where every user of this machine may put another in its place; take that right away (chmod o-w), or pin it with sha256",
        .0.display()
    )]
    ReplaceableByAll(PathBuf),
    #[error("is {0}, not an ELF shared object; {1}")]
    NotElf(&'static str, &'static str),
    #[error("is a {0} ELF file; build the plugin for this server's target")]
    Class(&'static str),
    #[error("is {0}, not a shared object; set crate-type = [\"cdylib\"] in the plugin's Cargo.toml")]
    NotShared(&'static str),
    #[error(
        "is built for {theirs}, this server runs on {}; build the plugin for this server's target",
        machine(MACHINE)
    )]
    Machine { theirs: String },
    #[error("is cut off: its {part} ends at byte {end}, the file has {bytes}; copy or build it again")]
    Truncated { part: &'static str, end: u64, bytes: u64 },
    #[error("is a damaged ELF file ({0}); copy or build it again")]
    Damaged(String),
    #[error(
        "is a shared object but not a TokenRouter plugin (no section {}); a plugin calls export_policy! from tokenrouter-plugin-api",
        metadata::SECTION
    )]
    NoMetadata,
    #[error("{0}")]
    Metadata(MetadataError),
}

/// The content of a file that passed, and what its metadata says.
pub struct Checked {
    pub bytes: Vec<u8>,
    pub metadata: Metadata,
    /// In hexadecimal.
    pub sha256: String,
}

/// Read and check the file at `path`.
pub fn check(path: &Path, pin: Option<&str>) -> Result<Checked, GateError> {
    let (bytes, found) = file::read(path, MAX_BYTES, file::STRIP)?;
    // What it does is done with the rights of this process. A pin says which content is meant.
    if pin.is_none() {
        if found.mode() & WRITABLE_BY_ALL != 0 {
            return Err(GateError::WritableByAll);
        }
        // A link can be replaced where it lies, the file where it leads to.
        for path in [path, &std::fs::canonicalize(path)?] {
            let directory = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
            // In a sticky one files can be replaced by their owner alone.
            if std::fs::metadata(directory)?.mode() & (WRITABLE_BY_ALL | STICKY) == WRITABLE_BY_ALL {
                return Err(GateError::ReplaceableByAll(directory.to_owned()));
            }
        }
    }
    let metadata = check_elf(&bytes)?;
    let sha256 = file::digest(&bytes, pin)?;
    Ok(Checked { bytes, metadata, sha256 })
}

/// What is checked of a file's content.
pub fn check_elf(bytes: &[u8]) -> Result<Metadata, GateError> {
    let size = bytes.len() as u64;
    let within = |part: &'static str, at: u64, length: u64| match at.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        end => Err(GateError::Truncated { part, end: end.unwrap_or(u64::MAX), bytes: size }),
    };
    let damaged = |e: object::read::Error| GateError::Damaged(e.to_string());

    if !bytes.starts_with(b"\x7fELF") {
        return Err(not_elf(bytes));
    }
    within("header", 0, size_of::<FileHeader64<LittleEndian>>() as u64)?;
    match (bytes[4], bytes[5]) {
        (2, 1) => {}
        (1, _) => return Err(GateError::Class("32-bit")),
        (2, 2) => return Err(GateError::Class("big-endian")),
        _ => return Err(GateError::Damaged("unknown class or byte order".to_owned())),
    }
    let header = FileHeader64::<LittleEndian>::parse(bytes).map_err(damaged)?;
    match header.e_type(LittleEndian) {
        elf::ET_DYN => {}
        elf::ET_REL => return Err(GateError::NotShared("an object file")),
        elf::ET_EXEC => return Err(GateError::NotShared("a program")),
        _ => return Err(GateError::NotShared("an ELF file of another type")),
    }
    let theirs = header.e_machine(LittleEndian).0;
    if theirs != MACHINE {
        return Err(GateError::Machine { theirs: machine(theirs) });
    }
    let count = |n: u16, each: u16| u64::from(n) * u64::from(each);
    let segments = count(header.e_phnum(LittleEndian), header.e_phentsize(LittleEndian));
    within("segment table", header.e_phoff(LittleEndian), segments)?;
    for segment in header.program_headers(LittleEndian, bytes).map_err(damaged)? {
        if segment.p_type(LittleEndian) == elf::PT_LOAD {
            within("code or data", segment.p_offset(LittleEndian), segment.p_filesz(LittleEndian))?;
        }
    }
    let sections = count(header.e_shnum(LittleEndian), header.e_shentsize(LittleEndian));
    within("section table", header.e_shoff(LittleEndian), sections)?;
    let sections = header.sections(LittleEndian, bytes).map_err(damaged)?;
    let section = sections.section_by_name(LittleEndian, metadata::SECTION.as_bytes());
    let (_, section) = section.ok_or(GateError::NoMetadata)?;
    let record = section.data(LittleEndian, bytes).map_err(damaged)?;
    metadata::decode(record).map_err(GateError::Metadata)
}

fn not_elf(bytes: &[u8]) -> GateError {
    let (what, remedy) = match bytes {
        [] => ("an empty file", "build the plugin again"),
        [b'\0', b'a', b's', b'm', ..] => ("a WebAssembly module", "name it with the ending .wasm"),
        [b'!', b'<', b'a', b'r', b'c', b'h', b'>', ..] => {
            ("a static library", "set crate-type = [\"cdylib\"] in the plugin's Cargo.toml")
        }
        [b'M', b'Z', ..] => ("a Windows library", "build the plugin for this server's target"),
        [0xcf, 0xfa, 0xed, 0xfe, ..] | [0xca, 0xfe, 0xba, 0xbe, ..] => {
            ("a macOS library", "build the plugin for this server's target")
        }
        _ => ("some other file", "give the path of the plugin's .so"),
    };
    GateError::NotElf(what, remedy)
}

fn machine(number: u16) -> String {
    match elf::Machine(number) {
        elf::EM_X86_64 => "x86_64".to_owned(),
        elf::EM_AARCH64 => "aarch64".to_owned(),
        elf::EM_386 => "x86".to_owned(),
        elf::EM_ARM => "arm".to_owned(),
        elf::EM_RISCV => "riscv".to_owned(),
        elf::EM_PPC64 => "powerpc64".to_owned(),
        _ => format!("machine number {number}"),
    }
}
