//! From a step's results to samples and signals.

use tokenrouter_kernels::Distribution;
use tokenrouter_kernels::gpu::GpuError;
use tokenrouter_kernels::gpu::ops::{LIST, SAMPLE_WORDS};

use super::CudaRunner;
use super::memory::{self, SCORES, results};
use super::step::Step;
use crate::request::{Score, TokenId};
use crate::runner::net::NetId;
use crate::runner::sampler::{NOT_FINITE, Row};
use crate::runner::score::score;
use crate::runner::{Columns, NetScores, RowBatch, RowOutputs, Sample, SignalRequest};

/// What the host made of a slot's logits.
#[derive(Clone, Debug, Default)]
pub(super) struct FromLogits {
    sample: Option<Sample>,
    /// Of a scored row.
    score: Option<Score>,
    /// The best tokens with their logits.
    top: Vec<(TokenId, f32)>,
}

impl CudaRunner {
    /// What takes whole rows of logits, which are fetched for it: scores of given tokens, tokens that the host
    /// draws, and lists of the best that are longer than the device's.
    pub(super) fn read_logits(&mut self, batch: &RowBatch<'_>, step: &Step) -> Result<Vec<FromLogits>, GpuError> {
        let mut all = vec![FromLogits::default(); step.slots.len()];
        let top_k = batch.signals.top_k as usize;
        let (pitch, vocabulary) = (memory::pitch(&self.config), self.config.vocab_size);
        for (index, slot) in
            step.slots.iter().enumerate().filter(|(_, slot)| slot.scored || slot.on_host || top_k > LIST)
        {
            let from = self.buffers.logits.offset(index * pitch * 4);
            // SAFETY: a row of logits; `logits` is read after the stream was waited for.
            unsafe { self.stream.download_async(&mut self.logits, from, vocabulary * 4)? };
            self.stream.synchronize()?;
            let logits = &mut self.logits[..vocabulary];
            if slot.scored {
                all[index].score = score(logits, &batch.sequences[slot.sequence], slot.end - 1);
                continue;
            }
            if top_k > LIST {
                let mut ids = Vec::new();
                tokenrouter_kernels::top(logits, top_k, &mut ids);
                all[index].top = ids.into_iter().map(|id| (id, logits[id as usize])).collect();
            }
            if slot.on_host {
                let s = &batch.sequences[slot.sequence];
                let row = Row {
                    context: &s.context[..slot.end],
                    prompt_len: s.prompt_len,
                    params: s.sampling,
                    masked: s.masked,
                    allowed: s.allowed_at(slot.end - 1 - (s.end - s.sampled), vocabulary),
                };
                let nothing = SignalRequest::default();
                all[index].sample = Some(self.sampler.sample(logits, &row, &nothing, &mut Columns::default()));
            }
        }
        Ok(all)
    }

    /// Give nets the tokens that the host drew, evaluate them and fetch their scores.
    pub(super) fn evaluate_after_host(
        &mut self,
        nets: &[NetId],
        prompt: bool,
        fetched: &[FromLogits],
    ) -> Result<(), GpuError> {
        let words = fetched.len() * SAMPLE_WORDS;
        for (index, fetched) in fetched.iter().enumerate() {
            let Some(sample) = &fetched.sample else { continue };
            let out = &mut self.download[index * SAMPLE_WORDS..][..2];
            out.copy_from_slice(&[sample.token, u32::from(sample.finite)]);
        }
        self.upload[..words].copy_from_slice(&self.download[..words]);
        self.busy = true;
        // SAFETY: the results have room; `upload` is written again only after the stream was waited for.
        unsafe { self.stream.upload_async(self.buffers.results, &self.upload, words * 4)? };
        self.launch_nets(nets, prompt)?;
        // SAFETY: as in `run`.
        unsafe {
            self.stream.download_async(&mut self.download, self.buffers.results, results::TOKEN_LOGITS * 4)?;
        }
        self.stream.synchronize()?;
        self.busy = false;
        Ok(())
    }

    /// Samples and signals of a step, from `download`.
    pub(super) fn collect(
        &mut self,
        batch: &RowBatch<'_>,
        step: &Step,
        fetched: Vec<FromLogits>,
        out: &mut RowOutputs,
    ) {
        let wanted = &batch.signals;
        for (index, (slot, fetched)) in step.slots.iter().zip(fetched).enumerate() {
            if slot.scored {
                out.scores.push(fetched.score);
                continue;
            }
            let s = &batch.sequences[slot.sequence];
            let words = &self.download[results::SAMPLES + index * SAMPLE_WORDS..][..SAMPLE_WORDS];
            let float = |word: usize| f32::from_bits(words[word]);
            let ids = &self.download[results::TOKEN_LOGITS + index * LIST..][..wanted.token_logits.len()];
            out.signals.token_logits.extend(ids.iter().map(|bits| f32::from_bits(*bits)));
            let top = &self.download[results::TOP_IDS + index * LIST..][..LIST];
            let values = &self.download[results::TOP_VALUES + index * LIST..][..LIST];
            let top_k = wanted.top_k as usize;
            let finite = words[1] != 0 || slot.on_host;
            let distribution =
                Distribution { max: float(3), argmax: 0, second: float(4), log_sum_exp: float(5), entropy: float(6) };
            let known = finite && distribution.log_sum_exp.is_finite();
            let listed = if !known {
                0
            } else if top_k <= LIST {
                out.signals.topk_values.extend(values[..top_k].iter().map(|bits| f32::from_bits(*bits)));
                out.signals.topk_ids.extend(&top[..top_k]);
                top_k
            } else {
                out.signals.topk_values.extend(fetched.top.iter().map(|(_, value)| value));
                out.signals.topk_ids.extend(fetched.top.iter().map(|(id, _)| id));
                fetched.top.len()
            };
            out.signals.push_top(&[], &[], top_k - listed);
            let possible =
                self.config.vocab_size - s.masked.iter().filter(|id| (**id as usize) < self.config.vocab_size).count();
            let sample = match fetched.sample {
                Some(sample) => sample,
                None if !known => NOT_FINITE,
                None => {
                    let count = s.sampling.top_logprobs.unwrap_or(0) as usize;
                    let listed =
                        top.iter().zip(values).take(count).filter(|(_, bits)| f32::from_bits(**bits).is_finite());
                    Sample {
                        token: words[0],
                        logprob: distribution.log_prob(float(2)),
                        top_logprobs: listed
                            .map(|(id, bits)| (*id, distribution.log_prob(f32::from_bits(*bits))))
                            .collect(),
                        finite: true,
                    }
                }
            };
            let scalars = known.then_some((&distribution, possible, sample.logprob));
            out.signals.push_scalars(wanted.scalars, scalars);
            out.samples.push(sample);
        }
    }

    pub(super) fn collect_scores(
        &self,
        batch: &RowBatch<'_>,
        step: &Step,
        nets: &[NetId],
        out: &mut [(NetId, NetScores)],
    ) {
        for (id, (_, scores)) in nets.iter().zip(out) {
            let column = self.score_column(id.0 as usize);
            for (index, slot) in step.slots.iter().enumerate().filter(|(_, slot)| !slot.scored) {
                let named = batch.sequences[slot.sequence].nets.contains(id);
                let row = &self.download[results::SCORES_AT + index * SCORES + column..][..scores.width];
                scores.scores.extend(row.iter().map(|bits| if named { f32::from_bits(*bits) } else { f32::NAN }));
            }
        }
    }

    pub(super) fn fetch_hidden(&mut self, step: &Step, out: &mut RowOutputs) -> Result<(), GpuError> {
        let words = step.slots.len() * self.config.hidden;
        // SAFETY: the slots' hidden states; `download` is read after the stream was waited for.
        unsafe { self.stream.download_async(&mut self.download, self.buffers.hidden, words * 4)? };
        self.stream.synchronize()?;
        for (states, _) in self.download[..words].chunks(self.config.hidden).zip(&step.slots).filter(|(_, s)| !s.scored)
        {
            out.hidden.extend(states.iter().map(|bits| f32::from_bits(*bits)));
        }
        Ok(())
    }
}
