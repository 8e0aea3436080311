//! Errors, colours and logs on the terminal.

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;

/// Why a command ended. One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Exit status: 2 for what the user can mend in the input, 1 for what went wrong later.
    pub status: u8,
    pub message: String,
}

impl Failure {
    /// Something about the input.
    pub fn input(error: impl std::fmt::Display) -> Self {
        Self { status: 2, message: error.to_string() }
    }

    /// Something that went wrong while working.
    pub fn work(error: impl std::fmt::Display) -> Self {
        Self { status: 1, message: error.to_string() }
    }

    /// Write the line to standard error.
    pub fn report(&self) -> ExitCode {
        // One line, whatever a library put into its message.
        let message = self.message.split('\n').map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join("; ");
        if stderr_is_coloured() {
            eprintln!("\x1b[1;31merror:\x1b[0m {message}")
        } else {
            eprintln!("error: {message}")
        }
        ExitCode::from(self.status)
    }
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
pub fn log_to_stderr(filter: Option<&str>, default: &str) -> Result<(), Failure> {
    let text = filter.filter(|f| !f.is_empty()).unwrap_or(default);
    let filter = EnvFilter::try_new(text).map_err(|e| {
        Failure::input(format!("--log {text:?}: {e}; write a level such as `info`, or `info,tokenrouter=debug`"))
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(stderr_is_coloured())
        .try_init()
        .map_err(Failure::work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_there_are_colours() {
        assert!(coloured(true, None));
        assert!(coloured(true, Some(OsStr::new(""))));
        assert!(!coloured(true, Some(OsStr::new("1"))));
        assert!(!coloured(false, None));
    }
}
