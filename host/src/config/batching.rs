//! `[batching]`: when models start their forwards.

use super::error::Fault;
use super::tree::{Field, Section};
use crate::subserver::gate::Schedule;

/// `[batching]`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchingConfig {
    /// Of all models of the server.
    pub schedule: Schedule,
}

pub(crate) fn batching(mut section: Section) -> Result<BatchingConfig, Fault> {
    let schedule = section.take("schedule").map(|field| schedule(&field)).transpose()?.unwrap_or_default();
    section.end()?;
    Ok(BatchingConfig { schedule })
}

fn schedule(field: &Field) -> Result<Schedule, Fault> {
    Schedule::parse(&field.text()?).map_err(|e| field.fault(e))
}
