//! A step's upload: rows, work for attention and sampling parameters as words. Pure.

use tokenrouter_kernels::gpu::ops::{HEADER_WORDS, ITEM_WORDS, LIST, PARAMS_WORDS, SampleParams, item_rows, mode};
use tokenrouter_plugin_api::random;

use super::memory::{SLOTS, UploadLayout};
use crate::request::{ModelId, TokenId};
use crate::runner::sampler::{GREEDY, Row, changes_logits};
use crate::runner::{PAGE_TOKENS, RowBatch, Rows};

/// Some rows of a sequence of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Index of the sequence in its batch.
    pub(super) sequence: usize,
    pub(super) start: usize,
    pub(super) end: usize,
    /// How many of the last rows are scored or sampled.
    pub(super) slots: usize,
}

/// Cut a batch into steps of at most `rows` rows and [`SLOTS`] scored or sampled ones, in the order of its rows.
pub(super) fn steps(batch: &RowBatch<'_>, rows: usize) -> Vec<Vec<Part>> {
    let mut steps = vec![Vec::new()];
    let (mut rows_left, mut slots_left) = (rows, SLOTS);
    for (sequence, s) in batch.sequences.iter().enumerate() {
        let first_slot = s.scored_positions().start;
        let mut start = s.start;
        while start < s.end {
            if rows_left == 0 || (slots_left == 0 && first_slot <= start) {
                steps.push(Vec::new());
                (rows_left, slots_left) = (rows, SLOTS);
            }
            let end = s.end.min(start + rows_left).min(first_slot.max(start) + slots_left);
            let slots = end - first_slot.clamp(start, end);
            let part = Part { sequence, start, end, slots };
            if let Some(step) = steps.last_mut() {
                step.push(part);
            }
            rows_left -= end - start;
            slots_left -= slots;
            start = end;
        }
    }
    steps
}

/// What the host must know of an upload.
#[derive(Debug, PartialEq)]
pub(super) struct Step {
    pub(super) rows: usize,
    pub(super) slots: Vec<Slot>,
    pub(super) items: usize,
    /// Words to upload.
    pub(super) words: usize,
    /// Best tokens that some slot wants.
    pub(super) list: usize,
}

/// A row that is scored or sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Slot {
    pub(super) sequence: usize,
    /// One past its position.
    pub(super) end: usize,
    /// The token after it is given; the host scores it.
    pub(super) scored: bool,
    /// The host draws the token.
    pub(super) on_host: bool,
    /// Best tokens wanted.
    pub(super) list: usize,
}

/// What stays the same for all steps of a runner.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fixed {
    pub(super) model: ModelId,
    pub(super) vocabulary: usize,
    /// Query heads a key/value head.
    pub(super) group: usize,
    /// Best logits that nets read.
    pub(super) net_list: usize,
}

/// Fill `words` with the step of `parts`. `whole`: attention for prompts. The error says what does not fit.
pub(super) fn fill(
    batch: &RowBatch<'_>,
    parts: &[Part],
    layout: UploadLayout,
    whole: bool,
    fixed: Fixed,
    words: &mut [u32],
) -> Result<Step, String> {
    let mut step = Step { rows: 0, slots: Vec::new(), items: 0, words: 0, list: 0 };
    // Page lists of sequences, then the masked tokens, from here on.
    let mut list = Appended { start: layout.page_list(), len: 0 };
    let mut masked_lists: Vec<(&[TokenId], u32)> = Vec::new();
    let most_rows = item_rows(fixed.group as u32, whole) as usize;
    for part in parts {
        let s = &batch.sequences[part.sequence];
        let pages = list.append(words, &s.pages[..part.end.div_ceil(PAGE_TOKENS)])?;
        let mut item_end = part.start;
        for position in part.start..part.end {
            let row = step.rows;
            words[layout.tokens() + row] = s.context[position];
            words[layout.positions() + row] = position as u32;
            words[layout.page_starts() + row] = pages;
            if position == item_end {
                let rest_of_page = PAGE_TOKENS - position % PAGE_TOKENS;
                let rows = most_rows.max(1).min(rest_of_page).min(part.end - position);
                item_end = position + rows;
                let item = [row as u32, rows as u32, position as u32, pages, part.start as u32, 0, 0, 0];
                words[layout.items() + step.items * ITEM_WORDS..][..ITEM_WORDS].copy_from_slice(&item);
                step.items += 1;
            }
            step.rows += 1;
            if position < part.end - part.slots {
                continue;
            }
            let known = masked_lists.iter().find(|(tokens, _)| std::ptr::eq(*tokens, s.masked));
            let masked = match known {
                Some((_, start)) => *start,
                None => {
                    let start = list.append(words, s.masked)?;
                    masked_lists.push((s.masked, start));
                    start
                }
            };
            let (mut params, mut slot) = sampling(s, part.sequence, position, row, masked, batch, fixed);
            if position < s.end - s.sampled {
                params = SampleParams { mode: mode::HOST, list: 0, ..params };
                slot = Slot { scored: true, on_host: false, list: 0, ..slot };
            } else {
                let allowed = s.allowed_at(position - (s.end - s.sampled), fixed.vocabulary);
                if !slot.on_host && !allowed.is_empty() {
                    params.allowed = list.append(words, allowed)? + 1;
                }
            }
            words[layout.samples() + step.slots.len() * PARAMS_WORDS..][..PARAMS_WORDS]
                .copy_from_slice(&params.words());
            step.list = step.list.max(slot.list);
            step.slots.push(slot);
        }
    }
    let signals = &batch.signals;
    words[layout.token_logits()..][..signals.token_logits.len()].copy_from_slice(&signals.token_logits);
    let mut header = [0; HEADER_WORDS];
    header[..5].copy_from_slice(&[
        step.rows as u32,
        step.slots.len() as u32,
        step.items as u32,
        signals.top_k,
        signals.token_logits.len() as u32,
    ]);
    words[..HEADER_WORDS].copy_from_slice(&header);
    step.words = list.start + list.len;
    Ok(step)
}

/// What cannot be asked of the device's sampling.
pub(super) fn check_signals(batch: &RowBatch<'_>) -> Result<(), String> {
    let ids = batch.signals.token_logits.len();
    if ids > LIST {
        return Err(format!(
            "the logits of {ids} tokens are asked for, but CUDA gives at most {LIST}; set the model's device to \"cpu\""
        ));
    }
    let most = batch.sequences.iter().filter_map(|s| s.sampling.top_logprobs).max().unwrap_or(0) as usize;
    if most > LIST {
        return Err(format!("top_logprobs is {most}; at most {LIST} are possible"));
    }
    Ok(())
}

fn sampling(
    s: &Rows<'_>,
    sequence: usize,
    position: usize,
    row: usize,
    masked: u32,
    batch: &RowBatch<'_>,
    fixed: Fixed,
) -> (SampleParams, Slot) {
    let end = position + 1;
    let params = s.sampling;
    // A position that is scored is before those, and nothing is drawn there.
    let allowed = position.checked_sub(s.end - s.sampled).map_or(&[][..], |row| s.allowed_at(row, fixed.vocabulary));
    let all = Row { context: &s.context[..end], prompt_len: s.prompt_len, params, masked: s.masked, allowed };
    let top_k = if params.top_k == 0 { fixed.vocabulary } else { params.top_k as usize };
    // The device gives the log-probabilities of the best tokens alone.
    let mode = if changes_logits(&all) || !params.listed_logprobs.is_empty() {
        mode::HOST
    } else if params.temperature < GREEDY {
        mode::GREEDY
    } else if allowed.is_empty() && top_k <= LIST.min(fixed.vocabulary) {
        mode::LIST
    } else if top_k >= fixed.vocabulary && params.top_p >= 1.0 {
        mode::ALL
    } else {
        mode::HOST
    };
    let drawn = if mode == mode::LIST { top_k } else { 0 };
    let list = drawn
        .max((batch.signals.top_k as usize).min(LIST))
        .max(params.top_logprobs.unwrap_or(0) as usize)
        .max(if s.nets.is_empty() { 0 } else { fixed.net_list });
    let sample = SampleParams {
        row: row as u32,
        mode,
        inv_temperature: 1.0 / params.temperature.max(GREEDY),
        top_k: drawn as u32,
        top_p: params.top_p,
        min_p: params.min_p,
        uniform: random::uniform(params.seed, end as u64, u64::from(fixed.model.0)),
        masked: (masked, s.masked.len() as u32),
        list: list as u32,
        allowed: 0,
    };
    (sample, Slot { sequence, end, scored: false, on_host: mode == mode::HOST, list })
}

/// A list at the end of the words that grows.
struct Appended {
    start: usize,
    len: usize,
}

impl Appended {
    /// Where in the list `values` begin.
    fn append(&mut self, words: &mut [u32], values: &[u32]) -> Result<u32, String> {
        let at = self.start + self.len;
        let room = words.len() - at;
        let Some(place) = words.get_mut(at..at + values.len()) else {
            return Err(format!("pages and masked tokens of a step take {} words, {room} are left", values.len()));
        };
        place.copy_from_slice(values);
        let start = self.len as u32;
        self.len += values.len();
        Ok(start)
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
