//! The directory of a recording: one subdirectory a run.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What a directory holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// One more than the highest number of a run.
    pub next_run: u32,
    /// Of all runs together.
    pub bytes: u64,
}

/// Look at `directory` without changing it: it does not exist, or holds runs and nothing else.
pub fn inspect(directory: &Path) -> Result<Contents, String> {
    let shown = directory.display();
    let unreadable = |e: std::io::Error| format!("{shown} cannot be read: {e}");
    let mut contents = Contents::default();
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(contents),
        Err(e) if e.kind() == ErrorKind::NotADirectory => return Err(format!("{shown} is not a directory")),
        Err(e) => return Err(unreadable(e)),
    };
    for entry in entries {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name();
        let run = name.to_str().and_then(run_number).filter(|_| entry.path().is_dir());
        let Some(run) = run else {
            return Err(format!(
                "{shown} holds {name:?}, which no recording wrote; give an empty directory, or one that does not exist"
            ));
        };
        contents.next_run = contents.next_run.max(run.saturating_add(1));
        for file in std::fs::read_dir(entry.path()).map_err(unreadable)? {
            contents.bytes += file.and_then(|f| f.metadata()).map_err(unreadable)?.len();
        }
    }
    Ok(contents)
}

fn run_number(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("run-")?;
    (digits.len() >= 5 && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// A directory that no other process records into while this lives.
pub struct Claimed {
    pub contents: Contents,
    path: PathBuf,
    _lock: File,
}

/// Make `directory` if it is missing, and claim it.
pub fn claim(directory: &Path) -> Result<Claimed, String> {
    let shown = directory.display();
    inspect(directory)?;
    let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|e| format!("{shown} cannot be made: {e}"))?;
    let lock = File::open(directory).map_err(|e| format!("{shown} cannot be read: {e}"))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(format!("another server records into {shown}; give each its own directory"));
        }
        Err(TryLockError::Error(e)) => return Err(format!("{shown} cannot be locked: {e}")),
    }
    // Again, as the former owner may have written until now.
    Ok(Claimed { contents: inspect(directory)?, path: directory.into(), _lock: lock })
}

impl Claimed {
    /// Make the directory of the next run.
    pub fn make_run(&self) -> Result<PathBuf, String> {
        let run = self.path.join(format!("run-{:05}", self.contents.next_run));
        let made = DirBuilder::new().mode(0o700).create(&run).and_then(|()| sync(&self.path));
        made.map_err(|e| format!("{} cannot be made: {e}", run.display()))?;
        Ok(run)
    }
}

/// Write a file, readable for its owner alone, to the disk itself.
pub fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Put `from` in the place of `to`, which has the same directory, on the disk itself. Files that were
/// written there before are there for good, too.
pub fn replace(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::rename(from, to)?;
    to.parent().map_or(Ok(()), sync)
}

/// Write which files `directory` has to the disk itself.
fn sync(directory: &Path) -> std::io::Result<()> {
    match File::open(directory)?.sync_all() {
        // File systems without such a call keep their directories by themselves.
        Err(e) if matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
        synced => synced,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_counted_and_strangers_refused() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("a/b");
        assert_eq!(inspect(&at), Ok(Contents::default()));
        let claimed = claim(&at).unwrap();
        let run = claimed.make_run().unwrap();
        assert!(run.ends_with("run-00000"));
        write(&run.join("new"), &[1; 10]).unwrap();
        write(&run.join("f"), &[2; 5]).unwrap();
        replace(&run.join("new"), &run.join("f")).unwrap();
        assert!(claim(&at).err().unwrap().contains("another server records into"));
        drop(claimed);
        std::fs::create_dir(at.join("run-00007")).unwrap();
        assert_eq!(claim(&at).unwrap().contents, Contents { next_run: 8, bytes: 10 });
        write(&at.join("notes.txt"), b"").unwrap();
        assert!(inspect(&at).unwrap_err().contains("holds \"notes.txt\", which no recording wrote"));
        assert!(inspect(&at.join("notes.txt")).unwrap_err().ends_with("is not a directory"));
        assert_eq!([run_number("run-1"), run_number("run-0000x"), run_number("run-00012")], [None, None, Some(12)]);
    }
}
