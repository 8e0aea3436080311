//! Cases 1 to 7: text that comes in pieces.

use serde_json::json;

use super::super::choices::{answering, commit, finished};
use super::super::fixture::{Options, Server};
use super::{CHATS, ROUTES, asking, said, said_once};
use crate::api::choice::Piece;
use crate::request::{FinishReason, TokenId, Told};
use crate::text::tokenizer_fixtures::{byte_fallback, demo};
use crate::text::{Detokenizer, Tokenizer};

const WORDS: &str = "안녕 👩\u{200D}👧 ďábelské 漢é";

/// What a client is shown with each of `ids`, which two models write in turns, and at the end.
async fn shown(tokenizer: Tokenizer, ids: &[TokenId], stops: &[&str]) -> Vec<Piece> {
    shown_after(&[], tokenizer, ids, stops).await
}

/// The same of the answer to `prompt`.
async fn shown_after(prompt: &[TokenId], tokenizer: Tokenizer, ids: &[TokenId], stops: &[&str]) -> Vec<Piece> {
    let (sender, mut choice) = answering(prompt, tokenizer, stops);
    let mut pieces = Vec::new();
    for (at, &id) in ids.iter().enumerate() {
        sender.send(Told::now(commit(at as u32, &[id]))).unwrap();
        tokio::task::yield_now().await;
        pieces.push(tokio::select! {
            biased;
            piece = choice.next() => piece.unwrap(),
            () = std::future::ready(()) => Piece::default(),
        });
    }
    sender.send(Told::now(finished(FinishReason::Length))).unwrap();
    pieces.push(choice.next().await.unwrap());
    pieces
}

/// The byte-level token of `byte`.
fn of_byte(tokenizer: &Tokenizer, byte: u8) -> TokenId {
    (0..tokenizer.vocab_size() as TokenId).find(|&id| tokenizer.bytes(id) == Some(&[byte][..])).unwrap()
}

#[tokio::test]
async fn bug_01_characters_over_several_tokens() {
    let server = Server::saying(WORDS);
    let ids = server.tokenizer.encode(WORDS).unwrap();
    let part = |&&id: &&TokenId| std::str::from_utf8(server.tokenizer.bytes(id).unwrap()).is_err();
    assert!(ids.iter().filter(part).count() > 10, "characters are handed over in the middle");
    for fields in [json!({}), json!({"n": 3})] {
        // All at once, in batches.
        let asked = [&fields; 3].map(|fields| ROUTES.map(|route| said(&server, route, fields.clone())));
        let [[a, b], [c, d], [e, f]] = asked;
        let (a, b, c, d, e, f) = tokio::join!(a, b, c, d, e, f);
        for choice in [a, b, c, d, e, f].iter().flatten() {
            assert_eq!(choice.text, WORDS);
            assert!(choice.parts.iter().all(|part| !part.contains('\u{FFFD}')), "{choice:?}");
        }
    }
}

#[tokio::test]
async fn bug_01_an_answer_cut_within_a_character() {
    let server = Server::saying(WORDS);
    let ids = server.tokenizer.encode(WORDS).unwrap();
    for route in ROUTES {
        for most in 1..=ids.len() {
            let choice = said_once(&server, route, json!({"max_tokens": most})).await;
            assert_eq!(choice.text, server.tokenizer.library_decode(&ids[..most]), "{most}");
            let (_, before) = choice.parts.split_last().unwrap();
            assert!(before.iter().rev().skip(1).all(|part| !part.contains('\u{FFFD}')), "{choice:?}");
        }
    }
}

#[tokio::test]
async fn bug_02_pieces_are_the_decoding_of_all() {
    for text in ["ďábelské", "naïve café", "ďábelské\u{301} x"] {
        let server = Server::saying(text);
        let ids = server.tokenizer.encode(text).unwrap();
        for route in ROUTES {
            assert_eq!(said_once(&server, route, json!({})).await.text, server.tokenizer.library_decode(&ids));
        }
    }
}

#[tokio::test]
async fn bug_04_bytes_that_are_no_text() {
    let tokenizer = demo();
    let bytes = b"a\xE2\x82b\xFF \xC3";
    let script: Vec<TokenId> = bytes.iter().map(|&byte| of_byte(&tokenizer, byte)).collect();
    let server = Server::with("", Options { script: Some(script), ..Options::default() });
    for route in ROUTES {
        assert_eq!(said_once(&server, route, json!({})).await.text, "a\u{FFFD}b\u{FFFD} \u{FFFD}");
        let answer = server.ok(CHATS, asking(CHATS, route, &json!({"logprobs": true}))).await;
        let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
        let told: Vec<u64> = content[..bytes.len()].iter().map(|entry| entry["bytes"][0].as_u64().unwrap()).collect();
        assert_eq!(told, bytes.map(u64::from));
    }
    let tokenizer = byte_fallback();
    let ids = [10, 100 + 0xE2, 11, 100 + 0xFF, 10];
    let wanted = tokenizer.decode(&ids);
    let text: String = shown(tokenizer, &ids, &[]).await.into_iter().map(|piece| piece.text).collect();
    assert_eq!((text.as_str(), &wanted[..]), ("hello\u{FFFD}hi\u{FFFD} hello", &wanted[..]));
}

#[tokio::test]
async fn bug_06_leading_white_space() {
    for text in [" x", "  x", "\n\nx", " \n x ", "\t", " "] {
        let server = Server::saying(text);
        for route in ROUTES {
            assert_eq!(said_once(&server, route, json!({})).await.text, text);
            assert_eq!(said_once(&server, route, json!({"stop": " y"})).await.text, text);
        }
    }
    for ids in [vec![10, 11], vec![3, 10], vec![12, 12, 11], vec![12, 10, 12], vec![113, 10], vec![3]] {
        let wanted = byte_fallback().library_decode(&ids);
        let text: String = shown(byte_fallback(), &ids, &[]).await.into_iter().map(|piece| piece.text).collect();
        assert_eq!(text, wanted, "{ids:?}");
        // An answer that goes on with a text keeps the space between them.
        let prompt = [1, 10];
        let all: Vec<TokenId> = prompt.iter().chain(&ids).copied().collect();
        let pieces = shown_after(&prompt, byte_fallback(), &ids, &[]).await;
        let text: String = pieces.into_iter().map(|piece| piece.text).collect();
        assert_eq!(format!("hello{text}"), byte_fallback().library_decode(&all), "{ids:?}");
    }
}

/// After every token a client has all text but what may become a stop string.
#[tokio::test]
async fn bug_07_no_more_is_held_back_than_may_become_a_stop() {
    let text = "one two one twx\nthree \n 한국 한 aaab 😀one";
    let stops = ["two one two", "\n\n", "한국어", "aaaa", "😀😀", "x\ny"];
    let ids = demo().encode(text).unwrap();
    let pieces = shown(demo(), &ids, &stops).await;
    let (mut detokenizer, mut all, mut seen) = (Detokenizer::default(), String::new(), String::new());
    let mut held_somewhere = 0;
    for (&id, piece) in ids.iter().zip(&pieces) {
        all.push_str(&detokenizer.push(&demo(), id));
        seen.push_str(&piece.text);
        let begun = |stop: &&str| {
            let starts = stop.char_indices().map(|(at, _)| at);
            starts.filter(|&at| all.ends_with(&stop[..at])).max().unwrap_or(0)
        };
        let held = stops.iter().map(begun).max().unwrap();
        assert_eq!(seen, all[..all.len() - held], "of {all:?}");
        held_somewhere += usize::from(held > 0);
    }
    assert!(held_somewhere > 5);
    assert_eq!(seen + &pieces.last().unwrap().text, text);
}
