//! Answers in one piece.

use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};

use super::fixture::{END, Options, Server, chat, completion, json_of};
use crate::text::ModelText;
use crate::text::tokenizer_fixtures::demo;

const TEXT: &str = "The answer is 한국어 😀 ďábelské.\n\nDone.";

#[tokio::test]
async fn chat_answer() {
    let server = Server::saying(TEXT);
    let answer = server.ok("/v1/chat/completions", chat()).await;
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "pair");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": TEXT, "refusal": null}));
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &Value::Null));

    let tokens = server.tokenizer.encode(TEXT).unwrap().len() as u64 + 1;
    let usage = &answer["usage"];
    let prompt = server.tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n").unwrap().len();
    assert_eq!(usage["prompt_tokens"], prompt);
    assert_eq!(usage["completion_tokens"], tokens);
    assert_eq!(usage["total_tokens"], prompt as u64 + tokens);
    assert_eq!(usage["tokens_by_model"], json!({"large": tokens / 2, "small": tokens.div_ceil(2)}));
    assert_eq!(usage["handoffs"], tokens - 1);
    assert_eq!(usage["prompt_tokens_details"], json!({"cached_tokens": 0}));
}

#[tokio::test]
async fn length_is_told_apart_from_stop() {
    let server = Server::saying(TEXT);
    let mut request = completion();
    request["max_tokens"] = 3.into();
    let answer = server.ok("/v1/completions", request).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let without = server.ok("/v1/completions", json!({"model": "small", "prompt": "Hi"})).await;
    assert_eq!(without["usage"]["completion_tokens"], 16, "OpenAI's default");
}

#[tokio::test]
async fn stop_strings_and_tokens() {
    let server = Server::saying(TEXT);
    let cut = |fields: Value| {
        let mut request = completion();
        for (name, value) in fields.as_object().unwrap() {
            request[name] = value.clone();
        }
        let server = &server;
        async move { server.ok("/v1/completions", request).await["choices"][0].clone() }
    };
    let choice = cut(json!({"stop": "국어 "})).await;
    assert_eq!(choice["text"], "The answer is 한");
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!("국어 ")));
    let choice = cut(json!({"stop": ["nowhere", "\n\n"], "include_stop_str_in_output": true})).await;
    assert_eq!(choice["text"], TEXT.strip_suffix("Done.").unwrap());

    let late = server.tokenizer.encode(TEXT).unwrap().len() + 1;
    let choice = cut(json!({"stop": "is", "min_tokens": late})).await;
    assert_eq!((&choice["text"], &choice["stop_reason"]), (&json!(TEXT), &Value::Null));

    // `Done.` never becomes the stop string, so it is given back at the end.
    assert_eq!(cut(json!({"stop": "Done. And"})).await["text"], TEXT);

    let dot = server.tokenizer.id_of(".").unwrap();
    let choice = cut(json!({"stop_token_ids": [dot]})).await;
    assert_eq!(choice["text"], TEXT.strip_suffix('.').unwrap());
    assert_eq!(choice["stop_reason"], dot);
    let choice = cut(json!({"stop_token_ids": [dot], "include_stop_str_in_output": true})).await;
    assert_eq!(choice["text"], TEXT);
    server.idle().await;
}

#[tokio::test]
async fn routing_covers_the_text() {
    let server = Server::saying(TEXT);
    for (stop, text) in [(Value::Null, TEXT), (json!("국어 "), "The answer is 한")] {
        let mut request = chat();
        request["return_routing"] = true.into();
        request["stop"] = stop;
        let answer = server.ok("/v1/chat/completions", request).await;
        let routing = answer["choices"][0]["routing"].as_array().unwrap();
        let joined: String = routing.iter().map(|entry| entry["text"].as_str().unwrap()).collect();
        assert_eq!(joined, text);
        assert_eq!(answer["usage"]["completion_tokens"], routing.len());
        let models: Vec<&str> = routing.iter().map(|entry| entry["model"].as_str().unwrap()).collect();
        assert_eq!(models[..3], ["small", "large", "small"]);
        assert_eq!(routing[0]["logprob"], -0.25);
        assert!(routing[0]["signals"].is_object());
    }
}

#[tokio::test]
async fn logprobs_of_chat() {
    let server = Server::saying("a😀");
    let mut request = chat();
    request["logprobs"] = true.into();
    request["top_logprobs"] = 2.into();
    let answer = server.ok("/v1/chat/completions", request.clone()).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], content.len());
    assert_eq!((&content[0]["token"], &content[0]["bytes"]), (&json!("a"), &json!([97])));
    assert_eq!(content[0]["top_logprobs"][1]["logprob"], -9999.0, "infinity is not JSON");
    assert_eq!(content.last().unwrap()["token"], "<|im_end|>");
    let bytes = content[1..content.len() - 1].iter().flat_map(|item| item["bytes"].as_array().unwrap().clone());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
    assert_eq!(bytes, "😀".as_bytes());
    assert_eq!(content[1]["token"].as_str().unwrap().get(..8), Some("bytes:\\x"));

    request.as_object_mut().unwrap().remove("top_logprobs");
    let answer = server.ok("/v1/chat/completions", request).await;
    assert_eq!(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

#[tokio::test]
async fn logprobs_of_completions() {
    let server = Server::saying("é is 한.");
    let mut request = completion();
    request["logprobs"] = 1.into();
    let answer = server.ok("/v1/completions", request).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    let length = |column: &str| logprobs[column].as_array().unwrap().len();
    for column in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(answer["usage"]["completion_tokens"], length(column), "{column}");
    }
    let tokens: Vec<&str> = logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    let is = tokens.iter().position(|&token| token == " is").unwrap();
    assert_eq!(logprobs["text_offset"][is], 1, "characters, not bytes");
    assert_eq!(logprobs["top_logprobs"][is], json!({" is": -0.25}));
}

#[tokio::test]
async fn prompts_of_every_shape() {
    let server = Server::saying("ok");
    let cases = [(json!("Hi"), 1), (json!(["Hi", "Ho"]), 2), (json!([1, 2.0, "3"]), 1), (json!([[1, 2], [3]]), 2)];
    for (prompt, choices) in cases {
        let answer = server.ok("/v1/completions", json!({"model": "pair", "prompt": prompt, "n": 2})).await;
        let indices: Vec<u64> =
            answer["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, (0..choices * 2).collect::<Vec<u64>>(), "{prompt}");
        assert!(answer["choices"].as_array().unwrap().iter().all(|c| c["text"] == "ok"));
    }
    let twice = server.ok("/v1/completions", json!({"model": "pair", "prompt": [1, 2, 3], "n": 2})).await;
    assert_eq!(twice["usage"]["prompt_tokens"], 3, "a prompt counts once, whatever n is");
    assert_eq!(twice["usage"]["completion_tokens"], 2 * (server.tokenizer.encode("ok").unwrap().len() + 1));
}

#[tokio::test]
async fn content_in_parts() {
    let server = Server::saying("ok");
    let prompt_tokens = |content: Value| {
        let server = &server;
        async move {
            let body = json!({"model": "pair", "messages": [{"role": "user", "content": content}]});
            server.ok("/v1/chat/completions", body).await["usage"]["prompt_tokens"].clone()
        }
    };
    let whole = prompt_tokens(json!("Hello!")).await;
    let parts = json!([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]);
    assert_eq!(prompt_tokens(parts).await, whole);
    assert_eq!(prompt_tokens(json!([])).await, prompt_tokens(json!("")).await);
}

#[tokio::test]
async fn models() {
    let server = Server::saying("ok");
    let get = |path: &str| server.send(Request::get(path).body(Body::empty()).unwrap());
    let (_, list) = json_of(get("/v1/models").await).await;
    let ids: Vec<&str> = list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["pair", "small", "large"]);
    let (status, pair) = json_of(get("/v1/models/pair").await).await;
    assert_eq!((status, &pair["policy"], &pair["max_model_len"]), (200, &json!("ping-pong"), &json!(256)));
    assert_eq!(pair["models"][1]["role"], "llm");
    let (status, error) = json_of(get("/v1/models/none").await).await;
    assert_eq!((status, &error["error"]["code"]), (404, &json!("model_not_found")));
}

#[tokio::test]
async fn the_native_endpoint() {
    let server = Server::saying(TEXT);
    let body = json!({"model": "pair", "text": "Hi", "sampling_params": {"max_new_tokens": 100}, "rid": "mine"});
    let answer = server.ok("/generate", body).await;
    assert_eq!(answer["text"], TEXT);
    let ids: Vec<u32> = serde_json::from_value(answer["output_ids"].clone()).unwrap();
    assert_eq!(ids.last(), Some(&END));
    let meta = &answer["meta_info"];
    assert_eq!((&meta["id"], &meta["completion_tokens"]), (&json!("mine"), &json!(ids.len())));
    assert_eq!(meta["finish_reason"], json!({"type": "stop", "matched": END}));

    let body = json!({"model": "pair", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}});
    let answer = server.ok("/generate", body).await;
    assert_eq!(answer["meta_info"]["finish_reason"], json!({"type": "length", "length": 2}));

    let body = json!({"model": "pair", "text": "Hi", "sampling_params": {"stop": "답"}});
    let events = server.events("/generate", body).await;
    let texts: Vec<&str> = events.iter().map(|event| event["text"].as_str().unwrap()).collect();
    assert!(texts.windows(2).all(|pair| pair[1].starts_with(pair[0])), "{texts:?}");
    assert_eq!(texts.last(), Some(&TEXT));
    assert_eq!(events[0]["meta_info"]["finish_reason"], Value::Null);

    let batch = server.ok("/generate", json!({"model": "pair", "text": ["a", "b"]})).await;
    assert_eq!(batch.as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_model_without_a_template() {
    let text = Some(ModelText::new(demo(), None, &Value::Null));
    let server = Server::with("ok", Options { text, ..Options::default() });
    let (status, error) = server.json("/v1/chat/completions", chat()).await;
    assert_eq!(status, 400);
    assert!(error["error"]["message"].as_str().unwrap().contains("/v1/completions"), "{error}");
    server.ok("/v1/completions", completion()).await;
}

#[tokio::test]
async fn cached_tokens_of_the_prompt() {
    let server = Server::saying("ok");
    let prompt: Vec<u32> = (10..50).collect();
    let cached = async |fields: Value| {
        let mut request = json!({"model": "pair", "prompt": prompt, "max_tokens": 20});
        request["stream_options"] = json!({"include_usage": true});
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let streamed = server.events("/v1/completions", request.clone()).await.pop().unwrap()["usage"].clone();
        server.idle().await;
        request.as_object_mut().unwrap().remove("stream_options");
        let usage = server.ok("/v1/completions", request).await["usage"].clone();
        server.idle().await;
        assert_eq!((&usage["prompt_tokens"], &streamed["prompt_tokens"]), (&json!(40), &json!(40)));
        [streamed, usage].map(|usage| usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap())
    };
    assert_eq!(cached(json!({})).await, [0, 32]);
    assert_eq!(cached(json!({"n": 2})).await, [32, 32], "a prompt counts once, whatever n is");
    assert_eq!(cached(json!({"cache_salt": "a"})).await, [0, 32]);
    let native = |salt: Value| json!({"model": "pair", "input_ids": prompt, "cache_salt": salt, "sampling_params": {"max_new_tokens": 2}});
    for (salt, tokens) in [(json!(null), 32), (json!("b"), 0), (json!("b"), 32)] {
        let meta = server.ok("/generate", native(salt)).await["meta_info"].clone();
        server.idle().await;
        assert_eq!((&meta["cached_tokens"], &meta["prompt_tokens"]), (&json!(tokens), &json!(40)));
    }
}
