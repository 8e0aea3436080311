//! Recordings of engines on simulated models, and of made-up evaluations.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::SafeTensors;
use sha2::{Digest, Sha256};
use tokenrouter_plugin_api::{
    Context, Decision, Handoff, ModelIndex, NO_TOKEN, Policy, PolicyError, RequestView, Requirements, RouteBatch,
    SignalSet,
};

use super::*;
use crate::engine::{Engine, ModelSetup, OnError, RouteSetup, TokenText};
use crate::policy::{Linked, PolicyFactory};
use crate::request::{Committed, FinishReason, SamplingParams, TokenId};
use crate::runner::simulated::SimulatedRunner;
use crate::runner::{Columns as SignalColumns, Runner, SignalRequest};

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
    Setup { directory: directory.into(), settings, models, routes }
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

/// The first model's unsure candidates are dropped and the second writes two tokens; some are replaced.
struct Hop(ModelIndex);

impl Policy for Hop {
    const NAME: &'static str = "hop";
    fn create(ctx: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self(ctx.model))
    }
    fn requirements(&self) -> Requirements {
        let mut wanted = Requirements::signals(SignalSet::ENTROPY);
        wanted.token_logits = vec![5];
        wanted
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (row, decision) in out.iter_mut().enumerate() {
            if self.0 == 0 && batch.signals.entropy[row] > 0.5 {
                *decision = Decision::to(1);
            } else if batch.positions[row] % 5 == 0 {
                *decision = Decision::STAY.replacing(7);
            }
        }
    }
    fn send(&mut self, _: &RequestView<'_>, _: ModelIndex) -> Handoff {
        Handoff::drop_candidate().budget(2)
    }
}

/// Every token from the next model.
struct Turns(ModelIndex);

impl Policy for Turns {
    const NAME: &'static str = "turns";
    fn create(ctx: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self((ctx.model + 1) % ctx.models.len() as u32))
    }
    fn route(&mut self, _: &RouteBatch<'_>, out: &mut [Decision]) {
        out.fill(Decision::to(self.0));
    }
}

/// The first model drafts three tokens, the second verifies them and keeps those with even ids.
struct Speculate(ModelIndex);

impl Policy for Speculate {
    const NAME: &'static str = "speculate";
    fn create(ctx: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self(ctx.model))
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (row, decision) in out.iter_mut().enumerate() {
            let draft = batch.drafts[row];
            *decision = match self.0 {
                0 if batch.positions[row] % 4 < 3 => Decision::DRAFT,
                0 => Decision::to(1),
                _ if draft != NO_TOKEN && draft % 2 == 0 => Decision::ACCEPT,
                _ => Decision::to(0),
            };
        }
    }
    fn send(&mut self, _: &RequestView<'_>, to: ModelIndex) -> Handoff {
        if to == 1 { Handoff::default().verify() } else { Handoff::default() }
    }
}

struct NoText;
impl TokenText for NoText {
    fn token_bytes(&self, _: TokenId) -> Option<Vec<u8>> {
        None
    }
    fn token_id(&self, _: &str) -> Option<TokenId> {
        None
    }
}

/// Three models under `hop`, `turns` and `speculate`, watched by `recording`.
fn engine(recording: &Recording) -> Engine {
    let models = (0..3).map(|index| ModelSetup {
        runner: Box::new(model(index)),
        text: Arc::new(NoText),
        min_batch: vec![1],
        max_wait: Duration::from_millis(5),
        max_rows: 256,
        prefill_chunk: 64,
    });
    let route = |name: &str, models: &[u32], policy: Arc<dyn PolicyFactory>| RouteSetup {
        name: name.into(),
        models: models.iter().map(|&m| (ModelId(m), format!("role{m}"))).collect(),
        entry: 0,
        policy,
        settings: "{}".into(),
        on_error: OnError::FailRequest,
        excluded: Vec::new(),
        directory: PathBuf::new(),
    };
    let routes = vec![
        route("hop", &[0, 2], Arc::new(Linked::<Hop>::default())),
        route("turns", &[2, 1, 0], Arc::new(Linked::<Turns>::default())),
        route("speculate", &[1, 2], Arc::new(Linked::<Speculate>::default())),
    ];
    Engine::start_observed(models.collect(), routes, Some(recording.observer())).unwrap()
}

fn routes() -> Vec<Route> {
    let named = [route("hop", &[0, 2], true), route("turns", &[2, 1, 0], true), route("speculate", &[1, 2], true)];
    let alone = [0, 1, 2].map(|m| Route { plugin: None, ..route(&format!("m/{m}"), &[m], m != 1) });
    named.into_iter().chain(alone).collect()
}

fn request(route: u32, seed: u32, max_tokens: u32) -> NewRequest {
    let sampling = SamplingParams { ignore_eos: true, seed: u64::from(seed), ..SamplingParams::greedy() };
    NewRequest { route: RouteId(route), prompt: vec![1, 2, 3 + seed], max_tokens, sampling, return_signals: false }
}

/// Every token, its writer and its evaluation agree, for every request of every route.
#[test]
fn every_token_has_its_evaluation() {
    let directory = tempfile::tempdir().unwrap();
    let recording = Recording::start(setup(directory.path(), settings(1 << 30, 100), 3, routes())).unwrap();
    let engine = engine(&recording);
    let mut answers = BTreeMap::new();
    let streams: Vec<_> = (0..30).map(|i| (i % 6, engine.submit(request(i % 6, i / 6, 20 + i)).unwrap())).collect();
    for (route, mut stream) in streams {
        let mut tokens: Vec<Committed> = Vec::new();
        let handoffs = loop {
            match stream.events.blocking_recv().unwrap() {
                Event::Committed { tokens: more, .. } => tokens.extend(more),
                Event::Finished { reason, handoffs } => {
                    assert_eq!(reason, FinishReason::Length);
                    break handoffs;
                }
                Event::Failed(error) => panic!("{error}"),
            }
        };
        answers.insert(stream.id, (route, tokens, handoffs));
    }
    let cancelled = engine.submit(request(1, 0, 5000)).unwrap().id;
    drop(engine);
    let run = recording.directory().clone();
    drop(recording);

    let manifest = manifest(&run);
    assert_eq!((manifest.stopped.as_deref(), manifest.dropped_rows), (Some("shutdown"), 0));
    assert_eq!(manifest.models.iter().map(|m| m.files.as_str()).collect::<Vec<_>>(), ["m_0", "m_1", "m_2"]);
    let lines: BTreeMap<u64, RequestLine> = lines(&run).into_iter().map(|line| (line.id, line)).collect();
    let mut evaluations: BTreeMap<(i64, usize, i32), Vec<Evaluated>> = BTreeMap::new();
    for row in rows(&run) {
        assert_ne!(row.route, 4, "this route is not recorded");
        match (row.route, row.token_logit) {
            // The simulated runner gives the same number for each signal of a row.
            (0, logit) => assert_eq!(logit, Some(row.entropy)),
            (_, logit) => assert!(logit.is_none_or(f32::is_nan), "{row:?}"),
        }
        evaluations.entry((row.request, row.model, row.position)).or_default().push(row);
    }
    evaluations.values_mut().for_each(|rows| rows.sort_by_key(|row| row.time_us));
    let mut decisions = [0; 4];
    for (id, (route, tokens, handoffs)) in &answers {
        let Some(line) = lines.get(id) else {
            assert_eq!(*route, 4);
            continue;
        };
        let ids: Vec<u32> = tokens.iter().map(|t| t.token).collect();
        let writers: Vec<u32> = tokens.iter().map(|t| t.model.0).collect();
        assert_eq!((line.token_ids.as_ref(), &line.writers), (Some(&ids), &writers));
        assert_eq!((line.route, line.end.as_str(), line.handoffs), (*route, "length", Some(*handoffs)));
        assert_eq!(line.prompt_ids.as_ref().map(Vec::len), Some(3));
        for (position, token) in (0..).zip(tokens) {
            let of = |model: usize| evaluations.get(&(*id as i64, model, position)).map_or(&[][..], Vec::as_slice);
            let by_writer = of(token.model.index());
            // Only drafts that were rejected are evaluated again.
            assert!(*route == 2 || by_writer.len() == 1, "{position}: {by_writer:?}");
            let kept = by_writer.last().unwrap();
            let written = if kept.replacement >= 0 { kept.replacement } else { kept.candidate };
            assert_eq!(written, token.token as i32, "{kept:?}");
            decisions[usize::from(kept.decision)] += 1;
            match route {
                1 => assert_eq!((kept.decision, kept.decision_model), (2, [2, 0, 1][kept.model])),
                2 if token.model.0 == 1 && kept.decision == 1 => {
                    let verified = |row: &Evaluated| row.decision == 3 && row.draft == token.token as i32;
                    // The last tokens of a request are committed without the verifier.
                    assert!(of(2).iter().any(verified) || position + 4 > tokens.len() as i32, "{position}");
                }
                2 => {}
                _ => assert_eq!(kept.decision, 0, "{kept:?}"),
            }
        }
    }
    assert!(decisions[..3].iter().all(|&count| count > 0), "{decisions:?}");
    assert!(evaluations.values().flatten().any(|row| row.decision == 3));
    assert!(matches!(lines[&cancelled].end.as_str(), "cancelled"), "{:?}", lines[&cancelled]);
    assert_eq!(lines.len(), 26);
}

/// Signals of one row that a forward gave.
fn signals() -> (SignalColumns, SignalRequest) {
    let mut columns = SignalColumns::default();
    columns.entropy.push(0.5);
    columns.topk_values.extend((0..VOCAB).map(|i| -(i as f32)));
    columns.topk_ids.extend(0..VOCAB);
    (columns, SignalRequest { scalars: SignalSet::ENTROPY, top_k: VOCAB, token_logits: Vec::new() })
}

/// Tell `observer` of `count` evaluations of request `id`.
fn evaluate(observer: &dyn Observer, id: RequestId, count: u32) {
    let (columns, computed) = signals();
    let requirements = Requirements::default();
    for position in 0..count {
        observer.evaluated(&Evaluation {
            request: id,
            route: RouteId(0),
            model: ModelId(0),
            position,
            candidate: 1,
            logprob: -1.0,
            draft: None,
            decision: Decision::STAY,
            requirements: &requirements,
            nets: &[],
            columns: &columns,
            computed: &computed,
            row: 0,
            hidden: &[1.0],
        });
    }
}

fn serve(recording: &Recording, requests: u64) {
    let observer = recording.observer();
    for id in 0..requests {
        observer.submitted(id, &request(0, 1, 9));
        evaluate(&*observer, id, 30);
        observer.event(id, &Event::Finished { reason: FinishReason::Length, handoffs: 0 });
    }
}

/// Whatever the bound, files never exceed it, and what the manifest names is whole.
#[test]
fn the_bound_is_kept_to_the_byte() {
    let mut ended = BTreeMap::new();
    for max in (0..200_000).step_by(1777) {
        let directory = tempfile::tempdir().unwrap();
        let one = || setup(directory.path(), settings(max, 70), 1, vec![route("r", &[0], true)]);
        let recording = match Recording::start(one()) {
            Ok(recording) => recording,
            Err(StartError::Full { .. }) => {
                assert_eq!(size(directory.path()), 0);
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let run = recording.directory().clone();
        serve(&recording, 10);
        drop(recording);
        assert!(size(directory.path()) <= max, "{} > {max}", size(directory.path()));
        let (manifest, rows) = (manifest(&run), rows(&run));
        let stopped = manifest.stopped.unwrap();
        if stopped == "shutdown" {
            assert_eq!((rows.len(), lines(&run).len()), (300, 10));
        } else {
            // Room for at least one more row or line would have been used: batches have 64 rows.
            assert!(size(directory.path()) + 64 * 600 + 20_000 > max, "{} of {max}", size(directory.path()));
        }
        *ended.entry(stopped).or_insert(0) += 1;
    }
    assert_eq!(ended.keys().collect::<Vec<_>>(), ["max_bytes", "shutdown"], "{ended:?}");
}

/// The bound holds for all runs of a directory together.
#[test]
fn runs_share_the_bound() {
    let directory = tempfile::tempdir().unwrap();
    let max = 400_000;
    let start = || Recording::start(setup(directory.path(), settings(max, 70), 1, vec![route("r", &[0], true)]));
    let mut runs = 0;
    let full = loop {
        match start() {
            Ok(recording) => {
                assert!(recording.directory().ends_with(format!("run-{runs:05}")));
                assert!(start().is_err_and(|e| e.to_string().contains("another server records into")));
                serve(&recording, 10);
            }
            Err(error) => break error.to_string(),
        }
        assert!(size(directory.path()) <= max);
        runs += 1;
    };
    assert!(runs >= 2, "{runs}");
    assert!(full.contains("of earlier runs and record.max_bytes is 400000"), "{full}");
}

/// A recorder whose writer never takes anything.
fn stuck() -> (Recorder, Receiver<Message>) {
    let directory = tempfile::tempdir().unwrap();
    let setup = setup(directory.path(), settings(1 << 30, 1000), 1, vec![route("r", &[0], true)]);
    let shapes = [Shape { hidden: 1, top_k: VOCAB as usize }];
    let (sender, receiver) = bounded(1);
    (Recorder::new(&describe(&setup, &shapes, 0), &shapes, sender), receiver)
}

#[test]
fn a_full_channel_drops_and_counts() {
    let (recorder, receiver) = stuck();
    recorder.submitted(1, &request(0, 1, 9));
    evaluate(&recorder, 1, 300);
    recorder.event(1, &Event::Finished { reason: FinishReason::Length, handoffs: 0 });
    // One batch of 64 waits in the channel, 44 rows in the next batch.
    assert_eq!((recorder.status.dropped_rows(), recorder.status.dropped_requests()), (192, 1));
    recorder.close(Instant::now() + Duration::from_millis(10));
    assert_eq!(recorder.status.dropped_rows(), 236);
    evaluate(&recorder, 1, 300);
    assert_eq!(recorder.status.dropped_rows(), 236, "closed");
    assert!(matches!(receiver.recv().unwrap(), Message::Rows(ModelId(0), rows) if rows.rows() == 64));
    assert!(receiver.try_recv().is_err());
}

#[test]
fn a_runner_that_gives_too_little_is_noticed() {
    let (recorder, _receiver) = stuck();
    let (columns, computed) = signals();
    let requirements = Requirements::default();
    let whole = Evaluation {
        request: 1,
        route: RouteId(0),
        model: ModelId(0),
        position: 0,
        candidate: 1,
        logprob: -1.0,
        draft: None,
        decision: Decision::STAY,
        requirements: &requirements,
        nets: &[],
        columns: &columns,
        computed: &computed,
        row: 0,
        hidden: &[1.0],
    };
    recorder.evaluated(&whole);
    assert_eq!(recorder.status.dropped_rows(), 0);
    recorder.evaluated(&Evaluation { hidden: &[], ..whole });
    recorder.evaluated(&Evaluation { computed: &SignalRequest { top_k: 3, ..computed.clone() }, ..whole });
    recorder.evaluated(&Evaluation { row: 1, ..whole });
    assert_eq!(recorder.status.dropped_rows(), 3);
}

#[test]
fn which_requests_are_recorded() {
    let directory = tempfile::tempdir().unwrap();
    let routes = vec![route("r", &[0], true), route("s", &[0], false)];
    let setup = setup(directory.path(), Settings { sample: 0.3, ..settings(1 << 30, 9) }, 1, routes);
    let recorder = |run| Recorder::new(&describe(&setup, &[Shape::default()], run), &[Shape::default()], bounded(1).0);
    let drawn = |run| -> Vec<u64> { (0..2000).filter(|&id| recorder(run).records(RouteId(0), id)).collect() };
    let first = drawn(0);
    assert!((540..660).contains(&first.len()), "{}", first.len());
    assert_eq!(first, drawn(0));
    assert_ne!(first, drawn(1));
    assert!((0..2000).all(|id| !recorder(0).records(RouteId(1), id) && !recorder(0).records(RouteId(9), id)));
}

fn wait_for(mut is: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if is() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("it never became true");
}

/// A process that is killed leaves what the manifest names, and no reason.
#[test]
fn a_killed_run_can_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let one = || setup(directory.path(), settings(1 << 30, 64), 1, vec![route("r", &[0], true)]);
    let recording = Recording::start(one()).unwrap();
    let run = recording.directory().clone();
    assert_eq!((manifest(&run).rows, rows(&run).len()), (0, 0));
    serve(&recording, 10);
    wait_for(|| manifest(&run).shards.len() == 4);
    assert_eq!((rows(&run).len(), manifest(&run).stopped), (256, None));
    std::mem::forget(recording);
}

#[test]
fn a_disk_that_fails_stops_the_recording_alone() {
    let directory = tempfile::tempdir().unwrap();
    let recording =
        Recording::start(setup(directory.path(), settings(1 << 30, 64), 1, vec![route("r", &[0], true)])).unwrap();
    let observer = recording.observer();
    assert_eq!(observer.wanted(), Wanted { top_k: 100, hidden: true });
    std::fs::remove_dir_all(recording.directory()).unwrap();
    serve(&recording, 10);
    wait_for(|| observer.wanted() == Wanted::default());
    assert!(recording.recorder.status.dropped_rows() >= 64);
    serve(&recording, 10);
}
