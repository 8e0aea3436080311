//! One layer of the shapes of published models: which kernel computes a linear layer follows from its size and
//! the number of rows, and all of them must give a row the same bits.

use tokenrouter::request::SamplingParams;
use tokenrouter::runner::cuda::Source;
use tokenrouter::runner::model_config::{ModelConfig, shapes};
use tokenrouter::runner::{PageId, Rows, Runner};

use crate::device::{BF16, Draws, How, Poisoned, Seen, assert_same, gpu, observe, some};
use crate::support::Sequence;

/// Tokens of a prompt, and how many of its last ones are sampled.
const PROMPT: usize = 640;
const SAMPLED: usize = 64;
const FROM: usize = PROMPT - SAMPLED;
/// Pages of the prompt, and of each sequence beside it.
const PAGES: PageId = PROMPT as PageId / 16;

fn layer_of(name: &str) -> Poisoned {
    let shape = shapes::find(name).unwrap_or_else(|| panic!("there is a shape {name}"));
    let config = ModelConfig { layers: 1, vocab_size: 2049, ..shape.config(Some(4096)).unwrap() };
    let how = How { pages: PAGES * 2, max_rows: 2048, ..BF16 };
    Poisoned::new(config, Source::Random { seed: 3 }, how)
}

/// The sampled rows in steps of so many, each with so many rows of other sequences, whose pages are shared.
fn in_company(runner: &mut Poisoned, tail: &Sequence, step: usize, others: &[Sequence]) -> Vec<Seen> {
    let mut tail = tail.clone();
    let mut seen = Vec::new();
    while tail.done < PROMPT {
        let end = (tail.done + step).min(PROMPT);
        let mut batch = vec![tail.rows(end, end - tail.done)];
        batch.extend(
            others.iter().map(|other| Rows { start: other.tokens.len() - 1, ..other.rows(other.tokens.len(), 1) }),
        );
        seen.extend(observe(runner, batch).drain(..end - tail.done));
        tail.done = end;
    }
    seen
}

#[test]
fn rows_of_published_shapes_have_the_same_bits_in_every_kernel() {
    if !gpu() {
        return;
    }
    for name in some(&["qwen3-0.6b", "qwen3-32b", "qwen3-8b"], 1).iter().copied() {
        let mut runner = layer_of(name);
        let ids = Draws::new(31).tokens(PROMPT, runner.info().vocab_size);
        let mut sequence = Sequence::new(&ids, PROMPT, 0, 1);
        sequence.sampling = SamplingParams { top_k: 40, seed: 8, ..SamplingParams::default() };
        let whole = observe(&mut runner, vec![sequence.rows(PROMPT, SAMPLED)]);
        let tail = Sequence { done: FROM, ..sequence.clone() };
        let other = |i: usize| Sequence::new(&ids[i..][..1 + i], 1 + i, PAGES + (i % PAGES as usize) as PageId, 0);
        let others: Vec<Sequence> = (0..15).map(other).collect();
        // The graphs of 8 rows with few items and with many, of 16, 32 and 64.
        for (step, company) in some(&[(64, 0), (20, 12), (9, 7), (4, 4), (4, 0), (1, 0), (1, 1), (33, 15)], 3) {
            let seen = in_company(&mut runner, &tail, *step, &others[..*company]);
            assert_same(&format!("{name} in steps of {step} beside {company} others"), &seen, &whole);
        }
        // As prompts of other lengths, which larger and smaller blocks compute.
        for step in some(&[80, 320, 200], 1) {
            let mut again = sequence.clone();
            let mut seen = Vec::new();
            while again.done < PROMPT {
                let end = (again.done + step).min(PROMPT);
                let sampled = end.saturating_sub(FROM).min(end - again.done);
                seen.extend(observe(&mut runner, vec![again.rows(end, sampled)]));
                again.done = end;
            }
            assert_same(&format!("{name} as prompts of {step}"), &seen, &whole);
        }
        // A long prompt: the same sequence beside itself.
        let copies = vec![sequence.rows(PROMPT, 1); 3];
        let long: Vec<Seen> = observe(&mut runner, copies);
        assert_same(&format!("{name} beside itself"), &long[2..], &whole[SAMPLED - 1..]);
    }
}
