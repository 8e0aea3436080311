//! `[record]`: what is written down while serving.

use std::path::PathBuf;

use super::error::Fault;
use super::read::size;
use super::tree::Field;
use crate::plain::suggestion;

const DEFAULT_MAX_BYTES: u64 = 1 << 30;
/// Room for the manifest and for something to describe.
const LEAST_BYTES: u64 = 1 << 20;
const DEFAULT_SHARD_ROWS: u32 = 65536;
/// The manifest, which grows by an entry a shard, is written anew after each.
const LEAST_SHARD_ROWS: i64 = 1024;

/// `[record]`
#[derive(Clone, Debug, PartialEq)]
pub struct RecordConfig {
    /// As written; relative to the file.
    pub directory: PathBuf,
    /// All files in `directory` together, those of earlier runs included.
    pub max_bytes: u64,
    /// Most evaluations in a shard.
    pub shard_rows: u32,
    /// Whether last hidden states are written.
    pub hidden: bool,
    /// Largest raw logits a row.
    pub top_k: u32,
    /// Names of the routes and bare models to record; `None` for all.
    pub routes: Option<Vec<String>>,
    /// Share of the requests that are recorded; in (0, 1].
    pub sample: f64,
    /// Whether token ids of prompts and answers are written with each request.
    pub requests: bool,
}

/// Read the table; `known` are the names of routes and bare models.
pub(super) fn record(field: &Field, known: &[&str]) -> Result<RecordConfig, Fault> {
    let mut section = field.section()?;
    let Some(directory) = section.take("directory") else {
        return Err(section.fault("has no `directory`; add `directory = \"recordings\"`"));
    };
    let max_bytes = match section.take("max_bytes") {
        Some(field) => match size(&field)? {
            bytes if bytes < LEAST_BYTES => return Err(field.fault("must be at least 1MiB")),
            bytes => bytes,
        },
        None => DEFAULT_MAX_BYTES,
    };
    let shard_rows = match section.take("shard_rows") {
        Some(field) => field.integer(LEAST_SHARD_ROWS..=1 << 24)? as u32,
        None => DEFAULT_SHARD_ROWS,
    };
    let hidden = section.take("hidden").map(|f| f.boolean()).transpose()?.unwrap_or(false);
    let top_k = section.take("top_k").map(|f| f.integer(0..=65536)).transpose()?.unwrap_or(0) as u32;
    let routes = section.take("routes").map(|f| names(&f, known)).transpose()?;
    let sample = match section.take("sample") {
        Some(field) => match field.number(0.0..=1.0)? {
            0.0 => return Err(field.fault("records nothing; leave [record] out instead")),
            share => share,
        },
        None => 1.0,
    };
    let requests = section.take("requests").map(|f| f.boolean()).transpose()?.unwrap_or(false);
    section.end()?;
    Ok(RecordConfig {
        directory: PathBuf::from(directory.text()?),
        max_bytes,
        shard_rows,
        hidden,
        top_k,
        routes,
        sample,
        requests,
    })
}

fn names(field: &Field, known: &[&str]) -> Result<Vec<String>, Fault> {
    let mut names: Vec<String> = Vec::new();
    for item in field.array("strings")? {
        let name = item.text()?;
        if !known.contains(&&*name) {
            let near = suggestion(&name, known.iter().copied());
            return Err(item.fault(format!("is neither a route nor a model: {near}")));
        }
        if names.contains(&name) {
            return Err(item.fault("is listed twice"));
        }
        names.push(name);
    }
    if names.is_empty() {
        return Err(field.fault("must name at least one route; leave it out to record all"));
    }
    Ok(names)
}
