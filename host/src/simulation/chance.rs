//! A policy that leaves every decision to chance, and a runner that computes nothing: with them the
//! schedulers can be measured for routing probabilities and step times alone.

use tokenrouter_plugin_api::random::uniform;
use tokenrouter_plugin_api::{
    Acceptance, Decision, Handoff, ModelIndex, PeerView, RequestView, Requirements, RouteBatch, Slot,
};

use super::plan::{COMMITS, ROUTES};
use crate::policy::{PolicyFailure, PolicyInstance};
use crate::runner::{ModelInfo, RowBatch, RowOutputs, Runner, RunnerError, Sample};

/// Draws where each request goes, at one model.
pub struct Chance {
    requirements: Requirements,
    own: usize,
    /// By model: the probability to go there or to one before it.
    upto: Vec<f64>,
    commit: Vec<f64>,
    seed: u64,
    draws: u64,
}

impl Chance {
    /// `routing` and `commit`: probabilities by model, of model `own`.
    pub fn new(own: usize, routing: &[f64], commit: &[f64], seed: u64) -> Self {
        let mut sum = 0.0;
        let upto = routing.iter().map(|p| {
            sum += p;
            sum
        });
        let (requirements, commit) = (Requirements::default(), commit.to_vec());
        Self { requirements, own, upto: upto.collect(), commit, seed, draws: 0 }
    }

    fn draw(&mut self, stream: u64) -> f64 {
        self.draws += 1;
        uniform(self.seed, self.draws, stream)
    }
}

impl PolicyInstance for Chance {
    fn requirements(&self) -> &Requirements {
        &self.requirements
    }

    fn entry(&mut self, _: &RequestView<'_>) -> Result<Option<ModelIndex>, PolicyFailure> {
        Ok(None)
    }

    fn route(&mut self, _: &RouteBatch<'_>, out: &mut [Decision]) -> Result<(), PolicyFailure> {
        for decision in out {
            let random = self.draw(ROUTES);
            // Rounding may leave the last sum a little below 1.
            let to = self.upto.iter().position(|upto| random < *upto).unwrap_or(self.upto.len() - 1);
            if to != self.own {
                *decision = Decision::to(to as ModelIndex);
            }
        }
        Ok(())
    }

    fn send(&mut self, _: &RequestView<'_>, to: ModelIndex) -> Result<Handoff, PolicyFailure> {
        let commit = self.commit.get(to as usize).copied().unwrap_or(1.0);
        let kept = commit >= 1.0 || self.draw(COMMITS) < commit;
        Ok(if kept { Handoff::default() } else { Handoff::drop_candidate() })
    }

    fn receive(&mut self, _: &RequestView<'_>, _: &PeerView<'_>) -> Result<Acceptance, PolicyFailure> {
        Ok(Acceptance::Verify)
    }

    fn finished(&mut self, _: Slot) -> Result<(), PolicyFailure> {
        Ok(())
    }
}

/// Says the same token always. It has no end tokens.
pub struct Blank(ModelInfo);

impl Blank {
    pub fn new(name: &str, pages: u32) -> Self {
        Self(ModelInfo {
            name: name.into(),
            description: "simulated".into(),
            vocab_size: 2,
            hidden_size: 1,
            context: u32::MAX,
            eos: Vec::new(),
            pages,
            weight_bytes: 0,
            page_bytes: 0,
        })
    }
}

impl Runner for Blank {
    fn info(&self) -> &ModelInfo {
        &self.0
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        let sample = Sample { token: 1, logprob: 0.0, top_logprobs: Vec::new(), finite: true };
        let samples = vec![sample; batch.sampled()];
        Ok(RowOutputs { samples, ..RowOutputs::default() })
    }
}
