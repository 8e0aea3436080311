//! Cases 27 to 30, and offsets of case 55.

use serde_json::{Value, json};

use super::super::fixture::Server;
use super::{CHATS, COMPLETIONS, NATIVE, ROUTES, asking};
use crate::api::answer::top_with;

const TEXT: &str = "one two 한국어 three é.";
/// Fields that let several tokens come in one chunk: those in which a stop string may begin.
const HELD: &str = "two 한국어 three é. x";

fn choices(events: &[Value]) -> impl Iterator<Item = &Value> {
    events.iter().map(|event| &event["choices"][0])
}

fn joined<'a>(parts: impl Iterator<Item = &'a Value>) -> Vec<Value> {
    parts.filter_map(Value::as_array).flatten().cloned().collect()
}

#[tokio::test]
async fn bug_27_each_token_of_a_chunk_has_its_own_logprobs() {
    let server = Server::saying(TEXT);
    let ids = server.tokenizer.encode(TEXT).unwrap();
    for route in ROUTES {
        for stop in [Value::Null, json!(HELD)] {
            let body = asking(CHATS, route, &json!({"logprobs": true, "top_logprobs": 1, "stop": stop}));
            let whole = server.ok(CHATS, body.clone()).await;
            let events = server.events(CHATS, body).await;
            let chunks: Vec<&Value> = choices(&events).map(|choice| &choice["logprobs"]["content"]).collect();
            let several = chunks.iter().any(|chunk| chunk.as_array().is_some_and(|entries| entries.len() > 3));
            assert!(several || stop.is_null(), "tokens are held back, and then come at once");
            let content = joined(chunks.into_iter());
            assert_eq!(whole["choices"][0]["logprobs"]["content"], json!(content));
            assert_eq!(whole["usage"]["completion_tokens"], content.len());
            for (entry, &id) in content.iter().zip(&ids) {
                assert_eq!(entry["bytes"], json!(server.tokenizer.bytes(id).unwrap()));
                assert_eq!(entry["top_logprobs"][0]["bytes"], entry["bytes"]);
            }
        }
    }
}

#[tokio::test]
async fn bug_27_offsets_are_those_of_the_text() {
    let server = Server::saying(TEXT);
    for route in ROUTES {
        for (stop, echo) in [(Value::Null, false), (json!(HELD), false), (json!(HELD), true)] {
            let body = asking(COMPLETIONS, route, &json!({"logprobs": 1, "stop": stop, "echo": echo}));
            let whole = server.ok(COMPLETIONS, body.clone()).await;
            let events = server.events(COMPLETIONS, body).await;
            let choice = &whole["choices"][0];
            for column in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let streamed = joined(choices(&events).map(|choice| &choice["logprobs"][column]));
                assert_eq!(choice["logprobs"][column], json!(streamed), "{column}");
            }
            let text: Vec<char> = choice["text"].as_str().unwrap().chars().collect();
            let tokens = choice["logprobs"]["tokens"].as_array().unwrap();
            let offsets = choice["logprobs"]["text_offset"].as_array().unwrap();
            let mut whole_ones = 0;
            for (token, offset) in tokens.iter().zip(offsets) {
                let (token, offset) = (token.as_str().unwrap(), offset.as_u64().unwrap() as usize);
                if !token.starts_with("bytes:") && !token.starts_with("<|") {
                    assert!(text[offset..].iter().collect::<String>().starts_with(token), "{token} at {offset}");
                    whole_ones += 1;
                }
            }
            assert!(whole_ones > 4);
        }
    }
}

#[tokio::test]
async fn bug_29_each_endpoint_has_its_own_form() {
    let server = Server::saying(TEXT);
    let keys = |value: &Value| {
        let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort_unstable();
        keys
    };
    for route in ROUTES {
        let completion = asking(COMPLETIONS, route, &json!({"logprobs": 2}));
        let chat = asking(CHATS, route, &json!({"logprobs": true, "top_logprobs": 2}));
        let completions = [
            server.ok(COMPLETIONS, completion.clone()).await,
            server.events(COMPLETIONS, completion).await.swap_remove(0),
        ];
        for answer in completions {
            let logprobs = &answer["choices"][0]["logprobs"];
            assert_eq!(keys(logprobs), ["text_offset", "token_logprobs", "tokens", "top_logprobs"]);
            assert!(logprobs["tokens"][0].is_string() && logprobs["token_logprobs"][0].is_number());
            assert!(logprobs["top_logprobs"][0].is_object() && logprobs["text_offset"][0].is_u64());
        }
        // The first event of a chat has the role alone.
        let chats = [server.ok(CHATS, chat.clone()).await, server.events(CHATS, chat).await.swap_remove(1)];
        for answer in chats {
            let logprobs = &answer["choices"][0]["logprobs"];
            assert_eq!(keys(logprobs), ["content", "refusal"]);
            let entry = &logprobs["content"][0];
            assert_eq!(keys(entry), ["bytes", "logprob", "token", "top_logprobs"]);
            assert_eq!(keys(&entry["top_logprobs"][0]), ["bytes", "logprob", "token"]);
        }
        for path in [CHATS, COMPLETIONS] {
            let without = server.ok(path, asking(path, route, &json!({}))).await;
            assert_eq!(without["choices"][0]["logprobs"], Value::Null);
        }
        let mut native = asking(NATIVE, route, &json!({}));
        native["return_logprob"] = true.into();
        let meta = &server.ok(NATIVE, native).await["meta_info"];
        assert_eq!(meta["output_token_logprobs"][0].as_array().map(Vec::len), Some(3));
    }
}

#[test]
fn bug_30_the_token_is_among_the_best() {
    let best = [(5, -0.1), (6, -3.0)];
    assert_eq!(top_with(6, -3.0, &best, 2), best);
    assert_eq!(top_with(5, -0.1, &best, 1), best[..1]);
    assert_eq!(top_with(6, -3.0, &best, 1), best, "one more than asked for");
    assert_eq!(top_with(7, -9.0, &best, 2), [best[0], best[1], (7, -9.0)]);
    assert_eq!(top_with(7, -9.0, &best, 0), [(7, -9.0)]);
}
