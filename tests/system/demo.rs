//! The demo family, loaded the way the server loads it.

use std::env::VarError;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokenrouter::engine::{Engine, ModelSetup, OnError, RouteSetup};
use tokenrouter::policy::overrides::Overrides;
use tokenrouter::policy::wasm::WasmPlugin;
use tokenrouter::policy::{PolicyFactory, native, plugin};
use tokenrouter::request::{Committed, Event, FinishReason, ModelId, NewRequest};
use tokenrouter::runner::Runner;
use tokenrouter::runner::cpu::{self, CpuRunner};
use tokenrouter::runner::cuda::{self, CudaRunner, Dtype, Source};
use tokenrouter::runner::model_config::ModelConfig;
use tokenrouter::subserver::gate::Schedule;
use tokenrouter::subserver::observe::Observer;
use tokenrouter::text::ModelText;

pub const MODELS: [&str; 4] = ["small", "medium", "large", "small-collm"];

/// The repository; a test that runs on another machine than it was built on is told where it lies.
pub fn root() -> PathBuf {
    match std::env::var_os("TOKENROUTER_TEST_ROOT") {
        Some(root) => root.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the repository").into(),
    }
}

/// A plugin built beside the test's executable, or in `TOKENROUTER_TEST_PLUGINS`; a module from its text.
pub fn plugin(name: &str) -> Arc<dyn PolicyFactory> {
    let built = || {
        let path = std::env::current_exe().expect("a test has an executable");
        path.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST").to_path_buf()
    };
    let directory = std::env::var_os("TOKENROUTER_TEST_PLUGINS").map_or_else(built, PathBuf::from);
    if let Some(stem) = name.strip_suffix(".wasm") {
        let module = wat::parse_file(root().join("plugins").join(stem).join(stem).with_extension("wat"));
        let loaded = WasmPlugin::from_bytes(module.expect("our own module"), None);
        return Arc::new(loaded.expect("our own module loads"));
    }
    let found = plugin::find(name, &[directory]).expect("built by `cargo xtask test`");
    Arc::new(native::NativePlugin::load(&found, None).expect("our own plugin loads"))
}

/// How the engine is set up; the text must not depend on it.
#[derive(Clone, Debug)]
pub struct Setup {
    pub pages: u32,
    pub min_batch: Vec<u32>,
    pub max_rows: usize,
    pub prefill_chunk: usize,
    pub prefix_cache: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self { pages: 1024, min_batch: vec![1], max_rows: 512, prefill_chunk: 256, prefix_cache: true }
    }
}

/// A route over the demo models; the first of `models` is its entry.
pub struct Route {
    pub name: String,
    pub plugin: &'static str,
    pub settings: serde_json::Value,
    /// Indices into [`MODELS`], with roles.
    pub models: &'static [(u32, &'static str)],
}

/// R-Stitch between small and large.
pub fn rstitch(name: &str, threshold: f64) -> Route {
    let settings = serde_json::json!({ "threshold": threshold });
    Route { name: name.into(), plugin: "rstitch", settings, models: &[(0, "slm"), (2, "llm")] }
}

/// The ensemble of all three models.
pub fn me(name: &str, settings: serde_json::Value) -> Route {
    Route { name: name.into(), plugin: "me", settings, models: &[(0, "small"), (1, "medium"), (2, "large")] }
}

/// A policy between a small model and `large`.
pub fn pair(name: &str, plugin: &'static str, settings: serde_json::Value) -> Route {
    let models: &[_] = if plugin == "collm" { &[(3, "slm"), (2, "llm")] } else { &[(0, "slm"), (2, "llm")] };
    Route { name: name.into(), plugin, settings, models }
}

/// A model on the CPU or, with `TOKENROUTER_TEST_DEVICE=cuda`, in f32 on the first CUDA device.
fn runner(name: &str, directory: &Path, model: ModelId, setup: &Setup) -> Box<dyn Runner> {
    let (name, pages) = (name.to_owned(), setup.pages);
    match std::env::var("TOKENROUTER_TEST_DEVICE").as_deref() {
        Err(VarError::NotPresent) | Ok("cpu") => {
            let options = cpu::LoadOptions { name, model, pages, context: None, progress: None };
            Box::new(CpuRunner::load(directory, options).expect("a demo model loads"))
        }
        Ok("cuda") => {
            let options = cuda::LoadOptions {
                name,
                model,
                ordinal: 0,
                dtype: Dtype::F32,
                pages,
                max_rows: setup.max_rows as u32,
                partition: None,
                graphs: true,
                high_priority: false,
                progress: None,
            };
            let config = ModelConfig::load(directory, None).expect("a demo model's configuration");
            CudaRunner::load(config, Source::Directory(directory), options).expect("a demo model loads")
        }
        other => panic!("TOKENROUTER_TEST_DEVICE is {other:?}; give \"cpu\" or \"cuda\""),
    }
}

/// An engine over the demo models with `routes`.
pub fn engine(setup: &Setup, routes: &[Route]) -> Engine {
    observed(setup, routes, None)
}

/// [`engine`], with an observer.
pub fn observed(setup: &Setup, routes: &[Route], observer: Option<Arc<dyn Observer>>) -> Engine {
    let models = MODELS.iter().enumerate().map(|(index, name)| {
        let directory = root().join("models/demo").join(name);
        let model = ModelId(index as u32);
        ModelSetup {
            masked: Vec::new(),
            runner: runner(name, &directory, model, setup),
            text: Arc::new(ModelText::load(&directory).expect("its tokenizer loads").tokenizer),
            min_batch: setup.min_batch.clone(),
            max_wait: Duration::from_millis(50),
            hold: Duration::ZERO,
            max_rows: setup.max_rows,
            prefill_chunk: setup.prefill_chunk,
            prefix_cache: setup.prefix_cache,
        }
    });
    let routes = routes.iter().map(|route| RouteSetup {
        name: route.name.clone(),
        models: route.models.iter().map(|&(model, role)| (ModelId(model), role.to_owned())).collect(),
        entry: 0,
        policy: plugin(route.plugin),
        settings: route.settings.to_string(),
        overrides: Overrides::default(),
        on_error: OnError::FailRequest,
        budget: tokenrouter::policy::monitor::DEFAULT_BUDGET,
        excluded: Vec::new(),
        directory: root(),
    });
    Engine::start_observed(models.collect(), routes.collect(), Schedule::default(), observer)
        .expect("the engine starts")
}

/// A finished request.
#[derive(Clone, Debug)]
pub struct Answer {
    pub tokens: Vec<Committed>,
    pub reason: FinishReason,
    /// Tokens of the prompt whose K/V came from the cache.
    pub cached: u32,
}

/// Run requests at once, each on its own thread.
pub fn answers(engine: &Engine, requests: Vec<NewRequest>) -> Vec<Answer> {
    let streams: Vec<_> = requests.into_iter().map(|r| engine.submit(r).expect("accepted")).collect();
    let read = |mut stream: tokenrouter::engine::RequestStream| {
        let (mut ledger, mut cached) = (tokenrouter::request::Ledger::default(), 0);
        loop {
            match stream.events.blocking_recv().map(|told| told.event) {
                Some(Event::Committed { start, tokens }) => drop(ledger.enter(start, tokens).expect("one history")),
                Some(Event::PromptCached { tokens }) => cached = tokens,
                Some(Event::Finished { reason, .. }) => {
                    return Answer { tokens: ledger.tokens().to_vec(), reason, cached };
                }
                other => panic!("{other:?}"),
            }
        }
    };
    streams.into_iter().map(read).collect()
}
