//! Draws, log-probabilities and signals of the device against the host's sampler, both in f32.

use std::collections::BTreeSet;

use tokenrouter::constraint::{allows, mask_words};
use tokenrouter::request::{PromptLogprobs, SamplingParams, Score, TokenId};
use tokenrouter::runner::cpu::CpuRunner;
use tokenrouter::runner::sampler::NO_TOKEN;
use tokenrouter::runner::{PageId, RowBatch, RowOutputs, Rows, Runner, SignalRequest};
use tokenrouter_plugin_api::SignalSet;

use crate::device::{Draws, F32, Poisoned, gpu, short, some, written};
use crate::support::{DEFER, Sequence, demo, load, tiny};

const SEEDS: u64 = 40;
const CONTEXTS: usize = 5;

struct Case {
    name: &'static str,
    params: SamplingParams,
    masked: Vec<TokenId>,
    allowed: Vec<u32>,
}

/// The bits of `tokens`.
fn bits(vocabulary: u32, tokens: impl Iterator<Item = TokenId>) -> Vec<u32> {
    let mut bits = vec![0; mask_words(vocabulary as usize)];
    tokens.for_each(|token| bits[token as usize / 32] |= 1 << (token % 32));
    bits
}

/// Ways to draw; `best` are the most probable tokens, best first.
fn cases(vocabulary: u32, best: &[TokenId]) -> Vec<Case> {
    let hot = SamplingParams { temperature: 2.0, ..SamplingParams::default() };
    let case = |name, params: SamplingParams| Case { name, params, masked: Vec::new(), allowed: Vec::new() };
    let mut few: Vec<TokenId> = best[..5].to_vec();
    few.sort_unstable();
    let masked = |name, params: SamplingParams| Case { name, params, masked: few.clone(), allowed: Vec::new() };
    // Every third token, the best of all not among them.
    let third = bits(vocabulary, (0..vocabulary).filter(|id| id % 3 == 1 && *id != best[0]));
    let allowed = |name, params: SamplingParams| Case { name, params, masked: few.clone(), allowed: third.clone() };
    let pair = bits(vocabulary, [best[6], vocabulary - 1].into_iter());
    let bias = vec![(best[3], 4.0), (best[0], -2.0), (best[7], 1.5)];
    vec![
        case("greedy", SamplingParams::greedy()),
        case("temperature", hot.clone()),
        case("low temperature", SamplingParams { temperature: 0.3, ..hot.clone() }),
        case("top_k", SamplingParams { top_k: 20, ..hot.clone() }),
        case("top_k 1", SamplingParams { top_k: 1, ..hot.clone() }),
        case("top_k and top_p", SamplingParams { top_k: 50, top_p: 0.8, ..hot.clone() }),
        case("the longest list", SamplingParams { top_k: 128, top_p: 0.95, min_p: 0.01, ..hot.clone() }),
        case("longer than the list", SamplingParams { top_k: 129, ..hot.clone() }),
        case("top_k of all", SamplingParams { top_k: 100_000, ..hot.clone() }),
        case("top_p", SamplingParams { top_p: 0.9, ..hot.clone() }),
        case("min_p", SamplingParams { min_p: 0.1, ..hot.clone() }),
        case("min_p and top_k", SamplingParams { min_p: 0.05, top_k: 30, ..hot.clone() }),
        case("top_logprobs", SamplingParams { top_logprobs: Some(20), ..hot.clone() }),
        case("top_logprobs of none", SamplingParams { top_logprobs: Some(0), top_k: 5, ..hot.clone() }),
        case("repetition", SamplingParams { repetition_penalty: 1.3, top_logprobs: Some(3), ..hot.clone() }),
        case("penalties", SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.3, ..hot.clone() }),
        case("logit_bias", SamplingParams { logit_bias: bias.clone(), ..hot.clone() }),
        case("greedy with a bias", SamplingParams { logit_bias: bias, ..SamplingParams::greedy() }),
        case("min_tokens", SamplingParams { min_tokens: 1000, stop_token_ids: few.clone(), ..hot.clone() }),
        masked("masked", hot.clone()),
        masked("masked and greedy", SamplingParams { top_logprobs: Some(20), ..SamplingParams::greedy() }),
        masked("masked and top_k", SamplingParams { top_k: 20, top_p: 0.9, top_logprobs: Some(7), ..hot.clone() }),
        masked("masked and penalties", SamplingParams { repetition_penalty: 1.2, top_p: 0.9, ..hot.clone() }),
        allowed("allowed and greedy", SamplingParams { top_logprobs: Some(20), ..SamplingParams::greedy() }),
        allowed("allowed", hot.clone()),
        allowed("allowed and min_p", SamplingParams { min_p: 0.05, min_tokens: 1000, ..hot.clone() }),
        allowed("allowed and top_k", SamplingParams { top_k: 20, top_p: 0.9, ..hot.clone() }),
        allowed("allowed and penalties", SamplingParams { repetition_penalty: 1.2, ..hot.clone() }),
        Case {
            allowed: pair,
            ..case("one of two allowed", SamplingParams { top_k: 100_000, temperature: 0.9, ..hot })
        },
    ]
}

/// A sequence whose K/V both runners hold, but of its last row.
struct Prepared {
    tokens: Vec<TokenId>,
    pages: Vec<PageId>,
}

impl Prepared {
    fn rows<'a>(&'a self, params: &'a SamplingParams, masked: &'a [TokenId], allowed: &'a [u32]) -> Rows<'a> {
        let end = self.tokens.len();
        Rows {
            context: &self.tokens,
            start: end - 1,
            end,
            pages: &self.pages,
            sampled: 1,
            scored: 0,
            sampling: params,
            prompt_len: end / 2,
            masked,
            nets: &[],
            allowed,
        }
    }
}

fn prepare(runners: &mut [&mut dyn Runner], vocabulary: u32) -> Vec<Prepared> {
    let mut draws = Draws::new(5);
    (0..CONTEXTS)
        .map(|i| {
            let tokens = match i {
                0 => written("rstitch-1"),
                1 => written("me-2"),
                _ => draws.tokens(30 + draws.clone().below(100), vocabulary),
            };
            let sequence = Sequence::new(&tokens, tokens.len(), i as PageId, CONTEXTS as PageId);
            for runner in runners.iter_mut() {
                let all = RowBatch { sequences: vec![sequence.rows(tokens.len(), 1)], ..RowBatch::default() };
                runner.forward(&all).unwrap();
            }
            Prepared { tokens, pages: sequence.pages }
        })
        .collect()
}

/// One row a seed, for each of the cases.
fn draw(runner: &mut dyn Runner, prepared: &Prepared, cases: &[Case], signals: &SignalRequest) -> RowOutputs {
    let seeded = |case: &Case, seed| SamplingParams { seed, ..case.params.clone() };
    let params: Vec<(SamplingParams, &Case)> =
        cases.iter().flat_map(|case| (0..SEEDS).map(move |seed| (seeded(case, seed), case))).collect();
    let sequences = params.iter().map(|(params, case)| prepared.rows(params, &case.masked, &case.allowed)).collect();
    let batch = RowBatch { sequences, signals: signals.clone(), hidden: false };
    runner.forward(&batch).unwrap_or_else(|e| panic!("{e}"))
}

/// Values within `tolerance`; infinities and NaN at the same places.
pub fn assert_near(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let same = got == want || (got.is_nan() && want.is_nan());
        assert!(same || (got - want).abs() <= tolerance, "{what}, {i}: {got}, not {want}");
    }
}

/// All scalars but `candidate_prob`, and the logits that were asked for; `most` ids of a list may differ, where
/// logits are as good as equal.
fn assert_signals(what: &str, got: &RowOutputs, want: &RowOutputs, most: usize) {
    let (g, w) = (&got.signals, &want.signals);
    for (name, got, want) in [
        ("entropy", &g.entropy, &w.entropy),
        ("entropy_norm", &g.entropy_norm, &w.entropy_norm),
        ("top1_prob", &g.top1_prob, &w.top1_prob),
        ("margin", &g.margin, &w.margin),
        ("logsumexp", &g.logsumexp, &w.logsumexp),
        ("largest logits", &g.topk_values, &w.topk_values),
        ("token logits", &g.token_logits, &w.token_logits),
    ] {
        assert_near(&format!("{what}: {name}"), got, want, 1e-4);
    }
    assert_eq!(g.topk_ids.len(), w.topk_ids.len(), "{what}");
    let swapped = g.topk_ids.iter().zip(&w.topk_ids).filter(|(g, w)| g != w).count();
    assert!(swapped <= most, "{what}: {swapped} of {} ids differ", w.topk_ids.len());
}

struct Both {
    cuda: Poisoned,
    cpu: CpuRunner,
}

impl Both {
    fn load(directory: &std::path::Path) -> Self {
        Self { cuda: Poisoned::load(directory, F32), cpu: load(directory, F32.pages) }
    }
}

#[test]
fn draws_are_the_hosts() {
    if !gpu() {
        return;
    }
    for model in some(&["small", "small-collm"], 1).iter().copied() {
        let Both { mut cuda, mut cpu } = Both::load(&demo(model));
        let vocabulary = cpu.info().vocab_size;
        let prepared = prepare(&mut [&mut cuda, &mut cpu], vocabulary);
        let ids = (0..100).map(|i| i * 17).chain([vocabulary - 1]).collect();
        let signals = SignalRequest { scalars: SignalSet::ALL, top_k: 12, token_logits: ids };
        let count = cases(vocabulary, &[0; 8]).len();
        // Of each case: draws that differ, and the tokens drawn.
        let mut differ = vec![0; count];
        let mut drawn = vec![BTreeSet::new(); count];
        let prepared = some(&prepared, 1);
        for prepared in prepared {
            let best = SignalRequest { top_k: 8, ..SignalRequest::default() };
            let greedy = SamplingParams::greedy();
            let batch = RowBatch { sequences: vec![prepared.rows(&greedy, &[], &[])], signals: best, hidden: false };
            let cases = cases(vocabulary, &cpu.forward(&batch).unwrap().signals.topk_ids);
            for (index, case) in cases.iter().enumerate() {
                let what = format!("{model}, {}", case.name);
                let only = std::slice::from_ref(case);
                let got = draw(&mut cuda, prepared, only, &signals);
                let want = draw(&mut cpu, prepared, only, &signals);
                assert_signals(&what, &got, &want, 2 * SEEDS as usize);
                assert_eq!(got.samples.len(), SEEDS as usize);
                for (seed, (got, want)) in got.samples.iter().zip(&want.samples).enumerate() {
                    assert!(got.finite && want.finite, "{what}, seed {seed}");
                    assert!(case.allowed.is_empty() || allows(&case.allowed, got.token), "{what}, seed {seed}");
                    drawn[index].insert(want.token);
                    let lists = [got, want].map(|s| s.top_logprobs.iter().map(|(_, p)| *p).collect::<Vec<_>>());
                    assert_near(&format!("{what}, seed {seed}: top logprobs"), &lists[0], &lists[1], 1e-4);
                    if got.token != want.token {
                        differ[index] += 1;
                        continue;
                    }
                    assert_near(&format!("{what}, seed {seed}: logprob"), &[got.logprob], &[want.logprob], 1e-4);
                    let [got, want] = [&got, &want].map(|s| s.top_logprobs.first().map(|(id, _)| *id));
                    assert_eq!(got, want, "{what}, seed {seed}: the best token");
                }
                assert_near(
                    &format!("{what}: candidate_prob"),
                    &got.signals.candidate_prob,
                    &got.samples.iter().map(|s| s.logprob.exp()).collect::<Vec<_>>(),
                    1e-6,
                );
            }
        }
        for (index, case) in cases(vocabulary, &[0; 8]).iter().enumerate() {
            let draws = SEEDS as usize * prepared.len();
            assert!(differ[index] * 100 <= draws, "{model}, {}: {} of {draws} differ", case.name, differ[index]);
            let fixed = case.params.temperature < 1.0 || case.params.top_k == 1;
            // One context alone may leave a single token that is probable enough.
            let varies = drawn[index].len() > prepared.len();
            assert!(fixed || varies || short(), "{model}, {}: only {:?}", case.name, drawn[index]);
        }
    }
}

/// What the device makes of the tokens of a prompt, in pieces and in company, against the CPU.
#[test]
fn scores_of_a_prompt_are_the_hosts() {
    if !gpu() {
        return;
    }
    let Both { mut cuda, mut cpu } = Both::load(&demo("small"));
    let tokens = written("me-2");
    let mut sequence = Sequence::new(&tokens, tokens.len(), 0, 1);
    sequence.sampling.prompt_logprobs = Some(PromptLogprobs { from: 1, top: 5 });
    sequence.sampling.listed_logprobs = vec![3, 900];
    let other = Sequence::new(&tokens[..20], 20, 40, 1);
    let scored = |runner: &mut dyn Runner, step: usize| {
        let (mut at, mut scores) = (sequence.clone(), Vec::new());
        while at.done < tokens.len() {
            let end = (at.done + step).min(tokens.len());
            let sampled = usize::from(end == tokens.len());
            let rows = Rows { scored: end - at.done - sampled, ..at.rows(end, sampled) };
            let signals = SignalRequest { scalars: SignalSet::ALL, ..SignalRequest::default() };
            let batch = RowBatch { sequences: vec![other.rows(20, 2), rows], signals, hidden: true };
            let out = runner.forward(&batch).unwrap_or_else(|e| panic!("{e}"));
            let width = runner.info().hidden_size as usize;
            let kept = [out.samples.len(), out.signals.entropy.len(), out.hidden.len() / width];
            assert_eq!(kept, [2 + sampled; 3], "scored rows leave nothing but scores");
            scores.extend(out.scores.into_iter().map(|score| score.unwrap()));
            at.done = end;
        }
        scores
    };
    let want = scored(&mut cpu, tokens.len());
    let whole = scored(&mut cuda, tokens.len());
    assert_eq!(whole.len(), tokens.len() - 1);
    for step in some(&[70, 7, 200], 1) {
        assert_eq!(scored(&mut cuda, *step), whole, "in pieces of {step}");
    }
    let top = |score: &Score| score.top_logprobs.iter().map(|(_, value)| *value).collect::<Vec<f32>>();
    for (at, (got, want)) in whole.iter().zip(&want).enumerate() {
        assert_near(&format!("token {}", at + 1), &[got.logprob], &[want.logprob], 2e-3);
        assert_near(&format!("best of token {}", at + 1), &top(got), &top(want), 2e-3);
    }
}

#[test]
fn ways_to_draw_do_not_disturb_each_other() {
    if !gpu() {
        return;
    }
    let Both { mut cuda, mut cpu } = Both::load(&demo("small"));
    let signals = SignalRequest { scalars: SignalSet::ALL, top_k: 12, token_logits: vec![5, 3] };
    for prepared in some(&prepare(&mut [&mut cuda, &mut cpu], 2048), 1) {
        let cases = cases(2048, &[40, 900, 7, 333, 1201, 5, 1777, 64]);
        let together = draw(&mut cuda, prepared, &cases, &signals);
        for (case, samples) in cases.iter().zip(together.samples.chunks(SEEDS as usize)) {
            let alone = draw(&mut cuda, prepared, std::slice::from_ref(case), &signals);
            assert_eq!(alone.samples, samples, "{}", case.name);
        }
    }
}

#[test]
fn what_is_masked_keeps_its_logit_and_nothing_else() {
    if !gpu() {
        return;
    }
    let Both { mut cuda, mut cpu } = Both::load(&tiny::dir("llama3"));
    let ids = Draws::new(8).tokens(50, 256);
    let sequence = Sequence::new(&ids, ids.len(), 0, 1);
    // 200, all but one, and all of 256 tokens.
    for kept in [vec![], (100..156).collect(), vec![77]] {
        let masked: Vec<TokenId> = (0..256).filter(|id| !kept.contains(id)).collect();
        let signals = SignalRequest { scalars: SignalSet::ALL, top_k: 128, token_logits: (60..188).rev().collect() };
        for params in [
            SamplingParams { top_logprobs: Some(20), ..SamplingParams::greedy() },
            SamplingParams { top_k: 100, top_p: 0.9, ..SamplingParams::default() },
            SamplingParams { repetition_penalty: 1.2, top_logprobs: Some(20), ..SamplingParams::default() },
            SamplingParams::default(),
        ] {
            let what = format!("{} tokens are left, {params:?}", kept.len());
            let rows = Rows { sampling: &params, masked: &masked, ..sequence.rows(50, 3) };
            let batch = RowBatch { sequences: vec![rows], signals: signals.clone(), hidden: false };
            let [got, want] = [&mut cuda as &mut dyn Runner, &mut cpu].map(|runner| runner.forward(&batch).unwrap());
            assert_signals(&what, &got, &want, 4);
            assert_near(&what, &got.signals.candidate_prob, &want.signals.candidate_prob, 1e-4);
            for (row, (got, want)) in got.samples.iter().zip(&want.samples).enumerate() {
                assert_eq!((got.finite, want.finite), (!kept.is_empty(), !kept.is_empty()), "{what}, row {row}");
                if want.finite {
                    assert_eq!(got.token, want.token, "{what}, row {row}");
                    assert_near(&what, &[got.logprob], &[want.logprob], 1e-4);
                    assert_eq!(got.top_logprobs.len(), want.top_logprobs.len(), "{what}, row {row}");
                }
            }
            let filled = got.signals.topk_ids.iter().filter(|id| **id == NO_TOKEN).count();
            assert_eq!(filled, 3 * (128 - kept.len()), "{what}");
        }
    }
}

#[test]
fn the_logit_of_deferral_is_that_of_a_masked_token() {
    if !gpu() {
        return;
    }
    let Both { mut cuda, mut cpu } = Both::load(&demo("small-collm"));
    let tokens = written("collm-1");
    let mut sequence = Sequence::new(&tokens, tokens.len(), 0, 1);
    sequence.masked = vec![DEFER];
    let signals = SignalRequest { token_logits: vec![DEFER], ..SignalRequest::default() };
    let rows = sequence.rows(tokens.len(), 100);
    let batch = RowBatch { sequences: vec![rows], signals, hidden: false };
    let [got, want] = [&mut cuda as &mut dyn Runner, &mut cpu].map(|runner| runner.forward(&batch).unwrap());
    assert_signals("deferral", &got, &want, 0);
    assert!(want.signals.token_logits.iter().all(|logit| logit.is_finite()));
    assert!(got.samples.iter().zip(&want.samples).all(|(got, want)| got.token == want.token));
}

/// More than the device gives is refused before anything is computed.
#[test]
fn lists_that_are_longer_than_the_devices() {
    if !gpu() {
        return;
    }
    let (mut cuda, mut cpu) = (Poisoned::load(&tiny::dir("llama3"), F32), load(&tiny::dir("llama3"), F32.pages));
    let tokens = [1, 2, 3];
    let mut sequence = Sequence::new(&tokens, 3, 0, 1);
    sequence.masked = vec![7, 9];
    let signals = SignalRequest { top_k: 200, ..SignalRequest::default() };
    let batch = RowBatch { sequences: vec![sequence.rows(3, 3)], signals, hidden: false };
    let (here, there) = (cuda.forward(&batch).unwrap().signals, cpu.forward(&batch).unwrap().signals);
    assert_eq!(here.topk_values.len(), 600);
    for (place, (one, other)) in here.topk_values.iter().zip(&there.topk_values).enumerate() {
        assert!((one - other).abs() <= 1e-4, "{one} and {other} at {place}");
    }
    assert_eq!(here.topk_ids[..20], there.topk_ids[..20]);

    let signals = SignalRequest { token_logits: (0..130).collect(), ..SignalRequest::default() };
    let batch = RowBatch { sequences: vec![sequence.rows(3, 1)], signals, hidden: false };
    let error = cuda.forward(&batch).unwrap_err().message;
    assert!(error.contains("the logits of 130 tokens are asked for") && error.contains("at most 128"), "{error}");
}
