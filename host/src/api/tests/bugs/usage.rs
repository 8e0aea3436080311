//! Case 24: tokens are counted alike everywhere.

use serde_json::{Value, json};

use super::super::fixture::{Server, chat};
use super::{CHATS, COMPLETIONS, NATIVE, ROUTES, asking, said};

const TEXT: &str = "one two 한국어 three";

#[tokio::test]
async fn bug_24_streams_count_as_whole_answers_do() {
    let server = Server::saying(TEXT);
    let all = server.tokenizer.encode(TEXT).unwrap().len() + 1;
    for route in ROUTES {
        for (fields, tokens) in [
            (json!({}), all),
            (json!({"n": 3}), 3 * all),
            (json!({"max_tokens": 1}), 1),
            (json!({"max_tokens": all - 1}), all - 1),
            (json!({"max_tokens": all}), all),
            (json!({"ignore_eos": true, "max_tokens": all + 3}), all + 3),
            (json!({"stop": "two"}), server.tokenizer.encode("one two").unwrap().len()),
            (
                json!({"stop": "two", "include_stop_str_in_output": true}),
                server.tokenizer.encode("one two").unwrap().len(),
            ),
            (json!({"stop": "three four"}), all),
        ] {
            // That streams say the same is looked at there.
            said(&server, route, fields.clone()).await;
            for path in [CHATS, COMPLETIONS] {
                let usage = &server.ok(path, asking(path, route, &fields)).await["usage"];
                assert_eq!(usage["completion_tokens"], tokens, "{route} {fields}");
                let by_model: u64 =
                    usage["tokens_by_model"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
                assert_eq!(usage["completion_tokens"], by_model, "{route} {fields}");
            }
        }
    }
}

#[tokio::test]
async fn bug_24_a_prompt_counts_once() {
    let server = Server::saying("ok");
    let prompt = json!([[1, 2, 3], [4, 5]]);
    for n in [1, 4] {
        let body = json!({"model": "pair", "prompt": prompt, "n": n});
        assert_eq!(server.ok(COMPLETIONS, body).await["usage"]["prompt_tokens"], 5);
    }
    let of = async |n: u32| {
        let mut body = chat();
        body["n"] = n.into();
        server.ok(CHATS, body).await["usage"]["prompt_tokens"].clone()
    };
    assert_eq!(of(5).await, of(1).await);
}

#[tokio::test]
async fn bug_24_the_native_endpoint_counts_so_too() {
    let server = Server::saying(TEXT);
    let all = server.tokenizer.encode(TEXT).unwrap().len() + 1;
    for route in ROUTES {
        for (fields, tokens) in [(json!({}), all), (json!({"max_new_tokens": 3}), 3)] {
            let body = asking(NATIVE, route, &fields);
            let whole = server.ok(NATIVE, body.clone()).await;
            let events = server.events(NATIVE, body).await;
            for meta in [&whole["meta_info"], &events.last().unwrap()["meta_info"]] {
                assert_eq!(meta["completion_tokens"], tokens);
            }
            assert_eq!(whole["output_ids"].as_array().map(Vec::len), Some(tokens));
            let counts: Vec<u64> = events.iter().map(|e| count(&e["meta_info"])).collect();
            assert!(counts.is_sorted(), "{counts:?}");
        }
    }
}

fn count(meta: &Value) -> u64 {
    meta["completion_tokens"].as_u64().unwrap()
}
