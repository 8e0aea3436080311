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

/// Of `known`, the one that `word` was probably meant to be.
pub fn closest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = word.chars().count().div_ceil(3).min(3);
    known.into_iter().map(|k| (distance(word, k), k)).filter(|(d, _)| *d <= limit).min_by_key(|(d, _)| *d).map(|p| p.1)
}

/// `did you mean …?` or, with nothing close, all that is known.
pub fn suggestion<'a>(word: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    match closest(word, known.clone()) {
        Some(near) => format!("did you mean `{near}`?"),
        None => {
            let known: Vec<&str> = known.into_iter().collect();
            if known.is_empty() { "there are none".into() } else { format!("known are {}", known.join(", ")) }
        }
    }
}

/// Edit distance with swaps of neighbours as one edit.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let mut best = (last[j] + 1).min(row[j - 1] + 1).min(last[j - 1] + usize::from(a[i - 1] != b[j - 1]));
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(before[j - 2] + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
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

    #[test]
    fn near_words() {
        assert_eq!(distance("prot", "port"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(closest("min_bacth", ["min_batch", "max_rows"]), Some("min_batch"));
        assert_eq!(closest("colour", ["port", "host"]), None);
        assert_eq!(suggestion("colour", ["port", "host"]), "known are port, host");
        assert_eq!(suggestion("x", []), "there are none");
    }
}
