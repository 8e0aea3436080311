//! What answers tell of their prompts.

use serde_json::{Value, json};

use super::fixture::{END, Server};

/// Log-probabilities as the models of the fixture give them: the token at position `at`.
fn scored(at: usize) -> Value {
    json!(-(at as f64))
}

#[tokio::test]
async fn an_echo_with_logprobs_has_an_entry_for_each_token() {
    let server = Server::saying(" world.");
    let prompt = "é is 한";
    let ids = server.tokenizer.encode(prompt).unwrap();
    let said = server.tokenizer.decode(&server.tokenizer.encode(" world.").unwrap()[..1]);
    for (given, model) in [(json!(prompt), "pair"), (json!(ids), "small")] {
        let body = json!({"model": model, "prompt": given, "echo": true, "logprobs": 1, "max_tokens": 1});
        let answer = server.ok("/v1/completions", body).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["text"], format!("{prompt}{said}"));
        let logprobs = &choice["logprobs"];
        let column = |name: &str| logprobs[name].as_array().unwrap().clone();
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(column(name).len(), ids.len() + 1, "{name}");
        }
        assert_eq!((&logprobs["token_logprobs"][0], &logprobs["top_logprobs"][0]), (&Value::Null, &Value::Null));
        let values: Vec<Value> = (1..ids.len()).map(scored).chain([json!(-0.25)]).collect();
        assert_eq!(column("token_logprobs")[1..], values);
        let top = logprobs["top_logprobs"][1].as_object().unwrap();
        assert_eq!(top.values().max_by(|a, b| a.as_f64().partial_cmp(&b.as_f64()).unwrap()), Some(&json!(-0.125)));
        assert_eq!(top.len(), 2, "the best one and the token itself");
        let offsets: Vec<u64> = column("text_offset").iter().map(|offset| offset.as_u64().unwrap()).collect();
        assert!(offsets[0] == 0 && offsets.is_sorted(), "{offsets:?}");
        assert_eq!(offsets[ids.len()], prompt.chars().count() as u64);
        assert_eq!(answer["usage"]["prompt_tokens"], ids.len());
        assert_eq!(answer["usage"]["completion_tokens"], 1);
    }
}

#[tokio::test]
async fn no_token_may_be_asked_for_with_an_echo() {
    let server = Server::saying("never said");
    let body =
        json!({"model": "pair", "prompt": ["Hi you", "Ho"], "echo": true, "logprobs": 0, "max_tokens": 0, "n": 2});
    let answer = server.ok("/v1/completions", body.clone()).await;
    let choices = answer["choices"].as_array().unwrap();
    let texts: Vec<&Value> = choices.iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["Hi you", "Hi you", "Ho", "Ho"]);
    assert!(choices.iter().all(|choice| choice["finish_reason"] == "length"));
    let ids = server.tokenizer.encode("Hi you").unwrap();
    for choice in &choices[..2] {
        assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), ids.len());
        assert_eq!(choice["logprobs"]["top_logprobs"][1].as_object().unwrap().len(), 1);
    }
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let plain = server.ok("/v1/completions", json!({"model": "small", "prompt": "Hi", "echo": true, "max_tokens": 0}));
    assert_eq!(plain.await["choices"][0]["text"], "Hi");

    // A prompt that fills the context leaves no room for a token, and none is asked for.
    let full = json!({"model": "small", "prompt": vec![5; 256], "echo": true, "max_tokens": 0});
    assert_eq!(server.ok("/v1/completions", full).await["usage"]["prompt_tokens"], 256);
    server.idle().await;
}

/// The choices of a stream, put together as clients do.
fn joined(events: &[Value], choices: usize) -> Vec<Value> {
    let mut all = vec![json!({"text": "", "logprobs": {}}); choices];
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let whole = &mut all[choice["index"].as_u64().unwrap() as usize];
        whole["text"] = format!("{}{}", whole["text"].as_str().unwrap(), choice["text"].as_str().unwrap()).into();
        for (name, column) in choice["logprobs"].as_object().into_iter().flatten() {
            let mut values = whole["logprobs"][name].as_array().cloned().unwrap_or_default();
            values.extend(column.as_array().unwrap().clone());
            whole["logprobs"][name] = values.into();
        }
        for name in ["prompt_logprobs", "prompt_token_ids"] {
            if !choice[name].is_null() {
                assert!(whole[name].is_null(), "{name} comes twice");
                whole[name] = choice[name].clone();
            }
        }
        if let Some(ids) = choice["token_ids"].as_array() {
            let mut all = whole["token_ids"].as_array().cloned().unwrap_or_default();
            all.extend(ids.clone());
            whole["token_ids"] = all.into();
        }
    }
    all
}

#[tokio::test]
async fn streams_tell_the_same() {
    let server = Server::saying("The answer is 한국어 😀.");
    for more in [
        json!({"echo": true, "logprobs": 2}),
        json!({"echo": true, "max_tokens": 0, "prompt_logprobs": 1}),
        json!({"echo": true}),
        json!({"prompt_logprobs": 0, "return_token_ids": true, "logprobs": 0, "return_tokens_as_token_ids": true}),
        json!({"return_token_ids": true, "skip_special_tokens": false}),
    ] {
        let mut body = json!({"model": "pair", "prompt": ["Hi you", [1, 2, 3]], "n": 2, "seed": 1, "max_tokens": 30});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.ok("/v1/completions", body.clone()).await;
        let events = server.events("/v1/completions", body).await;
        for (whole, part) in answer["choices"].as_array().unwrap().iter().zip(joined(&events, 4)) {
            assert_eq!(whole["text"], part["text"], "{more}");
            assert_eq!(
                whole["logprobs"].as_object().cloned().unwrap_or_default(),
                *part["logprobs"].as_object().unwrap()
            );
            for name in ["prompt_logprobs", "prompt_token_ids", "token_ids"] {
                assert_eq!(whole[name], part[name], "{name}: {more}");
            }
        }
    }
}

#[tokio::test]
async fn prompt_logprobs_by_token_id() {
    let server = Server::saying("ok");
    let body = json!({"model": "pair", "prompt": [9, 7, 11], "prompt_logprobs": 1, "max_tokens": 1});
    let answer = server.ok("/v1/completions", body).await;
    let of = &answer["choices"][0]["prompt_logprobs"];
    assert_eq!(of[0], Value::Null);
    // Token 7 is the best one, token 11 is not.
    assert_eq!(of[1]["7"]["logprob"], -1.0);
    assert_eq!(
        (&of[2]["7"]["rank"], &of[2]["11"]["rank"], &of[2]["11"]["logprob"]),
        (&json!(1), &json!(3), &json!(-2.0))
    );
    assert_eq!(of[2]["11"]["decoded_token"], String::from_utf8_lossy(server.tokenizer.bytes(11).unwrap()).as_ref());

    let chat = json!({
        "model": "pair", "messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0,
        "return_token_ids": true, "n": 2,
    });
    let answer = server.ok("/v1/chat/completions", chat.clone()).await;
    let prompt = answer["prompt_token_ids"].as_array().unwrap();
    assert_eq!(answer["usage"]["prompt_tokens"], prompt.len());
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len(), prompt.len());
    let ids = answer["choices"][1]["token_ids"].as_array().unwrap();
    assert_eq!(ids.last(), Some(&json!(END)));
    let events = server.events("/v1/chat/completions", chat).await;
    let told: Vec<&Value> = events.iter().filter(|event| event.get("prompt_logprobs").is_some()).collect();
    assert_eq!((told.len(), &told[0]["prompt_logprobs"]), (1, &answer["prompt_logprobs"]));
    assert_eq!(events[0]["prompt_token_ids"], answer["prompt_token_ids"], "with the role");
    assert_eq!(events.iter().filter(|event| event.get("prompt_token_ids").is_some()).count(), 1);
    let streamed = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
    let streamed = streamed.filter(|choice| choice["index"] == 1);
    let last = streamed.clone().find(|choice| choice["finish_reason"].is_string());
    assert_eq!(last.map(|choice| &choice["token_ids"]), Some(&json!([])));
    let streamed: Vec<Value> =
        streamed.flat_map(|choice| choice["token_ids"].as_array().cloned().unwrap_or_default()).collect();
    assert_eq!(streamed, *ids);
}

#[tokio::test]
async fn tokens_named_by_id() {
    let server = Server::saying("ok");
    let fields = json!({"model": "small", "prompt": [9, 7], "echo": true, "logprobs": 1, "max_tokens": 1,
        "return_tokens_as_token_ids": true});
    let logprobs = server.ok("/v1/completions", fields).await["choices"][0]["logprobs"].clone();
    assert_eq!((&logprobs["tokens"][0], &logprobs["tokens"][1]), (&json!("token_id:9"), &json!("token_id:7")));
    assert_eq!(logprobs["top_logprobs"][1], json!({"token_id:7": -0.125}));
}

#[tokio::test]
async fn truncated_prompts() {
    let server = Server::saying("ok");
    let body = json!({"model": "small", "prompt": "one two three four", "echo": true, "max_tokens": 0,
        "truncate_prompt_tokens": 2, "return_token_ids": true});
    let answer = server.ok("/v1/completions", body).await;
    let ids = server.tokenizer.encode("one two three four").unwrap();
    assert_eq!(answer["choices"][0]["prompt_token_ids"], json!(ids[ids.len() - 2..]));
    assert_eq!(answer["choices"][0]["text"], server.tokenizer.decode(&ids[ids.len() - 2..]));
    assert_eq!(answer["usage"]["prompt_tokens"], 2);
    let long = json!({"model": "small", "prompt": vec![5; 600], "max_tokens": 6, "truncate_prompt_tokens": -1});
    assert_eq!(server.ok("/v1/completions", long).await["usage"]["prompt_tokens"], 250);
    let chat = json!({"model": "small", "messages": [{"role": "user", "content": "Hi ".repeat(300)}],
        "max_tokens": 6, "truncate_prompt_tokens": -1});
    assert_eq!(server.ok("/v1/chat/completions", chat).await["usage"]["prompt_tokens"], 250);
}

#[tokio::test]
async fn the_last_message_continued() {
    let server = Server::saying("ok");
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello th"}]);
    let body = |more: Value| {
        let mut body = json!({"model": "small", "messages": messages, "return_token_ids": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello th";
    for more in [json!({}), json!({"add_generation_prompt": false})] {
        let mut body = body(more);
        body["continue_final_message"] = true.into();
        let answer = server.ok("/v1/chat/completions", body).await;
        assert_eq!(answer["prompt_token_ids"], json!(server.tokenizer.encode(text).unwrap()));
    }
    let both = body(json!({"continue_final_message": true, "add_generation_prompt": true}));
    let (status, error) = server.json("/v1/chat/completions", both).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("continue_final_message")));
}

#[tokio::test]
async fn special_tokens_in_the_text() {
    let server = Server::saying("a<|im_start|>b");
    let ask = |skip: bool| json!({"model": "small", "prompt": "Hi", "skip_special_tokens": skip});
    assert_eq!(server.ok("/v1/completions", ask(true)).await["choices"][0]["text"], "ab");
    assert_eq!(server.ok("/v1/completions", ask(false)).await["choices"][0]["text"], "a<|im_start|>b");
}

#[tokio::test]
async fn native_log_probabilities() {
    let server = Server::saying("ok");
    let length = server.tokenizer.encode("ok").unwrap().len() + 1;
    let body = json!({
        "model": "pair", "input_ids": [9, 7, 11], "return_logprob": true, "logprob_start_len": 0,
        "top_logprobs_num": 1, "token_ids_logprob": [4, 5],
    });
    let answer = server.ok("/generate", body.clone()).await;
    let meta = &answer["meta_info"];
    assert_eq!(meta["input_token_logprobs"], json!([[null, 9, null], [-1.0, 7, null], [-2.0, 11, null]]));
    assert_eq!(meta["input_top_logprobs"], json!([null, [[-0.125, 7, null]], [[-0.125, 7, null]]]));
    let listed = json!([[-2.5, 4, null], [-2.5, 5, null]]);
    assert_eq!(meta["input_token_ids_logprobs"], json!([null, listed, listed]));
    let output = meta["output_token_logprobs"].as_array().unwrap();
    assert_eq!((output.len(), &output[0][0]), (length, &json!(-0.25)));
    assert_eq!(meta["output_token_ids_logprobs"][0], json!([[-1.5, 4, null], [-1.5, 5, null]]));
    assert_eq!(meta["output_top_logprobs"].as_array().unwrap().len(), length);
    assert!(meta["e2e_latency"].as_f64().is_some_and(|seconds| seconds >= 0.0));
    let events = server.events("/generate", body).await;
    let mut last = events.last().unwrap()["meta_info"].clone();
    for (name, value) in meta.as_object().unwrap() {
        if !["id", "e2e_latency"].contains(&name.as_str()) {
            assert_eq!(last[name].take(), *value, "{name}");
        }
    }

    let from = json!({"model": "pair", "input_ids": [9, 7, 11, 12], "return_logprob": true, "logprob_start_len": 2,
        "return_text_in_logprobs": true, "sampling_params": {"max_new_tokens": 0}});
    let answer = server.ok("/generate", from).await;
    let input = &answer["meta_info"]["input_token_logprobs"];
    assert_eq!(
        (&input[0][0], &input[0][1], &input[1][0], &input[1][1]),
        (&Value::Null, &json!(11), &json!(-3.0), &json!(12))
    );
    assert!(input[0][2].is_string());
    assert_eq!(answer["meta_info"]["output_token_logprobs"], json!([]));
    assert_eq!(answer["meta_info"]["finish_reason"], json!({"type": "length", "length": 0}));

    let none = server.ok("/generate", json!({"model": "pair", "text": "Hi", "return_logprob": true})).await;
    assert_eq!(none["meta_info"]["input_token_logprobs"], json!([]));
    let (status, error) = server.json("/generate", json!({"model": "pair", "text": "Hi", "top_logprobs_num": 2})).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("return_logprob")));
}

#[tokio::test]
async fn native_values_by_prompt() {
    let server = Server::saying("The answer.");
    let body = json!({
        "model": "pair", "text": ["Hi", "Ho"], "rid": ["a", "b"],
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2, "no_stop_trim": true}],
        "return_logprob": [true, false],
    });
    let answers = server.ok("/generate", body).await;
    let meta = |index: usize| answers[index]["meta_info"].clone();
    assert_eq!((&meta(0)["id"], &meta(1)["id"]), (&json!("a"), &json!("b")));
    assert_eq!((&meta(0)["completion_tokens"], &meta(1)["completion_tokens"]), (&json!(1), &json!(2)));
    assert!(meta(0)["output_token_logprobs"].is_array() && meta(1)["output_token_logprobs"].is_null());
    for (field, value, param) in [
        ("rid", json!(["a"]), "rid"),
        ("sampling_params", json!([{}]), "sampling_params"),
        ("sampling_params", json!([{"n": 1}, {"n": 2}]), "sampling_params.n"),
        ("sampling_params", json!([{}, {"top_p": 2}]), "sampling_params[1].top_p"),
        ("echo", json!(true), "echo"),
    ] {
        let mut body = json!({"model": "pair", "text": ["Hi", "Ho"]});
        body[field] = value;
        let (status, error) = server.json("/generate", body).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)), "{error}");
    }
}
