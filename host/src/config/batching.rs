//! `[batching]`: when models start their forwards.

use std::time::Duration;

use super::error::Fault;
use super::tree::{Field, Section};
use crate::online::Settings;
use crate::subserver::gate::Schedule;

const DEFAULT_INTERVAL: f64 = 3.0;

/// `[batching]`
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchingConfig {
    /// Of all models of the server.
    pub schedule: Schedule,
    /// `mode = "online"`: ladders follow the traffic. `None`: they are those of the models' tables.
    pub online: Option<Settings>,
}

pub(crate) fn batching(mut section: Section) -> Result<BatchingConfig, Fault> {
    let schedule = section.take("schedule").map(|field| schedule(&field)).transpose()?.unwrap_or_default();
    let online = match section.take("mode") {
        Some(field) => is_online(&field, schedule)?,
        None => false,
    };
    // Of `mode = "online"` alone.
    let mut number = |key, range| match section.take(key) {
        Some(field) if !online => {
            Err(field.fault("has no effect without mode = \"online\"; set that or leave this out"))
        }
        Some(field) => field.number(range).map(Some),
        None => Ok(None),
    };
    let interval = number("interval_s", 0.5..=3600.0)?.unwrap_or(DEFAULT_INTERVAL);
    let settings = Settings {
        interval: Duration::from_secs_f64(interval),
        p99_tpot_ms: number("p99_tpot_ms", 1e-3..=1e7)?,
        p99_ttft_ms: number("p99_ttft_ms", 1e-3..=1e7)?,
    };
    section.end()?;
    Ok(BatchingConfig { schedule, online: online.then_some(settings) })
}

fn schedule(field: &Field) -> Result<Schedule, Fault> {
    Schedule::parse(&field.text()?).map_err(|e| field.fault(e))
}

fn is_online(field: &Field, schedule: Schedule) -> Result<bool, Fault> {
    match field.text()?.as_str() {
        "fixed" => Ok(false),
        "online" if schedule == Schedule::Delayed => Ok(true),
        "online" => Err(field.fault(format!(
            "needs schedule = \"delayed\"; under \"{}\" no model waits for min_batch requests",
            schedule.name()
        ))),
        _ => Err(field.fault("must be \"fixed\" or \"online\"")),
    }
}
