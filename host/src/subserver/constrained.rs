//! Requests whose answers have a form: which tokens may be drawn in a step, and what the form says of those drawn.

use tokenrouter_plugin_api::{Decision, DecisionKind, NO_TOKEN};

use super::SubServer;
use super::plan::Run;
use super::replica::Replica;
use crate::constraint::{Broken, Rules, allows, mask_words};
use crate::request::{Committed, RequestError, RequestId, TokenId};
use crate::runner::ModelInfo;

/// Which tokens may be drawn at the sampled rows of a step.
#[derive(Debug, Default)]
pub(super) struct Masks {
    words: Vec<u32>,
    /// Requests with a mask, each with the place of its first word, and how many words it has.
    requests: Vec<(RequestId, usize, usize)>,
}

impl Masks {
    /// Those of one request, row by row; nothing if all tokens may be drawn.
    pub fn of(&self, id: RequestId) -> &[u32] {
        let place = self.requests.iter().find(|(of, ..)| *of == id);
        place.map_or(&[], |&(_, start, len)| &self.words[start..start + len])
    }
}

impl Replica {
    /// Tokens of the sequence that the form is about to judge: those up to the first that ends the answer. A token
    /// behind it is never committed.
    fn open(&self) -> usize {
        let ends = self.ends();
        let closing = self.provisional.iter().position(|token| ends.close(token) || token.complete);
        self.committed + closing.unwrap_or(self.provisional.len())
    }

    /// Append a mask for each sampled row of `run`. The error has the position that it is about.
    fn append_masks(
        &mut self,
        run: Run,
        info: &ModelInfo,
        masked: &[TokenId],
        words: &mut Vec<u32>,
    ) -> Result<(), (usize, Broken)> {
        let (prompt, open) = (self.prompt_len(), self.open());
        let Some(matcher) = &mut self.matcher else { return Ok(()) };
        let sampling = &self.spec.new.sampling;
        for next in run.end - run.sampled + 1..=run.end {
            let start = words.len();
            words.resize(start + mask_words(info.vocab_size as usize), u32::MAX);
            if next > open {
                continue;
            }
            let early = next - prompt < sampling.min_tokens as usize;
            let rules = Rules {
                width: info.vocab_size as usize,
                eos: &info.eos,
                stop: &sampling.stop_token_ids,
                masked,
                hold_eos: early || sampling.ignore_eos,
                hold_stop: early,
            };
            let filled = matcher.follow(&self.tokens[prompt..next]);
            filled.and_then(|()| matcher.mask(&rules, &mut words[start..])).map_err(|broken| (next, broken))?;
        }
        Ok(())
    }

    /// What the form says of the token that `decisions` choose: whether the answer is complete with it. A replacement
    /// that it forbids is taken out of the decision; the number of those is the other result.
    pub(super) fn judge(
        &mut self,
        run: Run,
        mask: &[u32],
        eos: &[TokenId],
        candidates: &mut [Committed],
        decisions: &mut [Decision],
    ) -> Result<u32, (usize, Broken)> {
        let (prompt, open) = (self.prompt_len(), self.open());
        let accepts = |d: &&Decision| d.kind() == Some(DecisionKind::Accept);
        let accepted = if self.verify { decisions.iter().take_while(accepts).count() } else { 0 };
        let row = accepted.min(self.provisional.len()).min(run.sampled.saturating_sub(1));
        let next = run.end - run.sampled + row + 1;
        let (Some(matcher), Some(candidate), Some(decision)) =
            (&mut self.matcher, candidates.get_mut(row), decisions.get_mut(row))
        else {
            return Ok(0);
        };
        if next > open {
            return Ok(0);
        }
        let words = mask.len() / run.sampled.max(1);
        let (mut token, mut forbidden) = (candidate.token, 0);
        if let Some(replacement) = decision.replacement() {
            if allows(&mask[row * words..(row + 1) * words], replacement) {
                token = replacement;
            } else {
                forbidden = 1;
                *decision = decision.replacing(NO_TOKEN);
            }
        }
        if eos.binary_search(&token).is_err() {
            let read = matcher.follow(&self.tokens[prompt..next]).and_then(|()| matcher.advance(token));
            read.map_err(|broken| (next, broken))?;
            candidate.complete = matcher.is_complete();
        }
        Ok(forbidden)
    }
}

impl SubServer {
    /// Find out which tokens may be drawn at the sampled rows of `runs`. A request whose answer cannot go on fails.
    pub(super) fn constrain(&mut self, runs: &mut Vec<Run>, masks: &mut Masks) {
        masks.words.clear();
        masks.requests.clear();
        let mut failed = Vec::new();
        for &run in runs.iter().filter(|run| run.sampled > 0) {
            let Some(replica) = self.replicas.get_mut(&run.id).filter(|r| r.matcher.is_some()) else { continue };
            let masked = self.routes.get(replica.spec.new.route).map_or(&[][..], |a| &a.masked);
            let start = masks.words.len();
            match replica.append_masks(run, self.runner.info(), masked, &mut masks.words) {
                Ok(()) => masks.requests.push((run.id, start, masks.words.len() - start)),
                Err((position, broken)) => failed.push((run.id, position, broken)),
            }
        }
        for (id, position, broken) in failed {
            runs.retain(|run| run.id != id);
            self.fail_constrained(id, position, broken);
        }
    }

    pub(super) fn fail_constrained(&mut self, id: RequestId, position: usize, Broken(message): Broken) {
        let model = self.runner.info().name.clone();
        self.fail(id, RequestError::Constraint { model, position, message });
    }
}
