//! Random models of every architecture: prefill, single steps and ragged batches.

use std::path::PathBuf;

use proptest::prelude::*;
use tokenrouter::request::TokenId;
use tokenrouter::runner::Runner;
use tokenrouter::runner::cpu::CpuRunner;

use crate::support::{Sequence, all_logits, fixtures, forward, load, logits};

const ARCHITECTURES: [&str; 6] = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "qwen3-head-dim"];
const LENGTHS: [usize; 3] = [1, 17, 70];
const PAGES: u32 = 64;

pub fn dir(architecture: &str) -> PathBuf {
    fixtures().join("tiny").join(architecture)
}

/// A sequence and the logits at each of its positions.
struct Golden {
    ids: Vec<TokenId>,
    logits: Vec<Vec<f32>>,
}

fn goldens(architecture: &str) -> Vec<Golden> {
    let bytes = std::fs::read(dir(architecture).join("golden.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    LENGTHS
        .iter()
        .map(|length| {
            let ids = file.tensor(&format!("ids_{length}")).unwrap();
            let logits = file.tensor(&format!("logits_{length}")).unwrap();
            let values: Vec<f32> =
                logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            Golden {
                ids: ids.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as TokenId).collect(),
                logits: values.chunks(logits.shape()[1]).map(<[f32]>::to_vec).collect(),
            }
        })
        .collect()
}

fn assert_close(architecture: &str, got: &[Vec<f32>], want: &[Vec<f32>]) {
    assert_eq!(got.len(), want.len());
    let all = || want.iter().flatten().copied();
    let range = all().fold(f32::MIN, f32::max) - all().fold(f32::MAX, f32::min);
    let worst = got.iter().flatten().zip(all()).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
    assert!(worst <= 1e-4 * range, "{architecture}, {} rows: off by {worst} of {range}", want.len());
}

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
