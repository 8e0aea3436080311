//! The conformance kit: everything that a server may bring to a policy, and what must come back.
//!
//! It knows policies as the sub-servers do, by [`PolicyFactory`](super::PolicyFactory), wherever they come
//! from. It guards against nothing: who checks a plugin that may end the process runs it in another one and
//! has [`run`] tell what it begins and what it found.

mod checks;
mod cost;
mod play;
mod rows;
mod setup;
mod watched;
mod wrong_settings;

pub use checks::CHECKS;
pub use setup::{Setup, parse_roles};

use serde::{Deserialize, Serialize};

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    Ok,
    Warning,
    Failed,
    /// A check before it failed and left nothing to run it on.
    NotRun,
}

/// What one check found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    pub check: String,
    pub status: Status,
    /// What was seen.
    pub what: String,
    /// What to do; empty where nothing is to be done.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub remedy: String,
    /// Measured numbers, of the checks that measure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numbers: Option<serde_json::Value>,
}

impl Finding {
    fn new(status: Status, what: impl Into<String>, remedy: &str) -> Self {
        Self { check: String::new(), status, what: what.into(), remedy: remedy.into(), numbers: None }
    }

    pub fn ok(what: impl Into<String>) -> Self {
        Self::new(Status::Ok, what, "")
    }

    pub fn warning(what: impl Into<String>, remedy: &str) -> Self {
        Self::new(Status::Warning, what, remedy)
    }

    pub fn failed(what: impl Into<String>, remedy: &str) -> Self {
        Self::new(Status::Failed, what, remedy)
    }

    /// The same, as the finding of the check with this name.
    pub fn of(self, check: &str) -> Self {
        Self { check: check.into(), ..self }
    }
}

/// A check by its name.
pub struct Check {
    pub name: &'static str,
    /// Whether nothing after it can be run where it fails.
    pub needed: bool,
    run: fn(&Setup<'_>) -> Finding,
}

/// Run the checks from number `from` on. `begins` is told the number of each before it runs, `found` what it
/// found.
pub fn run<E>(
    setup: &Setup<'_>,
    from: usize,
    mut begins: impl FnMut(usize) -> Result<(), E>,
    mut found: impl FnMut(Finding) -> Result<(), E>,
) -> Result<(), E> {
    for (number, check) in CHECKS.iter().enumerate().skip(from) {
        begins(number)?;
        let finding = (check.run)(setup).of(check.name);
        let ends = check.needed && finding.status == Status::Failed;
        found(finding)?;
        if ends {
            break;
        }
    }
    Ok(())
}
