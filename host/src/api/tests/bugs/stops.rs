//! Cases 8 to 14: where answers end.

use serde_json::{Value, json};

use super::super::choices::{choice, commit};
use super::super::fixture::{END, Options, Server};
use super::{ROUTES, refused, said_once};
use crate::api::choice::Reason;
use crate::request::{TokenId, Told};
use crate::runner::model_config::ModelConfig;
use crate::text::Tokenizer;
use crate::text::tokenizer_fixtures::{demo, demo_directory};

/// Tokens of all `pieces`, none of which begins in one and ends in another.
fn cut(tokenizer: &Tokenizer, pieces: &[&str]) -> Vec<TokenId> {
    pieces.iter().flat_map(|piece| tokenizer.encode(piece).unwrap()).collect()
}

#[tokio::test]
async fn bug_08_the_beginning_of_a_stop_is_not_shown() {
    for pieces in [&["ABC", "DEF", "GHIJ", "K"][..], &["ABCDEFGHIJK"], &["A", "BCD", "E", "FGHI", "JK"]] {
        let script = Some(cut(&demo(), pieces));
        let server = Server::with("", Options { script, ..Options::default() });
        for route in ROUTES {
            let choice = said_once(&server, route, json!({"stop": ["nowhere", "DEFGHIJ"]})).await;
            assert_eq!((choice.text.as_str(), &choice.stop_reason), ("ABC", &json!("DEFGHIJ")));
            assert_eq!(choice.finish_reason, "stop");
            // It was no stop after all.
            let choice = said_once(&server, route, json!({"stop": "DEFGHIX"})).await;
            assert_eq!((choice.text.as_str(), &choice.stop_reason), ("ABCDEFGHIJK", &Value::Null));
        }
    }
    // Within characters, at which the models take turns.
    let server = Server::saying("a 한국어 b");
    for route in ROUTES {
        assert_eq!(said_once(&server, route, json!({"stop": "국어 b"})).await.text, "a 한");
    }
}

#[tokio::test]
async fn bug_10_what_was_held_back_comes_at_the_end() {
    let text = "UNO DUE TRE 한";
    let server = Server::saying(text);
    let ids = server.tokenizer.encode(text).unwrap();
    for route in ROUTES {
        for stop in ["DUE TRE X", "TRE 한국", "E 한 "] {
            let choice = said_once(&server, route, json!({"stop": stop})).await;
            assert_eq!((choice.text.as_str(), &choice.finish_reason), (text, &json!("stop")));
            for most in 1..=ids.len() {
                let choice = said_once(&server, route, json!({"stop": stop, "max_tokens": most})).await;
                assert_eq!(choice.text, server.tokenizer.library_decode(&ids[..most]));
                assert_eq!(choice.finish_reason, "length");
            }
        }
    }
}

#[tokio::test]
async fn bug_10_an_aborted_answer_has_what_was_held_back() {
    let ids = demo().encode("UNO DUE TRE").unwrap();
    let (sender, mut choice) = choice(demo(), &["DUE TRE X"]);
    sender.send(Told::now(commit(0, &ids))).unwrap();
    assert_eq!(choice.next().await.unwrap().text, "UNO ");
    let last = choice.abort();
    assert_eq!((last.text.as_str(), last.end.unwrap().reason), ("DUE TRE", Reason::Aborted));
}

#[tokio::test]
async fn bug_12_empty_stop_strings() {
    let server = Server::saying("ok");
    for stop in [json!(""), json!([""]), json!(["x", ""]), json!(["", "x"])] {
        refused(&server, &json!({"stop": stop}), "stop").await;
    }
    // No stop string at all asks for nothing.
    assert_eq!(said_once(&server, "pair", json!({"stop": []})).await.text, "ok");
}

/// The end tokens of the demo model with other files.
fn ends(config: Value, generation: Option<Value>, tokenizer: Option<Value>, template: bool) -> Vec<TokenId> {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str| dir.path().join(name);
    let text = std::fs::read_to_string(demo_directory().join("config.json")).unwrap();
    let mut whole: Value = serde_json::from_str(&text).unwrap();
    whole["eos_token_id"] = config;
    std::fs::write(place("config.json"), whole.to_string()).unwrap();
    std::fs::copy(demo_directory().join("tokenizer.json"), place("tokenizer.json")).unwrap();
    for (name, json) in [("generation_config.json", generation), ("tokenizer_config.json", tokenizer)] {
        if let Some(json) = json {
            std::fs::write(place(name), json.to_string()).unwrap();
        }
    }
    if template {
        std::fs::write(place("chat_template.jinja"), "{{ messages[0].content }}<|im_end|>").unwrap();
    }
    ModelConfig::load(dir.path(), None).unwrap().eos
}

#[test]
fn bug_13_end_tokens_of_all_files() {
    let text = |token: &str| Some(json!({"eos_token": token}));
    let object = Some(json!({"eos_token": {"content": "<|im_end|>"}}));
    let generation = |ids: Value| Some(json!({"eos_token_id": ids}));
    assert_eq!(ends(json!(7), None, None, false), [7]);
    assert_eq!(ends(Value::Null, generation(json!([8, 9])), None, false), [8, 9]);
    assert_eq!(ends(Value::Null, generation(json!(8)), None, false), [8]);
    assert_eq!(ends(Value::Null, None, text("<|endoftext|>"), false), [2045]);
    assert_eq!(ends(json!([7, 8]), generation(json!([8, 9])), object, false), [7, 8, 9, END]);
    // The token that ends the messages of the model's chats.
    assert_eq!(ends(json!(2045), None, text("<|endoftext|>"), true), [2045, END]);
    let own = json!({"chat_template": "{{ messages[0].content + '<|im_end|>' }}"});
    assert_eq!(ends(json!(2045), None, Some(own), false), [2045, END]);
}

/// A token that ends answers at one model of a route and not at the other.
#[tokio::test]
async fn bug_13_each_model_has_its_own_end_tokens() {
    let end = 2045;
    let large_end = Some(end);
    let letters = cut(&demo(), &["a", "b", "c", "d"]);
    for (route, at, text) in [("pair", 1, "a"), ("pair", 2, "abcd"), ("small", 1, "abcd"), ("large", 2, "ab")] {
        let mut script = letters.clone();
        script.insert(at, end);
        let server = Server::with("", Options { script: Some(script), large_end, ..Options::default() });
        let choice = said_once(&server, route, json!({})).await;
        assert_eq!((choice.text.as_str(), &choice.finish_reason), (text, &json!("stop")), "{route} {at}");
    }
}

#[tokio::test]
async fn bug_14_stops_count_from_min_tokens_on() {
    let text = "a. b. c. 한. d";
    let server = Server::saying(text);
    let ids = server.tokenizer.encode(text).unwrap();
    let dot = server.tokenizer.id_of(".").unwrap();
    let ends: Vec<usize> = (0..ids.len()).filter(|&at| ids[at] == dot).collect();
    assert_eq!(ends.len(), 4, "each stop is a token of its own");
    for route in ROUTES {
        for least in 0..=ids.len() {
            // A stop that is complete with just as many tokens counts.
            let at = ends.iter().find(|&&at| at + 1 >= least);
            let wanted = at.map_or(text.to_owned(), |&at| server.tokenizer.decode(&ids[..at]));
            let choice = said_once(&server, route, json!({"stop": ".", "min_tokens": least})).await;
            assert_eq!(choice.text, wanted, "{least}");
            assert_eq!(choice.stop_reason, at.map_or(Value::Null, |_| json!(".")));
        }
    }
}
