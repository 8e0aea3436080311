use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenrouter_plugin_api::net::{Net as Description, Op as DescribedOp, WeightsInfo};
use tokenrouter_plugin_api::{
    Context, Decision, ModelDescription, Policy, PolicyError, Requirements, RouteBatch, Services,
};

use super::*;
use crate::engine::OnError;
use crate::policy::{Linked, PolicyFactory, nets};
use crate::request::{Event, ModelId, NewRequest, RequestSpec, RouteId, SamplingParams};
use crate::runner::cpu::{CpuRunner, LoadOptions};
use crate::runner::net::{NetId, Node as NetNode};
use crate::runner::{RowBatch, Rows, Runner, SignalRequest};
use crate::subserver::{Attachment, Effect, Limits, Message, SubServer};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn small() -> CpuRunner {
    let options = LoadOptions { name: "small".into(), model: ModelId(0), pages: 16, context: None, progress: None };
    CpuRunner::load(&root().join("models/demo/small"), options).unwrap()
}

struct Files;

impl Services for Files {
    fn weights(&self, path: &str) -> Result<WeightsInfo, String> {
        nets::describe(&root(), path)
    }
}

/// The net that `P` asks for with these settings at its small model.
fn asked<P: Policy>(settings: &str) -> Description {
    let models = ["slm", "llm"].map(|role| ModelDescription { name: role.to_owned(), role: role.to_owned() });
    let context =
        Context { route: "r", model: 0, models: &models, entry: 0, vocab_size: 2048, eos: &[], services: &Files };
    let policy = P::create(&context, settings).unwrap();
    let Requirements { mut nets, .. } = policy.requirements();
    nets.pop().unwrap()
}

struct Goldens {
    hidden: Vec<f32>,
    top_logits: Vec<f32>,
    tokens: Vec<TokenId>,
    file: Vec<u8>,
}

impl Goldens {
    fn load() -> Self {
        let file = std::fs::read(root().join("tests/fixtures/goldens/routers.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        let tokens =
            tensors.tensor("token").unwrap().data().chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()));
        let tokens = tokens.map(|id| id as TokenId).collect();
        let mut goldens = Self { hidden: vec![], top_logits: vec![], tokens, file: vec![] };
        (goldens.hidden, goldens.top_logits) = (floats(&file, "hidden"), floats(&file, "top_logits"));
        goldens.file = file;
        goldens
    }

    /// Scores of rows `rows`, by a net whose logits are the golden ones: their top 100 are all of them.
    fn scores(&self, net: &CpuNet, runner: &CpuRunner, rows: std::ops::Range<usize>) -> Vec<f32> {
        let part = |values: &[f32], width: usize| vec![values[rows.start * width..rows.end * width].to_vec()];
        let inputs = Inputs {
            hidden: &part(&self.hidden, 160),
            logits: &part(&self.top_logits, 100),
            candidates: &self.tokens[rows.clone()],
            embedding: &runner.model.embedding,
        };
        net.evaluate(&inputs, &mut Vec::new())
    }

    fn assert_scores(&self, net: &Description, tensor: &str) -> Vec<f32> {
        let runner = small();
        let net = CpuNet::new(nets::load("test", net, &root(), runner.info()).unwrap());
        let scores = self.scores(&net, &runner, 0..16);
        for (row, (score, want)) in scores.iter().zip(floats(&self.file, tensor)).enumerate() {
            assert!((score - want).abs() <= 1e-5, "row {row}: {score}, not {want}");
            assert_eq!(self.scores(&net, &runner, row..row + 1), [*score], "row {row} alone");
        }
        scores
    }
}

fn floats(file: &[u8], name: &str) -> Vec<f32> {
    let tensors = safetensors::SafeTensors::deserialize(file).unwrap();
    tensors.tensor(name).unwrap().data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn r2r_gives_the_reference_scores_from_both_layouts() {
    let goldens = Goldens::load();
    let scores = ["safetensors", "pt"].map(|layout| {
        let net = asked::<r2r::R2r>(&format!(r#"{{"router": "models/demo/routers/r2r/router.{layout}"}}"#));
        goldens.assert_scores(&net, "r2r_probability")
    });
    assert_eq!(scores[0], scores[1]);
}

#[test]
fn citer_gives_the_reference_scores_from_both_layouts() {
    let goldens = Goldens::load();
    let scores = ["safetensors", "pth"].map(|layout| {
        let net = asked::<citer::Citer>(&format!(r#"{{"router": "models/demo/routers/citer/router.{layout}"}}"#));
        goldens.assert_scores(&net, "citer_confidence")
    });
    assert_eq!(scores[0], scores[1]);
}

/// Weights without a pattern.
fn noise(count: usize, seed: u64) -> Vec<f32> {
    let draw = |i| tokenrouter_plugin_api::random::uniform(seed, i as u64, 1 << 20) as f32 - 0.5;
    (0..count).map(draw).collect()
}

/// A net that looks at this position and two before it, at each with other weights.
fn window() -> Net {
    let node = |op, inputs: &[u32], width| NetNode { op, inputs: inputs.to_vec(), width };
    let linear = |seed, inputs: usize| Op::Linear { weight: noise(3 * inputs, seed), bias: noise(3, seed + 9) };
    let nodes = vec![
        node(Op::Hidden { back: 0 }, &[], 160),
        node(Op::Hidden { back: 2 }, &[], 160),
        node(Op::TopLogits { count: 7, back: 1 }, &[], 7),
        node(linear(1, 160), &[0], 3),
        node(linear(2, 160), &[1], 3),
        node(linear(3, 7), &[2], 3),
        node(Op::Concat, &[3, 4, 5], 9),
    ];
    Net { name: "window".into(), nodes }
}

#[test]
fn a_window_is_the_same_however_its_rows_were_computed() {
    let tokens: Vec<TokenId> = (0..40).map(|i| (i * 37 + 5) % 2000).collect();
    let sampling = SamplingParams::greedy();
    let pages: Vec<u32> = vec![4, 2, 9];
    let rows = |start, end, sampled, nets: &'static [NetId], masked: &'static [TokenId]| Rows {
        context: &tokens,
        start,
        end,
        pages: &pages,
        sampled,
        scored: 0,
        sampling: &sampling,
        prompt_len: 40,
        masked,
        nets,
        allowed: &[],
    };
    let masked: &[TokenId] = &[3, 700];
    // What the window should see: hidden states and logits of all rows at once, without a net.
    let mut plain = small();
    let signals = SignalRequest { top_k: 7, ..SignalRequest::default() };
    let batch = RowBatch { sequences: vec![rows(0, 40, 40, &[], masked)], signals, hidden: true };
    let all = plain.forward(&batch).unwrap();
    let at = |values: &[f32], width: usize, position: usize, back: usize| match position.checked_sub(back) {
        Some(p) => values[p * width..][..width].to_vec(),
        None => vec![0.0; width],
    };
    let net = CpuNet::new(window());
    let want = |position: usize| {
        let inputs = Inputs {
            hidden: &[0, 1, 2].map(|back| at(&all.hidden, 160, position, back)),
            logits: &[vec![], at(&all.signals.topk_values, 7, position, 1), vec![]],
            candidates: &[all.samples[position].token],
            embedding: &plain.model.embedding,
        };
        net.evaluate(&inputs, &mut Vec::new())
    };
    for step in [1, 3, 16, 40] {
        let mut runner = small();
        let id = runner.load_net(window()).unwrap();
        assert_eq!(id, NetId(0));
        let mut seen = 0;
        for start in (0..40).step_by(step) {
            let end = (start + step).min(40);
            // Of each chunk the last two rows are sampled; another sequence without the net comes along.
            let sampled = 2.min(end - start);
            let mut other = rows(0, 5, 1, &[], &[]);
            other.pages = &[7];
            let sequences = vec![other, rows(start, end, sampled, &[NetId(0)], masked)];
            let out = runner.forward(&RowBatch { sequences, ..RowBatch::default() }).unwrap();
            let scores = out.signals.net(id).unwrap();
            assert!(scores.row(0).iter().all(|score| score.is_nan()), "a sequence that names no net");
            for i in 0..sampled {
                assert_eq!(
                    scores.row(1 + i),
                    want(end - sampled + i),
                    "position {} in steps of {step}",
                    end - sampled + i
                );
                seen += 1;
            }
        }
        assert!(seen >= 2);
    }
}

/// Asks for [`window`].
struct Looks;

impl Policy for Looks {
    const NAME: &'static str = "looks";
    fn create(_: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self)
    }
    fn requirements(&self) -> Requirements {
        let mut net = Description::new("window", "w");
        net.push(DescribedOp::Hidden { back: 2 }, &[]);
        let mut requirements = Requirements::default();
        requirements.nets.push(net);
        requirements
    }
    fn route(&mut self, _: &RouteBatch<'_>, _: &mut [Decision]) {}
}

/// Pages hold hidden states only where a sequence with such a net computed them, so those of others are not
/// taken; those of the same kind are, and give the same scores.
#[test]
fn a_window_over_pages_from_the_cache() {
    let context = Context { route: "r", model: 0, models: &[], entry: 0, vocab_size: 2048, eos: &[], services: &Files };
    let policy = Linked::<Looks>::default().create(&context, "{}").unwrap();
    let mut runner = small();
    let net = runner.load_net(window()).unwrap();
    let route = |policy| Attachment::new("r", policy, vec![ModelId(0)], 0, OnError::FailRequest, &[]);
    let routes = vec![Some(route(Some(policy)).with_nets(vec![net])), Some(route(None))];
    let limits = Limits { max_rows: 64, prefill_chunk: 64 };
    let mut server = SubServer::new(ModelId(0), Box::new(runner), routes, limits);
    let mut answer = |id: u64, route: u32| {
        let (prompt, sampling) = ((0..33).map(|i| (i * 37 + 5) % 2000).collect(), SamplingParams::greedy());
        let (route, max_tokens) = (RouteId(route), 3);
        let new = NewRequest { route, prompt, max_tokens, sampling, return_signals: true, cache_salt: None };
        server.take(Message::Submit(Arc::new(RequestSpec::new(id, new))));
        while server.step().rows > 0 {}
        let (mut cached, mut signals) = (0, Vec::new());
        for effect in server.effects() {
            match effect {
                Effect::Event(_, Event::PromptCached { tokens }) => cached = tokens,
                Effect::Event(_, Event::Committed { tokens, .. }) => {
                    signals.extend(tokens.into_iter().flat_map(|token| *token.signals.unwrap()));
                }
                _ => {}
            }
        }
        (cached, signals)
    };
    assert_eq!(answer(1, 1).0, 0);
    let (cached, cold) = answer(2, 0);
    assert_eq!((cached, cold.iter().filter(|(name, _)| name.starts_with("net_window")).count()), (0, 27));
    assert!(cold.iter().all(|(_, value)| value.is_finite()));
    assert_eq!(answer(3, 0), (32, cold));
    assert_eq!(answer(4, 1).0, 32);
}

/// Every network class of R2R with its variants, against PyTorch (tests/fixtures/goldens/router_forms.py).
#[test]
fn all_forms_of_r2r_agree_with_pytorch() {
    let directory = "tests/fixtures/goldens/router-forms";
    let file = std::fs::read(root().join(directory).join("expected.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let tokens = tensors.tensor("token").unwrap().data().chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()));
    let tokens: Vec<TokenId> = tokens.map(|id| id as TokenId).collect();
    let by_position = |name: &str| [0, 1, 2].map(|back| floats(&file, &format!("{name}_{back}")));
    let (hidden, logits) = (by_position("hidden"), by_position("logits"));
    let embedding = PackedMatrix::from_rows(12, &floats(&file, "embedding"));
    let model = crate::runner::ModelInfo {
        name: "tiny".into(),
        description: String::new(),
        vocab_size: 30,
        hidden_size: 12,
        context: 64,
        eos: vec![],
        pages: 4,
        weight_bytes: 0,
        page_bytes: 0,
    };
    let inputs = Inputs { hidden: &hidden, logits: &logits, candidates: &tokens, embedding: &embedding };
    let mut forms = 0;
    for name in tensors.names() {
        let Some(form) = name.strip_prefix("expected_") else { continue };
        let strategy = if form.starts_with("multi") { "neural_multi_input" } else { "neural" };
        let net = asked::<r2r::R2r>(&format!(r#"{{"strategy": "{strategy}", "router": "{directory}/{form}.pt"}}"#));
        let net = nets::load("r2r", &net, &root(), &model).unwrap();
        let width = net.width();
        let scores = CpuNet::new(net).evaluate(&inputs, &mut Vec::new());
        for (row, want) in floats(&file, name).iter().enumerate() {
            // Of three classes the last is "divergent".
            let score = scores[(row + 1) * width - 1];
            assert!((score - want).abs() <= 1e-5, "{form}, row {row}: {score}, not {want}");
        }
        forms += 1;
    }
    assert_eq!(forms, 14);
}
