//! What a step's scored rows and rows without a distribution mean for their requests.

use super::plan::Run;
use super::{Effect, SubServer};
use crate::request::{Event, RequestError, Score};

impl SubServer {
    /// Tell what a run has scored. False where the request has failed.
    pub(super) fn tell_scores(&mut self, run: &Run, scores: &mut impl Iterator<Item = Option<Score>>) -> bool {
        let Some(replica) = self.replicas.get_mut(&run.id) else { return true };
        let count = replica.scored_rows(run);
        if count == 0 {
            return true;
        }
        let all: Option<Vec<Score>> = scores.take(count).collect::<Vec<_>>().into_iter().collect();
        let start = replica.scored(count);
        match all {
            Some(scores) => {
                self.effects.push(Effect::Event(run.id, Event::PromptScored { start: start as u32, scores }));
                true
            }
            None => {
                self.not_finite(run, start);
                false
            }
        }
    }

    /// The distribution of the token at `position` of a run is no distribution.
    pub(super) fn not_finite(&mut self, run: &Run, position: usize) {
        let model = self.runner.info().name.clone();
        // Whatever spoilt the row may have spoilt pages that it read; none of them is found again.
        self.pool.forget_cached();
        if let Some(replica) = self.replicas.get_mut(&run.id) {
            replica.retract();
        }
        self.fail(run.id, RequestError::NotFinite { model, position });
    }
}
