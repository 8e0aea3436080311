//! In f32: the goldens' logits, and the CPU's tokens.

use tokenrouter::runner::Runner;

use crate::device::{Draws, F32, How, Poisoned, all_logits, all_logits_at_once, gpu, in_steps, some};
use crate::support::tiny::{ARCHITECTURES, LENGTHS, assert_close, dir, goldens};
use crate::support::{Sequence, assert_greedy, demo, load};

pub const MODELS: [&str; 4] = ["small", "medium", "large", "small-collm"];

#[test]
fn tiny_models_agree_with_the_goldens_in_any_steps() {
    if !gpu() {
        return;
    }
    for architecture in some(&ARCHITECTURES, 2) {
        let mut runner = Poisoned::load(&dir(architecture), F32);
        for golden in some(&goldens(architecture), 2) {
            let sequence = Sequence::new(&golden.ids, golden.ids.len(), 3, 5);
            let mut logits = |steps: &[usize]| in_steps(&mut runner, &sequence, 0, steps, all_logits);
            let prefill = logits(&[golden.ids.len()]);
            assert_close(architecture, &prefill, &golden.logits);
            for steps in some(&[&[16][..], &[65], &[3, 1, 20], &[1]], 2) {
                assert!(logits(steps) == prefill, "{architecture}, {} rows: steps of {steps:?}", golden.ids.len());
            }
        }
    }
}

#[test]
fn tiny_models_in_ragged_batches_give_the_same_bits() {
    if !gpu() {
        return;
    }
    use crate::device::{assert_same, observe};
    for architecture in some(&ARCHITECTURES, 1) {
        let mut runner = Poisoned::load(&dir(architecture), F32);
        let goldens = goldens(architecture);
        let sequences: Vec<Sequence> =
            goldens.iter().zip(0..).map(|(golden, first)| Sequence::new(&golden.ids, 70, first, 7)).collect();
        let mut alone = |s: &Sequence| in_steps(&mut runner, s, 0, &[70], |runner, rows| observe(runner, vec![rows]));
        let alone: Vec<_> = sequences.iter().map(&mut alone).collect();
        for seed in some(&[0, 1, 2, 3, 4, 5, 6, 7], 1).iter().copied() {
            let mut draws = Draws::new(seed);
            let mut sequences = sequences.clone();
            let mut together = vec![Vec::new(); sequences.len()];
            while sequences.iter().zip(LENGTHS).any(|(s, length)| s.done < length) {
                let ends: Vec<usize> =
                    sequences.iter().zip(LENGTHS).map(|(s, length)| length.min(s.done + draws.below(24))).collect();
                let mut active: Vec<usize> = (0..3).filter(|&i| ends[i] > sequences[i].done).collect();
                if active.len() > 1 && draws.below(2) == 1 {
                    active.reverse();
                }
                let rows = active.iter().map(|&i| sequences[i].rows(ends[i], ends[i] - sequences[i].done)).collect();
                let mut seen = observe(&mut runner, rows).into_iter();
                for i in active {
                    together[i].extend(seen.by_ref().take(ends[i] - sequences[i].done));
                    sequences[i].done = ends[i];
                }
            }
            for (together, alone) in together.iter().zip(&alone) {
                assert_same(&format!("{architecture}, schedule {seed}"), together, alone);
            }
        }
    }
}

#[test]
fn demo_models_give_the_cpus_greedy_tokens() {
    if !gpu() {
        return;
    }
    for name in some(&MODELS, 1) {
        assert_greedy(&mut Poisoned::load(&demo(name), F32), name);
        // In steps that are cut at the fewest rows there can be.
        assert_greedy(&mut Poisoned::load(&demo(name), How { max_rows: 1, ..F32 }), name);
    }
}

#[test]
fn demo_models_give_the_cpus_logits() {
    if !gpu() {
        return;
    }
    for name in some(&MODELS, 1) {
        let mut runner = Poisoned::load(&demo(name), F32);
        let mut cpu = load(&demo(name), F32.pages);
        let ids = Draws::new(3).tokens(200, runner.info().vocab_size);
        let sequence = Sequence::new(&ids, ids.len(), 1, 3);
        let want = all_logits_at_once(&mut cpu, sequence.rows(200, 60));
        for steps in some(&[66, 7, 200, 1], 1).iter().copied() {
            let got = in_steps(&mut runner, &sequence, 140, &[steps], all_logits);
            assert_close(name, &got, &want);
        }
    }
}
