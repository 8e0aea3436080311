//! The file of a plugin: a regular one of bounded size, and the one that was pinned.

use std::fs::{File, Metadata, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use sha2::{Digest, Sha256};

/// Why a file is not looked into.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("no such file; build the plugin or correct the path")]
    Missing,
    #[error("cannot be read ({0}); check its permissions")]
    Io(#[from] std::io::Error),
    #[error("is {0}, not a regular file; give the path of the plugin's file")]
    NotRegular(&'static str),
    #[error("has {bytes} bytes, more than the {most} allowed; {remedy}")]
    TooLarge { bytes: u64, most: u64, remedy: &'static str },
    #[error("sha256 is `{0}` in the configuration; give 64 hexadecimal digits, as sha256sum prints them")]
    BadPin(String),
    #[error(
        "has SHA-256 {actual}, the configuration wants {wanted}; install the file that was pinned, or pin this one after looking at it"
    )]
    Pin { actual: String, wanted: String },
}

/// The content of the file at `path`, of at most `most` bytes, and what the system knows of the file. `remedy`: what
/// makes a larger one smaller.
pub fn read(path: &Path, most: u64, remedy: &'static str) -> Result<(Vec<u8>, Metadata), FileError> {
    let kind = |e: std::io::Error| if e.kind() == std::io::ErrorKind::NotFound { FileError::Missing } else { e.into() };
    regular(&std::fs::metadata(path).map_err(kind)?)?;
    // Another file may stand here by now: opening must not wait, and what was opened is looked at again.
    let file: File = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(kind)?;
    let found = file.metadata()?;
    regular(&found)?;
    let mut content = Vec::new();
    if found.len() <= most {
        file.take(most + 1).read_to_end(&mut content)?;
    }
    let bytes = found.len().max(content.len() as u64);
    if bytes > most { Err(FileError::TooLarge { bytes, most, remedy }) } else { Ok((content, found)) }
}

fn regular(found: &Metadata) -> Result<(), FileError> {
    let kind = found.file_type();
    Err(FileError::NotRegular(match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a named pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    }))
}

/// For files of compilers.
pub const STRIP: &str = "strip its debug information";

/// SHA-256 of `bytes` in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 of `bytes` in hexadecimal; with `pin`, only if it is that.
pub fn digest(bytes: &[u8], pin: Option<&str>) -> Result<String, FileError> {
    let actual = sha256(bytes);
    if let Some(pin) = pin {
        let wanted = pin.trim().to_ascii_lowercase();
        if wanted.len() != 64 || !wanted.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(FileError::BadPin(pin.to_owned()));
        }
        if wanted != actual {
            return Err(FileError::Pin { actual, wanted });
        }
    }
    Ok(actual)
}
