//! Configuration errors: one line with place, field, value and remedy.

use std::fmt;

use crate::plain::plain;

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A line of the configuration file, counted from 1.
    Line(usize),
    /// An environment variable.
    Env(String),
}

/// What is wrong with a configuration. Its text is one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Name of the file as given.
    pub file: String,
    /// Where in it, if that is known.
    pub origin: Option<Origin>,
    /// Field, value and remedy.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Keys, names and the parser's words stand in it as they were written.
        let (file, message) = (plain(&self.file), plain(&self.message));
        match &self.origin {
            Some(Origin::Line(line)) => write!(f, "{file}:{line}: {message}"),
            Some(Origin::Env(name)) => write!(f, "environment variable {}: {message}", plain(name)),
            None => write!(f, "{file}: {message}"),
        }
    }
}

impl std::error::Error for ConfigError {}

/// A fault before the file's name is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub origin: Option<Origin>,
    pub message: String,
}

impl Fault {
    /// A fault at a known place.
    pub fn at(origin: &Origin, message: impl Into<String>) -> Self {
        Self { origin: Some(origin.clone()), message: message.into() }
    }

    /// The error to show.
    pub fn in_file(self, file: &str) -> ConfigError {
        ConfigError { file: file.into(), origin: self.origin, message: self.message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_line_whatever_the_keys_are() {
        let error = Fault::at(&Origin::Env("A\nB".into()), "unknown key `a\nb\u{1b}`").in_file("c.toml");
        assert_eq!(error.to_string(), "environment variable A\\nB: unknown key `a\\nb\\u{1b}`");
        let error = crate::config::Config::parse("\"a\\nb\" = 1", "c.toml".as_ref(), &Default::default());
        assert!(error.unwrap_err().to_string().starts_with("c.toml:1: unknown key `a\\nb`: known are server"));
    }
}
