//! What is tuned: models, the routing between them, and how they slow each other down.

use std::fmt;

use thiserror::Error;

/// Rows of the routing matrix may miss 1 by rounding of their inputs; they are scaled to it.
const ROW_SUM: f64 = 1e-6;
/// Of the longest step to the shortest. Beyond it the grain of the shortest is lost in the longest.
const RATIO: f64 = 1e5;

/// An input that describes nothing that could run. One line: field, value, what would do.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum Fault {
    #[error("models: none given; give a step time for at least one")]
    NoModels,
    #[error("{field} has {given} entries where {wanted} are needed, one for each model")]
    Count { field: &'static str, given: usize, wanted: usize },
    #[error("step time of {model}: none given; give milliseconds, one number or one for each batch size")]
    NoTime { model: String },
    #[error("step time of {model} for a batch of {batch} = {value} ms: must be a number above 0")]
    Time { model: String, batch: usize, value: f64 },
    #[error(
        "step times from {shortest} ms to {longest} ms: the longest may be 100000 times the shortest at most; are all in \
         milliseconds?"
    )]
    Ratio { shortest: f64, longest: f64 },
    #[error("stretch of {model} = {value}: must be a number from 1 (1 = the others do not slow it down)")]
    Stretch { model: String, value: f64 },
    #[error("sigma for {running} running models = {value}: must be a number above 0 (1 = no slower)")]
    Sigma { running: usize, value: f64 },
    #[error("hold of {model} = {value} ms: must be a number from 0 (0 = never held)")]
    Hold { model: String, value: f64 },
    #[error("max_batch of {model} = 0: must be at least 1")]
    MaxBatch { model: String },
    #[error("route {from} -> {to} = {value}: must be a probability from 0 to 1")]
    Probability { from: String, to: String, value: f64 },
    #[error("routes of {from} sum to {sum}: the probabilities of where its tokens lead must sum to 1")]
    RowSum { from: String, sum: f64 },
    #[error("tokens committed on {from} -> {to} = {value}: must be a number from 0")]
    Commit { from: String, to: String, value: f64 },
    #[error("entry = {entry}: there are {models} models, counted from 0")]
    Entry { entry: usize, models: usize },
    #[error("{model} is never reached from {entry}: no route leads to it; leave it out or give one")]
    Unreached { model: String, entry: String },
    #[error("{model} is left for ever: no route leads back from it to {entry}; leave {entry} out or give one")]
    NoReturn { model: String, entry: String },
    #[error("no route commits a token: throughput would be 0; give a commit above 0 on a route that is taken")]
    NothingCommitted,
    #[error("concurrency = {0}: must be from 1 to 4096 requests")]
    Concurrency(usize),
    #[error("min_batch of {model} = {value}: must be from 1 to the {requests} requests under way")]
    Threshold { model: String, value: u32, requests: usize },
    #[error(
        "min_batch = {min_batch}: locks up with {requests} requests, sum(B-1)={waiting} >= N={requests}: all could wait \
         at once; lower them until the sum is below N"
    )]
    LocksUp { min_batch: Thresholds, waiting: u64, requests: usize },
    #[error("step time of {model} = {value} ms: not a positive multiple of delta = {delta} ms; leave delta out")]
    Grain { model: String, value: f64, delta: f64 },
    #[error("delta = {0} ms: must be a number above 0")]
    Delta(f64),
}

/// One smallest batch for each model, as `[1, 3]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Thresholds(pub Vec<u32>);

impl fmt::Display for Thresholds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// One model of a [`System`].
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    pub name: String,
    /// Milliseconds of a step while no other model runs, by batch size from 1; the last holds for larger ones.
    pub step_ms: Vec<f64>,
    /// Most requests of a batch; `None` = all that wait.
    pub max_batch: Option<usize>,
    /// How many times longer a step takes while other models run, from 1.
    pub stretch: f64,
}

impl Model {
    pub fn new(name: impl Into<String>, step_ms: Vec<f64>) -> Self {
        Self { name: name.into(), step_ms, max_batch: None, stretch: 1.0 }
    }

    /// Milliseconds of a step of `batch` requests (at least 1), alone.
    pub fn step(&self, batch: usize) -> f64 {
        let last = self.step_ms.len().saturating_sub(1);
        self.step_ms.get((batch.max(1) - 1).min(last)).copied().unwrap_or(f64::NAN)
    }

    /// Requests that start together when `waiting` do.
    pub fn batch(&self, waiting: usize) -> usize {
        self.max_batch.map_or(waiting, |most| waiting.min(most))
    }
}

/// Models that hand requests to each other after every step.
#[derive(Clone, Debug, PartialEq)]
pub struct System {
    pub models: Vec<Model>,
    /// `routing[i][j]`: probability that a request goes on at model j after a step of model i.
    pub routing: Vec<Vec<f64>>,
    /// `commits[i][j]`: tokens written by a step of i that leads to j.
    pub commits: Vec<Vec<f64>>,
    /// `sigma[m]`: a further stretch of all steps while m models run. Index 0 is not used, the last entry
    /// holds for more; empty = 1.
    pub sigma: Vec<f64>,
    /// The model at which all requests wait at first.
    pub entry: usize,
}

/// How a system is run: what the tuner chooses.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// By model: an idle model starts when this many requests wait for it, from 1.
    pub min_batch: Vec<u32>,
    /// By model: milliseconds of work. It also waits while another running model has no more than this left.
    pub hold_ms: Vec<f64>,
}

impl Setting {
    /// Without holds.
    pub fn new(min_batch: Vec<u32>) -> Self {
        let hold_ms = vec![0.0; min_batch.len()];
        Self { min_batch, hold_ms }
    }
}

/// How many requests can wait below the thresholds at once. Nothing locks up while this is less than the
/// number of requests: with all of them waiting, one model then has enough.
pub fn most_waiting(min_batch: &[u32]) -> u64 {
    min_batch.iter().map(|&b| u64::from(b.saturating_sub(1))).sum()
}

impl System {
    pub fn len(&self) -> usize {
        self.models.len()
    }

    pub fn is_empty(&self) -> bool {
        self.models.is_empty()
    }

    fn name(&self, model: usize) -> String {
        self.models[model].name.clone()
    }

    /// Further stretch of all steps while `running` models run.
    pub fn sigma(&self, running: usize) -> f64 {
        self.sigma.get(running).or(self.sigma.last()).copied().unwrap_or(1.0)
    }

    /// Tokens that a step of `model` writes for each of its requests, on average.
    pub fn gain(&self, model: usize) -> f64 {
        self.routing[model].iter().zip(&self.commits[model]).map(|(p, c)| p * c).sum()
    }

    /// Check everything and scale the rows of the routing matrix to exactly 1.
    pub fn checked(mut self) -> Result<Self, Fault> {
        let count = self.len();
        if count == 0 {
            return Err(Fault::NoModels);
        }
        for (field, given) in [("routes", self.routing.len()), ("commits", self.commits.len())] {
            if given != count {
                return Err(Fault::Count { field, given, wanted: count });
            }
        }
        if self.entry >= count {
            return Err(Fault::Entry { entry: self.entry, models: count });
        }
        self.models.iter().try_for_each(check_model)?;
        let times = || self.models.iter().flat_map(|model| model.step_ms.iter().copied());
        let (shortest, longest) = (times().fold(f64::INFINITY, f64::min), times().fold(0.0, f64::max));
        if longest > RATIO * shortest {
            return Err(Fault::Ratio { shortest, longest });
        }
        // A single entry is the last one, and used.
        for (running, &value) in self.sigma.iter().enumerate().skip(usize::from(self.sigma.len() > 1)) {
            if !(value.is_finite() && value > 0.0) {
                return Err(Fault::Sigma { running, value });
            }
        }
        for from in 0..count {
            self.check_row(from)?;
            let sum: f64 = self.routing[from].iter().sum();
            self.routing[from].iter_mut().for_each(|p| *p /= sum);
        }
        self.check_routes()?;
        Ok(self)
    }

    fn check_row(&self, from: usize) -> Result<(), Fault> {
        let count = self.len();
        for (field, row) in [("a row of routes", &self.routing[from]), ("a row of commits", &self.commits[from])] {
            if row.len() != count {
                return Err(Fault::Count { field, given: row.len(), wanted: count });
            }
        }
        let pair = |to: usize| (self.name(from), self.name(to));
        for to in 0..count {
            let (value, commit) = (self.routing[from][to], self.commits[from][to]);
            if !(0.0..=1.0).contains(&value) {
                let (from, to) = pair(to);
                return Err(Fault::Probability { from, to, value });
            }
            if !(commit.is_finite() && commit >= 0.0) {
                let (from, to) = pair(to);
                return Err(Fault::Commit { from, to, value: commit });
            }
        }
        let sum: f64 = self.routing[from].iter().sum();
        if (sum - 1.0).abs() > ROW_SUM {
            return Err(Fault::RowSum { from: self.name(from), sum });
        }
        Ok(())
    }

    /// Every model must be reached from the entry and lead back to it, and some route must commit.
    fn check_routes(&self) -> Result<(), Fault> {
        let closure = |leads: &dyn Fn(usize, usize) -> bool| {
            let mut reached = vec![false; self.len()];
            let mut open = vec![self.entry];
            while let Some(at) = open.pop() {
                if !std::mem::replace(&mut reached[at], true) {
                    open.extend((0..self.len()).filter(|&to| leads(at, to)));
                }
            }
            reached.iter().position(|reached| !reached)
        };
        if let Some(model) = closure(&|at, to| self.routing[at][to] > 0.0) {
            return Err(Fault::Unreached { model: self.name(model), entry: self.name(self.entry) });
        }
        if let Some(model) = closure(&|at, to| self.routing[to][at] > 0.0) {
            return Err(Fault::NoReturn { model: self.name(model), entry: self.name(self.entry) });
        }
        if (0..self.len()).all(|model| self.gain(model) == 0.0) {
            return Err(Fault::NothingCommitted);
        }
        Ok(())
    }

    /// Whether `setting` can be used with `requests` under way.
    pub fn check_setting(&self, requests: usize, setting: &Setting) -> Result<(), Fault> {
        check_requests(requests)?;
        let counts = [("min_batch", setting.min_batch.len()), ("hold", setting.hold_ms.len())];
        if let Some((field, given)) = counts.into_iter().find(|(_, given)| *given != self.len()) {
            return Err(Fault::Count { field, given, wanted: self.len() });
        }
        if let Some((model, &value)) = setting.hold_ms.iter().enumerate().find(|(_, h)| h.is_nan() || **h < 0.0) {
            return Err(Fault::Hold { model: self.name(model), value });
        }
        if let Some((model, &value)) = setting.min_batch.iter().enumerate().find(|(_, b)| **b < 1) {
            return Err(Fault::Threshold { model: self.name(model), value, requests });
        }
        let waiting = most_waiting(&setting.min_batch);
        if waiting >= requests as u64 {
            return Err(Fault::LocksUp { min_batch: Thresholds(setting.min_batch.clone()), waiting, requests });
        }
        Ok(())
    }
}

pub(crate) fn check_requests(requests: usize) -> Result<(), Fault> {
    if (1..=4096).contains(&requests) { Ok(()) } else { Err(Fault::Concurrency(requests)) }
}

fn check_model(model: &Model) -> Result<(), Fault> {
    let name = || model.name.clone();
    if model.step_ms.is_empty() {
        return Err(Fault::NoTime { model: name() });
    }
    if let Some((index, &value)) = model.step_ms.iter().enumerate().find(|(_, t)| !(t.is_finite() && **t > 0.0)) {
        return Err(Fault::Time { model: name(), batch: index + 1, value });
    }
    if !(model.stretch.is_finite() && model.stretch >= 1.0) {
        return Err(Fault::Stretch { model: name(), value: model.stretch });
    }
    if model.max_batch == Some(0) {
        return Err(Fault::MaxBatch { model: name() });
    }
    Ok(())
}

/// Step times by batch size from 1 to the largest one known, from those of some sizes (ascending, from 1): on a
/// straight line between two of them, and below the smallest as that.
pub fn interpolate(known: &[(usize, f64)]) -> Vec<f64> {
    let at = |batch: usize| {
        let after = known.partition_point(|(size, _)| *size < batch);
        match (after.checked_sub(1).and_then(|before| known.get(before)), known.get(after)) {
            (Some((low, a)), Some((high, b))) => a + (b - a) * (batch - low) as f64 / (high - low) as f64,
            (Some((_, time)), None) | (None, Some((_, time))) => *time,
            (None, None) => f64::NAN,
        }
    };
    (1..=known.last().map_or(0, |(size, _)| *size)).map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two models, the second of which writes single tokens in place of the first one's.
    fn pair() -> System {
        System {
            models: vec![Model::new("s", vec![6.0]), Model::new("l", vec![27.9])],
            routing: vec![vec![0.65, 0.35], vec![1.0, 0.0]],
            commits: vec![vec![1.0, 0.0], vec![1.0, 0.0]],
            sigma: Vec::new(),
            entry: 0,
        }
    }

    #[test]
    fn impossible_systems_are_one_line_each() {
        let fault = |change: &dyn Fn(&mut System)| {
            let mut system = pair();
            change(&mut system);
            system.checked().unwrap_err().to_string()
        };
        for (error, expected) in [
            (fault(&|s| s.models.clear()), "models: none given; give a step time for at least one"),
            (fault(&|s| s.routing.truncate(1)), "routes has 1 entries where 2 are needed, one for each model"),
            (
                fault(&|s| s.commits[1].truncate(1)),
                "a row of commits has 1 entries where 2 are needed, one for each model",
            ),
            (fault(&|s| s.entry = 2), "entry = 2: there are 2 models, counted from 0"),
            (
                fault(&|s| s.models[0].step_ms.clear()),
                "step time of s: none given; give milliseconds, one number or one for each batch size",
            ),
            (
                fault(&|s| s.models[1].step_ms = vec![1e9, 2.0]),
                "step times from 2 ms to 1000000000 ms: the longest may be 100000 times the shortest at most; are all in \
                 milliseconds?",
            ),
            (
                fault(&|s| s.models[1].step_ms = vec![1.0, 0.0]),
                "step time of l for a batch of 2 = 0 ms: must be a number above 0",
            ),
            (
                fault(&|s| s.models[0].stretch = f64::NAN),
                "stretch of s = NaN: must be a number from 1 (1 = the others do not slow it down)",
            ),
            (fault(&|s| s.models[0].max_batch = Some(0)), "max_batch of s = 0: must be at least 1"),
            (
                fault(&|s| s.sigma = vec![0.0]),
                "sigma for 0 running models = 0: must be a number above 0 (1 = no slower)",
            ),
            (
                fault(&|s| s.sigma = vec![1.0, 1.0, -1.3]),
                "sigma for 2 running models = -1.3: must be a number above 0 (1 = no slower)",
            ),
            (fault(&|s| s.routing[0] = vec![1.5, -0.5]), "route s -> s = 1.5: must be a probability from 0 to 1"),
            (
                fault(&|s| s.routing[0] = vec![0.65, 0.3]),
                "routes of s sum to 0.95: the probabilities of where its tokens lead must sum to 1",
            ),
            (fault(&|s| s.commits[0][1] = -1.0), "tokens committed on s -> l = -1: must be a number from 0"),
            (
                fault(&|s| s.routing[0] = vec![1.0, 0.0]),
                "l is never reached from s: no route leads to it; leave it out or give one",
            ),
            (
                fault(&|s| s.routing[1] = vec![0.0, 1.0]),
                "l is left for ever: no route leads back from it to s; leave s out or give one",
            ),
            (
                fault(&|s| s.commits = vec![vec![0.0; 2]; 2]),
                "no route commits a token: throughput would be 0; give a commit above 0 on a route that is taken",
            ),
        ] {
            assert_eq!(error, expected);
        }
        assert_eq!(pair().checked().unwrap(), pair());
    }

    #[test]
    fn impossible_settings_are_one_line_each() {
        let fault = |requests, min_batch: &[u32], hold: f64| {
            let setting = Setting { min_batch: min_batch.to_vec(), hold_ms: vec![0.0, hold] };
            pair().check_setting(requests, &setting).unwrap_err().to_string()
        };
        for (error, expected) in [
            (fault(0, &[1, 1], 0.0), "concurrency = 0: must be from 1 to 4096 requests"),
            (fault(4, &[1], 0.0), "min_batch has 1 entries where 2 are needed, one for each model"),
            (fault(4, &[1, 0], 0.0), "min_batch of l = 0: must be from 1 to the 4 requests under way"),
            (fault(4, &[1, 1], -1.0), "hold of l = -1 ms: must be a number from 0 (0 = never held)"),
            (
                fault(4, &[3, 3], 0.0),
                "min_batch = [3, 3]: locks up with 4 requests, sum(B-1)=4 >= N=4: all could wait at once; lower them \
                 until the sum is below N",
            ),
        ] {
            assert_eq!(error, expected);
        }
        assert!(pair().check_setting(4, &Setting::new(vec![2, 3])).is_ok());
    }

    #[test]
    fn times_between_known_ones() {
        assert_eq!(interpolate(&[(2, 20.0), (4, 30.0)]), [20.0, 20.0, 25.0, 30.0]);
        assert_eq!(interpolate(&[]), []);
    }
}
