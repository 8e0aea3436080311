//! A row's result has the same bits in one piece and in any, alone and in company, in these pages and in those;
//! in bf16 it is near the CPU's.

use tokenrouter::request::{SamplingParams, TokenId};
use tokenrouter::runner::cuda::{Dtype, Source};
use tokenrouter::runner::model_config::ModelConfig;
use tokenrouter::runner::{PAGE_TOKENS, PageId, Rows, Runner};

use crate::device::{
    BF16, Draws, F32, How, Poisoned, Seen, all_logits, all_logits_at_once, assert_same, gpu, in_steps, observe, written,
};
use crate::exact::MODELS;
use crate::support::{Sequence, demo, load};

/// Query heads, key/value heads, and their width: every width of bf16, every number of heads that share one.
const HEADS: [(usize, usize, usize); 8] =
    [(4, 4, 32), (8, 4, 64), (6, 2, 96), (8, 2, 128), (5, 1, 64), (12, 2, 32), (7, 1, 128), (8, 1, 96)];

/// A model with random weights.
fn random((heads, kv_heads, head_dim): (usize, usize, usize), how: How) -> Poisoned {
    let odd = heads.is_multiple_of(kv_heads * 2);
    let config = ModelConfig {
        heads,
        kv_heads,
        head_dim,
        hidden: 288,
        intermediate: 416,
        vocab_size: 2049,
        tied: odd,
        qk_norm: odd,
        qkv_bias: !odd,
        ..ModelConfig::load(&demo("small"), None).unwrap_or_else(|e| panic!("{e}"))
    };
    Poisoned::new(config, Source::Random { seed: 5 }, how)
}

/// Draws with everything that the device itself draws.
fn sampling(seed: u64) -> SamplingParams {
    SamplingParams { top_k: 40, top_p: 0.9, top_logprobs: Some(20), seed, ..SamplingParams::default() }
}

fn seen(runner: &mut dyn Runner, sequence: &Sequence, from: usize, steps: &[usize]) -> Vec<Seen> {
    in_steps(runner, sequence, from, steps, |runner, rows| observe(runner, vec![rows]))
}

/// A prompt whose last 64 rows are compared: 325 rows, so that chunks of 65 and 130 end with a tiled one.
fn assert_pieces(name: &str, mut load: impl FnMut(How) -> Poisoned, how: How) {
    let mut runner = load(how);
    let ids = Draws::new(21).tokens(325, runner.info().vocab_size);
    let mut sequence = Sequence::new(&ids, ids.len(), 2, 1);
    sequence.sampling = sampling(9);
    let whole = seen(&mut runner, &sequence, 261, &[325]);
    assert_eq!(whole.len(), 64);
    for steps in [&[1][..], &[7], &[64], &[65], &[130], &[20, 1, 90, 3, 64]] {
        assert_same(&format!("{name} in steps of {steps:?}"), &seen(&mut runner, &sequence, 261, steps), &whole);
    }
    // The same prompt where work memory has less room.
    for max_rows in [64, 100] {
        let mut runner = load(How { max_rows, ..how });
        assert_same(&format!("{name}, {max_rows} rows a step"), &seen(&mut runner, &sequence, 261, &[325]), &whole);
    }
}

#[test]
fn pieces_of_demo_models() {
    if !gpu() {
        return;
    }
    for name in MODELS {
        for how in [BF16, F32] {
            assert_pieces(&format!("{name} in {:?}", how.dtype), |how| Poisoned::load(&demo(name), how), how);
        }
    }
}

#[test]
fn pieces_of_all_shapes_of_heads() {
    if !gpu() {
        return;
    }
    for heads in HEADS {
        assert_pieces(&format!("{heads:?}"), |how| random(heads, how), BF16);
    }
}

/// Other sequences of a batch: random rows at random positions, over whatever their pages hold.
struct Others {
    contexts: Vec<Vec<TokenId>>,
    starts: Vec<usize>,
    pages: Vec<Vec<PageId>>,
    sampling: Vec<SamplingParams>,
}

const OTHERS: usize = 40;
/// Pages of each, and of the sequence that is compared.
const OWN_PAGES: usize = 10;
const COMPANY: How = How { pages: ((OTHERS + 1) * OWN_PAGES) as u32, ..BF16 };

impl Others {
    /// Of up to `rows` rows each.
    fn new(draws: &mut Draws, vocabulary: u32, rows: usize) -> Self {
        let mut others = Self { contexts: vec![], starts: vec![], pages: vec![], sampling: vec![] };
        for i in 0..OTHERS {
            let count = 1 + draws.below(rows);
            let start = draws.below(OWN_PAGES * PAGE_TOKENS - count);
            others.contexts.push(draws.tokens(start + count, vocabulary));
            others.starts.push(start);
            let first = ((i + 1) * OWN_PAGES) as PageId;
            others.pages.push((first..first + OWN_PAGES as PageId).rev().collect());
            let drawn = sampling(draws.below(1000) as u64);
            others.sampling.push(match draws.below(4) {
                0 => SamplingParams::greedy(),
                1 => SamplingParams { top_k: 0, ..drawn },
                2 => SamplingParams { repetition_penalty: 1.2, ..drawn },
                _ => drawn,
            });
        }
        others
    }

    fn rows(&self, i: usize, sampled: usize) -> Rows<'_> {
        let context = &self.contexts[i];
        Rows {
            context,
            start: self.starts[i],
            end: context.len(),
            pages: &self.pages[i],
            sampled: sampled.min(context.len() - self.starts[i]),
            sampling: &self.sampling[i],
            prompt_len: 1,
            masked: &[],
            nets: &[],
        }
    }
}

/// Extends of 1 to 20 rows and a prompt, each alone and then at a random place among others.
fn assert_company(name: &str, mut runner: Poisoned) {
    let mut draws = Draws::new(33);
    let vocabulary = runner.info().vocab_size;
    let ids = draws.tokens(150, vocabulary);
    let mut sequence = Sequence::new(&ids, OWN_PAGES * PAGE_TOKENS, 0, 1);
    sequence.sampling = sampling(17);
    sequence.prompt_len = 1;
    // Whether others fill up to a small step or make a long one of it.
    for (end, rows, most) in [
        (1, 1, 1),
        (40, 1, 1),
        (41, 1, 20),
        (60, 20, 1),
        (70, 4, 1),
        (90, 20, 20),
        (97, 5, 9),
        (120, 7, 20),
        (150, 150, 1),
        (150, 110, 6),
    ] {
        let mut before = sequence.clone();
        before.tokens.truncate(end - rows);
        if end > rows {
            seen(&mut runner, &before, end, &[31]);
        }
        let target = Sequence { done: end - rows, ..sequence.clone() };
        let sampled = rows.min(20);
        let alone = observe(&mut runner, vec![target.rows(end, sampled)]);
        for _ in 0..3 {
            let others = Others::new(&mut draws, vocabulary, most);
            let place = draws.below(OTHERS + 1);
            let mut batch: Vec<Rows<'_>> = (0..OTHERS).map(|i| others.rows(i, draws.below(3))).collect();
            let first: usize = batch[..place].iter().map(|rows| rows.sampled).sum();
            batch.insert(place, target.rows(end, sampled));
            let all = observe(&mut runner, batch);
            let what = format!("{name}: rows {}..{end} at {place} among others of up to {most} rows", end - rows);
            assert_same(&what, &all[first..first + sampled], &alone);
        }
    }
}

#[test]
fn company_of_demo_models() {
    if !gpu() {
        return;
    }
    for name in MODELS {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            assert_company(&format!("{name} in {dtype:?}"), Poisoned::load(&demo(name), How { dtype, ..COMPANY }));
        }
    }
}

#[test]
fn company_of_all_shapes_of_heads() {
    if !gpu() {
        return;
    }
    for heads in HEADS {
        assert_company(&format!("{heads:?}"), random(heads, COMPANY));
    }
}

/// A sequence loses its pages to others and is computed again in other ones.
#[test]
fn pages_in_another_order() {
    if !gpu() {
        return;
    }
    for (name, how) in [("small", BF16), ("large", BF16), ("small", F32)] {
        let mut runner = Poisoned::load(&demo(name), how);
        let mut draws = Draws::new(4);
        let ids = draws.tokens(300, runner.info().vocab_size);
        let mut sequence = Sequence::new(&ids, ids.len(), 0, 3);
        sequence.sampling = sampling(2);
        let before = seen(&mut runner, &sequence, 240, &[200, 1]);
        for round in 0..4 {
            // Another sequence takes all pages of the pool, these as well.
            let other = draws.tokens(how.pages as usize * PAGE_TOKENS, runner.info().vocab_size);
            let other = Sequence::new(&other, other.len(), 0, 1);
            seen(&mut runner, &other, other.tokens.len(), &[512]);
            let mut free: Vec<PageId> = (0..how.pages).collect();
            for page in &mut sequence.pages {
                *page = free.swap_remove(draws.below(free.len()));
            }
            let steps = [&[300][..], &[200, 1], &[64, 5], &[1]][round];
            let what = format!("{name} in {:?}, pages {:?}", how.dtype, sequence.pages);
            assert_same(&what, &seen(&mut runner, &sequence, 240, steps), &before);
        }
    }
}

/// Norm of the difference over the norm.
fn relative_error(got: &[Vec<f32>], want: &[Vec<f32>]) -> f64 {
    let square = |v: f32| f64::from(v) * f64::from(v);
    let differences: f64 = got.iter().flatten().zip(want.iter().flatten()).map(|(g, w)| square(g - w)).sum();
    (differences / want.iter().flatten().map(|w| square(*w)).sum::<f64>()).sqrt()
}

#[test]
fn bf16_is_near_the_cpu() {
    if !gpu() {
        return;
    }
    for name in MODELS {
        let mut runner = Poisoned::load(&demo(name), BF16);
        let mut cpu = load(&demo(name), BF16.pages);
        for (text, steps) in [("rstitch-1", 1), ("collm-2", 5), ("me-1", 65), ("r2r-2", 512)] {
            let ids = written(text);
            let sequence = Sequence::new(&ids, ids.len(), 1, 1);
            let from = ids.len().saturating_sub(60);
            let want = all_logits_at_once(&mut cpu, sequence.rows(ids.len(), ids.len() - from));
            let got = in_steps(&mut runner, &sequence, from, &[steps], all_logits);
            assert_eq!(got.len(), want.len());
            let error = relative_error(&got, &want);
            eprintln!("{name}, {text}, steps of {steps}: relative error {error:.2e}");
            assert!(error <= 2e-2, "{name}, {text}, steps of {steps}: relative error {error}");
        }
    }
}

/// Steps whose kernels are launched one by one.
#[test]
fn without_graphs() {
    if !gpu() {
        return;
    }
    let observe_with = |graphs| {
        let mut runner = random(HEADS[3], How { graphs, ..BF16 });
        let ids = Draws::new(22).tokens(200, runner.info().vocab_size);
        let mut sequence = Sequence::new(&ids, ids.len(), 2, 1);
        sequence.sampling = sampling(4);
        seen(&mut runner, &sequence, 136, &[130, 1, 40, 9, 20])
    };
    assert_same("without graphs", &observe_with(false), &observe_with(true));
}

#[test]
fn parts_of_the_device() {
    if !gpu() {
        return;
    }
    let observe_at = |how| {
        let mut runner = random(HEADS[3], how);
        let ids = Draws::new(22).tokens(200, runner.info().vocab_size);
        let mut sequence = Sequence::new(&ids, ids.len(), 2, 1);
        sequence.sampling = sampling(4);
        seen(&mut runner, &sequence, 136, &[130, 40, 30])
    };
    let whole = observe_at(BF16);
    for part in [0, 1] {
        let how = How { part: Some((16, part)), ..BF16 };
        assert_same(&format!("part {part}"), &observe_at(how), &whole);
    }
}
