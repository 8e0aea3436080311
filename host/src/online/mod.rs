//! Thresholds of a server that follow its traffic: from what the models' threads observe to other ladders.
//!
//! [`Tuner`] is pure and shared by the server and the simulation; [`thread`] gives it the time.

mod pace;
mod sums;
mod thread;

use std::time::Duration;

pub use pace::{Pace, Paces, Times};
use serde::Serialize;
use sums::Sums;
pub use thread::{Source, Thread};
use tokenrouter_batching::Fault;
use tokenrouter_batching::online::{Choice, Config, Online, Reason};

use crate::subserver::coordinator::Ladders;
use crate::subserver::gate::thresholds;
use crate::subserver::observed::Observed;

/// How a server tunes itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    pub interval: Duration,
    /// Limits in milliseconds on the 99th percentile of the time per token and of the time to the first token.
    pub p99_tpot_ms: Option<f64>,
    pub p99_ttft_ms: Option<f64>,
}

impl Settings {
    pub fn has_limits(&self) -> bool {
        self.p99_tpot_ms.is_some() || self.p99_ttft_ms.is_some()
    }
}

/// What is seen at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// By model.
    pub observed: Vec<Observed>,
    /// Requests that are live, and the most that were since the last reading.
    pub live: usize,
    pub most_live: usize,
    pub times: Times,
    /// In force, by model.
    pub ladders: Ladders,
}

/// What the tuner knows and has done.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Status {
    /// Changes of the ladders.
    pub changes: u64,
    /// Too little was seen: the configured ladders hold.
    pub thin: bool,
    /// What is wrong with what was seen, or with the last search; ladders stay as they are meanwhile.
    pub fault: Option<String>,
    /// The tuner has broken off: ladders stay as they are, and nothing here is as of now.
    pub ended: bool,
    /// By model: how many times longer its steps take while others run.
    pub stretch: Vec<f64>,
    /// `routing[i][j]`: share of the requests that go on at model j after a step of model i. Empty while
    /// `thin` and while what was seen describes no system; models without requests have rows of zeros.
    pub routing: Vec<Vec<f64>>,
    /// Seconds of the last search, and of the longest.
    pub search_seconds: f64,
    pub longest_search_seconds: f64,
}

/// Ladders to put in force.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    pub ladders: Ladders,
    /// For the log: from what to what, and why; `None` where no number of requests has other thresholds.
    pub line: Option<String>,
}

/// Chooses ladders for the models of one server.
#[derive(Debug)]
pub struct Tuner {
    names: Vec<String>,
    online: Online,
    sums: Sums,
    changes: u64,
}

impl Tuner {
    /// `ladders`: those of the configuration. `entry`: the model where requests begin until some have.
    pub fn new(names: Vec<String>, entry: usize, ladders: Ladders, settings: Settings) -> Result<Self, Fault> {
        let Settings { interval, p99_tpot_ms, p99_ttft_ms } = settings;
        let stretch = vec![1.0; names.len()];
        let config = Config { names: names.clone(), entry, ladders, stretch, interval, p99_tpot_ms, p99_ttft_ms };
        Ok(Self { sums: Sums::new(names.len()), online: Online::new(config, Duration::ZERO)?, names, changes: 0 })
    }

    /// Once an interval. `now` counts from the making of the tuner.
    pub fn turn(&mut self, now: Duration, reading: Reading) -> Result<Option<Change>, Fault> {
        reading.times.tpot.into_iter().for_each(|ms| self.online.tpot(ms));
        reading.times.ttft.into_iter().for_each(|ms| self.online.ttft(ms));
        self.online.active(reading.most_live);
        let before = reading.ladders;
        self.online.set_ladders(&before)?;
        let choice = self.online.choose(now, self.sums.add(reading.observed));
        let Some(Choice { ladders, reason }) = choice else { return Ok(None) };
        let line = self.line(&before, &ladders, reading.live.max(1), &reason);
        self.changes += u64::from(line.is_some());
        Ok(Some(Change { ladders, line }))
    }

    /// At the number of requests nearest to `live` for which thresholds are others.
    fn line(&self, before: &Ladders, ladders: &Ladders, live: usize, reason: &Reason) -> Option<String> {
        let most = before.iter().chain(ladders).map(Vec::len).fold(live, usize::max);
        let differ = |requests: &usize| thresholds(before, *requests) != thresholds(ladders, *requests);
        let changed = (1..=most).filter(differ).min_by_key(|requests| requests.abs_diff(live))?;
        let join = |b: Vec<u32>| b.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let (old, new) = (join(thresholds(before, changed)), join(thresholds(ladders, changed)));
        let same = if changed == live { String::new() } else { format!("; the same for {live}, as now") };
        let names = self.names.join(", ");
        let why = match reason {
            Reason::Thin => "too little was seen: as configured".into(),
            Reason::Tuned { requests, gain, why } => {
                format!("{why}: {:+.1} % predicted for {requests} requests", 100.0 * gain)
            }
        };
        Some(format!("min_batch of {names} for {changed} requests: {old} -> {new}{same} ({why})"))
    }

    pub fn status(&self) -> Status {
        let models = self.names.len();
        let mut routing = Vec::new();
        if let Some((members, system)) = self.online.estimate() {
            routing = vec![vec![0.0; models]; models];
            for (&from, row) in members.iter().zip(&system.routing) {
                members.iter().zip(row).for_each(|(&to, share)| routing[from][to] = *share);
            }
        }
        let (changes, thin, stretch) = (self.changes, self.online.thin(), self.online.stretches());
        let fault = self.online.fault().map(Fault::to_string);
        Status { changes, thin, fault, stretch, routing, ..Status::default() }
    }
}

#[cfg(test)]
mod tests;
