//! Every reference trace of `rstitch` and `me`: token for token, model for model, whatever the batch,
//! the schedule, the pool and the chunks.

use serde_json::{Value, json};
use tokenrouter::engine::Engine;
use tokenrouter::request::{FinishReason, ModelId, NewRequest, SamplingParams};

use crate::demo::{Answer, MODELS, Setup, answers, engine, me, root, rstitch};

struct Trace {
    name: String,
    json: Value,
}

fn traces() -> Vec<Trace> {
    let names = (1..=4).map(|i| format!("rstitch-{i}")).chain((1..=3).map(|i| format!("me-{i}")));
    let load = |name: String| {
        let path = root().join(format!("tests/fixtures/goldens/traces/{name}.json"));
        let json = serde_json::from_slice(&std::fs::read(path).expect("a trace")).expect("JSON");
        Trace { name, json }
    };
    names.map(load).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("an array").iter().map(|v| v.as_u64().expect("an id") as u32).collect()
}

/// One route a trace: `me` replays the trace's own draws.
fn engine_for(traces: &[Trace], setup: &Setup) -> Engine {
    let routes: Vec<_> = traces
        .iter()
        .map(|trace| {
            let parameter = &trace.json["parameter"];
            if trace.name.starts_with("rstitch") {
                return rstitch(&trace.name, parameter.as_f64().expect("a threshold"));
            }
            let draws: Vec<&Value> =
                trace.json["steps"].as_array().expect("steps").iter().map(|step| &step["draw"]).collect();
            let weights = json!({"small": parameter[0], "medium": parameter[1], "large": parameter[2]});
            me(&trace.name, json!({"weights": weights, "draws": draws}))
        })
        .collect();
    engine(setup, &routes)
}

fn request(engine: &Engine, trace: &Trace) -> NewRequest {
    NewRequest {
        route: engine.find_route(&trace.name).expect("a route"),
        prompt: ids(&trace.json["prompt_ids"]),
        max_tokens: trace.json["max_new_tokens"].as_u64().expect("a number") as u32,
        sampling: SamplingParams::greedy(),
        return_signals: true,
    }
}

fn assert_same(trace: &Trace, answer: &Answer) {
    let (name, json) = (&trace.name, &trace.json);
    let tokens: Vec<u32> = answer.tokens.iter().map(|t| t.token).collect();
    assert_eq!(tokens, ids(&json["token_ids"]), "{name}: tokens");
    let models: Vec<&str> = answer.tokens.iter().map(|t| MODELS[t.model.index()]).collect();
    let want: Vec<&str> = json["models"].as_array().expect("models").iter().filter_map(Value::as_str).collect();
    assert_eq!(models, want, "{name}: models");
    let reason = match answer.reason {
        FinishReason::Stop(_) => "stop",
        FinishReason::Length => "length",
    };
    assert_eq!(reason, json["finish_reason"], "{name}");
    for (at, (token, step)) in answer.tokens.iter().zip(json["steps"].as_array().expect("steps")).enumerate() {
        let evaluation = step["evaluations"].as_array().and_then(|e| e.last()).expect("an evaluation");
        let signals = token.signals.as_ref().expect("signals were asked for");
        for (signal, field) in [
            ("entropy", "entropy_nats"),
            ("entropy_norm", "entropy_norm"),
            ("top1_prob", "top1_prob"),
            ("margin", "margin"),
        ] {
            let got = signals.iter().find(|(n, _)| *n == signal).expect("every scalar signal").1;
            let want = evaluation[field].as_f64().expect("a number");
            assert!((f64::from(got) - want).abs() <= 1e-4, "{name}, token {at}: {signal} {got}, not {want}");
        }
    }
}

/// All traces at once, and a sampled request of a bare model with them, under `setup`.
fn together(setup: &Setup) -> (Engine, Vec<Answer>) {
    let traces = traces();
    let engine = engine_for(&traces, setup);
    let mut requests: Vec<NewRequest> = traces.iter().map(|trace| request(&engine, trace)).collect();
    requests.push(sampled(&engine, "large", 5));
    let answers = answers(&engine, requests);
    traces.iter().zip(&answers).for_each(|(trace, answer)| assert_same(trace, answer));
    (engine, answers)
}

fn sampled(engine: &Engine, route: &str, seed: u64) -> NewRequest {
    let sampling = SamplingParams { temperature: 1.5, seed, ignore_eos: true, ..SamplingParams::default() };
    let route = engine.find_route(route).expect("a route");
    let prompt = ids(&traces()[0].json["prompt_ids"]);
    NewRequest { route, prompt, max_tokens: 60, sampling, return_signals: false }
}

#[test]
fn traces_alone() {
    let traces = traces();
    let engine = engine_for(&traces, &Setup::default());
    for trace in &traces {
        let answer = answers(&engine, vec![request(&engine, trace)]);
        assert_same(trace, &answer[0]);
    }
}

#[test]
fn traces_in_a_batch_of_eight() {
    let (engine, answers) = together(&Setup::default());
    assert_eq!(answers.len(), 8);
    let counters = engine.snapshot(ModelId(2)).counters;
    assert!(counters.batched > counters.steps, "nothing ran together: {counters:?}");
}

#[test]
fn traces_with_delayed_batches() {
    together(&Setup { min_batch: vec![4], ..Setup::default() });
}

#[test]
fn traces_with_a_pool_that_is_too_small() {
    // The largest request needs 24 pages, eight need far more.
    let (engine, _) = together(&Setup { pages: 25, ..Setup::default() });
    let retracted = |model| {
        let counters = engine.snapshot(ModelId(model)).counters;
        counters.retractions + counters.preemptions
    };
    assert!(retracted(0) > 0 && retracted(2) > 0, "the pool was large enough");
}

#[test]
fn traces_with_chunked_prefill() {
    together(&Setup { prefill_chunk: 16, max_rows: 40, ..Setup::default() });
}

#[test]
fn sampled_text_does_not_depend_on_company() {
    let alone = {
        let engine = engine(&Setup::default(), &[]);
        answers(&engine, vec![sampled(&engine, "large", 5)]).remove(0)
    };
    for setup in [
        Setup::default(),
        Setup { min_batch: vec![4], ..Setup::default() },
        Setup { pages: 25, ..Setup::default() },
        Setup { prefill_chunk: 16, max_rows: 40, ..Setup::default() },
    ] {
        let (_, answers) = together(&setup);
        assert_eq!(answers[7].tokens, alone.tokens, "{setup:?}");
    }
    let other = {
        let engine = engine(&Setup::default(), &[]);
        answers(&engine, vec![sampled(&engine, "large", 6)]).remove(0)
    };
    assert_ne!(other.tokens, alone.tokens, "the seed does nothing");
}
