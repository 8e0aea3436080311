//! The CPU runner on the demo models: decode steps by rows, prefill, and sampling from a large vocabulary.

use std::path::Path;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tokenrouter::request::{ModelId, SamplingParams};
use tokenrouter::runner::cpu::{CpuRunner, LoadOptions};
use tokenrouter::runner::sampler::{Row, Sampler};
use tokenrouter::runner::{Columns, PAGE_TOKENS, RowBatch, Rows, Runner, SignalRequest};
use tokenrouter_plugin_api::SignalSet;

/// Tokens before the measured rows.
const CONTEXT: usize = 256;

fn load(name: &str) -> CpuRunner {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo").join(name);
    let options = LoadOptions { name: name.into(), model: ModelId(0), pages: 512, context: None, progress: None };
    CpuRunner::load(&dir, options).unwrap_or_else(|e| panic!("{e}"))
}

fn forwards(c: &mut Criterion) {
    let tokens: Vec<u32> = (0..CONTEXT as u32 + 1).map(|i| i * 7 % 2000).collect();
    let sampling = SamplingParams::greedy();
    let signals = SignalRequest { scalars: SignalSet::ENTROPY_NORM, ..SignalRequest::default() };
    for name in ["small", "large"] {
        let mut runner = load(name);
        let pages = (CONTEXT + 1).div_ceil(PAGE_TOKENS) as u32;
        let tables: Vec<Vec<u32>> = (0..16).map(|s| (s * pages..(s + 1) * pages).collect()).collect();
        let rows = |s: usize, start: usize| Rows {
            context: &tokens,
            start,
            end: CONTEXT + 1,
            pages: &tables[s],
            sampled: 1,
            scored: 0,
            sampling: &sampling,
            prompt_len: CONTEXT,
            masked: &[],
            nets: &[],
            allowed: &[],
        };
        let mut step = |n: usize, start: usize| {
            let batch = RowBatch {
                sequences: (0..n).map(|s| rows(s, start)).collect(),
                signals: signals.clone(),
                hidden: false,
            };
            runner.forward(&batch).unwrap_or_else(|e| panic!("{e}"))
        };
        step(16, 0);
        let mut group = c.benchmark_group(format!("{name}/decode"));
        for n in [1, 4, 8, 16] {
            group.throughput(Throughput::Elements(n as u64));
            group.bench_function(format!("{n} rows"), |b| b.iter(|| step(n, CONTEXT)));
        }
        group.finish();
        let mut group = c.benchmark_group(format!("{name}/prefill"));
        group.throughput(Throughput::Elements(CONTEXT as u64 + 1));
        group.bench_function("one prompt", |b| b.iter(|| step(1, 0)));
        group.finish();
    }
}

fn sampling(c: &mut Criterion) {
    let logits: Vec<f32> = (0..151_936u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 1e6).collect();
    let mut sampler = Sampler::new(ModelId(0), vec![5]);
    let mut group = c.benchmark_group("sampling/152k");
    let base = SamplingParams::default();
    for (name, params) in [
        ("greedy", SamplingParams::greedy()),
        ("temperature", base.clone()),
        ("top-k top-p", SamplingParams { top_k: 20, top_p: 0.95, temperature: 0.6, ..base.clone() }),
        ("top-p", SamplingParams { top_p: 0.95, ..base.clone() }),
        ("penalty", SamplingParams { repetition_penalty: 1.1, ..base }),
    ] {
        let mut row = logits.clone();
        let signals = SignalRequest { scalars: SignalSet::ALL, ..SignalRequest::default() };
        group.bench_function(name, |b| {
            b.iter(|| {
                let at = Row { context: &[1, 2, 3], prompt_len: 1, params: &params, masked: &[], allowed: &[] };
                sampler.sample(&mut row, &at, &signals, &mut Columns::default())
            })
        });
    }
    group.finish();
}

criterion_group!(benches, forwards, sampling);
criterion_main!(benches);
