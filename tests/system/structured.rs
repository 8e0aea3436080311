//! Answers of a given form, over HTTP, from routes that change models inside strings and numbers.

mod schemas;

use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::demo::{Route, Setup, engine, pair, rstitch};
use crate::http::{send_to, start};
use schemas::{Draw, schema};

/// Schemas asked for, each at one of the routes; `TOKENROUTER_TEST_SCHEMAS` says otherwise.
const SCHEMAS: u32 = 48;
/// Enough for every schema that bounds its answers.
const ROOM: u32 = 1200;
/// Asked for at once.
const AT_ONCE: usize = 16;

fn routes() -> Vec<Route> {
    let router = "models/demo/routers/r2r/router.safetensors";
    vec![
        rstitch("rstitch", 0.03),
        pair("random", "random", json!({"probabilities": {"large": 0.5}})),
        pair("r2r", "r2r", json!({"router": router, "threshold": 0.5})),
        pair("verify", "verify", json!({"draft_tokens": 4})),
        pair("collm", "collm", json!({"threshold": 0.3})),
    ]
}

/// Status and body of the answer to `body`.
pub fn ask(address: SocketAddr, path: &str, body: &Value) -> (u16, String) {
    let mut text = String::new();
    send_to(address, path, body).read_to_string(&mut text).expect("the answer ends");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, body.to_owned())
}

/// The answer to `body`, which must be good.
pub fn good(address: SocketAddr, path: &str, body: &Value) -> Value {
    let (status, text) = ask(address, path, body);
    assert_eq!(status, 200, "{text}\n{body}");
    serde_json::from_str(&text).expect("JSON")
}

/// All answers, some at a time.
fn all<T: Send>(count: usize, one: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let done = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if index >= count {
                        return;
                    }
                    let answer = one(index);
                    done.lock().expect("not poisoned").push((index, answer));
                }
            });
        }
    });
    let mut done = done.into_inner().expect("not poisoned");
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, answer)| answer).collect()
}

fn chat(route: &str, seed: u64, schema: &Value) -> Value {
    json!({
        "model": route,
        "messages": [{"role": "user", "content": "Give me some data."}],
        "seed": seed,
        "temperature": if seed.is_multiple_of(3) { 0.0 } else { 0.8 },
        "max_tokens": ROOM,
        "return_routing": true,
        "response_format": {"type": "json_schema", "json_schema": {"name": "data", "strict": true, "schema": schema}},
    })
}

/// Changes of model inside strings and inside numbers.
fn changes(choice: &Value) -> (usize, usize) {
    let (mut strings, mut numbers) = (0, 0);
    let (mut in_string, mut escaped, mut last) = (false, false, None);
    let mut before = String::new();
    for token in choice["routing"].as_array().expect("routing") {
        if last.is_some_and(|last: &Value| *last != token["model"]) {
            let text = token["text"].as_str().unwrap_or_default();
            strings += usize::from(in_string);
            let digit = |c: Option<char>| c.is_some_and(|c| c.is_ascii_digit() || c == '.' || c == '-');
            numbers += usize::from(!in_string && digit(before.chars().last()) && digit(text.chars().next()));
        }
        for c in token["text"].as_str().unwrap_or_default().chars() {
            match c {
                _ if escaped => escaped = false,
                '\\' if in_string => escaped = true,
                '"' => in_string = !in_string,
                _ => {}
            }
            before.push(c);
        }
        last = Some(&token["model"]);
    }
    (strings, numbers)
}

#[test]
fn every_answer_is_what_its_schema_says() {
    let count = std::env::var("TOKENROUTER_TEST_SCHEMAS").map_or(SCHEMAS, |n| n.parse().expect("a number"));
    let routes = routes();
    let engine = Arc::new(engine(&Setup { pages: 4096, ..Setup::default() }, &routes));
    let (address, stop, thread) = start(&engine);
    let schemas: Vec<Value> = (0..count).map(|number| schema(&mut Draw::new(number))).collect();
    let body = |index: usize| chat(&routes[index % routes.len()].name, index as u64, &schemas[index]);
    let answers = all(schemas.len(), |index| good(address, "/v1/chat/completions", &body(index)));
    let (mut strings, mut numbers, mut handoffs, mut tokens) = (0, 0, 0, 0);
    for (index, answer) in answers.iter().enumerate() {
        let (choice, schema) = (&answer["choices"][0], &schemas[index]);
        let text = choice["message"]["content"].as_str().expect("a text");
        assert_eq!(choice["finish_reason"], "stop", "schema {index}: {schema}\n{text}");
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("schema {index}: {e}: {text}"));
        let valid = jsonschema::validate(schema, &value);
        assert!(valid.is_ok(), "schema {index}: {schema}\n{text}\n{}", valid.expect_err("checked"));
        let (in_strings, in_numbers) = changes(choice);
        (strings, numbers) = (strings + in_strings, numbers + in_numbers);
        handoffs += answer["usage"]["handoffs"].as_u64().expect("a number");
        tokens += answer["usage"]["completion_tokens"].as_u64().expect("a number");
    }
    println!("{count} answers, {tokens} tokens, {handoffs} hand-offs, {strings} in strings, {numbers} in numbers");
    assert!(strings > 10 && numbers > 10, "{strings} changes of model in strings, {numbers} in numbers");
    // Alone and as a stream, an answer is the same.
    for index in (0..schemas.len()).step_by(schemas.len().div_ceil(8)) {
        let text = &answers[index]["choices"][0]["message"]["content"];
        let alone = good(address, "/v1/chat/completions", &body(index));
        assert_eq!(&alone["choices"][0]["message"]["content"], text, "schema {index}");
        let mut streamed = body(index);
        streamed["stream"] = true.into();
        assert_eq!(&Value::from(streamed_text(address, &streamed)), text, "schema {index}");
    }
    drop((stop, engine));
    thread.join().expect("served");
}

/// The parts of a streamed answer together; chunked transfer lines are left out.
fn streamed_text(address: SocketAddr, body: &Value) -> String {
    let (status, text) = ask(address, "/v1/chat/completions", body);
    assert_eq!(status, 200, "{text}");
    let events = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let content = |event: &str| {
        let event: Value = serde_json::from_str(event).expect("JSON");
        event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()
    };
    events.map(content).collect()
}

/// The large model verifies what the small one drafts, and both keep to the form: the answer is the large model's.
#[test]
fn verified_drafts_are_the_verifiers_answer() {
    let engine = Arc::new(engine(&Setup::default(), &routes()));
    let (address, stop, thread) = start(&engine);
    for number in 0..6 {
        let schema = schema(&mut Draw::new(1000 + number));
        let [verified, own] = ["verify", "large"].map(|route| {
            let body = chat(route, 0, &schema);
            good(address, "/v1/chat/completions", &body)["choices"][0]["message"]["content"].clone()
        });
        assert_eq!(verified, own, "{schema}");
    }
    drop((stop, engine));
    thread.join().expect("served");
}

#[test]
fn every_endpoint_takes_every_form() {
    let engine = Arc::new(engine(&Setup::default(), &routes()));
    let (address, stop, thread) = start(&engine);
    let choices = ["red", "green", "blue", "dark blue"];
    let choice = |text: &Value| choices.contains(&text.as_str().expect("a text"));
    let digits = |text: &Value| {
        let text = text.as_str().expect("a text");
        text.len() == 6 && text.bytes().all(|byte| byte.is_ascii_digit())
    };
    for seed in 0..4 {
        let body = |more: Value| {
            let mut body = json!({"model": "random", "prompt": "Q:", "seed": seed, "max_tokens": 60});
            body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
            body
        };
        let text = |more: Value| good(address, "/v1/completions", &body(more))["choices"][0]["text"].clone();
        assert!(choice(&text(json!({"structured_outputs": {"choice": choices}}))));
        assert!(choice(&text(json!({"guided_choice": choices, "min_tokens": 50, "ignore_eos": true}))));
        assert!(digits(&text(json!({"regex": "[0-9]{6}"}))));
        assert!(digits(&text(json!({"grammar": "start: PAIR PAIR PAIR\nPAIR: /[0-9]{2}/"}))));
        let two = good(address, "/v1/completions", &body(json!({"guided_regex": "[0-9]{6}", "n": 2})));
        assert!(two["choices"].as_array().expect("choices").iter().all(|choice| digits(&choice["text"])));
        let params = json!({"regex": "[0-9]{6}", "max_new_tokens": 60, "seed": seed});
        let native = good(address, "/generate", &json!({"model": "r2r", "text": "Q:", "sampling_params": params}));
        assert!(digits(&native["text"]), "{native}");
        assert_eq!(native["meta_info"]["finish_reason"], json!({"type": "stop", "matched": null}));
        // Cut like any other answer.
        let cut = good(address, "/v1/completions", &body(json!({"regex": "[a-z]{500}", "logprobs": 2})));
        assert_eq!(cut["choices"][0]["finish_reason"], "length");
    }
    drop((stop, engine));
    thread.join().expect("served");
}

/// Each is refused, or served like any other, and the server goes on.
#[test]
fn hostile_forms_hurt_nobody() {
    let engine = Arc::new(engine(&Setup::default(), &routes()));
    let (address, stop, thread) = start(&engine);
    let plain = |max_tokens: u32| {
        let messages = json!([{"role": "user", "content": "Count."}]);
        json!({"model": "rstitch", "messages": messages, "max_tokens": max_tokens, "ignore_eos": true})
    };
    // Goes on all the while.
    let other = std::thread::spawn({
        let body = plain(400);
        move || good(address, "/v1/chat/completions", &body)
    });
    for (name, field, value, compiles) in schemas::hostile() {
        let mut body = plain(8);
        body[field] = value;
        let (status, text) = ask(address, "/v1/chat/completions", &body);
        let error: Value = serde_json::from_str(&text).expect("JSON");
        if compiles {
            assert_eq!(status, 200, "{name}: {text}");
            continue;
        }
        let error = &error["error"];
        assert_eq!((status, error["code"].as_str()), (400, Some("invalid_value")), "{name}: {text}");
        assert!(error["param"].as_str().is_some_and(|param| param.starts_with(field)), "{name}: {text}");
        let message = error["message"].as_str().expect("a message");
        assert!(message.len() < 700 && !message.contains('\n'), "{name}: {text}");
    }
    assert_eq!(other.join().expect("answered")["usage"]["completion_tokens"], 400);
    drop((stop, engine));
    thread.join().expect("served");
}
