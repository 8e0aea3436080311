//! Compiled kernels on disk: `KEY.cubin` is the machine code with its SHA-256 behind it, which the
//! driver and the disassemblers do not look at.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::Program;

const DIGEST: usize = 32;

/// `$XDG_CACHE_HOME/tokenrouter/kernels`, or below `$HOME/.cache`; `None` if neither is set.
pub fn directory() -> Option<PathBuf> {
    directory_in(|name| std::env::var_os(name))
}

fn directory_in(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    // The XDG specification: a relative path is to be ignored.
    let path = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = path("XDG_CACHE_HOME").or_else(|| path("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("tokenrouter").join("kernels"))
}

/// A name for all that decides what comes out of the compiler.
pub fn key(program: &Program, arch: &str, version: (i32, i32)) -> String {
    let mut hash = Sha256::new();
    // Every part goes in behind its length, so that no two lists of parts read the same.
    let mut part = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    part(env!("CARGO_PKG_VERSION"));
    part(&format!("{version:?}"));
    part(arch);
    part(program.name);
    part(program.source);
    part(&program.headers.len().to_string());
    for (name, text) in program.headers {
        part(name);
        part(text);
    }
    program.defines.iter().for_each(|define| part(define));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The machine code under `key`; `None` if there is none or it is damaged.
pub fn load(directory: &Path, key: &str) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(file(directory, key)).ok()?;
    let image = bytes.len().checked_sub(DIGEST)?;
    (Sha256::digest(&bytes[..image])[..] == bytes[image..]).then(|| {
        bytes.truncate(image);
        bytes
    })
}

/// Keep `image`. Readers see the whole file or none.
pub fn save(directory: &Path, key: &str, image: &[u8]) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let mut temporary = tempfile::NamedTempFile::new_in(directory)?;
    temporary.write_all(image)?;
    temporary.write_all(&Sha256::digest(image))?;
    temporary.persist(file(directory, key))?;
    Ok(())
}

fn file(directory: &Path, key: &str) -> PathBuf {
    directory.join(key).with_extension("cubin")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_changes_with_each_part() {
        let (one, two) = (["A".to_owned()], ["A".to_owned(), "B".to_owned()]);
        let base = Program { name: "k.cu", source: "s", headers: &[("h", "t")], defines: &one, arch_suffix: "" };
        let keys = [
            key(&base, "sm_90", (13, 0)),
            key(&base, "sm_80", (13, 0)),
            key(&base, "sm_90", (13, 1)),
            key(&Program { source: "S", ..base }, "sm_90", (13, 0)),
            key(&Program { headers: &[("h", "T")], ..base }, "sm_90", (13, 0)),
            key(&Program { headers: &[], ..base }, "sm_90", (13, 0)),
            key(&Program { defines: &two, ..base }, "sm_90", (13, 0)),
            key(&Program { defines: &[], ..base }, "sm_90", (13, 0)),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(a.len() == 64 && keys[..i].iter().all(|b| a != b), "{i}");
        }
        assert_eq!(keys[0], key(&base, "sm_90", (13, 0)));
    }

    #[test]
    fn a_damaged_file_is_as_good_as_none() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("new/kernels");
        assert_eq!(load(&directory, "k"), None);
        save(&directory, "k", b"machine code").unwrap();
        assert_eq!(load(&directory, "k").unwrap(), b"machine code");
        let good = std::fs::read(file(&directory, "k")).unwrap();
        let mut flipped = good.clone();
        flipped[3] ^= 1;
        for damaged in [&flipped[..], &good[..good.len() - 1], &good[..5], b""] {
            std::fs::write(file(&directory, "k"), damaged).unwrap();
            assert_eq!(load(&directory, "k"), None);
        }
        save(&directory, "k", b"machine code").unwrap();
        assert_eq!(load(&directory, "k").unwrap(), b"machine code");
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn the_directory_follows_xdg() {
        let directory = |xdg: Option<&str>, home: Option<&str>| {
            directory_in(|name| if name == "HOME" { home } else { xdg }.map(OsString::from))
        };
        assert_eq!(directory(Some("/x"), Some("/h")), Some("/x/tokenrouter/kernels".into()));
        assert_eq!(directory(Some("x"), Some("/h")), Some("/h/.cache/tokenrouter/kernels".into()));
        assert_eq!(directory(None, None), None);
    }
}
