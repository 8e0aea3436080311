//! Cases 56 to 59: fields that are null, and forms that no answer can have.

use serde_json::{Map, Value, json};

use super::super::fixture::Server;
use super::{CHATS, COMPLETIONS, NATIVE, asking, refused_at, with};

/// All optional fields that the documents name, those that are not built included.
const SHARED: &str =
    "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed n min_tokens
    stop stop_token_ids include_stop_str_in_output no_stop_trim skip_special_tokens ignore_eos logit_bias
    response_format regex grammar ebnf json_schema guided_json guided_regex guided_choice guided_grammar
    structured_outputs structural_tag stop_regex tools functions tool_choice modalities reasoning_effort
    chat_template suffix best_of allowed_token_ids bad_words logits_processors lora_path length_penalty typical_p
    no_repeat_ngram_size add_special_tokens";
const OPENAI: &str = "logprobs stream stream_options return_routing prompt_logprobs return_token_ids max_tokens
    max_completion_tokens return_tokens_as_token_ids truncate_prompt_tokens request_id cache_salt prompt_cache_key user
    metadata store service_tier spaces_between_special_tokens";

/// `fields`, all of them null.
fn nulls(fields: &[&str]) -> Value {
    let names = fields.iter().flat_map(|fields| fields.split_whitespace());
    names.map(|field| (field.to_owned(), Value::Null)).collect::<Map<_, _>>().into()
}

#[tokio::test]
async fn bug_56_null_is_the_same_as_nothing() {
    let server = Server::saying("one two 한국어 three four five six seven eight nine ten");
    let bare = |path: &str| match path {
        CHATS => json!({"model": "pair", "messages": [{"role": "user", "content": "Hi"}]}),
        COMPLETIONS => json!({"model": "pair", "prompt": "Hi"}),
        _ => json!({"model": "pair", "text": "Hi"}),
    };
    let chat_only = "top_logprobs chat_template_kwargs add_generation_prompt continue_final_message";
    let native_only = "rid return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs
        input_ids stream sampling_params cache_salt return_routing";
    let native_sampling = "max_new_tokens min_new_tokens";
    for (path, more) in [
        (CHATS, nulls(&[SHARED, OPENAI, chat_only])),
        (COMPLETIONS, nulls(&[SHARED, OPENAI, "echo"])),
        (NATIVE, nulls(&[native_only])),
        (NATIVE, json!({"sampling_params": nulls(&[SHARED, native_sampling])})),
    ] {
        let wanted = server.ok(path, bare(path)).await;
        let answer = server.ok(path, with(bare(path), &more)).await;
        for part in ["choices", "text", "output_ids"] {
            assert_eq!(answer[part], wanted[part], "{path}");
        }
        assert_eq!(answer["usage"]["completion_tokens"], wanted["usage"]["completion_tokens"]);
        // One by one as well: what two nulls do to each other would hide.
        for field in more.as_object().unwrap().keys() {
            let answer = server.ok(path, with(bare(path), &json!({field: null}))).await;
            assert_eq!(answer["choices"], wanted["choices"], "{path} {field}");
        }
    }
    let message = json!({"role": "user", "content": "Hi", "name": null, "tool_calls": null, "tool_call_id": null,
        "refusal": null, "annotations": null, "audio": null, "function_call": null});
    server.ok(CHATS, json!({"model": "pair", "messages": [message]})).await;
}

/// Each is refused with the name of its field, before anything is written, and the server goes on.
async fn none_is_left_out(forms: &[(&str, Value)]) {
    let server = Server::saying("unconstrained");
    for (field, value) in forms {
        for path in [CHATS, COMPLETIONS, NATIVE] {
            for stream in [false, true] {
                let mut body = with(asking(path, "pair", &json!({})), &json!({"stream": stream}));
                let (name, inner) = field.split_once('.').unwrap_or((field, ""));
                body[name] = if inner.is_empty() { value.clone() } else { json!({inner: value}) };
                let (status, error) = server.json(path, body.clone()).await;
                let error = &error["error"];
                assert_eq!((status, &error["code"]), (400, &json!("invalid_value")), "{path} {body}: {error}");
                let param = error["param"].as_str().unwrap();
                assert!(param.starts_with(name), "{param}: {body}");
                assert_eq!(server.state.engine.live_requests(), 0);
            }
        }
    }
    assert_eq!(
        server.ok(COMPLETIONS, asking(COMPLETIONS, "pair", &json!({}))).await["choices"][0]["text"],
        "unconstrained"
    );
}

#[tokio::test]
async fn bug_58_forms_that_cannot_be_compiled() {
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    none_is_left_out(&[
        ("regex", json!("(")),
        ("regex", json!("a{2,1}")),
        ("regex", json!("(?<=a)b")),
        ("guided_regex", json!("[z-a]")),
        ("structured_outputs.regex", json!("*")),
        ("json_schema", json!("{not json")),
        ("guided_json", json!({"type": "no such type"})),
        ("guided_json", json!({"$ref": "#/nowhere"})),
        ("guided_json", json!({"type": "array", "uniqueItems": true})),
        ("guided_json", json!({"allOf": [{"type": "string"}, {"type": "integer"}]})),
        ("structured_outputs.json", json!({"pattern": "(", "type": "string"})),
        ("response_format", schema(json!({"type": 5}))),
        ("response_format", schema(json!({"enum": []}))),
    ])
    .await;
}

#[tokio::test]
async fn bug_59_forms_that_cannot_be_read() {
    none_is_left_out(&[
        ("grammar", json!("root ::= \"a\"")),
        ("grammar", json!("start: undefined_rule")),
        ("grammar", json!("start: \"a")),
        ("ebnf", json!("start: /(/")),
        ("guided_grammar", json!("start: start")),
        ("structured_outputs.grammar", json!("?!")),
        ("response_format", json!({"type": "xml"})),
    ])
    .await;
    let server = Server::saying("ok");
    for (field, value) in [("regex", json!(5)), ("response_format", json!("json"))] {
        let body = with(asking(CHATS, "pair", &json!({})), &json!({field: value}));
        refused_at(&server, CHATS, body, field.into()).await;
    }
}
