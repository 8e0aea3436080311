//! What a token costs outside of its model: 64 streams over the whole HTTP interface, with a model whose steps compute
//! nothing. CPU time by thread, so that neither the clients nor other programs count.
//!
//! `taskset -c 0 cargo bench --bench http` has all threads on one core.

#![allow(clippy::expect_used)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;
use tokenrouter::api::{AppState, SamplingDefaults, serve};
use tokenrouter::engine::{Engine, ModelSetup};
use tokenrouter::request::TokenId;
use tokenrouter::runner::{ModelInfo, RowBatch, RowOutputs, Runner, RunnerError, Sample};
use tokenrouter::text::ModelText;
use tokio::net::{TcpListener, TcpStream};

const STREAMS: usize = 64;
const TOKENS: usize = 1000;
const TEXT: &str =
    "The total is 47 times 83, so first 40 times 83 makes 3320, and 7 times 83 makes 581. Together: 3901.\n";

/// Says a text again and again.
struct Reciter {
    info: ModelInfo,
    script: Vec<TokenId>,
    pause: Duration,
}

impl Runner for Reciter {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        if !self.pause.is_zero() {
            std::thread::sleep(self.pause);
        }
        let mut samples = Vec::new();
        for rows in &batch.sequences {
            let sampled = rows.end - rows.sampled..rows.end;
            samples.extend(sampled.map(|row| Sample {
                token: self.script[(row + 1 - rows.prompt_len) % self.script.len()],
                logprob: -0.25,
                top_logprobs: Vec::new(),
                finite: true,
            }));
        }
        Ok(RowOutputs { samples, ..RowOutputs::default() })
    }
}

fn engine(text: &ModelText, pause: Duration) -> Engine {
    let script = text.tokenizer.encode(TEXT).expect("the text has tokens");
    let info = ModelInfo {
        name: "m".into(),
        description: "recites".into(),
        vocab_size: 2048,
        hidden_size: 1,
        context: 4096,
        eos: vec![2047],
        pages: 1 << 16,
        weight_bytes: 0,
        page_bytes: 0,
    };
    let model = ModelSetup {
        runner: Box::new(Reciter { info, script, pause }),
        text: Arc::new(ModelText::load(&directory()).expect("a tokenizer").tokenizer),
        min_batch: vec![1],
        max_wait: Duration::ZERO,
        hold: Duration::ZERO,
        max_rows: 4096,
        prefill_chunk: 4096,
        prefix_cache: true,
        masked: Vec::new(),
    };
    Engine::start(vec![model], Vec::new()).expect("the engine starts")
}

fn directory() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/small")
}

async fn stream(address: SocketAddr) -> usize {
    let body = json!({"model": "m", "stream": true, "max_tokens": TOKENS, "ignore_eos": true,
        "messages": [{"role": "user", "content": "What is 47 * 83?"}]})
    .to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let connection = TcpStream::connect(address).await.expect("connected");
    let request = head + &body;
    connection.writable().await.expect("writable");
    assert_eq!(connection.try_write(request.as_bytes()).expect("sent"), request.len());
    let (mut buffer, mut bytes) = (vec![0; 1 << 16], 0);
    loop {
        connection.readable().await.expect("readable");
        match connection.try_read(&mut buffer) {
            Ok(0) => return bytes,
            Ok(more) => bytes += more,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
    }
}

/// Nanoseconds on a core, by the names of the threads.
fn run_times() -> BTreeMap<String, u64> {
    let mut times = BTreeMap::new();
    for task in std::fs::read_dir("/proc/self/task").expect("Linux").flatten() {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let ran = read("schedstat").split(' ').next().and_then(|nanos| nanos.parse().ok()).unwrap_or(0);
        *times.entry(read("comm").trim().to_owned()).or_default() += ran;
    }
    times
}

fn measure(title: &str, pause: Duration) {
    let text = Arc::new(ModelText::load(&directory()).expect("a tokenizer"));
    let engine = Arc::new(engine(&text, pause));
    let state = Arc::new(AppState::new(engine, vec![text], vec![SamplingDefaults::default()]));
    let server = tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("http").enable_all().build();
    let server = server.expect("a runtime");
    let listener = server.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
    let address = listener.local_addr().expect("an address");
    server.spawn(serve(listener, state, std::future::pending()));
    let (done, wait) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let (before, began) = (run_times(), Instant::now());
    let client = std::thread::Builder::new().name("client".into()).spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let bytes = runtime.block_on(async {
            let streams: Vec<_> = (0..STREAMS).map(|_| tokio::spawn(stream(address))).collect();
            let mut bytes = 0;
            for stream in streams {
                bytes += stream.await.expect("a whole answer");
            }
            bytes
        });
        done.send(bytes).expect("the bench waits");
        // Its time is read while it lives.
        let _ = ended.recv();
    });
    let client = client.expect("a thread");
    let bytes = wait.recv().expect("the client ends");
    let (wall, after) = (began.elapsed(), run_times());
    drop(end);
    client.join().expect("the client ends well");
    let tokens = (STREAMS * TOKENS) as f64;
    let of = |name: &str| {
        let spent = after.get(name).copied().unwrap_or(0) - before.get(name).copied().unwrap_or(0);
        spent as f64 / 1e3 / tokens
    };
    let (http, deliver, model) = (of("http"), of("deliver"), of("model-m"));
    println!("{title}: {:.1} µs a token outside of the model", http + deliver);
    println!("  http {http:.1}, delivery {deliver:.1}; scheduler {model:.1}, client {:.1} µs", of("client"));
    println!("  {:.0} tokens/s, {:.0} bytes a token", tokens / wall.as_secs_f64(), bytes as f64 / tokens);
}

fn main() {
    measure("steps without a pause", Duration::ZERO);
    measure("steps of 5 ms", Duration::from_millis(5));
}
