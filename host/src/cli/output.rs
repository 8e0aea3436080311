//! Errors, colours and logs on the terminal.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;

use super::stderr::StderrLines;
use crate::text::TRIAL_THREAD;

/// Why a command ended: one line, seldom with a table before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Exit status: 2 for what the user can mend in the input, 1 for what went wrong later.
    pub status: u8,
    pub message: String,
    /// Shown before it: whole lines, or nothing.
    pub details: String,
    /// A plugin's hook does not come back.
    pub hung: bool,
}

impl Failure {
    /// Something about the input.
    pub fn input(error: impl std::fmt::Display) -> Self {
        Self { status: 2, ..Self::work(error) }
    }

    /// The same, with `details` before the line.
    pub fn with_details(self, details: impl std::fmt::Display) -> Self {
        Self { details: details.to_string(), ..self }
    }

    /// Something that went wrong while working.
    pub fn work(error: impl std::fmt::Display) -> Self {
        Self { status: 1, message: error.to_string(), details: String::new(), hung: false }
    }

    /// A hook of a plugin does not come back.
    pub fn hung(error: impl std::fmt::Display) -> Self {
        Self { hung: true, ..Self::work(error) }
    }

    /// Standard output could not be written. A reader that has seen enough is no fault: it is ended
    /// quietly, with success.
    pub fn output(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self { status: 0, ..Self::work("") },
            _ => Self::work(format!("standard output: {error}")),
        }
    }

    /// One line, whatever a library put into its message.
    pub fn line(&self) -> String {
        self.message.split('\n').map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join("; ")
    }

    /// Exit status, and the lines for standard error if there is something to say.
    pub fn report(&self, coloured: bool) -> (ExitCode, Option<String>) {
        let message = self.line();
        let word = if coloured { "\x1b[1;31merror:\x1b[0m" } else { "error:" };
        (ExitCode::from(self.status), (self.status != 0).then(|| format!("{}{word} {message}\n", self.details)))
    }
}

/// What to do about a file or directory that cannot be made. `give`: what to give in its place.
pub fn unwritten(e: &io::Error, give: &str) -> String {
    match e.kind() {
        io::ErrorKind::NotFound => format!("its directory does not exist; make it, or {give}"),
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            format!("a file is where a directory is needed; {give}")
        }
        io::ErrorKind::IsADirectory => format!("is a directory; {give}"),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => format!("may not be written; {give}"),
        _ => format!("cannot be written ({e}); {give}"),
    }
}

/// Write all of `text` to standard output now.
pub fn write_stdout(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(Failure::output)
}

/// Colours go to terminals only, and not where `NO_COLOR` is set.
fn coloured(terminal: bool, no_color: Option<&OsStr>) -> bool {
    terminal && no_color.is_none_or(OsStr::is_empty)
}

pub fn stderr_is_coloured() -> bool {
    coloured(std::io::stderr().is_terminal(), std::env::var_os("NO_COLOR").as_deref())
}

pub fn stdout_is_coloured() -> bool {
    coloured(std::io::stdout().is_terminal(), std::env::var_os("NO_COLOR").as_deref())
}

/// Send logs to standard error. `filter` is the user's, `default` the command's.
pub fn log_to_stderr(lines: &StderrLines, filter: Option<&str>, default: &str) -> Result<(), Failure> {
    let text = filter.filter(|f| !f.is_empty()).unwrap_or(default);
    let filter = EnvFilter::try_new(text).map_err(|e| {
        Failure::input(format!("--log {text:?}: {e}; write a level such as `info`, or `info,tokenrouter=debug`"))
    })?;
    let sink = lines.sink();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || sink.clone())
        .with_ansi(stderr_is_coloured())
        .log_internal_errors(false)
        .try_init()
        .map_err(Failure::work)
}

/// Report panics through `lines` too: the standard report blocks where nobody reads standard error.
pub fn panics_to_stderr(lines: &StderrLines) {
    let sink = lines.sink();
    std::panic::set_hook(Box::new(move |info| {
        let thread = std::thread::current();
        // A trial's panic is its result and told as such.
        if thread.name() != Some(TRIAL_THREAD) {
            let trace = std::backtrace::Backtrace::capture();
            let trace = match trace.status() {
                std::backtrace::BacktraceStatus::Captured => format!("{trace}\n"),
                _ => String::new(),
            };
            sink.clone().put(format!("thread {:?} {info}\n{trace}", thread.name().unwrap_or("unnamed")).into_bytes());
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_leaves_is_no_fault() {
        let (_, line) = Failure::output(io::ErrorKind::BrokenPipe.into()).report(false);
        assert_eq!(line, None);
        let (_, line) = Failure::output(io::ErrorKind::StorageFull.into()).report(false);
        assert!(line.is_some_and(|line| line.starts_with("error: standard output: ")));
    }

    #[test]
    fn what_to_do_about_a_file_that_cannot_be_made() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("f");
        let said = |error: io::Result<()>| unwritten(&error.unwrap_err(), "give another");
        let made = |path: &std::path::Path| std::fs::File::create(path).map(drop);
        assert_eq!(
            said(made(&directory.path().join("none/f"))),
            "its directory does not exist; make it, or give another"
        );
        assert_eq!(said(made(directory.path())), "is a directory; give another");
        made(&file).unwrap();
        let in_the_way = "a file is where a directory is needed; give another";
        assert_eq!(said(made(&file.join("g"))), in_the_way);
        assert_eq!(said(std::fs::create_dir_all(&file)), in_the_way);
        assert_eq!(said(std::fs::create_dir_all(file.join("g"))), in_the_way);
        let full = io::Error::from(io::ErrorKind::StorageFull);
        assert_eq!(said(Err(full)), "cannot be written (no storage space); give another");
    }

    #[test]
    fn when_there_are_colours() {
        assert!(coloured(true, None));
        assert!(coloured(true, Some(OsStr::new(""))));
        assert!(!coloured(true, Some(OsStr::new("1"))));
        assert!(!coloured(false, None));
    }
}
