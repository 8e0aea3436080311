//! Cases 44 to 55: prompts and what becomes of them.

use serde_json::{Value, json};

use super::super::fixture::{Options, Server};
use super::{CHATS, COMPLETIONS, NATIVE, ROUTES, refused_at};
use crate::request::TokenId;
use crate::text::tokenizer_fixtures::{byte_fallback, changed_demo};
use crate::text::{ChatTemplate, ModelText, Tokenizer};

const BOS: TokenId = 1;

/// A model that wants a beginning-of-sequence token, which its tokenizer adds and its template writes.
fn with_bos() -> Server {
    let config = json!({"bos_token": "<s>", "add_bos_token": true});
    let template = ChatTemplate::new("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let text = Some(ModelText::new(byte_fallback(), Some(template), &config));
    Server::with("ok", Options { text, ..Options::default() })
}

/// A model whose tokenizer changes texts before it cuts them into tokens.
fn normalising(normalizer: Value) -> Server {
    let tokenizer = changed_demo(|json| json["normalizer"] = normalizer);
    let text = Some(ModelText::new(tokenizer, None, &Value::Null));
    Server::with("ok", Options { text, ..Options::default() })
}

async fn prompt_ids(server: &Server, path: &str, mut body: Value) -> Vec<TokenId> {
    body["return_token_ids"] = true.into();
    let answer = server.ok(path, body).await;
    let ids = answer.get("prompt_token_ids").unwrap_or(&answer["choices"][0]["prompt_token_ids"]);
    serde_json::from_value(ids.clone()).unwrap()
}

#[tokio::test]
async fn bug_44_exactly_one_token_begins_the_sequence() {
    let server = with_bos();
    let begins_once = |ids: &[TokenId]| ids[0] == BOS && ids[1..].iter().all(|&id| id != BOS);
    for route in ROUTES {
        for prompt in [json!("hello"), json!("<s>hello"), json!("<s>"), json!(["hello"])] {
            let body = json!({"model": route, "prompt": prompt, "max_tokens": 1});
            let ids = prompt_ids(&server, COMPLETIONS, body).await;
            assert!(begins_once(&ids), "{prompt}: {ids:?}");
        }
        let messages = json!([{"role": "user", "content": "hello"}]);
        let ids = prompt_ids(&server, CHATS, json!({"model": route, "messages": messages})).await;
        assert!(begins_once(&ids), "{ids:?}");
        // Tokens are taken as they are.
        let ids = prompt_ids(&server, COMPLETIONS, json!({"model": route, "prompt": [1, 1, 11]})).await;
        assert_eq!(ids, [1, 1, 11]);
    }
}

#[tokio::test]
async fn bug_51_contents_of_messages() {
    let server = Server::saying("ok");
    let ask = |content: Value| {
        let message = json!({"role": "user", "content": content});
        json!({"model": "pair", "messages": [message], "return_token_ids": true})
    };
    let text = |text: &str| json!({"type": "text", "text": text});
    for (parts, whole) in [
        (json!([text("a"), text("b")]), "ab"),
        (json!([text("a\n"), text(""), text(" b")]), "a\n b"),
        (json!([text("한")]), "한"),
        (json!([]), ""),
    ] {
        let of_parts = prompt_ids(&server, CHATS, ask(parts.clone())).await;
        assert_eq!(of_parts, prompt_ids(&server, CHATS, ask(json!(whole))).await, "{parts}");
    }
    let at = |place: &str| format!("messages[0].content{place}");
    for (content, param) in [
        (json!(null), at("")),
        (json!(3), at("")),
        (json!({"type": "text", "text": "a"}), at("")),
        (json!([text("a"), {"type": "image_url", "image_url": {"url": "x"}}]), at("[1].type")),
        (json!([{"type": "input_audio"}]), at("[0].type")),
        (json!([{"type": "text"}]), at("[0].text")),
        (json!([{"type": "text", "text": null}]), at("[0].text")),
        (json!([{"text": "a"}]), at("[0].type")),
        (json!(["a"]), at("[0].type")),
    ] {
        refused_at(&server, CHATS, ask(content), param).await;
    }
    // Calls of tools are not built, so that no message may be without content.
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"id": "a", "type": "function"}]});
    let body = json!({"model": "pair", "messages": [call]});
    refused_at(&server, CHATS, body, "messages[0].tool_calls".into()).await;
}

#[tokio::test]
async fn bug_52_prompts_without_anything() {
    let server = Server::saying("ok");
    for stream in [false, true] {
        for prompt in [json!(""), json!([]), json!([[]]), json!([""]), json!(["a", ""]), json!([[1], []]), json!(null)]
        {
            let body = json!({"model": "pair", "prompt": prompt, "stream": stream});
            refused_at(&server, COMPLETIONS, body, "prompt".into()).await;
            let body = json!({"model": "pair", "text": prompt, "stream": stream});
            refused_at(&server, NATIVE, body, "text".into()).await;
        }
        for ids in [json!([]), json!([[]]), json!([[1], []])] {
            let body = json!({"model": "pair", "input_ids": ids, "stream": stream});
            refused_at(&server, NATIVE, body, "input_ids".into()).await;
        }
        for messages in [json!([]), json!(null)] {
            let body = json!({"model": "pair", "messages": messages, "stream": stream});
            refused_at(&server, CHATS, body, "messages".into()).await;
        }
    }
    // Where a token begins the sequence, there is one even so.
    let server = with_bos();
    for route in ROUTES {
        let body = json!({"model": route, "prompt": ["", "hi"], "max_tokens": 2});
        let answer = server.ok(COMPLETIONS, body).await;
        assert_eq!(answer["choices"].as_array().map(Vec::len), Some(2));
        assert_eq!(prompt_ids(&server, COMPLETIONS, json!({"model": route, "prompt": ""})).await, [BOS]);
    }
    refused_at(&server, COMPLETIONS, json!({"model": "pair", "prompt": [[]]}), "prompt".into()).await;
}

/// Characters before each token, and the token itself as text.
async fn echo(server: &Server, prompt: &str) -> Vec<(usize, TokenId)> {
    let body = json!({"model": "pair", "prompt": prompt, "echo": true, "logprobs": 0, "max_tokens": 2,
        "return_token_ids": true});
    let answer = server.ok(COMPLETIONS, body.clone()).await;
    let streamed = server.events(COMPLETIONS, body).await;
    let choice = &answer["choices"][0];
    let said: String = streamed.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    let text = choice["text"].as_str().unwrap();
    assert_eq!(text, said);
    assert!(text.starts_with(prompt), "{text:?} does not begin with {prompt:?}");
    let ids: Vec<TokenId> = serde_json::from_value(choice["prompt_token_ids"].clone()).unwrap();
    let offsets: Vec<usize> = serde_json::from_value(choice["logprobs"]["text_offset"].clone()).unwrap();
    assert!(offsets.is_sorted(), "{offsets:?}");
    let chars = prompt.chars().count();
    assert_eq!(offsets[ids.len()], chars, "the answer begins where the prompt ends");
    assert!(offsets[..ids.len()].iter().all(|&offset| offset < chars));
    offsets.into_iter().zip(ids).collect()
}

#[tokio::test]
async fn bug_55_echoes_are_the_text_as_it_was_sent() {
    let prompts = [
        "\u{FB01}ne \u{212B} A\u{30A} is",
        "\u{FF46}\u{FF55}\u{FF4C}\u{FF4C} is",
        "ABC \u{130} is",
        "e\u{301}\u{302} is",
    ];
    for normalizer in [
        json!({"type": "NFC"}),
        json!({"type": "NFKC"}),
        json!({"type": "Lowercase"}),
        json!({"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]}),
    ] {
        let server = normalising(normalizer.clone());
        for prompt in prompts {
            let tokens = echo(&server, prompt).await;
            // A token that no normaliser changes lies where it was written.
            let is = token(&server.tokenizer, " is");
            let (offset, _) = tokens.iter().find(|(_, id)| *id == is).unwrap();
            assert_eq!(*offset, prompt.chars().count() - 3, "{normalizer} {prompt:?}: {tokens:?}");
        }
    }
}

fn token(tokenizer: &Tokenizer, text: &str) -> TokenId {
    tokenizer.id_of(text).unwrap()
}
