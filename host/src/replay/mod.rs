//! A policy over recorded signals, without models: what would it have decided where another one did?
//!
//! A [`Trace`] is read from a recording or from an answer's JSON; [`Team`] is a policy at the models of a route,
//! and [`play()`] puts the rows of the trace before it. `docs/policies.md` says what the numbers mean.

mod answers;
mod files;
mod limit;
mod play;
mod recording;
mod report;
mod team;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;

pub use limit::{LimitError, within};
pub use play::{Difference, PlayError, Played, play};
pub use report::Report;
pub use team::{Place, Team, TeamError};
use tokenrouter_plugin_api::{ModelDescription, TokenId};

use crate::plain::plain;
use crate::record::Plugin;

/// What was recorded of the requests of one route.
#[derive(Debug, Default)]
pub struct Trace {
    /// In words, for messages.
    pub source: String,
    /// The route's models and the place of its entry, where the trace tells them.
    pub route: Option<(Vec<ModelDescription>, usize)>,
    /// Of the recorded policy.
    pub plugin: Option<Plugin>,
    /// Names of the models that `Row::model` and `Request::writers` count.
    pub models: Vec<String>,
    /// Signals of each model's rows.
    pub columns: Vec<Columns>,
    pub requests: Vec<Request>,
    /// Token ids are below this.
    pub vocab_size: u32,
    /// What is to be known of the trace before its numbers are believed.
    pub notes: Vec<String>,
}

/// Signals of one model's rows; each column has one value a row, or is missing.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    pub rows: usize,
    /// By name, as in a recording.
    pub scalars: BTreeMap<String, Vec<f32>>,
    /// Values a row of the next two.
    pub top_k: usize,
    pub topk_values: Vec<f32>,
    pub topk_ids: Vec<TokenId>,
}

#[derive(Clone, Debug, Default)]
pub struct Request {
    pub id: u64,
    pub seed: u64,
    /// Ids that are not known are `NO_TOKEN`; so it is with `tokens`.
    pub prompt: Vec<TokenId>,
    pub max_tokens: u32,
    pub tokens: Vec<TokenId>,
    /// By token.
    pub writers: Vec<usize>,
    pub handoffs: u32,
    /// In the order of time.
    pub rows: Vec<Row>,
}

/// One evaluation.
#[derive(Clone, Debug)]
pub struct Row {
    pub model: usize,
    /// Its place in the model's columns.
    pub at: usize,
    pub position: u32,
    pub candidate: TokenId,
    /// `NO_TOKEN` for none.
    pub draft: TokenId,
    /// Whether the recorded policy was asked about it.
    pub asked: bool,
    /// What it answered, if that is known.
    pub answer: Option<Answer>,
}

/// A decision's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Stay,
    /// To the model with this number in the trace.
    To(usize),
    Draft,
    Accept,
}

/// Longest prompt of a trace: what is not known of it takes memory, too.
const LONGEST_PROMPT: u64 = 1 << 24;

fn prompt_length(tokens: u64) -> Result<usize, String> {
    if tokens > LONGEST_PROMPT {
        return Err(format!("prompt_tokens = {tokens}: more than {LONGEST_PROMPT} are not replayed"));
    }
    Ok(tokens as usize)
}

/// Read the trace at `path`: a run of a recording or its directory, or a file with an answer's JSON. `route`: whose
/// requests of a recording, where it has several routes.
pub fn read(path: &Path, route: Option<&str>) -> Result<Trace, String> {
    let read = || match std::fs::metadata(path).map_err(files::unread)?.is_dir() {
        true => recording::read(path, route),
        false if path.file_name().is_some_and(|name| name == "manifest.json") => {
            recording::read(path.parent().unwrap_or(Path::new(".")), route)
        }
        false if route.is_some() => Err("is one answer, of one route; leave --recorded out".to_owned()),
        false => answers::read(&files::read(path)?),
    };
    // Names and formats of a manifest may be anything.
    let trace = read().map_err(|e| plain(&format!("{}: {e}", path.display())))?;
    let rows: usize = trace.requests.iter().map(|request| request.rows.len()).sum();
    if rows == 0 {
        return Err(format!("{}: holds no evaluation of a request that ended", path.display()));
    }
    Ok(Trace { source: format!("{}: {}", path.display(), trace.source), ..trace })
}
