//! Random models of every architecture: prefill, single steps and ragged batches.

use proptest::prelude::*;
use tokenrouter::request::{PromptLogprobs, TokenId};
use tokenrouter::runner::cpu::CpuRunner;
use tokenrouter::runner::{Rows, Runner, SignalRequest};

use crate::support::tiny::{ARCHITECTURES, LENGTHS, assert_close, dir, goldens};
use crate::support::{Sequence, all_logits, forward, load, logits};

const PAGES: u32 = 64;

/// Logits of all rows, computed in steps of the given sizes; the last step is cut to fit.
fn in_steps(runner: &mut CpuRunner, ids: &[TokenId], steps: &[usize]) -> Vec<Vec<f32>> {
    let (signals, vocab) = (all_logits(runner), runner.info().vocab_size as usize);
    let mut sequence = Sequence::new(ids, ids.len(), 3, 5);
    let mut rows = Vec::new();
    for step in steps.iter().cycle() {
        let end = (sequence.done + step).min(ids.len());
        let out = forward(runner, vec![sequence.rows(end, end - sequence.done)], &signals);
        rows.extend(logits(&out, vocab));
        sequence.done = end;
        if end == ids.len() {
            return rows;
        }
    }
    rows
}

#[test]
fn prefill_agrees_with_the_goldens_and_steps_agree_with_prefill() {
    for architecture in ARCHITECTURES {
        let mut runner = load(&dir(architecture), PAGES);
        for golden in goldens(architecture) {
            let prefill = in_steps(&mut runner, &golden.ids, &[golden.ids.len()]);
            assert_close(architecture, &prefill, &golden.logits);
            for steps in [&[1][..], &[16], &[3, 1, 20]] {
                assert!(in_steps(&mut runner, &golden.ids, steps) == prefill, "{architecture}: steps of {steps:?}");
            }
        }
    }
}

/// Scores are what the logits of the row before say, in whatever chunks the prompt comes.
#[test]
fn scores_of_a_prompt_agree_with_its_logits() {
    for architecture in ARCHITECTURES {
        let mut runner = load(&dir(architecture), PAGES);
        let ids = &goldens(architecture)[2].ids;
        let logits = in_steps(&mut runner, ids, &[ids.len()]);
        for steps in [&[70][..], &[1], &[16, 5]] {
            let mut sequence = Sequence::new(ids, ids.len(), 3, 5);
            sequence.sampling.prompt_logprobs = Some(PromptLogprobs { from: 1, top: 3 });
            sequence.sampling.listed_logprobs = vec![7];
            let mut scores = Vec::new();
            for step in steps.iter().cycle() {
                let end = (sequence.done + step).min(ids.len());
                let sampled = usize::from(end == ids.len());
                let rows = Rows { scored: end - sequence.done - sampled, ..sequence.rows(end, sampled) };
                let out = forward(&mut runner, vec![rows], &SignalRequest::default());
                assert_eq!(out.samples.len(), sampled);
                scores.extend(out.scores);
                sequence.done = end;
                if end == ids.len() {
                    break;
                }
            }
            assert_eq!(scores.len(), ids.len() - 1);
            for ((score, logits), &token) in scores.into_iter().zip(&logits).zip(&ids[1..]) {
                let score = score.unwrap();
                let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
                let of = |id: u32| f64::from(logits[id as usize]) - sum.ln();
                assert!((f64::from(score.logprob) - of(token)).abs() < 1e-4, "{architecture}: {score:?}");
                let better = logits.iter().filter(|&&l| l > logits[token as usize]).count() as u32;
                assert!(score.rank > better, "{architecture}: {score:?}");
                let (best, _) = score.top_logprobs[0];
                assert!(logits.iter().all(|&l| l <= logits[best as usize]));
                assert_eq!((score.top_logprobs.len(), score.top_logprobs[3].0), (4, 7));
                assert_eq!(score.rank == 1, best == token);
                for (id, logprob) in score.top_logprobs {
                    assert!((f64::from(logprob) - of(id)).abs() < 1e-4, "{architecture}: token {id}");
                }
            }
        }
    }
}

#[test]
fn unsampled_rows_do_not_change_sampled_ones() {
    for architecture in ARCHITECTURES {
        let mut runner = load(&dir(architecture), PAGES);
        let (signals, vocab) = (all_logits(&runner), 256);
        let ids = &goldens(architecture)[2].ids;
        let prefill = in_steps(&mut runner, ids, &[ids.len()]);
        let mut sequence = Sequence::new(ids, ids.len(), 0, 1);
        let none = forward(&mut runner, vec![sequence.rows(30, 0)], &signals);
        assert!(none.samples.is_empty() && none.signals.topk_values.is_empty());
        sequence.done = 30;
        let out = forward(&mut runner, vec![sequence.rows(70, 3)], &signals);
        assert!(logits(&out, vocab) == prefill[67..], "{architecture}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Three sequences in one batch after another, each at its own pace.
    #[test]
    fn company_does_not_change_a_bit(
        architecture in prop::sample::select(&ARCHITECTURES[..]),
        paces in prop::collection::vec(prop::collection::vec(0usize..24, 3), 4..12),
        order in Just([0usize, 1, 2]).prop_shuffle(),
    ) {
        let mut runner = load(&dir(architecture), PAGES);
        let (signals, vocab) = (all_logits(&runner), 256);
        let goldens = goldens(architecture);
        let alone: Vec<_> = goldens.iter().map(|g| in_steps(&mut runner, &g.ids, &[g.ids.len()])).collect();
        let mut sequences: Vec<_> = goldens.iter().zip(0..).map(|(g, i)| Sequence::new(&g.ids, 70, i, 7)).collect();
        let mut together = vec![Vec::new(); 3];
        for pace in paces.iter().chain(&vec![vec![16; 3]; 5]) {
            let ends: Vec<usize> = (0..3).map(|i| (sequences[i].done + pace[i]).min(LENGTHS[i])).collect();
            let active: Vec<usize> = order.iter().copied().filter(|&i| ends[i] > sequences[i].done).collect();
            let rows = active.iter().map(|&i| sequences[i].rows(ends[i], ends[i] - sequences[i].done)).collect();
            let mut rows = logits(&forward(&mut runner, rows, &signals), vocab).into_iter();
            for i in active {
                together[i].extend(rows.by_ref().take(ends[i] - sequences[i].done));
                sequences[i].done = ends[i];
            }
        }
        prop_assert!(together == alone, "{architecture}");
    }
}
