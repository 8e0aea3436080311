//! A row's result has the same bits in one piece and in any, alone and in company, in these pages and in those;
//! in bf16 it is near the CPU's.

use tokenrouter::request::{SamplingParams, TokenId};
use tokenrouter::runner::cuda::{Dtype, Source};
use tokenrouter::runner::model_config::ModelConfig;
use tokenrouter::runner::{PAGE_TOKENS, PageId, Rows, Runner};

use crate::device::{
    BF16, Draws, F32, How, Poisoned, Seen, all_logits, all_logits_at_once, assert_same, gpu, in_steps, observe, short,
    some, written,
};
use crate::exact::MODELS;
use crate::random_model::{Shape, write_random};
use crate::support::{Sequence, demo, load};

/// Query heads, key/value heads, and their width: every width of bf16, every number of query heads that one block
/// takes of a key/value head, and some that several blocks share (16 in 2 parts, 11 in 11, 12 in 2, 9 in 3).
const HEADS: [(usize, usize, usize); 12] = [
    (4, 4, 32),
    (8, 4, 64),
    (6, 2, 96),
    (8, 2, 128),
    (16, 1, 64),
    (5, 1, 64),
    (12, 2, 32),
    (7, 1, 128),
    (8, 1, 96),
    (11, 1, 32),
    (24, 2, 128),
    (18, 2, 96),
];

fn demo_config(name: &str) -> ModelConfig {
    ModelConfig::load(&demo(name), None).unwrap_or_else(|e| panic!("{e}"))
}

fn random(heads: (usize, usize, usize), how: How) -> Poisoned {
    random_layers(demo_config("small").layers, heads, how)
}

/// A model with random weights.
fn random_layers(layers: usize, (heads, kv_heads, head_dim): (usize, usize, usize), how: How) -> Poisoned {
    let odd = heads.is_multiple_of(kv_heads * 2);
    let config = ModelConfig {
        heads,
        kv_heads,
        head_dim,
        hidden: 288,
        intermediate: 416,
        vocab_size: 2049,
        context: 8192,
        layers,
        tied: odd,
        qk_norm: odd,
        qkv_bias: !odd,
        ..demo_config("small")
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
    for steps in some(&[&[130, 64][..], &[7], &[130], &[1], &[64], &[65], &[20, 1, 90, 3, 64]], 1) {
        assert_same(&format!("{name} in steps of {steps:?}"), &seen(&mut runner, &sequence, 261, steps), &whole);
    }
    // The same prompt where work memory has less room.
    for max_rows in some(&[100, 64], 0).iter().copied() {
        let mut runner = load(How { max_rows, ..how });
        assert_same(&format!("{name}, {max_rows} rows a step"), &seen(&mut runner, &sequence, 261, &[325]), &whole);
    }
}

#[test]
fn pieces_of_demo_models() {
    if !gpu() {
        return;
    }
    for name in some(&MODELS, 1) {
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
    for heads in some(&HEADS, 5).iter().copied() {
        assert_pieces(&format!("{heads:?}"), |how| random(heads, how), BF16);
    }
}

/// Every warp has many pages of a long context: as part of a prompt, alone and in company, rows have the same bits,
/// near those in f32.
#[test]
fn pieces_of_long_contexts() {
    if !gpu() {
        return;
    }
    const LENGTH: usize = 4420;
    const FROM: usize = LENGTH - 24;
    const LINES: u32 = LENGTH.div_ceil(PAGE_TOKENS) as u32;
    let how = How { pages: LINES + 8 * 4, ..BF16 };
    for heads in some(&HEADS, 1).iter().copied() {
        let mut runner = random_layers(1, heads, how);
        let ids = Draws::new(23).tokens(LENGTH, runner.info().vocab_size);
        let mut sequence = Sequence::new(&ids, LENGTH, 0, 1);
        sequence.sampling = sampling(5);
        let whole = seen(&mut runner, &sequence, FROM, &[LENGTH]);
        let tail = Sequence { done: FROM, ..sequence.clone() };
        for step in some(&[5, 24, 1], 1).iter().copied() {
            assert_same(&format!("{heads:?} in steps of {step}"), &seen(&mut runner, &tail, FROM, &[step]), &whole);
        }
        let others: Vec<Sequence> =
            (0..8).map(|i| Sequence::new(&ids[i * 50..][..50], 50, LINES + 4 * i as PageId, 1)).collect();
        for company in [1, 2, 8] {
            let mut batch = vec![tail.rows(FROM + 1, 1)];
            batch.extend(others[..company].iter().map(|other| Rows { start: 49, ..other.rows(50, 1) }));
            let all = observe(&mut runner, batch);
            assert_same(&format!("{heads:?} beside {company} others"), &all[..1], &whole[..1]);
        }
    }
    if short() {
        return;
    }
    let config = ModelConfig { context: 8192, ..demo_config("small") };
    let logits = |how: How| {
        let mut runner = Poisoned::new(config.clone(), Source::Directory(&demo("small")), how);
        let ids = Draws::new(24).tokens(LENGTH, config.vocab_size as u32);
        in_steps(&mut runner, &Sequence::new(&ids, LENGTH, 0, 1), LENGTH - 1, &[LENGTH], all_logits)
    };
    let error = relative_error(&logits(how), &logits(How { dtype: Dtype::F32, ..how }));
    eprintln!("small at {LENGTH} positions, bf16 to f32: relative error {error:.2e}");
    assert!(error <= 2e-2, "small at {LENGTH} positions: relative error {error}");
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
            scored: 0,
            sampling: &self.sampling[i],
            prompt_len: 1,
            masked: &[],
            nets: &[],
            allowed: &[],
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
    let cases = [
        (41, 1, 20),
        (60, 20, 1),
        (150, 110, 6),
        (1, 1, 1),
        (40, 1, 1),
        (70, 4, 1),
        (90, 20, 20),
        (97, 5, 9),
        (120, 7, 20),
        (150, 150, 1),
    ];
    for (end, rows, most) in some(&cases, 3).iter().copied() {
        let mut before = sequence.clone();
        before.tokens.truncate(end - rows);
        if end > rows {
            seen(&mut runner, &before, end, &[31]);
        }
        let target = Sequence { done: end - rows, ..sequence.clone() };
        let sampled = rows.min(20);
        let alone = observe(&mut runner, vec![target.rows(end, sampled)]);
        for _ in some(&[(); 3], 1) {
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
    for name in some(&MODELS, 1) {
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
    for heads in some(&HEADS, 2).iter().copied() {
        assert_company(&format!("{heads:?}"), random(heads, COMPANY));
    }
}

/// A sequence loses its pages to others and is computed again in other ones.
#[test]
fn pages_in_another_order() {
    if !gpu() {
        return;
    }
    for (name, how) in some(&[("small", BF16), ("large", BF16), ("small", F32)], 1).iter().copied() {
        let mut runner = Poisoned::load(&demo(name), how);
        let mut draws = Draws::new(4);
        let ids = draws.tokens(300, runner.info().vocab_size);
        let mut sequence = Sequence::new(&ids, ids.len(), 0, 3);
        sequence.sampling = sampling(2);
        let before = seen(&mut runner, &sequence, 240, &[200, 1]);
        for round in some(&[0, 1, 2, 3], 1).iter().copied() {
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
    for name in some(&MODELS, 1) {
        let mut runner = Poisoned::load(&demo(name), BF16);
        let mut cpu = load(&demo(name), BF16.pages);
        for (text, steps) in some(&[("collm-2", 5), ("me-1", 65), ("rstitch-1", 1), ("r2r-2", 512)], 2).iter().copied()
        {
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

#[test]
fn all_shapes_of_heads_are_near_the_cpu() {
    if !gpu() {
        return;
    }
    for (heads, kv_heads, dim) in some(&HEADS, 5).iter().copied() {
        let shape = Shape { hidden: 288, vocabulary: 384, inner: 416, layers: 2, heads, kv_heads, dim };
        let model = write_random(&shape);
        let ids = Draws::new(25).tokens(200, 384);
        let (from, sequence) = (140, Sequence::new(&ids, ids.len(), 1, 1));
        let mut cpu = load(model.path(), BF16.pages);
        let want = all_logits_at_once(&mut cpu, sequence.rows(ids.len(), ids.len() - from));
        for (how, most) in [(BF16, 2e-2), (F32, 1e-4)] {
            for steps in some(&[5, 200, 65, 1], 2).iter().copied() {
                let got = in_steps(&mut Poisoned::load(model.path(), how), &sequence, from, &[steps], all_logits);
                let error = relative_error(&got, &want);
                eprintln!(
                    "{heads}, {kv_heads}, {dim} in {:?}, steps of {steps}: relative error {error:.2e}",
                    how.dtype
                );
                assert!(error <= most, "{heads}, {kv_heads}, {dim} in {:?}, steps of {steps}: {error}", how.dtype);
            }
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
    for part in some(&[0, 1], 1).iter().copied() {
        let how = How { part: Some((16, part)), ..BF16 };
        assert_same(&format!("part {part}"), &observe_at(how), &whole);
    }
}
