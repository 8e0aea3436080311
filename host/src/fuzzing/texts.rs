//! What clients send, and the texts in it.

use std::cell::OnceCell;
use std::sync::{Arc, OnceLock};

use super::one_line;
use crate::api::fuzzed;
use crate::constraint::{Form, Rules, STACK, Vocabulary, allows, compile, mask_words};
use crate::plain::plain;
use crate::request::TokenId;
use crate::text::{ChatTemplate, Detokenizer, ModelText, StopMatcher, Tokenizer};

/// Texts of a small model, read once.
fn with_text<T>(work: impl FnOnce(&Arc<ModelText>) -> T) -> T {
    thread_local! {
        static TEXT: OnceCell<Arc<ModelText>> = const { OnceCell::new() };
    }
    TEXT.with(|text| {
        work(text.get_or_init(|| {
            let tokenizer = Tokenizer::from_json(include_bytes!("../../../models/demo/small/tokenizer.json"));
            let config = include_str!("../../../models/demo/small/tokenizer_config.json");
            let config: serde_json::Value = serde_json::from_str(config).expect("JSON");
            let template = config["chat_template"].as_str().map(ChatTemplate::new).expect("a template");
            Arc::new(ModelText::new(tokenizer.expect("a tokenizer"), Some(template.expect("its syntax")), &config))
        }))
    })
}

/// A request's body at each endpoint: refused as the client's fault, or read into values in their ranges.
pub fn http_body(bytes: &[u8]) {
    for answer in with_text(|text| fuzzed::read(bytes, text)) {
        match answer {
            Ok(read) => {
                let sampling = &read.generation.sampling;
                assert!((0.0..=2.0).contains(&sampling.temperature), "{sampling:?}");
                assert!(sampling.top_p > 0.0 && sampling.top_p <= 1.0, "{sampling:?}");
                assert!((0.0..=1.0).contains(&sampling.min_p), "{sampling:?}");
                assert!(sampling.repetition_penalty.is_finite() && sampling.repetition_penalty > 0.0, "{sampling:?}");
                assert!((1..=64).contains(&read.generation.n));
                let vocab = with_text(|text| text.tokenizer.vocab_size());
                assert!(read.prompts.iter().flatten().all(|&id| (id as usize) < vocab), "{:?}", read.prompts);
            }
            Err(error) => {
                assert!(error.status.is_client_error(), "{error:?}");
                one_line(&error.message);
            }
        }
    }
}

/// A chat template is compiled or refused. It is not rendered: templates may loop as they like.
pub fn chat_template(bytes: &[u8]) {
    let Ok(source) = std::str::from_utf8(bytes) else { return };
    if let Err(error) = ChatTemplate::new(source) {
        one_line(&error.to_string());
    }
}

/// A text through the tokenizer and back, token by token, and past stop strings: what comes out does not
/// depend on how it is cut.
pub fn text_tokens(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (text, stops) = text.split_once('\0').unwrap_or((text, ""));
    let pieces = with_text(|model| {
        let ids = model.tokenizer.encode(text).expect("any text has tokens");
        let mut detokenizer = Detokenizer::default();
        let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(&model.tokenizer, id)).collect();
        pieces.push(detokenizer.flush());
        assert_eq!(pieces.concat(), model.tokenizer.decode(&ids));
        pieces
    });
    let back = pieces.concat();
    let again = with_text(|model| model.tokenizer.encode(&back).map(|ids| model.tokenizer.decode(&ids)));
    // Special tokens are no part of the text, and the tokenizer normalises what is not ASCII (NFC).
    if !text.contains("<|") {
        assert!(!text.is_ascii() || back == text, "{text:?} came back as {back:?}");
        assert_eq!(again.as_ref(), Ok(&back), "{text:?}");
    }
    let stops: Vec<String> = stops.split('\0').filter(|stop| !stop.is_empty()).map(str::to_owned).take(16).collect();
    for include in [false, true] {
        let run = |pieces: &[&str]| {
            let mut matcher = StopMatcher::new(stops.clone(), include);
            let mut out = String::new();
            for piece in pieces {
                match matcher.push(piece, true) {
                    Ok(more) => out.push_str(&more),
                    Err(stopped) => return (out + &stopped.text, Some(stopped.stop)),
                }
            }
            (out + &matcher.flush(), None)
        };
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        assert_eq!(run(&pieces), run(&[&back]));
    }
}

/// The form of an answer, its kind in the first byte: refused with a reason, or followed for some tokens, each of which
/// the mask allows. What is taken back is as if it had never been read.
pub fn structured_form(bytes: &[u8]) {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, || follow_form(bytes));
        thread.expect("a thread").join().expect("no promise is broken");
    });
}

fn follow_form(bytes: &[u8]) {
    let Some((kind, text)) = bytes.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let form = match kind % 4 {
        0 => Form::JsonSchema(text.into()),
        1 => Form::Regex(text.into()),
        2 => Form::Choice(text.split('\n').filter(|text| !text.is_empty()).map(str::to_owned).collect()),
        _ => Form::Lark(text.into()),
    };
    let vocabulary = VOCABULARY.get_or_init(|| {
        with_text(|text| {
            let tokenizer = &text.tokenizer;
            Vocabulary::new(tokenizer.vocab_size(), |id| tokenizer.text_bytes(id)).expect("the demo's tokens")
        })
    });
    let grammar = match compile(form, vocabulary) {
        Ok(grammar) => grammar,
        Err(error) => return one_line(&plain(&error.to_string())),
    };
    let (mut matcher, mut mask) = (grammar.matcher(), vec![0; mask_words(WIDTH)]);
    let rules = Rules { width: WIDTH, eos: &[END], ..Rules::default() };
    for step in 0..6 {
        // A form may be too costly, or lead nowhere. Then that is said.
        if let Err(broken) = matcher.mask(&rules, &mut mask) {
            return one_line(&plain(&broken.to_string()));
        }
        let allowed: Vec<TokenId> = (0..WIDTH as TokenId).filter(|&token| allows(&mask, token)).collect();
        let token = allowed[(text.len() * 7 + step * 31) % allowed.len()];
        if token == END {
            assert!(matcher.is_accepting().expect("a mask was computed"));
            return;
        }
        if matcher.advance(token).is_err() {
            return;
        }
        matcher.rollback(1).expect("what was read can be taken back");
        let mut again = mask.clone();
        matcher.mask(&rules, &mut again).expect("it could be computed before");
        assert_eq!(again, mask);
        matcher.advance(token).expect("it was read before");
        if matcher.is_complete() {
            return;
        }
    }
}

/// Tokens of the demo family, and one of them that ends texts.
const WIDTH: usize = 2048;
const END: TokenId = 2047;

static VOCABULARY: OnceLock<Vocabulary> = OnceLock::new();
