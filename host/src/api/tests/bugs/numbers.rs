//! Cases 35 to 43: what is drawn, and how many.

use std::time::Duration;

use serde_json::{Value, json};

use super::super::fixture::{Options, Server, scrape};
use super::{CHATS, COMPLETIONS, NATIVE, ROUTES, asking, refused, said};

const TEXT: &str = "one two three four five six seven eight nine ten eleven twelve 한국어 thirteen";

/// Answers are as long as their seeds say.
fn seeded() -> Server {
    Server::with(TEXT, Options { lengths_by_seed: true, ..Options::default() })
}

#[tokio::test]
async fn bug_35_a_nan_costs_its_own_request_alone() {
    let pause = Duration::from_millis(2);
    let options = Options { breaks_at: Some(4), breaks_seed: Some(13), pause, ..Options::default() };
    let server = Server::with(TEXT, options);
    let ask = |path, seed: u64| server.json(path, asking(path, "pair", &json!({"seed": seed})));
    // In the same batches.
    let all = tokio::join!(ask(CHATS, 1), ask(COMPLETIONS, 13), ask(COMPLETIONS, 2), ask(NATIVE, 3), ask(CHATS, 13));
    let ((a, _), (b, broken), (c, good), (d, _), (e, _)) = all;
    assert_eq!([a, b, c, d, e], [200, 500, 200, 200, 500]);
    assert_eq!((&broken["error"]["code"], &broken["error"]["type"]), (&json!("not_finite"), &json!("server_error")));
    assert_eq!(good["choices"][0]["text"], TEXT);
    let seen = scrape(&server).await;
    assert_eq!(seen[r#"vllm:corrupted_requests_total{model_name="pair"}"#], 2.0);
    server.ok(CHATS, asking(CHATS, "pair", &json!({"seed": 1}))).await;
}

/// The texts of `n` choices.
async fn texts(server: &Server, route: &str, fields: Value) -> Vec<String> {
    said(server, route, fields).await.into_iter().map(|said| said.text).collect()
}

#[tokio::test]
async fn bug_36_a_seed_holds_whatever_else_is_asked() {
    let server = seeded();
    for route in ROUTES {
        let alone = texts(&server, route, json!({"seed": 5})).await;
        let (among, _, other, _) = tokio::join!(
            texts(&server, route, json!({"seed": 5})),
            texts(&server, route, json!({"seed": 6})),
            texts(&server, route, json!({"seed": 9})),
            server.ok(COMPLETIONS, asking(COMPLETIONS, route, &json!({"n": 5}))),
        );
        assert_eq!(among, alone);
        assert_eq!(other, texts(&server, route, json!({"seed": 9})).await);
    }
}

#[tokio::test]
async fn bug_38_seeds_are_numbers_and_none_is_random() {
    let server = seeded();
    let text = async |path: &str, fields: Value| {
        let answer = server.ok(path, asking(path, "pair", &fields)).await;
        let choice = &answer["choices"][0];
        let text = choice["text"].as_str().or(choice["message"]["content"].as_str()).or(answer["text"].as_str());
        text.unwrap().to_owned()
    };
    for path in [CHATS, COMPLETIONS, NATIVE] {
        let mut seen = Vec::new();
        for seed in [0, 1, 2, -1, i64::MIN, i64::MAX] {
            let first = text(path, json!({"seed": seed})).await;
            assert_eq!(text(path, json!({"seed": seed})).await, first, "{seed}");
            seen.push(first);
        }
        seen.sort_unstable();
        seen.dedup();
        assert!(seen.len() > 2, "seeds matter, those that are not positive as well: {seen:?}");
        for fields in [json!({}), json!({"seed": null})] {
            let mut seen = Vec::new();
            for _ in 0..40 {
                seen.push(text(path, fields.clone()).await);
            }
            assert!(seen.iter().any(|text| *text != seen[0]), "forty times the same");
        }
    }
}

#[tokio::test]
async fn bug_39_each_choice_has_a_seed_and_an_end_of_its_own() {
    let server = seeded();
    let most = server.tokenizer.encode(TEXT).unwrap().len() / 2;
    for route in ROUTES {
        // That there is an end for each one, and that they come in order, is looked at there.
        let choices = said(&server, route, json!({"n": 8, "seed": 3, "max_tokens": most})).await;
        assert_eq!(choices.len(), 8);
        let mut texts: Vec<&str> = choices.iter().map(|choice| choice.text.as_str()).collect();
        let reasons: Vec<&Value> = choices.iter().map(|choice| &choice.finish_reason).collect();
        assert!(reasons.contains(&&json!("stop")) && reasons.contains(&&json!("length")), "{reasons:?}");
        texts.sort_unstable();
        texts.dedup();
        assert!(texts.len() > 3, "{texts:?}");
        assert_eq!(choices[0].text, said(&server, route, json!({"seed": 3, "max_tokens": most})).await[0].text);
    }
}

#[tokio::test]
async fn bug_41_values_beyond_all_sense() {
    let server = Server::saying("ok");
    for (field, values) in [
        ("temperature", vec![json!(999_999), json!(-0.1), json!(1e308), json!("hot"), json!([1])]),
        ("top_p", vec![json!(-1), json!(0), json!(1.01)]),
        ("top_k", vec![json!(-2), json!(0.5), json!(1e30)]),
        ("min_p", vec![json!(-0.1), json!(2)]),
        ("repetition_penalty", vec![json!(0), json!(-1), json!(1e9)]),
        ("presence_penalty", vec![json!(-2.1), json!(3)]),
        ("frequency_penalty", vec![json!(2.1), json!(-1e300)]),
        ("seed", vec![json!(1.5), json!(1e30), json!("x")]),
        ("logit_bias", vec![json!({"1": 1e9}), json!({"1": "x"}), json!({"-1": 1}), json!([1])]),
        ("stop_token_ids", vec![json!([1.5]), json!(["x"]), json!([1e12]), json!(5)]),
    ] {
        for value in values {
            refused(&server, &json!({field: value}), field).await;
        }
    }
    // Numbers that JSON has no place for.
    for number in ["NaN", "Infinity", "1e999"] {
        let body = format!(r#"{{"model": "pair", "prompt": "Hi", "temperature": {number}}}"#);
        let response = server.send(super::super::fixture::post(COMPLETIONS, body)).await;
        assert_eq!(response.status(), 400, "{number}");
    }
}

#[tokio::test]
async fn bug_43_counts_have_limits() {
    let server = Server::saying("ok");
    let biases: serde_json::Map<String, Value> = (0..1025).map(|id| (id.to_string(), json!(1))).collect();
    for (field, value) in [
        ("n", json!(5_000_000)),
        ("n", json!(u64::MAX)),
        ("stop", json!(vec!["x"; 17])),
        ("stop", json!("x".repeat(1025))),
        ("stop_token_ids", json!(vec![5; 129])),
        ("stop_token_ids", json!([2048])),
        ("logit_bias", json!(biases)),
        ("logit_bias", json!({"99999999": 1})),
        ("best_of", json!(5_000_000)),
        ("cache_salt", json!("x".repeat(257))),
    ] {
        // /generate has it beside its sampling fields.
        if field != "cache_salt" {
            refused(&server, &json!({field: value}), field).await;
        }
    }
    let long = vec![json!({"role": "user", "content": ""}); 4097];
    for (path, field, value) in [
        (CHATS, "messages", json!(long)),
        (CHATS, "cache_salt", json!("x".repeat(257))),
        (COMPLETIONS, "logprobs", json!(1_000_000_000)),
        (COMPLETIONS, "prompt_logprobs", json!(1_000_000_000)),
        (COMPLETIONS, "prompt", json!(vec!["x"; 257])),
        (COMPLETIONS, "prompt", json!(vec![99_999_999])),
        (COMPLETIONS, "request_id", json!("x".repeat(257))),
        (NATIVE, "text", json!(vec!["x"; 257])),
        (NATIVE, "cache_salt", json!("x".repeat(257))),
    ] {
        let mut body = asking(path, "pair", &json!({}));
        body[field] = value;
        super::refused_at(&server, path, body, field.into()).await;
    }
    let best = asking(CHATS, "pair", &json!({"logprobs": true, "top_logprobs": 1_000_000_000}));
    super::refused_at(&server, CHATS, best, "top_logprobs".into()).await;
    let native = json!({"model": "pair", "text": "Hi", "return_logprob": true, "top_logprobs_num": 1_000_000_000});
    super::refused_at(&server, NATIVE, native, "top_logprobs_num".into()).await;
    // Prompts and choices together.
    let many = json!({"model": "pair", "prompt": vec![[1]; 5], "n": 64});
    super::refused_at(&server, COMPLETIONS, many, "prompt".into()).await;
}
