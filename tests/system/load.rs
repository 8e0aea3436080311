//! 64 streaming clients over HTTP, 1,000 of whose requests are broken off at random: all others get
//! their whole answer, and nothing is left behind.

use std::collections::HashMap;
use std::io::Read;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokenrouter::engine::Engine;
use tokenrouter::request::ModelId;
use tokenrouter_plugin_api::random::uniform;

use crate::demo::{MODELS, Setup, engine, me, rstitch};
use crate::http::{scrape, send, start};

const CLIENTS: usize = 64;
const DISCONNECTS: usize = 1000;
const PROMPTS: [&str; 3] = ["What is 47 * 83?", "What is 1127 / 23?", "What is 905 - 278 + 14?"];
const ROUTES: [&str; 4] = ["rstitch", "me", "small", "large"];

fn routed(setup: &Setup) -> Engine {
    let weights = json!({"weights": {"small": 0.5, "medium": 0.3, "large": 0.2}});
    engine(setup, &[rstitch("rstitch", 0.03), me("me", weights)])
}

/// The text of a stream that must end well.
pub fn text(stream: &mut TcpStream) -> String {
    let mut raw = String::new();
    stream.read_to_string(&mut raw).expect("the stream ends");
    written(&raw)
}

/// The text of an answer that must be a stream with a good end.
pub fn written(raw: &str) -> String {
    assert!(raw.starts_with("HTTP/1.1 200"), "{raw}");
    assert!(raw.contains("data: [DONE]"), "a stream without an end: {raw}");
    let events = raw.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let delta = |data: &str| -> String {
        let chunk: Value = serde_json::from_str(data).expect("JSON");
        assert!(chunk.get("error").is_none(), "{chunk}");
        chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()
    };
    events.map(delta).collect()
}

pub fn body(route: &str, prompt: &str) -> Value {
    json!({"model": route, "stream": true, "temperature": 0, "seed": 1, "max_tokens": 40,
           "messages": [{"role": "user", "content": prompt}]})
}

#[test]
fn nothing_is_left_behind() {
    // A pool that is too small for so many, so that replicas are retracted as well.
    let engine = Arc::new(routed(&Setup { pages: 200, ..Setup::default() }));
    let (address, stop, server) = start(&engine);
    let mut expected = HashMap::new();
    for route in ROUTES {
        for prompt in PROMPTS {
            expected.insert((route, prompt), text(&mut send(address, &body(route, prompt))));
        }
    }
    assert!(expected.values().all(|text| !text.is_empty()));
    let (broken, finished, wrong) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (broken, finished, wrong, expected) = (&broken, &finished, &wrong, &expected);
            scope.spawn(move || {
                let mut draws = 0;
                let mut draw = || {
                    draws += 1;
                    uniform(client as u64, draws, 1 << 20)
                };
                while broken.load(Ordering::Relaxed) < DISCONNECTS {
                    let route = ROUTES[(draw() * ROUTES.len() as f64) as usize];
                    let prompt = PROMPTS[(draw() * PROMPTS.len() as f64) as usize];
                    let mut stream = send(address, &body(route, prompt));
                    if draw() < 0.7 {
                        // Leave at once, or somewhere in the answer.
                        let mut rest = (draw() * draw() * 4000.0) as usize;
                        let mut buffer = [0; 256];
                        while rest > 0 {
                            let got = stream.read(&mut buffer[..rest.min(256)]).expect("reads");
                            if got == 0 {
                                break;
                            }
                            rest -= got;
                        }
                        drop(stream);
                        broken.fetch_add(1, Ordering::Relaxed);
                    } else {
                        let got = text(&mut stream);
                        if got != expected[&(route, prompt)] {
                            wrong.lock().expect("no panic").push((route, prompt, got));
                        }
                        finished.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    assert!(wrong.lock().expect("no panic").is_empty(), "texts changed under load: {wrong:?}");
    assert!(broken.into_inner() >= DISCONNECTS);
    assert!(finished.into_inner() >= CLIENTS, "too few requests were left to finish");
    let deadline = Instant::now() + Duration::from_secs(60);
    let state = || {
        let of = |model| engine.snapshot(ModelId(model));
        (0..MODELS.len() as u32)
            .map(of)
            .map(|s| (s.pages_in_use, s.replicas, s.ready, s.policy_slots))
            .collect::<Vec<_>>()
    };
    while engine.live_requests() > 0 || state().iter().any(|s| *s != (0, 0, 0, 0)) {
        assert!(Instant::now() < deadline, "left behind: {} requests, {:?}", engine.live_requests(), state());
        std::thread::sleep(Duration::from_millis(20));
    }
    gauges_are_back(&scrape(address));
    drop(stop);
    server.join().expect("the server ends well");
}

/// What rises with requests has fallen, and what was broken off is counted.
fn gauges_are_back(samples: &[(String, f64)]) {
    for gauge in [
        "tokenrouter_live_requests",
        "tokenrouter_model_requests",
        "tokenrouter_kv_pages_used",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    ] {
        let of_it: Vec<_> = samples.iter().filter(|(name, _)| name.split('{').next() == Some(gauge)).collect();
        assert!(!of_it.is_empty() && of_it.iter().all(|(_, value)| *value == 0.0), "{of_it:?}");
    }
    let ended = |how: &str| -> f64 {
        let of_it = |name: &str| name.starts_with("vllm:request_success_total{") && name.contains(how);
        samples.iter().filter(|(name, _)| of_it(name)).map(|(_, value)| value).sum()
    };
    assert!(ended("\"abort\"") > 0.0 && ended("\"stop\"") + ended("\"length\"") > CLIENTS as f64);
    assert_eq!(ended("\"error\""), 0.0);
}
