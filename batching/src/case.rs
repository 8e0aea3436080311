//! One question in the form of the conformance cases (`tests/data/dtmc.json`), and its answer in the same fields.

use serde::{Deserialize, Serialize};

use crate::chain::Limits;
use crate::grid::Grain;
use crate::search::{self, Method, Options};
use crate::system::{Fault, Model, Setting, System, most_waiting};

/// What is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Rates under the thresholds `B`.
    #[default]
    Eval,
    /// The best of all thresholds, some of which may be given (`fixed_B`).
    Argmax,
    /// Whether the thresholds `B` lock up.
    Infeasible,
}

/// A case. Times are milliseconds; `null` and a missing field mean the same; fields of the answer are not read.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Case {
    pub id: Option<String>,
    #[serde(default)]
    pub kind: Kind,
    #[serde(rename = "N")]
    pub requests: usize,
    #[serde(rename = "B")]
    pub min_batch: Option<Vec<u32>>,
    #[serde(rename = "fixed_B")]
    pub fixed: Option<Vec<Option<u32>>>,
    #[serde(rename = "delta_ms")]
    pub delta: Option<f64>,
    #[serde(rename = "L_ms")]
    pub step: Option<Vec<f64>>,
    #[serde(rename = "L_ms_by_batch")]
    pub step_by_batch: Option<Vec<Vec<f64>>>,
    #[serde(rename = "P")]
    pub routing: Option<Vec<Vec<f64>>>,
    #[serde(rename = "C")]
    pub commits: Option<Vec<Vec<f64>>>,
    pub max_batch: Option<Vec<usize>>,
    pub sigma: Option<Vec<f64>>,
    /// By model: stretch of its steps while others run. Not in the published cases.
    pub stretch: Option<Vec<f64>>,
    pub hold_grains: Option<Vec<u32>>,
    #[serde(default)]
    pub entry: usize,
    pub tie: Option<String>,
}

/// The answer to a case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    pub kind: Kind,
    #[serde(rename = "N")]
    pub requests: usize,
    #[serde(rename = "B")]
    pub min_batch: Vec<u32>,
    #[serde(flatten)]
    pub result: Outcome,
}

/// What the kind of the case asks for.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Outcome {
    Rates {
        throughput_tok_per_s: f64,
        step_rate_per_s: Vec<f64>,
        mean_batch: Vec<f64>,
        /// `None` where it was simulated.
        states: Option<usize>,
        /// Standard error by throughput where it was simulated.
        #[serde(skip_serializing_if = "Option::is_none")]
        simulated_rel_se: Option<f64>,
    },
    Best {
        throughput_tok_per_s: f64,
        /// Lead over the second best, by the best; `None` if there is none.
        margin_to_second: Option<f64>,
        #[serde(rename = "feasible_B")]
        feasible: usize,
    },
    /// `None` where nothing locks up.
    Infeasible { reason: Option<String> },
}

/// Why there is no answer. One line.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CaseError {
    #[error(transparent)]
    Fault(#[from] Fault),
    #[error("{0}: missing; this kind of case needs it")]
    Missing(&'static str),
    #[error("L_ms and L_ms_by_batch: give one of them")]
    Times,
    #[error("tie = {0:?}: only \"joint\" is known; steps that end at the same moment end together")]
    Tie(String),
    #[error("hold_grains: needs delta_ms")]
    HoldWithoutGrain,
    #[error("fixed_B: {0} settings to try; fix more thresholds, at most 20000 are tried one by one")]
    TooMany(f64),
}

impl Case {
    fn system(&self) -> Result<System, CaseError> {
        let times = match (&self.step, &self.step_by_batch) {
            (Some(_), Some(_)) => return Err(CaseError::Times),
            (Some(times), None) => times.iter().map(|&time| vec![time]).collect(),
            (None, Some(times)) => times.clone(),
            (None, None) => return Err(CaseError::Missing("L_ms")),
        };
        let counts = [
            ("max_batch", self.max_batch.as_ref().map(Vec::len)),
            ("stretch", self.stretch.as_ref().map(Vec::len)),
            ("hold_grains", self.hold_grains.as_ref().map(Vec::len)),
        ];
        for (field, given) in counts {
            if let Some(given) = given.filter(|given| *given != times.len()) {
                return Err(Fault::Count { field, given, wanted: times.len() }.into());
            }
        }
        let model = |(index, step_ms): (usize, Vec<f64>)| Model {
            max_batch: self.max_batch.as_ref().map(|most| most[index]),
            stretch: self.stretch.as_ref().map_or(1.0, |stretch| stretch[index]),
            ..Model::new(format!("model {index}"), step_ms)
        };
        let system = System {
            models: times.into_iter().enumerate().map(model).collect(),
            routing: self.routing.clone().ok_or(CaseError::Missing("P"))?,
            commits: self.commits.clone().ok_or(CaseError::Missing("C"))?,
            sigma: self.sigma.clone().unwrap_or_default(),
            entry: self.entry,
        };
        Ok(system.checked()?)
    }

    /// Compute the answer, on up to `threads` threads.
    pub fn answer(&self, threads: usize) -> Result<Answer, CaseError> {
        if let Some(tie) = self.tie.as_ref().filter(|tie| *tie != "joint") {
            return Err(CaseError::Tie(tie.clone()));
        }
        let (min_batch, result) = match self.kind {
            Kind::Infeasible => {
                let min_batch = self.min_batch.clone().ok_or(CaseError::Missing("B"))?;
                let waiting = most_waiting(&min_batch);
                let reason = (waiting >= self.requests as u64).then(|| format!("sum(B-1)={waiting} >= N"));
                (min_batch, Outcome::Infeasible { reason })
            }
            Kind::Eval => self.rates()?,
            Kind::Argmax => self.best(threads)?,
        };
        Ok(Answer { id: self.id.clone(), kind: self.kind, requests: self.requests, min_batch, result })
    }

    fn grain(&self) -> Grain {
        self.delta.map_or(Grain::Auto, Grain::Exact)
    }

    fn hold_ms(&self, models: usize) -> Result<Vec<f64>, CaseError> {
        match (&self.hold_grains, self.delta) {
            (None, _) => Ok(vec![0.0; models]),
            (Some(grains), Some(delta)) => Ok(grains.iter().map(|g| f64::from(*g) * delta).collect()),
            (Some(_), None) => Err(CaseError::HoldWithoutGrain),
        }
    }

    fn rates(&self) -> Result<(Vec<u32>, Outcome), CaseError> {
        let system = self.system()?;
        let min_batch = self.min_batch.clone().ok_or(CaseError::Missing("B"))?;
        let setting = Setting { min_batch: min_batch.clone(), hold_ms: self.hold_ms(system.len())? };
        let options = Options { grain: self.grain(), ..Options::default() };
        let point = search::evaluate(&system, self.requests, &setting, &options, Limits::EXACT)?;
        let (states, error) = match point.method {
            Method::Chain { states } => (Some(states), None),
            Method::Simulation { standard_error, .. } => (None, Some(standard_error / point.rates.throughput)),
        };
        let outcome = Outcome::Rates {
            throughput_tok_per_s: point.rates.throughput,
            step_rate_per_s: point.rates.step_rate,
            mean_batch: point.rates.mean_batch,
            states,
            simulated_rel_se: error,
        };
        Ok((min_batch, outcome))
    }

    fn best(&self, threads: usize) -> Result<(Vec<u32>, Outcome), CaseError> {
        let system = self.system()?;
        let fixed = self.fixed.clone().unwrap_or_default();
        let free = system.len() - fixed.iter().flatten().count().min(system.len());
        let settings = (0..free).fold(1.0, |all, i| all * (self.requests + i) as f64 / (i + 1) as f64);
        if settings > 20_000.0 {
            return Err(CaseError::TooMany(settings));
        }
        let holds = self.hold_ms(system.len())?.into_iter().map(Some).collect();
        let options = Options { fixed, holds, grain: self.grain(), threads, haste: 1 };
        let limits = Limits { fold: true, ..Limits::EXACT };
        let (point, margin, feasible) = search::all(&system, self.requests, &options, limits)?;
        let outcome =
            Outcome::Best { throughput_tok_per_s: point.rates.throughput, margin_to_second: margin, feasible };
        Ok((point.setting.min_batch, outcome))
    }
}
