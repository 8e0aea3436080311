//! Recordings, read back.

mod engine;
mod made_up;
mod replay;

use std::path::Path;

use safetensors::SafeTensors;
use sha2::{Digest, Sha256};

use super::*;
use crate::request::{Event, FinishReason, ModelId, NewRequest, RouteId, SamplingParams};
use crate::runner::Runner;
use crate::runner::simulated::SimulatedRunner;

const VOCAB: u32 = 50;

fn settings(max_bytes: u64, shard_rows: u32) -> Settings {
    Settings { hidden: true, top_k: 100, sample: 1.0, requests: true, shard_rows, max_bytes }
}

fn model(index: u32) -> SimulatedRunner {
    SimulatedRunner::new(&format!("m/{index}"), index, VOCAB, 4096)
}

fn route(name: &str, models: &[u32], recorded: bool) -> Route {
    let members = models.iter().map(|m| Member { name: format!("m/{m}"), role: format!("role{m}") });
    let plugin = Some(Plugin { name: name.into(), version: "1".into(), sha256: "ab".into() });
    let settings = serde_json::json!({});
    Route { name: name.into(), plugin, settings, models: members.collect(), entry: 0, recorded }
}

fn setup(directory: &Path, settings: Settings, models: u32, routes: Vec<Route>) -> Setup {
    let models = (0..models).map(|index| model(index).info().clone()).collect();
    let kept_in_memory = Duration::from_secs(3600);
    Setup { directory: directory.into(), settings, models, routes, kept_in_memory }
}

fn manifest(run: &Path) -> Manifest {
    serde_json::from_slice(&std::fs::read(run.join("manifest.json")).unwrap()).unwrap()
}

/// One row as read from a shard.
#[derive(Clone, Debug)]
struct Evaluated {
    model: usize,
    request: i64,
    position: i32,
    candidate: i32,
    draft: i32,
    decision: u8,
    decision_model: i32,
    replacement: i32,
    time_us: i64,
    route: usize,
    entropy: f32,
    token_logit: Option<f32>,
}

/// All rows of a run, with every promise of the manifest checked on the way.
fn rows(run: &Path) -> Vec<Evaluated> {
    let manifest = manifest(run);
    let mut all = Vec::new();
    for shard in &manifest.shards {
        let bytes = std::fs::read(run.join(&shard.file)).unwrap();
        assert_eq!(bytes.len() as u64, shard.bytes);
        assert_eq!(hex(&bytes), shard.sha256);
        assert!(shard.rows <= u64::from(manifest.settings.shard_rows));
        let model = manifest.models.iter().position(|m| m.name == shard.model).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let data = |name: &str| file.tensor(name).unwrap().data().to_vec();
        let ints = |name: &str| -> Vec<i32> {
            data(name).chunks(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
        };
        let longs = |name: &str| -> Vec<i64> {
            data(name).chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
        };
        let floats = |name: &str| ints(name).into_iter().map(|bits| f32::from_bits(bits as u32)).collect::<Vec<_>>();
        let rows = shard.rows as usize;
        let settings = &manifest.settings;
        if settings.hidden {
            assert_eq!(file.tensor("hidden").unwrap().shape(), [rows, manifest.models[model].hidden_size as usize]);
        }
        assert_eq!(file.tensor("topk_ids").unwrap().shape(), [rows, settings.top_k.min(VOCAB) as usize]);
        for name in file.names() {
            let tensor = file.tensor(name).unwrap();
            let listed = manifest.columns.iter().find(|column| column.name == name).unwrap();
            assert_eq!((tensor.dtype().to_string(), tensor.shape()[0]), (listed.dtype.clone(), rows));
        }
        let token_logit = file.names().contains(&"token_logit_5").then(|| floats("token_logit_5"));
        let (request, time_us) = (longs("request"), longs("time_us"));
        let [position, candidate, draft] = ["position", "candidate", "draft"].map(ints);
        let [decision_model, replacement, route] = ["decision_model", "replacement", "route"].map(ints);
        let (decision, entropy) = (data("decision"), floats("entropy"));
        all.extend((0..rows).map(|i| Evaluated {
            model,
            request: request[i],
            position: position[i],
            candidate: candidate[i],
            draft: draft[i],
            decision: decision[i],
            decision_model: decision_model[i],
            replacement: replacement[i],
            time_us: time_us[i],
            route: route[i] as usize,
            entropy: entropy[i],
            token_logit: token_logit.as_ref().map(|column| column[i]),
        }));
    }
    assert_eq!(all.len() as u64, manifest.rows);
    all
}

fn lines(run: &Path) -> Vec<RequestLine> {
    let mut all = Vec::new();
    for file in manifest(run).requests {
        let text = std::fs::read(run.join(&file.file)).unwrap();
        assert_eq!((text.len() as u64, hex(&text)), (file.bytes, file.sha256));
        let lines: Vec<RequestLine> =
            text.split_inclusive(|b| *b == b'\n').map(|line| serde_json::from_slice(line).unwrap()).collect();
        assert_eq!(lines.len() as u64, file.rows);
        all.extend(lines);
    }
    all
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes of all files below `directory`.
fn size(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { size(&path) } else { path.metadata().unwrap().len() }).sum()
}

fn request(route: u32, seed: u32, max_tokens: u32) -> NewRequest {
    let sampling = SamplingParams { ignore_eos: true, seed: u64::from(seed), ..SamplingParams::greedy() };
    NewRequest {
        route: RouteId(route),
        prompt: vec![1, 2, 3 + seed],
        max_tokens,
        sampling,
        return_signals: false,
        cache_salt: None,
    }
}
