//! A server in this process over two of the demo models, with a route under test and one whose text must not
//! change, and the simplest of clients.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokenrouter::api::{AppState, SamplingDefaults, serve};
use tokenrouter::engine::{Engine, ModelSetup, OnError, RouteSetup, StartError};
use tokenrouter::policy::PolicyFactory;
use tokenrouter::policy::monitor::DEFAULT_BUDGET;
use tokenrouter::policy::overrides::{Key, Overrides};
use tokenrouter::request::ModelId;
use tokenrouter::runner::cpu::{CpuRunner, LoadOptions};
use tokenrouter::runner::{ModelInfo, RowBatch, RowOutputs, Runner, RunnerError};
use tokenrouter::text::ModelText;

use crate::support::{library, load};

const MODELS: [&str; 2] = ["small", "large"];
/// More than any of these tests takes on a machine that is not stuck.
const PATIENCE: Duration = Duration::from_secs(100);

fn directory(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("models/demo").join(model)
}

/// A route from `small` to `large`.
pub fn route(name: &str, policy: Arc<dyn PolicyFactory>, settings: Value, on_error: OnError) -> RouteSetup {
    RouteSetup {
        name: name.into(),
        models: vec![(ModelId(0), "slm".into()), (ModelId(1), "llm".into())],
        entry: 0,
        policy,
        settings: settings.to_string(),
        overrides: Overrides::default(),
        on_error,
        budget: DEFAULT_BUDGET,
        excluded: Vec::new(),
        directory: ".".into(),
    }
}

/// The probe as a policy that serves, with more settings.
pub fn probe(name: &str, mut settings: Value, on_error: OnError) -> RouteSetup {
    settings["serve"] = true.into();
    route(name, Arc::new(load(&library("libprobe.so"))), settings, on_error)
}

/// Such a route whose requests may set these settings.
pub fn letting(route: RouteSetup, keys: &[&str], max_variants: usize) -> RouteSetup {
    let keys = keys.iter().map(|key| Key::parse(key).unwrap()).collect();
    RouteSetup { overrides: Overrides { keys, max_variants }, ..route }
}

/// A runner whose signals are all one number.
struct Constant(CpuRunner, f32);

impl Runner for Constant {
    fn info(&self) -> &ModelInfo {
        self.0.info()
    }
    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        let mut outputs = self.0.forward(batch)?;
        let signals = &mut outputs.signals;
        for column in [&mut signals.entropy, &mut signals.entropy_norm, &mut signals.margin] {
            column.fill(self.1);
        }
        Ok(outputs)
    }
}

fn engine(routes: Vec<RouteSetup>, signal: Option<f32>) -> Result<Engine, StartError> {
    let models = MODELS.iter().enumerate().map(|(index, name)| {
        let (model, pages) = (ModelId(index as u32), 256);
        let options = LoadOptions { name: (*name).into(), model, pages, context: None, progress: None };
        let runner = CpuRunner::load(&directory(name), options).unwrap();
        let runner: Box<dyn Runner> = match signal {
            None => Box::new(runner),
            Some(signal) => Box::new(Constant(runner, signal)),
        };
        ModelSetup {
            masked: Vec::new(),
            runner,
            text: Arc::new(ModelText::load(&directory(name)).unwrap().tokenizer),
            min_batch: vec![1],
            max_wait: Duration::from_millis(50),
            hold: Duration::ZERO,
            max_rows: 512,
            prefill_chunk: 256,
            prefix_cache: true,
        }
    });
    let good = Arc::new(load(&library("librstitch.so")));
    let good = route("good", good, json!({ "threshold": 0.03 }), OnError::FailRequest);
    Engine::start(models.collect(), routes.into_iter().chain([good]).collect())
}

/// Why an engine with this route does not start.
pub fn refused(route: RouteSetup) -> String {
    engine(vec![route], None).err().unwrap().to_string()
}

pub struct Server {
    pub engine: Arc<Engine>,
    address: SocketAddr,
    stop: Mutex<Option<tokio::sync::oneshot::Sender<()>>>,
    thread: Option<JoinHandle<()>>,
    /// What `good` and the model `small` say before anything else happens.
    before: [String; 2],
}

impl Server {
    pub fn start(routes: Vec<RouteSetup>) -> Self {
        Self::with_signals(routes, None)
    }

    /// A server whose models give this number for every signal.
    pub fn with_signals(routes: Vec<RouteSetup>, signal: Option<f32>) -> Self {
        let engine = Arc::new(engine(routes, signal).unwrap());
        let texts = MODELS.iter().map(|name| Arc::new(ModelText::load(&directory(name)).unwrap())).collect();
        let defaults = MODELS.iter().map(|_| SamplingDefaults::default()).collect();
        let state = Arc::new(AppState::new(engine.clone(), texts, defaults));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (report, address) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            runtime.unwrap().block_on(async {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                report.send(listener.local_addr().unwrap()).unwrap();
                serve(listener, state, async { drop(stopped.await) }).await.unwrap();
            });
        });
        let address = address.recv().unwrap();
        let before = Default::default();
        let mut server = Self { engine, address, stop: Mutex::new(Some(stop)), thread: Some(thread), before };
        server.before = server.others();
        assert!(server.before.iter().all(|text| !text.is_empty()));
        server
    }

    /// As SIGTERM does.
    pub fn stop(&self) {
        self.stop.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn others(&self) -> [String; 2] {
        ["good", "small"].map(|model| self.text(model))
    }

    /// The server is as it was: other routes give the text that they gave, and nothing is left behind.
    pub fn assert_unharmed(&self) {
        assert_eq!(self.others(), self.before);
        self.until(|| self.engine.live_requests() == 0);
        let left = |model| {
            let board = self.engine.snapshot(ModelId(model));
            (board.ready, board.replicas, board.pages_in_use, board.policy_slots)
        };
        self.until(|| [0, 1].map(left) == [(0, 0, 0, 0); 2]);
    }

    pub fn until(&self, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < PATIENCE, "it does not come to that");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn exchange(&self, request: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        self.exchange(&format!("GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"))
    }

    pub fn get_json(&self, path: &str) -> (u16, Value) {
        let (status, body) = self.get(path);
        (status, serde_json::from_str(&body).unwrap())
    }

    /// A greedy chat of a few tokens at a route or model.
    pub fn chat(&self, model: &str) -> (u16, Value) {
        self.chat_with(model, &json!({}))
    }

    /// The same with settings for the policy.
    pub fn chat_with(&self, model: &str, settings: &Value) -> (u16, Value) {
        let body = json!({"model": model, "temperature": 0, "max_tokens": 12, "ignore_eos": true,
                          "messages": [{"role": "user", "content": "What is 47 * 83?"}],
                          "routing": {"settings": settings}});
        let body = body.to_string();
        let (status, answer) = self.exchange(&format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: \
             {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        ));
        (status, serde_json::from_str(&answer).unwrap())
    }

    /// The text of an answer that must be good, and whole.
    pub fn text(&self, model: &str) -> String {
        let (status, answer) = self.chat(model);
        assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(12)), "{answer}");
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    }

    /// The sum of a counter over the lines that have all of `labels`.
    pub fn counter(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        let (status, text) = self.get("/metrics");
        assert_eq!(status, 200);
        let wanted: Vec<String> = labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        let lines = text.lines().filter(|line| line.starts_with(&format!("tokenrouter_policy_{name}_total{{")));
        let lines = lines.filter(|line| wanted.iter().all(|label| line.contains(label.as_str())));
        let values: Vec<u64> = lines.map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap()).collect();
        assert!(!values.is_empty(), "no {name} with {labels:?} in {text}");
        values.iter().sum()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))), "the server ends well");
    }
}
