//! A server whose two models recite a given answer.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response};
use axum::response::IntoResponse;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokenrouter_plugin_api::random::uniform;
use tokenrouter_plugin_api::{Context, Decision, Policy, PolicyError, RouteBatch};
use tower::ServiceExt;

use super::openapi::{check, check_events};
use crate::api::{AppState, SamplingDefaults, router};
use crate::engine::{Engine, ModelSetup, OnError, RouteSetup};
use crate::policy::Linked;
use crate::policy::monitor::DEFAULT_BUDGET;
use crate::policy::overrides::Overrides;
use crate::request::{ModelId, Score, TokenId};
use crate::runner::{Columns, ModelInfo, RowBatch, RowOutputs, Runner, RunnerError, Sample};
use crate::text::tokenizer_fixtures::{demo, demo_directory};
use crate::text::{ModelText, Tokenizer};

pub const END: TokenId = 2047;

/// The last position of the answer to a request with `seed`, where seeds give lengths.
fn length_of(seed: u64, most: usize) -> usize {
    (uniform(seed, 0, 1 << 20) * most as f64) as usize
}

/// Says `script` whatever the prompt, then the end token for ever.
struct Reciter {
    info: ModelInfo,
    script: Arc<Vec<TokenId>>,
    /// Answer position at which the logits are not finite.
    breaks_at: Option<usize>,
    /// The only request of which that is so, by its seed.
    breaks_seed: Option<u64>,
    lengths_by_seed: bool,
    /// Answer position at which the runner can compute nothing any more.
    lost_at: Option<usize>,
    pause: Duration,
}

impl Runner for Reciter {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        std::thread::sleep(self.pause);
        let mut out = RowOutputs::default();
        for rows in &batch.sequences {
            for at in rows.scored_positions() {
                let listed = rows.sampling.listed_logprobs.iter().map(|&id| (id, -2.5));
                let top = rows.sampling.prompt_logprobs.map_or(0, |wanted| wanted.top) as usize;
                let best = [(7, -0.125), (8, -0.5)].into_iter().take(top);
                let (logprob, rank) = (-(at as f32) - 1.0, 3);
                out.scores.push(Some(Score { logprob, rank, top_logprobs: best.chain(listed).collect() }));
            }
            for row in rows.end - rows.sampled..rows.end {
                let position = row + 1 - rows.prompt_len;
                if self.lost_at == Some(position) {
                    return Err(RunnerError::fatal("the device is gone"));
                }
                let seed = rows.sampling.seed;
                let ended = self.lengths_by_seed && position > length_of(seed, self.script.len());
                let token = self.script.get(position).copied().filter(|_| !ended).unwrap_or(END);
                let top = [(token, -0.25), (0, f32::NEG_INFINITY)];
                let listed = rows.sampling.listed_logprobs.iter().map(|&id| (id, -1.5));
                let wanted = rows.sampling.top_logprobs.unwrap_or(0) as usize;
                out.samples.push(Sample {
                    token,
                    logprob: -0.25,
                    top_logprobs: top.into_iter().take(wanted).chain(listed).collect(),
                    finite: self.breaks_at != Some(position) || self.breaks_seed.is_some_and(|other| other != seed),
                });
            }
        }
        let rows = out.samples.len();
        let column = || vec![0.5; rows];
        out.signals = Columns { entropy: column(), top1_prob: column(), ..Columns::default() };
        Ok(out)
    }
}

/// Hands the request over after every token.
struct PingPong(u32);

impl Policy for PingPong {
    const NAME: &'static str = "ping-pong";

    fn create(context: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self(1 - context.model))
    }

    fn route(&mut self, _: &RouteBatch<'_>, out: &mut [Decision]) {
        out.fill(Decision::to(self.0));
    }
}

pub struct Server {
    pub state: Arc<AppState>,
    pub tokenizer: Tokenizer,
}

#[derive(Default)]
pub struct Options {
    pub breaks_at: Option<usize>,
    pub breaks_seed: Option<u64>,
    /// Said instead of the text's own tokens.
    pub script: Option<Vec<TokenId>>,
    /// Answers end early, where depends on the seed.
    pub lengths_by_seed: bool,
    /// Pages of each model's pool, instead of enough.
    pub pages: Option<u32>,
    /// Ends answers at model `large`, besides [`END`].
    pub large_end: Option<TokenId>,
    /// Answer position at which model `large` goes down.
    pub large_lost_at: Option<usize>,
    pub pause: Duration,
    /// Instead of the demo model's.
    pub text: Option<ModelText>,
}

impl Server {
    /// Both models say `text`.
    pub fn saying(text: &str) -> Self {
        Self::with(text, Options::default())
    }

    pub fn with(text: &str, options: Options) -> Self {
        let tokenizer = demo();
        let script = Arc::new(options.script.unwrap_or_else(|| tokenizer.encode(text).unwrap()));
        let model = |name: &str| ModelSetup {
            masked: vec![],
            runner: Box::new(Reciter {
                info: ModelInfo {
                    name: name.into(),
                    description: "recites".into(),
                    vocab_size: 2048,
                    hidden_size: 1,
                    context: 256,
                    eos: options.large_end.filter(|_| name == "large").into_iter().chain([END]).collect(),
                    pages: options.pages.unwrap_or(1024),
                    weight_bytes: 0,
                    page_bytes: 0,
                },
                script: Arc::clone(&script),
                breaks_at: options.breaks_at,
                breaks_seed: options.breaks_seed,
                lengths_by_seed: options.lengths_by_seed,
                lost_at: options.large_lost_at.filter(|_| name == "large"),
                pause: options.pause,
            }),
            text: Arc::new(demo()),
            min_batch: vec![1],
            max_wait: Duration::from_millis(1),
            hold: Duration::ZERO,
            max_rows: 512,
            prefill_chunk: 256,
            prefix_cache: true,
        };
        let route = RouteSetup {
            name: "pair".into(),
            models: vec![(ModelId(0), "slm".into()), (ModelId(1), "llm".into())],
            entry: 0,
            policy: Arc::new(Linked::<PingPong>::default()),
            settings: "{}".into(),
            overrides: Overrides::default(),
            on_error: OnError::FailRequest,
            budget: DEFAULT_BUDGET,
            excluded: vec![],
            directory: ".".into(),
        };
        let engine = Engine::start(vec![model("small"), model("large")], vec![route]).unwrap();
        let text = Arc::new(options.text.unwrap_or_else(|| ModelText::load(&demo_directory()).unwrap()));
        let defaults = vec![SamplingDefaults::default(); 2];
        let mut state = AppState::new(Arc::new(engine), vec![text.clone(), text], defaults);
        if !options.pause.is_zero() {
            state.keep_alive = options.pause / 4;
        }
        Self { state: Arc::new(state), tokenizer }
    }

    pub async fn send(&self, request: Request<Body>) -> Response<Body> {
        let response = router(Arc::clone(&self.state)).oneshot(request).await;
        response.into_response()
    }

    pub async fn post(&self, path: &str, body: Value) -> Response<Body> {
        self.send(post(path, body.to_string())).await
    }

    /// Status and JSON of an answer, which is as the document of the interface says.
    pub async fn json(&self, path: &str, body: Value) -> (u16, Value) {
        let (status, json) = json_of(self.post(path, body).await).await;
        check("post", path, status, &json);
        (status, json)
    }

    /// JSON of an answer that must be good.
    pub async fn ok(&self, path: &str, body: Value) -> Value {
        let (status, json) = self.json(path, body).await;
        assert_eq!(status, 200, "{json}");
        json
    }

    /// Events of a stream that must be good, without the last `[DONE]`.
    pub async fn events(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = true.into();
        let response = self.post(path, body).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        assert_eq!(response.headers()["cache-control"], "no-cache");
        let text = text_of(response).await;
        let mut events: Vec<&str> = text.split_terminator("\n\n").filter(|event| !event.starts_with(':')).collect();
        assert_eq!(events.pop(), Some("data: [DONE]"));
        let data = events.iter().map(|event| event.strip_prefix("data: ").unwrap());
        let events: Vec<Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
        check_events(path, &events);
        events
    }

    /// Wait until no request lives.
    pub async fn idle(&self) {
        while self.state.engine.live_requests() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

pub fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).header("content-type", "application/json").body(body.into()).unwrap()
}

pub async fn text_of(response: Response<Body>) -> String {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

pub async fn json_of(response: Response<Body>) -> (u16, Value) {
    let status = response.status().as_u16();
    (status, serde_json::from_str(&text_of(response).await).unwrap())
}

/// A chat request at both models, greedy.
pub fn chat() -> Value {
    json!({"model": "pair", "messages": [{"role": "user", "content": "Hi"}]})
}

pub fn completion() -> Value {
    json!({"model": "pair", "prompt": "Hi", "max_tokens": 200})
}

/// Samples of GET /metrics, by name and labels as written.
pub async fn scrape(server: &Server) -> std::collections::BTreeMap<String, f64> {
    let response = server.send(Request::get("/metrics").body(Body::empty()).unwrap()).await;
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let text = text_of(response).await;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap();
        (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("{line}")))
    };
    lines.map(sample).collect()
}
