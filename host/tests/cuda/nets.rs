//! Router networks on the device against the CPU's: the demo's, every form of R2R, and one that looks back.

use std::path::{Path, PathBuf};

use serde_json::json;
use tokenrouter::policy::nets;
use tokenrouter::request::{SamplingParams, TokenId};
use tokenrouter::runner::cpu::CpuRunner;
use tokenrouter::runner::net::{Net, NetId, Node, Op};
use tokenrouter::runner::{ModelInfo, PageId, RowBatch, Rows, Runner, SignalRequest};
use tokenrouter_plugin_api::net::{Net as Description, WeightsInfo};
use tokenrouter_plugin_api::{Context, ModelDescription, Policy, Requirements, Services, random};

use crate::device::{BF16, Draws, F32, Poisoned, assert_same, gpu, observe, some};
use crate::random_model::{Shape, write_random};
use crate::sampling::assert_near;
use crate::support::{Sequence, demo, load, root};

struct Files;

impl Services for Files {
    fn weights(&self, path: &str) -> Result<WeightsInfo, String> {
        nets::describe(&root(), path)
    }
}

/// The net that `P` asks for with these settings, for the model `info`.
fn asked<P: Policy>(plugin: &str, settings: &str, info: &ModelInfo) -> Net {
    let models = ["slm", "llm"].map(|role| ModelDescription { name: role.to_owned(), role: role.to_owned() });
    let context = Context {
        route: "r",
        model: 0,
        models: &models,
        entry: 0,
        vocab_size: info.vocab_size,
        eos: &info.eos,
        services: &Files,
    };
    let Requirements { mut nets, .. } = P::create(&context, settings).unwrap().requirements();
    let net: Description = nets.pop().unwrap();
    nets::load(plugin, &net, &root(), info).unwrap()
}

fn r2r(info: &ModelInfo) -> Net {
    asked::<r2r::R2r>("r2r", r#"{"router": "models/demo/routers/r2r/router.safetensors"}"#, info)
}

fn citer(info: &ModelInfo) -> Net {
    asked::<citer::Citer>("citer", r#"{"router": "models/demo/routers/citer/router.safetensors"}"#, info)
}

pub fn noise(count: usize, seed: u64) -> Vec<f32> {
    (0..count).map(|i| random::uniform(seed, i as u64, 1 << 20) as f32 - 0.5).collect()
}

/// Hidden states of this position and of `back` before it, the token's embedding, and all activations.
fn window(back: u32, width: usize) -> Net {
    let node = |op, inputs: &[u32], width| Node { op, inputs: inputs.to_vec(), width };
    let linear = |seed, inputs: usize| Op::Linear { weight: noise(3 * inputs, seed), bias: noise(3, seed + 9) };
    let nodes = vec![
        node(Op::Hidden { back: 0 }, &[], width),
        node(Op::Hidden { back }, &[], width),
        node(Op::TokenEmbedding, &[], width),
        node(linear(1, width), &[0], 3),
        node(linear(2, width), &[1], 3),
        node(linear(3, width), &[2], 3),
        node(Op::Silu, &[3], 3),
        node(Op::Tanh, &[4], 3),
        node(Op::Concat, &[6, 7, 5], 9),
    ];
    Net { name: "window".into(), nodes }
}

/// Of a net of every kind: `count` rows a sequence at the ends of `length` tokens.
fn assert_scores(what: &str, cuda: &mut Poisoned, cpu: &mut CpuRunner, id: NetId) {
    let vocabulary = cpu.info().vocab_size;
    let mut draws = Draws::new(6);
    let named = [id];
    let masked: Vec<TokenId> = (0..vocabulary / 3).map(|i| i * 3).collect();
    let hot = SamplingParams { temperature: 1.5, seed: 4, ..SamplingParams::default() };
    let greedy = SamplingParams::greedy();
    let listed = SamplingParams { top_k: 10, ..hot.clone() };
    let penalised = SamplingParams { repetition_penalty: 1.3, frequency_penalty: 0.2, ..hot.clone() };
    // Steps of few rows and of many; with rows that the host draws and without.
    let cases = [(9, 2, false), (90, 15, false), (9, 9, true), (1, 1, false), (40, 1, true)];
    for (length, sampled, host) in some(&cases, 2).iter().copied() {
        let tokens: Vec<Vec<TokenId>> = (0..5).map(|_| draws.tokens(length, vocabulary)).collect();
        let last = if host { &penalised } else { &listed };
        let ways: [(&SamplingParams, &[TokenId], &[NetId]); 5] = [
            (&greedy, &[], &named),
            (&hot, &masked, &named),
            (&listed, &[], &[]),
            (&listed, &masked, &named),
            (last, &[], &named),
        ];
        // The first rows come as a chunk before, as far as there are any.
        for chunk in [0, length / 2] {
            let rows = |i: usize, start: usize, end: usize, pages: &'static [PageId], sampled: usize| {
                let (sampling, masked, nets) = ways[i];
                let context = &tokens[i];
                Rows {
                    context,
                    start,
                    end,
                    pages,
                    sampled,
                    scored: 0,
                    sampling,
                    prompt_len: 1,
                    masked,
                    nets,
                    allowed: &[],
                }
            };
            const PAGES: [&[PageId]; 5] = [
                &[3, 1, 9, 20, 21, 22],
                &[0, 2, 4, 23, 24, 25],
                &[5, 6, 7, 26, 27, 28],
                &[10, 8, 11, 29, 30, 31],
                &[12, 14, 13, 32, 33, 34],
            ];
            let batch = |start: usize, end: usize, sampled: usize| RowBatch {
                sequences: (0..5).map(|i| rows(i, start, end, PAGES[i], sampled)).collect(),
                ..RowBatch::default()
            };
            if chunk > 0 {
                for runner in [&mut *cuda as &mut dyn Runner, &mut *cpu] {
                    runner.forward(&batch(0, chunk, 0)).unwrap();
                }
            }
            let sampled = sampled.min(length - chunk);
            let [got, want] = [&mut *cuda as &mut dyn Runner, &mut *cpu]
                .map(|runner| runner.forward(&batch(chunk, length, sampled)).unwrap());
            let what = format!("{what}, {sampled} of {length} rows from {chunk}");
            for (row, (got, want)) in got.samples.iter().zip(&want.samples).enumerate() {
                assert_eq!(got.token, want.token, "{what}: candidate {row}");
            }
            let [got, want] = [&got, &want].map(|out| &out.signals.net(id).unwrap().scores);
            assert_near(&what, got, want, 1e-4);
            let width = want.len() / (5 * sampled);
            let none = want.chunks(width * sampled).map(|scores| scores.iter().all(|score| score.is_nan()));
            assert_eq!(none.collect::<Vec<_>>(), [false, false, true, false, false], "{what}");
        }
    }
}

#[test]
fn the_demos_routers() {
    if !gpu() {
        return;
    }
    let (mut cuda, mut cpu) = (Poisoned::load(&demo("small"), F32), load(&demo("small"), F32.pages));
    // One after another, and then all at once.
    for (name, net) in [("r2r", r2r(cpu.info())), ("citer", citer(cpu.info())), ("window", window(2, 160))] {
        let [id, same] = [&mut cuda as &mut dyn Runner, &mut cpu].map(|r| r.load_net(net.clone()).unwrap());
        assert_eq!(id, same);
        assert_scores(name, &mut cuda, &mut cpu, id);
    }
    for id in 0..3 {
        assert_scores(&format!("net {id} of three"), &mut cuda, &mut cpu, NetId(id));
    }
    cuda.forget_nets();
    cpu.forget_nets();
    let net = citer(cpu.info());
    let [id, _] = [&mut cuda as &mut dyn Runner, &mut cpu].map(|r| r.load_net(net.clone()).unwrap());
    assert_scores("citer after all were forgotten", &mut cuda, &mut cpu, id);
}

#[test]
fn scores_do_not_depend_on_company_or_pieces() {
    if !gpu() {
        return;
    }
    for how in some(&[BF16, F32], 1).iter().copied() {
        let mut cuda = Poisoned::load(&demo("small"), how);
        let info = cuda.info().clone();
        let ids: Vec<NetId> =
            [r2r(&info), citer(&info), window(3, 160)].map(|net| cuda.load_net(net).unwrap()).to_vec();
        let mut draws = Draws::new(12);
        let tokens = draws.tokens(170, info.vocab_size);
        let mut sequence = Sequence::new(&tokens, tokens.len(), 0, 1);
        let whole = observe(&mut cuda, vec![Rows { nets: &ids, ..sequence.rows(170, 40) }]);
        for step in some(&[66, 20, 1], 1).iter().copied() {
            sequence.done = 0;
            let mut seen = Vec::new();
            while sequence.done < 170 {
                let end = (sequence.done + step).min(170);
                let sampled = end.saturating_sub(130).min(end - sequence.done);
                let others: Vec<Sequence> = (0..10)
                    .map(|i| Sequence::new(&draws.tokens(1 + draws.clone().below(9), info.vocab_size), 16, 20 + i, 1))
                    .collect();
                let mut batch: Vec<Rows<'_>> = others
                    .iter()
                    .zip(0..)
                    .map(|(s, i)| Rows { nets: &ids[i % 4..], ..s.rows(s.tokens.len(), 1) })
                    .collect();
                batch.insert(4, Rows { nets: &ids, ..sequence.rows(end, sampled) });
                seen.extend(observe(&mut cuda, batch).drain(4..4 + sampled));
                sequence.done = end;
            }
            assert_same(&format!("{:?} in steps of {step}", how.dtype), &seen, &whole);
        }
    }
}

#[test]
fn all_forms_of_r2r() {
    if !gpu() {
        return;
    }
    // The sizes that the forms were made for.
    let shape = Shape { hidden: 12, vocabulary: 30, inner: 20, layers: 1, heads: 2, kv_heads: 1, dim: 8 };
    let model = write_random(&shape);
    let (mut cuda, mut cpu) = (Poisoned::load(model.path(), F32), load(model.path(), F32.pages));
    let directory = Path::new("tests/fixtures/goldens/router-forms");
    let files = std::fs::read_dir(root().join(directory)).unwrap().map(|entry| entry.unwrap().path());
    let is_form = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "pt");
    let mut files: Vec<PathBuf> = files.filter(is_form).collect();
    files.sort();
    let (mut computed, mut refused) = (Vec::new(), Vec::new());
    for file in some(&files, 6) {
        let form = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let strategy = if form.starts_with("multi") { "neural_multi_input" } else { "neural" };
        let settings = json!({"strategy": strategy, "router": directory.join(format!("{form}.pt"))}).to_string();
        let net = asked::<r2r::R2r>("r2r", &settings, cpu.info());
        cuda.forget_nets();
        cpu.forget_nets();
        match cuda.load_net(net.clone()) {
            Ok(id) => {
                assert_eq!(cpu.load_net(net).unwrap(), id);
                assert_scores(&form, &mut cuda, &mut cpu, id);
                computed.push(form);
            }
            Err(error) => {
                let message = "positions before the row, which CUDA does not keep";
                assert!(
                    error.message.contains(message) && error.message.contains("set the model's device to \"cpu\""),
                    "{error}"
                );
                refused.push(form);
            }
        }
    }
    if files.len() == some(&files, 6).len() {
        assert_eq!((computed.len(), refused), (13, vec!["multi-logits".to_owned()]), "{computed:?}");
    }
}

#[test]
fn a_vocabulary_that_is_shorter_than_the_lists() {
    if !gpu() {
        return;
    }
    // The sizes that the forms were made for.
    let shape = Shape { hidden: 12, vocabulary: 30, inner: 20, layers: 1, heads: 2, kv_heads: 1, dim: 8 };
    let model = write_random(&shape);
    let (mut cuda, mut cpu) = (Poisoned::load(model.path(), F32), load(model.path(), F32.pages));
    let tokens = Draws::new(2).tokens(20, 30);
    let mut sequence = Sequence::new(&tokens, 20, 0, 1);
    sequence.masked = vec![4, 9];
    sequence.sampling = SamplingParams { top_k: 40, top_logprobs: Some(20), ..SamplingParams::default() };
    let signals = SignalRequest { top_k: 40, ..SignalRequest::default() };
    let batch = RowBatch { sequences: vec![sequence.rows(20, 20)], signals, hidden: false };
    let [got, want] = [&mut cuda as &mut dyn Runner, &mut cpu].map(|runner| runner.forward(&batch).unwrap());
    assert_near("largest logits", &got.signals.topk_values, &want.signals.topk_values, 1e-4);
    assert_eq!(got.signals.topk_ids, want.signals.topk_ids);
    let ids = |out: &tokenrouter::runner::RowOutputs| -> Vec<_> {
        out.samples.iter().map(|s| (s.token, s.top_logprobs.iter().map(|(id, _)| *id).collect::<Vec<_>>())).collect()
    };
    assert_eq!(ids(&got), ids(&want));
}

#[test]
fn nets_that_cuda_refuses() {
    if !gpu() {
        return;
    }
    let mut cuda = Poisoned::load(&demo("small"), F32);
    let logits = |count: u32, back| Node { op: Op::TopLogits { count, back }, inputs: vec![], width: count as usize };
    let sum = Node { op: Op::Linear { weight: noise(200, 1), bias: vec![] }, inputs: vec![0], width: 1 };
    let wide = Net { name: "wide".into(), nodes: vec![logits(200, 0), sum.clone()] };
    let error = cuda.load_net(wide).unwrap_err().message;
    assert_eq!(
        error,
        "wide: reads the 200 largest logits, but CUDA gives at most 128; set the model's device to \"cpu\""
    );
    cuda.load_net(window(1, 160)).unwrap();
    let error = cuda.load_net(window(1, 160)).unwrap_err().message;
    assert_eq!(
        error,
        "window: the model's nets give 18 scores, but CUDA has room for 16; set the model's device to \"cpu\""
    );
}
