//! One choice fed with events as a network may deliver them.

use std::sync::Arc;

use serde_json::Value;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::api::choice::{Choice, ChoiceError, Ending, Piece, Reason};
use crate::engine::RequestStream;
use crate::request::{Committed, Event, FinishReason, ModelId, RequestError, TokenId, Told};
use crate::text::tokenizer_fixtures::demo;
use crate::text::{ModelText, Tokenizer};

const END: TokenId = 2047;

/// Two models write in turns.
pub fn commit(start: u32, tokens: &[TokenId]) -> Event {
    let token = |(&token, at)| Committed {
        token,
        model: ModelId(at % 2),
        eos: false,
        complete: false,
        logprob: 0.0,
        top_logprobs: vec![],
        signals: None,
    };
    Event::Committed { start, tokens: tokens.iter().zip(start..).map(token).collect() }
}

pub fn finished(reason: FinishReason) -> Event {
    Event::Finished { reason, handoffs: 0 }
}

/// A choice of a model with `tokenizer` without a prompt, and where its events come from.
pub fn choice(tokenizer: Tokenizer, stops: &[&str]) -> (UnboundedSender<Told>, Choice) {
    answering(&[], tokenizer, stops)
}

/// The same for a prompt.
pub fn answering(prompt: &[TokenId], tokenizer: Tokenizer, stops: &[&str]) -> (UnboundedSender<Told>, Choice) {
    let (sender, receiver) = unbounded_channel();
    let ending = Ending {
        eos: Arc::new([END]),
        stop_tokens: vec![],
        stops: stops.iter().map(|s| s.to_string()).collect(),
        include_stop: false,
        min_tokens: 0,
        keep_special: false,
    };
    let text = Arc::new(ModelText::new(tokenizer, None, &Value::Null));
    (sender, Choice::new(RequestStream::unconnected(1, receiver), prompt, text, ending))
}

/// All pieces, put together.
async fn run(events: Vec<Event>, stops: &[&str]) -> Result<Piece, ChoiceError> {
    let (sender, mut choice) = choice(demo(), stops);
    events.into_iter().for_each(|event| sender.send(Told::now(event)).unwrap());
    drop(sender);
    let mut all = Piece::default();
    while all.end.is_none() {
        let piece = choice.next().await?;
        all.text.push_str(&piece.text);
        all.entries.extend(piece.entries);
        all.end = piece.end;
    }
    Ok(all)
}

fn ids(text: &str) -> Vec<TokenId> {
    demo().encode(text).unwrap()
}

#[tokio::test]
async fn order_and_repetition_do_not_matter() {
    let all = [ids("한 a 😀"), vec![END]].concat();
    let (a, b) = all.split_at(4);
    let end = || finished(FinishReason::Stop(END));
    let orders = [
        vec![commit(0, &all), end()],
        vec![commit(4, b), commit(0, a), end()],
        vec![commit(0, a), commit(0, a), commit(2, &all[2..]), end()],
        vec![commit(4, b), end(), commit(0, a)],
    ];
    for events in orders {
        let answer = run(events, &[]).await.unwrap();
        assert_eq!(answer.text, "한 a 😀");
        assert_eq!(answer.entries.iter().map(|entry| entry.committed.token).collect::<Vec<_>>(), all);
        assert_eq!(answer.end.unwrap().reason, Reason::EndOfSequence);
    }
}

#[tokio::test]
async fn the_multi_token_event_makes_no_difference_to_a_stop() {
    let all = ids("one two three");
    let single: Vec<Event> = all.iter().enumerate().map(|(at, &id)| commit(at as u32, &[id])).collect();
    for events in [vec![commit(0, &all)], single] {
        let answer = run(events, &[" two"]).await.unwrap();
        assert_eq!(answer.text, "one");
        assert_eq!(answer.end.unwrap().reason, Reason::StopString(" two".into()));
        assert_eq!(answer.entries.len(), ids("one two").len());
    }
}

#[tokio::test]
async fn an_unfinished_character_is_replaced_and_belongs_to_a_token() {
    let part = &ids("a😀")[..3];
    let events = vec![commit(0, &part[..2]), commit(2, &part[2..]), finished(FinishReason::Length)];
    let answer = run(events, &[]).await.unwrap();
    assert_eq!(answer.text, "a\u{FFFD}");
    let entries: String = answer.entries.iter().map(|entry| entry.text.as_str()).collect();
    assert_eq!((answer.entries.len(), entries.as_str()), (3, "a\u{FFFD}"));

    let ended = vec![commit(0, part), commit(3, &[END]), finished(FinishReason::Stop(END))];
    let answer = run(ended, &[]).await.unwrap();
    assert_eq!((answer.text.as_str(), answer.entries.len()), ("a\u{FFFD}", 4));
}

#[tokio::test]
async fn a_complete_form_ends_with_all_of_its_text() {
    // The end token of another model is text like any other.
    let all = [ids("ab"), vec![END]].concat();
    let answer = run(vec![commit(0, &all), finished(FinishReason::Complete)], &[]).await.unwrap();
    assert_eq!((answer.text.as_str(), answer.entries.len()), ("ab", all.len()));
    assert_eq!(answer.end.unwrap().reason, Reason::Complete);
}

#[tokio::test]
async fn an_end_token_that_does_not_end_is_skipped() {
    let all = [ids("a"), vec![END], ids("b")].concat();
    let answer = run(vec![commit(0, &all), finished(FinishReason::Length)], &[]).await.unwrap();
    assert_eq!((answer.text.as_str(), answer.entries.len()), ("ab", 3));
}

#[tokio::test]
async fn failures() {
    let failed = RequestError::ShuttingDown;
    assert_eq!(run(vec![commit(0, &[5]), Event::Failed(failed.clone())], &[]).await, Err(failed.into()));
    assert_eq!(run(vec![commit(0, &[5])], &[]).await, Err(ChoiceError::Lost));
    assert!(matches!(run(vec![commit(0, &[5]), commit(0, &[6])], &[]).await, Err(ChoiceError::Ledger(_))));
}
