//! Bodies that the endpoints take.

use serde_json::{Value, json};

fn messages() -> Value {
    json!([{"role": "user", "content": "What is 47 * 83?"}])
}

pub fn chats() -> Vec<Value> {
    let schema = json!({"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]});
    let format = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]);
    vec![
        json!({"model": "small", "messages": messages(), "max_tokens": 32}),
        json!({"model": "small", "messages": messages(), "max_tokens": 32, "response_format": format}),
        json!({"model": "small", "messages": parts, "max_completion_tokens": 8, "temperature": 0.7, "seed": 1,
               "logprobs": true, "top_logprobs": 2, "return_routing": true, "prompt_logprobs": 1}),
        json!({"model": "small", "messages": messages(), "max_tokens": 8, "stream": true,
               "stream_options": {"include_usage": true}}),
    ]
}

pub fn completions() -> Vec<Value> {
    vec![
        json!({"model": "small", "prompt": "The total is", "max_tokens": 16}),
        json!({"model": "small", "prompt": ["One", "Two"], "max_tokens": 8, "n": 2, "stop": ["\n"], "seed": 1}),
        json!({"model": "small", "prompt": "The total is", "echo": true, "logprobs": 2, "max_tokens": 0}),
        json!({"model": "small", "prompt": [10, 11, 12], "max_tokens": 8, "stream": true, "return_token_ids": true}),
    ]
}

pub fn generations() -> Vec<Value> {
    let params = json!({"max_new_tokens": 8, "temperature": 0});
    let each = json!([{"max_new_tokens": 4}, {"max_new_tokens": 8, "regex": "[0-9]+"}]);
    vec![
        json!({"model": "small", "text": "The total is", "sampling_params": params}),
        json!({"model": "small", "text": ["One", "Two"], "sampling_params": each, "rid": ["a", "b"]}),
        json!({"model": "small", "input_ids": [10, 11, 12], "sampling_params": params, "return_logprob": true,
               "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5], "return_text_in_logprobs": true}),
        json!({"model": "small", "text": "The total is", "sampling_params": params, "stream": true}),
    ]
}

pub fn tokenizations() -> Vec<Value> {
    vec![
        json!({"model": "small", "prompt": "The total is", "return_token_strs": true}),
        json!({"model": "small", "prompt": ["One", "Two"]}),
        json!({"model": "small", "messages": messages()}),
    ]
}

pub fn detokenizations() -> Vec<Value> {
    vec![json!({"model": "small", "tokens": [10, 11, 12]}), json!({"model": "small", "tokens": [[10], [11, 12]]})]
}

pub fn aborts() -> Vec<Value> {
    vec![json!({"rid": "a"}), json!({"request_ids": ["chatcmpl-1", "chatcmpl-2"]})]
}
