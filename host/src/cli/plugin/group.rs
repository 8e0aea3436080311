//! Groups of processes: what a plugin starts must not outlive the check of it.
#![allow(unsafe_code)] // One system call has no safe wrapper in the dependencies.

use std::io;
use std::os::unix::process::parent_id;
use std::time::Duration;

/// How often a process looks whether the one that began it is still there.
const LOOK: Duration = Duration::from_millis(100);

/// End all processes of a group that this program made. One that is empty already is no error.
pub fn end(group: u32) -> io::Result<()> {
    // 0 and 1 would mean this process's own group, and every process that there is.
    let group = libc::pid_t::try_from(group).ok().filter(|&group| group > 1);
    let group = group.ok_or_else(|| io::Error::other("the system gave a process an impossible number"))?;
    // SAFETY: the call takes numbers only.
    if unsafe { libc::kill(-group, libc::SIGKILL) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(error) }
}

/// End this process and its group, which it leads, when the process that began it has gone: an interrupt from the
/// terminal reaches that one only.
pub fn follow_parent() -> io::Result<()> {
    let parent = parent_id();
    let watch = move || {
        while parent_id() == parent {
            std::thread::sleep(LOOK);
        }
        // Nobody is left to be told of an error.
        let _ = end(std::process::id());
    };
    std::thread::Builder::new().name("parent".to_owned()).spawn(watch).map(drop)
}
