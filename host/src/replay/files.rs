//! Files of traces: regular ones alone, so that no read waits for a writer.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The content of the file at `path`.
pub fn read(path: &Path) -> Result<Vec<u8>, String> {
    // Another file may stand here by the next call: opening must not wait either.
    let mut file: File = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(unread)?;
    if !file.metadata().map_err(unread)?.is_file() {
        return Err("is not a regular file; give a run of a recording, or a file with an answer's JSON".into());
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(unread)?;
    Ok(bytes)
}

/// The file `name` of the run at `run`. The error begins with the name.
pub fn part(run: &Path, name: &str) -> Result<Vec<u8>, String> {
    if name.is_empty() || name == ".." || name.contains(['/', '\0']) {
        return Err(format!("manifest.json: file = {name:?}: is not the name of a file of the run"));
    }
    read(&run.join(name)).map_err(|e| format!("{name}: {e}"))
}

/// What to do about a file that cannot be looked into.
pub fn unread(e: io::Error) -> String {
    match e.kind() {
        io::ErrorKind::NotFound => {
            "there is no such file; give a run of a recording, or a file with an answer's JSON".into()
        }
        io::ErrorKind::PermissionDenied => "may not be read; check its permissions and those of its directory".into(),
        _ => format!("cannot be read ({e}); copy it to another place, or record again"),
    }
}
