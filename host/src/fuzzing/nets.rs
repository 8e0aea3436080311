//! Router networks: weights files and what plugins describe.

use std::collections::BTreeMap;
use std::io::{Cursor, Write};
use std::path::Path;

use tokenrouter_plugin_api::net::{Net as Description, Op};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::{one_line, scratch};
use crate::config::Config;
use crate::policy::nets::{HostNet, WeightsFile, build, written};
use crate::runner::ModelInfo;
use crate::runner::cpu::nets::try_out;

/// Widest matrix that a made-up net multiplies with.
const WIDEST: u64 = 4096;
/// Most nodes of a described net.
const NODES: usize = 48;

/// A weights file in safetensors.
pub fn safetensors_nets(bytes: &[u8]) {
    weights(&scratch("w.safetensors", bytes));
}

/// A checkpoint: the whole archive.
pub fn torch_file(bytes: &[u8]) {
    weights(&scratch("w.pt", bytes));
}

/// The pickle of a checkpoint with two small storages.
pub fn torch_pickle(bytes: &[u8]) {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let numbers: Vec<u8> = (0u8..64).flat_map(|number| f32::from(number).to_le_bytes()).collect();
    for (name, content) in [("w/data.pkl", bytes), ("w/data/0", &numbers), ("w/data/1", &numbers)] {
        archive.start_file(name, stored).expect("an entry");
        archive.write_all(content).expect("an entry's content");
    }
    let archive = archive.finish().expect("an archive").into_inner();
    weights(&scratch("w.pt", &archive));
}

/// A refusal is one line. What opens has tensors that can be read as their shapes say or not at all, and
/// nets over them run.
fn weights(path: &Path) {
    let mut file = match WeightsFile::open(path) {
        Ok(file) => file,
        Err(error) => return one_line(&error),
    };
    let info = file.info();
    assert!(serde_json::from_str::<serde_json::Value>(&info.metadata).is_ok_and(|value| value.is_object()));
    let mut left = 4;
    for tensor in &info.tensors {
        match file.read(&tensor.name) {
            Ok(numbers) => {
                assert_eq!(numbers.len() as u64, tensor.shape.iter().product::<u64>(), "{tensor:?}");
                assert!(numbers.iter().all(|number| number.is_finite()), "{tensor:?}");
            }
            Err(error) => {
                one_line(&error);
                continue;
            }
        }
        let [outputs, inputs] = tensor.shape[..] else { continue };
        if left > 0 && outputs <= WIDEST && (1..=WIDEST).contains(&inputs) {
            left -= 1;
            let weight = tensor.name.clone();
            let mut net = Description::new("n", "w");
            let x = net.hidden();
            let x = net.push(Op::Linear { weight: weight.clone(), bias: None }, &[x]);
            let row = net.push(Op::Row { tensor: weight, row: 0 }, &[]);
            let row = net.push(Op::TopK { count: 1 }, &[row]);
            let x = net.push(Op::TopK { count: 1 }, &[x]);
            net.concat(&[row, x]);
            run(&net, &mut file, &model(inputs as u32, 8));
        }
    }
}

fn model(hidden_size: u32, vocab_size: u32) -> ModelInfo {
    ModelInfo {
        name: "m".into(),
        description: String::new(),
        vocab_size,
        hidden_size,
        context: 64,
        eos: vec![],
        pages: 4,
        weight_bytes: 0,
        page_bytes: 0,
    }
}

/// A net that is taken has as many scores a row as it says.
fn run(net: &Description, file: &mut WeightsFile, model: &ModelInfo) {
    match build("net `n`", net, file, model) {
        Ok(net) => try_out(net, model.hidden_size as usize, model.vocab_size as usize),
        Err(error) => one_line(&error),
    }
}

/// A net as a plugin may describe it, decoded from bytes: sizes of the model, then for each node its
/// operation, its arguments and its inputs.
pub fn net_description(bytes: &[u8]) {
    let mut bytes = bytes.iter().copied();
    let mut next = || bytes.next();
    let (Some(hidden), Some(vocab)) = (next(), next()) else { return };
    let mut net = Description::new("n", "w");
    while let (Some(kind), Some(argument)) = (next(), next()) {
        let op = op(kind, argument);
        let count = match op {
            Op::Concat | Op::Add => argument % 6,
            Op::Hidden { .. } | Op::TopLogits { .. } | Op::TokenEmbedding | Op::Embedding { .. } | Op::Row { .. } => 0,
            _ => 1,
        };
        // Counted from the newest, so that most are there.
        let at = net.nodes.len() as u32;
        let inputs: Vec<u32> = (0..count).filter_map(|_| Some(at.wrapping_sub(1 + u32::from(next()? % 8)))).collect();
        net.push(op, &inputs);
        if net.nodes.len() == NODES {
            break;
        }
    }
    described(&net, 1 + u32::from(hidden % 8), 1 + u32::from(vocab % 16));
}

/// Keys of `[routes.r]`: what its `nets` describe has as many nodes as were written, and runs or is refused.
pub fn nets_toml(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let route = format!("[models.m]\npath = 'm'\n[routes.r]\nplugin = 'p'\nmodels = ['m']\n{text}\n");
    let config = match Config::parse(&route, Path::new("c.toml"), &BTreeMap::new()) {
        Ok(config) => config,
        Err(error) => return one_line(&error.to_string()),
    };
    let Some(table) = &config.routes[0].nets else { return };
    let nets = match written(table) {
        Ok(nets) => nets,
        Err(error) => return one_line(&config.error("/routes/r/nets", format!("routes.r.nets{error}")).to_string()),
    };
    for HostNet { net, .. } in nets {
        let nodes = table[&net.name]["nodes"].as_array().map_or(0, Vec::len);
        assert_eq!(net.nodes.len(), nodes, "{net:?}");
        if nodes <= NODES {
            described(&net, 4, 8);
        }
    }
}

/// Try `net` over the made-up tensors.
fn described(net: &Description, hidden: u32, vocab: u32) {
    thread_local! {
        static FILE: std::path::PathBuf = scratch("tensors.safetensors", &tensors());
    }
    let mut file = FILE.with(|path| WeightsFile::open(path)).expect("a weights file");
    run(net, &mut file, &model(hidden, vocab));
}

/// Tensors whose names are their shapes, `1x1` to `8x8` and `1` to `8`, a table of 16 tokens, and what a
/// batch norm of four needs.
fn tensors() -> Vec<u8> {
    use safetensors::tensor::{Dtype, TensorView};
    let mut shapes: Vec<(String, Vec<usize>)> = Vec::new();
    for rows in 1..=8 {
        shapes.push((format!("{rows}"), vec![rows]));
        shapes.extend((1..=8).map(|columns| (format!("{rows}x{columns}"), vec![rows, columns])));
    }
    shapes.push(("table".into(), vec![16, 4]));
    shapes.extend(["weight", "bias", "running_mean", "running_var"].map(|part| (format!("norm.{part}"), vec![4])));
    let data: Vec<u8> = (0u8..64).flat_map(|i| (f32::from(i) / 8.0).to_le_bytes()).collect();
    let view = |(name, shape): (String, Vec<usize>)| {
        let bytes = 4 * shape.iter().product::<usize>();
        (name, TensorView::new(Dtype::F32, shape, &data[..bytes]).expect("a tensor"))
    };
    safetensors::serialize(shapes.into_iter().map(view), None).expect("a file")
}

fn op(kind: u8, argument: u8) -> Op {
    let (low, high) = (argument % 9, argument / 16 % 9);
    let (vector, matrix) = (format!("{low}"), format!("{low}x{high}"));
    let eps = [1e-5, 1.0, 0.0, -1.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, 1e30][usize::from(high % 8)];
    match kind % 18 {
        0 => Op::Hidden { back: u32::from(argument % 18) },
        1 => Op::TopLogits { count: low.into(), back: high.into() },
        2 => Op::TokenEmbedding,
        3 => Op::Embedding { weight: if argument.is_multiple_of(4) { matrix } else { "table".into() } },
        4 => Op::Row { tensor: matrix, row: low.into() },
        5 => Op::Linear { weight: matrix, bias: None },
        6 => Op::Linear { weight: matrix, bias: Some(vector) },
        7 => Op::BatchNorm { prefix: "norm".into(), eps },
        8 => Op::LayerNorm { weight: vector.clone(), bias: vector, eps },
        9 => Op::RmsNorm { weight: vector, eps },
        10 => Op::Concat,
        11 => Op::Add,
        12 => Op::Softmax,
        13 => Op::Gelu,
        14 => Op::Silu,
        15 => Op::Tanh,
        16 => Op::Sigmoid,
        _ => Op::TopK { count: low.into() },
    }
}
