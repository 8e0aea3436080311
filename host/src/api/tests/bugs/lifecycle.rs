//! Cases 65 to 73: requests and connections that end, or should not.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use serde_json::{Value, json};

use super::super::connections::{exchange, request, start};
use super::super::fixture::{Options, Server, scrape};
use super::{CHATS, COMPLETIONS, NATIVE, asking, with};
use crate::api::Limits;
use crate::request::ModelId;

const TEXT: &str = "one two three four five six 한국어 seven";

fn ended(how: &str) -> String {
    format!(r#"vllm:request_success_total{{model_name="pair",finished_reason="{how}"}}"#)
}

#[tokio::test]
async fn bug_65_what_has_ended_is_not_broken_off() {
    let server = Server::saying(TEXT);
    for _ in 0..10 {
        for path in [CHATS, COMPLETIONS, NATIVE] {
            for fields in [json!({}), json!({"stop": "three"}), json!({"max_tokens": 3})] {
                let fields = if path == NATIVE { json!({}) } else { fields };
                server.ok(path, asking(path, "pair", &fields)).await;
                // The last event is read, and then the connection goes.
                server.events(path, asking(path, "pair", &fields)).await;
            }
        }
    }
    server.idle().await;
    while scrape(&server).await[&ended("stop")] + scrape(&server).await[&ended("length")] < 180.0 {
        tokio::task::yield_now().await;
    }
    let seen = scrape(&server).await;
    assert_eq!((seen[&ended("abort")], seen["tokenrouter_client_aborts_total"]), (0.0, 0.0));
}

#[tokio::test]
async fn bug_65_each_request_is_broken_off_once() {
    let server = Server::with(&"one ".repeat(80), Options { pause: Duration::from_millis(2), ..Options::default() });
    for n in [1, 4] {
        let body = asking(CHATS, "pair", &json!({"n": n, "ignore_eos": true}));
        let mut streamed = server.post(CHATS, with(body.clone(), &json!({"stream": true}))).await.into_body();
        streamed.frame().await.unwrap().unwrap();
        let under_way = async {
            while server.state.engine.live_requests() < 2 * n {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            _ = server.post(CHATS, body) => panic!("the answer has come already"),
            () = under_way => {}
        }
        drop(streamed);
        server.idle().await;
    }
    while scrape(&server).await[&ended("abort")] < 10.0 {
        tokio::task::yield_now().await;
    }
    let seen = scrape(&server).await;
    assert_eq!(seen[&ended("abort")], 10.0, "two of one choice and two of four");
    for gauge in ["tokenrouter_live_requests", r#"vllm:num_requests_running{model_name="pair"}"#] {
        assert_eq!(seen[gauge], 0.0, "{gauge}");
    }
    for model in [0, 1].map(ModelId) {
        while server.state.engine.snapshot(model).replicas > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(server.state.engine.snapshot(model).pages_in_use, 0);
    }
}

/// Clients keep connections for a minute or so and would write into one that is being closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bug_68_idle_connections_outlive_those_of_clients() {
    let usual = Limits::default();
    assert!(usual.idle_timeout >= Duration::from_secs(75) && usual.idle_timeout > usual.header_timeout, "{usual:?}");
    // Much less of both, in much the same proportion.
    let (head, idle) = (Duration::from_millis(50), Duration::from_secs(2));
    let mut server = Server::saying(TEXT);
    Arc::get_mut(&mut server.state).unwrap().front.limits =
        Limits { header_timeout: head, idle_timeout: idle, ..Limits::default() };
    let (address, _stop, _serving) = start(&server).await;
    let body = asking(CHATS, "small", &json!({})).to_string();
    let client = tokio::task::spawn_blocking(move || {
        let mut connection = TcpStream::connect(address).unwrap();
        let mut answers = Vec::new();
        for _ in 0..3 {
            answers.push(exchange(&mut connection, &request(CHATS, &body), "\"handoffs\":0}}"));
            std::thread::sleep(head * 4);
        }
        // In the end it is closed, without a word.
        (answers, exchange(&mut connection, "", "\0"))
    });
    let (answers, rest) = client.await.unwrap();
    for answer in answers {
        assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("seven"), "{answer}");
    }
    assert_eq!(rest, "");
}

#[tokio::test]
async fn bug_71_a_model_that_is_down_is_told_of() {
    let server = Server::with(TEXT, Options { large_lost_at: Some(3), ..Options::default() });
    let status =
        async |path: &str| server.send(Request::get(path).body(Body::empty()).unwrap()).await.status().as_u16();
    assert_eq!((status("/health").await, status("/ready").await), (200, 200));
    let (failed, _) = server.json(COMPLETIONS, asking(COMPLETIONS, "pair", &json!({}))).await;
    assert_eq!(failed, 503);
    assert_eq!((status("/health").await, status("/ready").await), (200, 503));
    assert_eq!(status("/health_generate").await, 503);
}

/// A pool in which not all requests have room: some are retracted and computed again.
#[tokio::test]
async fn bug_73_retracted_requests_say_nothing_twice() {
    let text = "one two three four five six seven eight nine ten 한국어 ".repeat(6);
    let options = Options { pages: Some(20), pause: Duration::from_millis(1), ..Options::default() };
    let server = Server::with(text.trim_end(), options);
    let ask = async |fields: Value| {
        let body = asking(COMPLETIONS, "pair", &with(fields, &json!({"return_token_ids": true})));
        let events = server.events(COMPLETIONS, body).await;
        let of = |field: &str| events.iter().map(|event| event["choices"][0][field].clone()).collect::<Vec<_>>();
        let said: String = of("text").iter().filter_map(Value::as_str).collect();
        let ids: Vec<Value> = of("token_ids").iter().filter_map(Value::as_array).flatten().cloned().collect();
        (said, ids)
    };
    let alone = ask(json!({"prompt": "Ha"})).await;
    assert_eq!(alone.0, text.trim_end());
    let prompts = ["Hb", "Hc", "Hd", "He"].map(|prompt| json!({"prompt": prompt}));
    let [a, b, c, d] = prompts.map(ask);
    let (a, b, c, d) = tokio::join!(a, b, c, d);
    for (said, ids) in [a, b, c, d] {
        assert_eq!((&said, &ids), (&alone.0, &alone.1));
    }
    let counters = [0, 1].map(|model| server.state.engine.snapshot(ModelId(model)).counters);
    assert!(counters.iter().any(|c| c.retractions + c.preemptions > 0), "the pool was large enough: {counters:?}");
}
