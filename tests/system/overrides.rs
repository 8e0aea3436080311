//! Requests with settings of their own, at a server that lets them: the text is that of a server which is configured so,
//! for native and WASM policies, in a crowd, and while the configuration changes.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::http::send_to;
use crate::reload::{Server, log_of};

const SEEDS: u64 = 2;
const STREAMS: usize = 32;
const THRESHOLDS: usize = 12;
const MAX_VARIANTS: u64 = 4;
/// Memory may change by this under load. A crowd of variants that are not given up takes far more.
const SLACK: u64 = 24 << 20;

/// The table of a route whose requests may set `overrides`.
fn table(plugin: &str, overrides: &str, settings: &str) -> String {
    format!(
        "plugin = \"{plugin}\"\nroles = {{ small = \"slm\", large = \"llm\" }}\n{overrides}\n[routes.r.settings]\n{settings}\n"
    )
}

fn ask(server: &Server, path: &str, mut body: Value, settings: Option<&Value>) -> (u16, Value) {
    body["model"] = "r".into();
    if let Some(settings) = settings {
        body["routing"] = json!({"settings": settings});
    }
    let mut answer = String::new();
    send_to(server.address, path, &body).read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
    let body = body.lines().find(|line| line.starts_with('{')).unwrap_or_else(|| panic!("{answer}"));
    (head[9..12].parse().expect("a status"), serde_json::from_str(body).expect("JSON"))
}

fn completion(seed: u64) -> Value {
    json!({"prompt": "What is 905 - 278 + 14?", "temperature": 1.5, "seed": seed, "max_tokens": 24, "ignore_eos": true,
           "return_token_ids": true})
}

/// The ids of an answer that must be good.
fn ids(server: &Server, seed: u64, settings: Option<&Value>) -> Value {
    let (status, answer) = ask(server, "/v1/completions", completion(seed), settings);
    assert_eq!(status, 200, "{answer}\n{}", log_of(server.directory.path()));
    assert_eq!(answer["model"], "r");
    answer["choices"][0]["token_ids"].clone()
}

fn all_ids(server: &Server, settings: Option<&Value>) -> Vec<Value> {
    (0..SEEDS).map(|seed| ids(server, seed, settings)).collect()
}

fn info(server: &Server) -> Value {
    let mut stream = TcpStream::connect(server.address).expect("connected");
    stream.write_all(b"GET /server_info HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    serde_json::from_str::<Value>(body).expect("JSON")["routes"][0].clone()
}

#[test]
fn the_text_is_that_of_a_server_that_is_configured_so() {
    let by_threshold = |value: f64| (format!("threshold = {value:?}"), json!({"threshold": value}));
    let thresholds = [0.0, 0.02, 0.3].map(by_threshold);
    let shares = [0.0, 0.4, 1.0];
    let shares =
        shares.map(|p: f64| (format!("probabilities = {{ large = {p:?} }}"), json!({"probabilities": {"large": p}})));
    let cases = [
        ("rstitch", "overrides = [\"threshold\"]", &thresholds),
        ("rstitch.wasm", "overrides = [\"threshold\"]", &thresholds),
        ("random", "overrides = [\"probabilities.large\"]", &shares),
    ];
    let server = Server::with(&table("rstitch", "", "threshold = 0.5"));
    for (plugin, overrides, values) in cases {
        let configured: Vec<_> = values
            .iter()
            .map(|(settings, _)| {
                let (status, reloaded) = server.reload(&table(plugin, "", settings));
                assert_eq!(status, 200, "{reloaded}");
                all_ids(&server, None)
            })
            .collect();
        let distinct: BTreeSet<_> = configured.iter().map(|ids| format!("{ids:?}")).collect();
        assert_eq!(distinct.len(), values.len(), "{plugin}: the values say the same");
        let (status, reloaded) = server.reload(&table(plugin, overrides, &values[0].0));
        assert_eq!(status, 200, "{reloaded}");
        for ((_, settings), configured) in values.iter().zip(&configured) {
            assert_eq!(all_ids(&server, Some(settings)), *configured, "{plugin} {settings}");
        }
        // The route itself is what it was, and the first value is its own.
        assert_eq!(all_ids(&server, None), configured[0]);
        assert_eq!(info(&server)["variants"], json!(values.len() - 1));
    }
}

#[test]
fn every_endpoint_takes_settings_and_names_what_it_does_not_take() {
    let server = Server::with(&table("rstitch", "overrides = [\"threshold\"]", "threshold = 0.03"));
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4});
    let native = json!({"text": "Hi", "sampling_params": {"max_new_tokens": 4}});
    let endpoints = [("/v1/chat/completions", chat), ("/v1/completions", completion(1)), ("/generate", native)];
    for (path, body) in endpoints {
        let ask = |settings: Value| ask(&server, path, body.clone(), Some(&settings));
        assert_eq!(ask(json!({"threshold": 0.7})).0, 200, "{path}");
        assert_eq!(ask(json!({})).0, 200, "{path}");
        let (status, refused) = ask(json!({"threshold": 1.5}));
        let message = "`routing.settings`: settings/threshold = 1.5: the value is greater than the maximum of 1.";
        assert_eq!((status, &refused["error"]["message"]), (400, &json!(message)), "{path}");
        assert_eq!(refused["error"]["param"], "routing.settings", "{path}");
        let (status, refused) = ask(json!({"router": "/etc/passwd"}));
        let message = "`router` cannot be set by a request: route `r` lets requests set `threshold`.";
        assert_eq!((status, &refused["error"]["message"]), (400, &json!(message)), "{path}");
        assert_eq!(refused["error"]["param"], "routing.settings.router", "{path}");
        let mut streamed = body.clone();
        (streamed["stream"], streamed["model"]) = (true.into(), "r".into());
        streamed["routing"] = json!({"settings": {"threshold": 0.7}});
        let mut answer = String::new();
        send_to(server.address, path, &streamed).read_to_string(&mut answer).expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("data: [DONE]"), "{path}: {answer}");
    }
    let info = info(&server);
    assert_eq!(
        (&info["overrides"], &info["variants"], &info["max_variants"]),
        (&json!(["threshold"]), &json!(1), &json!(8))
    );
    let (_, known) = server.admin("GET /admin/routes");
    let known: Vec<_> =
        known["routes"].as_array().expect("a list").iter().map(|route| route["settings"].clone()).collect();
    assert_eq!(known.iter().filter(|settings| !settings.is_null()).collect::<Vec<_>>(), [&json!({"threshold": 0.7})]);
}

#[test]
fn a_configuration_names_settings_that_are_there() {
    let server = Server::with(&table("rstitch", "", "threshold = 0.03"));
    let refused = |table: &str| {
        let (status, refused) = server.reload(table);
        assert_eq!((status, &refused["error"]["code"]), (400, &json!("invalid_config")), "{refused}");
        refused["error"]["message"].as_str().expect("a message").to_owned()
    };
    let unknown = refused(&table("rstitch", "overrides = [\"treshold\"]", "threshold = 0.03"));
    let says = "routes.r.overrides[0] = \"treshold\": is not in the settings schema of plugin `rstitch`; did you mean \
                `threshold`? It names ";
    assert!(unknown.contains(says), "{unknown}");
    let inner = refused(&table("random", "overrides = [\"probabilities.large.x\"]", "probabilities = { large = 0.5 }"));
    assert!(inner.contains("= \"probabilities.large.x\": is not in the settings schema"), "{inner}");
}

/// Waits until the server has what it began with.
fn settle(server: &Server) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while server.admin("GET /admin/routes").1["routes"].as_array().is_none_or(|routes| routes.len() != 3) {
        assert!(Instant::now() < deadline, "{}", server.admin("GET /admin/routes").1);
        std::thread::sleep(Duration::from_millis(20));
    }
}

struct Crowd<'a> {
    server: &'a Server,
    /// By threshold.
    expected: &'a [Vec<Value>],
    done: AtomicBool,
    answers: AtomicUsize,
    refused: AtomicUsize,
    wrong: Mutex<Vec<String>>,
}

fn threshold(number: usize) -> Value {
    json!({"threshold": number as f64 / 50.0})
}

impl Crowd<'_> {
    fn client(&self, client: usize) {
        for number in client.. {
            if self.done.load(Ordering::SeqCst) {
                return;
            }
            let (of, seed) = (number * 7 % THRESHOLDS, number as u64 % SEEDS);
            let (status, answer) = ask(self.server, "/v1/completions", completion(seed), Some(&threshold(of)));
            let full = answer["error"]["code"] == "server_overloaded";
            match status {
                200 if answer["choices"][0]["token_ids"] == self.expected[of][seed as usize] => {
                    self.answers.fetch_add(1, Ordering::SeqCst);
                }
                503 if full => {
                    self.refused.fetch_add(1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(5));
                }
                _ => {
                    self.wrong.lock().expect("no panic").push(format!("{status}: {answer}"));
                    return;
                }
            }
        }
    }

    /// So many answers, with reloads in between.
    fn round(&self, answers: usize, tables: &[String; 2]) -> (usize, u64) {
        let before = self.answers.load(Ordering::SeqCst);
        self.done.store(false, Ordering::SeqCst);
        std::thread::scope(|scope| {
            (0..STREAMS).for_each(|client| drop(scope.spawn(move || self.client(client))));
            for change in 0.. {
                let so_far = self.answers.load(Ordering::SeqCst) - before;
                if so_far >= answers || !self.wrong.lock().expect("no panic").is_empty() {
                    break;
                }
                // Those that are kept, and those that are being made in their places.
                let variants = info(self.server)["variants"].as_u64().expect("a number");
                if variants > 2 * MAX_VARIANTS {
                    self.wrong.lock().expect("no panic").push(format!("{variants} variants"));
                }
                let (status, reloaded) = self.server.reload(&tables[change % 2]);
                if status != 200 {
                    self.wrong.lock().expect("no panic").push(reloaded.to_string());
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            self.done.store(true, Ordering::SeqCst);
        });
        let wrong = self.wrong.lock().expect("no panic");
        assert!(wrong.is_empty(), "{wrong:?}\n{}", log_of(self.server.directory.path()));
        // A change retires what is left.
        for table in tables {
            assert_eq!(self.server.reload(table).0, 200);
        }
        settle(self.server);
        self.server.takes()
    }
}

#[test]
fn more_settings_than_variants_lose_no_accepted_request() {
    let overrides = format!("overrides = [\"threshold\"]\nmax_variants = {MAX_VARIANTS}");
    let tables =
        ["", "budget_us = 201\n"].map(|more| table("rstitch", &format!("{more}{overrides}"), "threshold = 0.9"));
    let server = Server::with(&tables[0]);
    let expected: Vec<_> = (0..THRESHOLDS).map(|number| all_ids(&server, Some(&threshold(number)))).collect();
    let crowd = Crowd {
        server: &server,
        expected: &expected,
        done: AtomicBool::new(false),
        answers: AtomicUsize::new(0),
        refused: AtomicUsize::new(0),
        wrong: Mutex::default(),
    };
    let (files, memory) = crowd.round(150, &tables);
    let (files_after, memory_after) = crowd.round(450, &tables);
    let refused = crowd.refused.load(Ordering::SeqCst);
    println!("{refused} refused; {files} then {files_after} files, {memory} then {memory_after} bytes");
    assert!(refused > 0, "{STREAMS} streams never needed more than {MAX_VARIANTS} variants");
    assert_eq!(files_after, files);
    assert!(memory_after < memory + SLACK, "{memory} bytes grew to {memory_after}");
}
