//! Every reference trace of every algorithm: token for token, model for model, evaluation for
//! evaluation, whatever the batch, the schedule, the pool, the chunks and the prefix cache.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use serde_json::{Value, json};
use tokenrouter::engine::Engine;
use tokenrouter::request::{Event, FinishReason, ModelId, NewRequest, RequestId, SamplingParams, TokenId};
use tokenrouter::runner::PAGE_TOKENS;
use tokenrouter::subserver::Counters;
use tokenrouter::subserver::observe::{Evaluation, Observer, Wanted};
use tokenrouter_plugin_api::SignalSet;

use crate::demo::{Answer, MODELS, Route, Setup, answers, engine, me, observed, pair, root};

/// GlimpRouter's signal is made of this many logits.
const TOP: usize = 20;

struct Trace {
    name: String,
    algorithm: String,
    json: Value,
}

fn traces() -> Vec<Trace> {
    let directory = root().join("tests/fixtures/goldens/traces");
    let mut paths: Vec<_> =
        std::fs::read_dir(directory).expect("traces").map(|e| e.expect("an entry").path()).collect();
    paths.sort();
    let load = |path: std::path::PathBuf| {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let json: Value = serde_json::from_slice(&std::fs::read(path).expect("a trace")).expect("JSON");
        Trace { name, algorithm: json["algorithm"].as_str().expect("an algorithm").to_owned(), json }
    };
    paths.into_iter().map(load).collect()
}

impl Trace {
    /// A route with the trace's own parameter.
    fn route(&self) -> Route {
        let (name, parameter) = (&self.name, &self.json["parameter"]);
        let router = |kind: &str| format!("models/demo/routers/{kind}/router.safetensors");
        match self.algorithm.as_str() {
            "r2r" => pair(name, "r2r", json!({"router": router("r2r"), "threshold": parameter})),
            "citer" => pair(name, "citer", json!({"router": router("citer"), "threshold": parameter})),
            "collm" => pair(name, "collm", json!({"threshold": parameter})),
            "collm-linear" => pair(name, "collm", json!({"threshold": parameter, "schedule": "linear"})),
            "rstitch" => pair(name, "rstitch", json!({"threshold": parameter})),
            "glimprouter" => pair(name, "glimprouter", json!({"threshold": parameter})),
            "me" => {
                let weights = json!({"small": parameter[0], "medium": parameter[1], "large": parameter[2]});
                me(name, json!({"weights": weights, "generator": "python"}))
            }
            other => panic!("{name}: no route for {other}"),
        }
    }

    fn request(&self, engine: &Engine) -> NewRequest {
        let seed = self.json["seed"].as_u64().unwrap_or(0);
        NewRequest {
            route: engine.find_route(&self.name).expect("a route"),
            prompt: ids(&self.json["prompt_ids"]),
            max_tokens: self.json["max_new_tokens"].as_u64().expect("a number") as u32,
            sampling: SamplingParams { seed, ..SamplingParams::greedy() },
            return_signals: false,
            cache_salt: None,
        }
    }

    /// What the policy compared, from what was observed.
    fn score(&self, seen: &Seen) -> f64 {
        let signal = |name: &str| f64::from(seen.signals[name]);
        match self.algorithm.as_str() {
            "r2r" => signal("net_r2r"),
            "citer" => signal("net_citer"),
            "collm" | "collm-linear" => 1.0 / (1.0 + (-signal("token_logit_2048")).exp()),
            "rstitch" => signal("entropy_norm"),
            "glimprouter" => seen.entropy_of_top,
            other => panic!("{other} compares nothing"),
        }
    }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("an array").iter().map(|v| v.as_u64().expect("an id") as u32).collect()
}

/// One evaluation as it was observed.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    candidate: TokenId,
    signals: BTreeMap<String, f32>,
    entropy_of_top: f64,
}

type Place = (u32, &'static str);

/// Keeps all evaluations, by request, position and model.
#[derive(Default)]
struct Watch(Mutex<BTreeMap<RequestId, BTreeMap<Place, Seen>>>);

impl Observer for Watch {
    fn wanted(&self) -> Wanted {
        Wanted { scalars: SignalSet::ALL, top_k: TOP as u32, hidden: false }
    }

    fn evaluated(&self, e: &Evaluation<'_>) {
        let signals = e.named_signals().into_iter().map(|(name, value)| (name.into_owned(), value)).collect();
        let width = e.computed.top_k as usize;
        let top = e.columns.topk_values[e.row * width..][..TOP].iter().map(|&v| f64::from(v));
        let sum: f64 = top.clone().map(f64::exp).sum();
        let entropy_of_top = top.map(|v| -(v.exp() / sum) * (v - sum.ln())).sum();
        let seen = Seen { candidate: e.candidate, signals, entropy_of_top };
        let mut requests = self.0.lock().expect("not poisoned");
        let place = (e.position, MODELS[e.model.index()]);
        // Policies rely on it: whoever is preempted is computed again, but not asked again.
        let before = requests.entry(e.request).or_default().insert(place, seen);
        assert_eq!(before, None, "two evaluations at {place:?} of request {}", e.request);
    }

    fn submitted(&self, _: RequestId, _: &NewRequest) {}
    fn event(&self, _: RequestId, _: &Event) {}
    fn cancelled(&self, _: RequestId) {}
}

fn assert_same(trace: &Trace, answer: &Answer, seen: &BTreeMap<Place, Seen>) {
    let (name, json) = (&trace.name, &trace.json);
    let tokens: Vec<u32> = answer.tokens.iter().map(|t| t.token).collect();
    assert_eq!(tokens, ids(&json["token_ids"]), "{name}: tokens");
    let models: Vec<&str> = answer.tokens.iter().map(|t| MODELS[t.model.index()]).collect();
    let want: Vec<&str> = json["models"].as_array().expect("models").iter().filter_map(Value::as_str).collect();
    assert_eq!(models, want, "{name}: models");
    let reason = match answer.reason {
        FinishReason::Stop(_) | FinishReason::Complete => "stop",
        FinishReason::Length => "length",
    };
    assert_eq!(reason, json["finish_reason"], "{name}");
    let mut expected = 0;
    for (position, step) in json["steps"].as_array().expect("steps").iter().enumerate() {
        for want in step["evaluations"].as_array().expect("evaluations") {
            expected += 1;
            let model = want["model"].as_str().expect("a model");
            let at = format!("{name}, token {position}, {model}");
            let place = seen.keys().find(|place| **place == (position as u32, model));
            let seen = &seen[place.unwrap_or_else(|| panic!("{at}: was not evaluated"))];
            assert_eq!(Some(u64::from(seen.candidate)), want["candidate"].as_u64(), "{at}: candidate");
            let compare = |what: &str, got: f64, want: &Value| {
                let want = want.as_f64().expect("a number");
                assert!((got - want).abs() <= 1e-4, "{at}: {what} is {got}, not {want}");
            };
            for (signal, field) in [
                ("entropy", "entropy_nats"),
                ("entropy_norm", "entropy_norm"),
                ("top1_prob", "top1_prob"),
                ("margin", "margin"),
            ] {
                compare(signal, f64::from(seen.signals[signal]), &want[field]);
            }
            compare("entropy_top20", seen.entropy_of_top, &want["entropy_top20"]);
            if want.get("score").is_some() {
                compare("score", trace.score(seen), &want["score"]);
            }
        }
    }
    assert_eq!(seen.len(), expected, "{name}: evaluations that the reference does not need");
}

/// An engine with a route for each trace.
struct Bench {
    setup: Setup,
    engine: Engine,
    traces: Vec<Trace>,
    watch: Arc<Watch>,
}

impl Bench {
    fn new(setup: Setup) -> Self {
        let traces = traces();
        assert_eq!(traces.len(), 24);
        Self::of(setup, traces, Trace::route)
    }

    fn of(setup: Setup, traces: Vec<Trace>, route: impl FnMut(&Trace) -> Route) -> Self {
        let routes: Vec<Route> = traces.iter().map(route).collect();
        let watch = Arc::new(Watch::default());
        let engine = observed(&setup, &routes, Some(watch.clone()));
        Self { setup, engine, traces, watch }
    }

    /// All traces at once, and a sampled request of a bare model with them. That one's text must be the same
    /// as without company. Returns how many tokens of each trace's prompt came from the cache.
    fn together(&self) -> Vec<u32> {
        let Self { setup, engine, traces, watch } = self;
        let mut requests: Vec<NewRequest> = traces.iter().map(|trace| trace.request(engine)).collect();
        requests.push(sampled(engine, "large", 5));
        let answers = answers(engine, requests);
        let watched = std::mem::take(&mut *watch.0.lock().expect("not poisoned"));
        // Requests are numbered as they are submitted.
        for ((trace, answer), seen) in traces.iter().zip(&answers).zip(watched.values()) {
            assert_same(trace, answer, seen);
        }
        static ALONE: OnceLock<Answer> = OnceLock::new();
        let alone = ALONE.get_or_init(|| sampled_alone(5));
        assert_eq!(answers[traces.len()].tokens, alone.tokens, "{setup:?}");
        answers[..traces.len()].iter().map(|answer| answer.cached).collect()
    }

    /// All traces, one after the other.
    fn alone(&self) -> Vec<u32> {
        let one = |trace: &Trace| {
            let answer = answers(&self.engine, vec![trace.request(&self.engine)]).remove(0);
            let seen = self.watch.0.lock().expect("not poisoned").pop_last().expect("a request").1;
            assert_same(trace, &answer, &seen);
            answer.cached
        };
        self.traces.iter().map(one).collect()
    }

    /// What a cache that keeps everything has of a prompt that it knows: all whole pages before its last token.
    fn all_cached(&self) -> Vec<u32> {
        let pages = |trace: &Trace| (ids(&trace.json["prompt_ids"]).len() - 1) / PAGE_TOKENS * PAGE_TOKENS;
        self.traces.iter().map(|trace| pages(trace) as u32).collect()
    }

    fn counters(&self, model: u32) -> Counters {
        self.engine.snapshot(ModelId(model)).counters
    }
}

fn sampled_alone(seed: u64) -> Answer {
    let engine = engine(&Setup::default(), &[]);
    answers(&engine, vec![sampled(&engine, "large", seed)]).remove(0)
}

fn sampled(engine: &Engine, route: &str, seed: u64) -> NewRequest {
    let sampling = SamplingParams { temperature: 1.5, seed, ignore_eos: true, ..SamplingParams::default() };
    let route = engine.find_route(route).expect("a route");
    let prompt = ids(&traces()[0].json["prompt_ids"]);
    NewRequest { route, prompt, max_tokens: 60, sampling, return_signals: false, cache_salt: None }
}

#[test]
fn traces_alone() {
    let bench = Bench::new(Setup::default());
    bench.alone();
    assert_eq!(bench.alone(), bench.all_cached());
}

/// R-Stitch as a WASM policy gives the traces of R-Stitch.
#[test]
fn traces_of_a_wasm_policy() {
    let traces: Vec<Trace> = traces().into_iter().filter(|trace| trace.algorithm == "rstitch").collect();
    assert!(traces.len() > 1);
    let route = |trace: &Trace| Route { plugin: "rstitch.wasm", ..trace.route() };
    let bench = Bench::of(Setup::default(), traces, route);
    bench.alone();
    bench.together();
}

#[test]
fn traces_of_all_algorithms_in_one_batch() {
    let bench = Bench::new(Setup::default());
    bench.together();
    let counters = bench.counters(2);
    assert!(counters.batched > counters.steps, "nothing ran together: {counters:?}");
    assert_eq!(bench.together(), bench.all_cached());
    // Answers are kept as well, so that the models that are asked later find them.
    let (before, after) = (counters, bench.counters(2));
    let found = after.prefix_found - before.prefix_found;
    let queried = after.prefix_queried - before.prefix_queried;
    assert!(found * 10 > queried * 8, "found {found} tokens of {queried}");
}

#[test]
fn traces_without_a_prefix_cache() {
    let bench = Bench::new(Setup { prefix_cache: false, ..Setup::default() });
    for _ in 0..2 {
        assert_eq!(bench.together(), [0; 24]);
    }
    assert_eq!((bench.counters(0).prefix_queried, bench.engine.snapshot(ModelId(0)).pages_cached), (0, 0));
}

#[test]
fn traces_with_delayed_batches() {
    Bench::new(Setup { min_batch: vec![4], ..Setup::default() }).together();
}

#[test]
fn traces_with_a_pool_that_is_too_small() {
    // The largest request needs 30 pages, all together need far more.
    let bench = Bench::new(Setup { pages: 31, ..Setup::default() });
    for _ in 0..2 {
        bench.together();
    }
    for model in [0, 2] {
        let counters = bench.counters(model);
        assert!(counters.retractions + counters.preemptions > 0, "the pool was large enough: {counters:?}");
        assert!(counters.prefix_found > 0 && counters.prefix_evicted > 0, "the cache had no work: {counters:?}");
    }
}

#[test]
fn traces_with_a_cache_that_keeps_nothing_for_long() {
    let bench = Bench::new(Setup { pages: 31, ..Setup::default() });
    bench.alone();
    let (before, cached) = (bench.counters(2).prefix_evicted, bench.alone());
    let (cached, all): (u32, u32) = (cached.iter().sum(), bench.all_cached().iter().sum());
    assert!(cached < all && bench.counters(2).prefix_evicted > before + 24, "{cached} of {all}");
}

#[test]
fn traces_with_chunked_prefill() {
    let bench = Bench::new(Setup { prefill_chunk: 16, max_rows: 40, ..Setup::default() });
    bench.together();
    assert_eq!(bench.together(), bench.all_cached());
}

#[test]
fn sampled_text_depends_on_the_seed() {
    assert_eq!(sampled_alone(5).tokens, sampled_alone(5).tokens);
    assert_ne!(sampled_alone(6).tokens, sampled_alone(5).tokens);
}
