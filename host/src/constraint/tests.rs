use std::sync::{Arc, OnceLock};
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::request::TokenId;
use crate::text::{ModelText, Tokenizer};
use crate::text::tokenizer_fixtures::{byte_fallback, demo};

fn laid(tokenizer: &Tokenizer) -> Vocabulary {
    Vocabulary::new(tokenizer.vocab_size(), |id| tokenizer.text_bytes(id)).unwrap()
}

fn vocabulary() -> &'static (Tokenizer, Vocabulary) {
    static VOCABULARY: OnceLock<(Tokenizer, Vocabulary)> = OnceLock::new();
    VOCABULARY.get_or_init(|| {
        let tokenizer = demo();
        let vocabulary = laid(&tokenizer);
        (tokenizer, vocabulary)
    })
}

fn schema(schema: Value) -> Form {
    Form::JsonSchema(schema.to_string())
}

fn grammar(form: Form) -> Grammar {
    compile(form, &vocabulary().1).unwrap()
}

/// With end token 0, which no text has.
fn rules(width: usize) -> Rules<'static> {
    Rules { width, eos: &[2045], ..Rules::default() }
}

fn mask(matcher: &mut Matcher) -> Vec<TokenId> {
    let (width, mut words) = (2048, vec![0; mask_words(2048)]);
    matcher.mask(&rules(width), &mut words).unwrap();
    (0..width as TokenId).filter(|&token| allows(&words, token)).collect()
}

/// The grammar's answer to a text that the tokenizer cuts into tokens: how many bytes it takes, and whether they may
/// be all.
fn taken(form: Form, text: &str) -> (usize, bool) {
    let mut matcher = grammar(form).matcher();
    let mut bytes = 0;
    for token in vocabulary().0.encode(text).unwrap() {
        if matcher.is_complete() || !mask(&mut matcher).contains(&token) {
            return (bytes, false);
        }
        matcher.advance(token).unwrap();
        bytes += vocabulary().0.bytes(token).unwrap().len();
    }
    (bytes, matcher.is_accepting().unwrap())
}

fn takes(form: Form, text: &str) -> bool {
    taken(form, text) == (text.len(), true)
}

#[test]
fn forms_take_what_they_say() {
    let object = || schema(json!({"type": "object", "properties": {"a": {"type": "integer", "maximum": 20}},
        "required": ["a"], "additionalProperties": false}));
    for (form, good, bad) in [
        (object(), "{\"a\": 17}", "{\"a\": 21}"),
        (object(), "{\n  \"a\": 17\n}", "{\n\n\"a\": 17}"),
        (Form::json_object(), "{\"x\": [1, \"é€𝄞\", null]}", "[1]"),
        (Form::Regex("[a-c]{2}/?".into()), "ab/", "abc"),
        (Form::Choice(vec!["yes".into(), "no \"x\"\n".into()]), "no \"x\"\n", "nothing"),
        (Form::Lark("start: \"a\" start \"b\" | \"c\"".into()), "aacbb", "aacb"),
        (schema(json!(true)), "[false]", "[fals"),
    ] {
        assert!(takes(form.clone(), good), "{form:?}: {good}");
        assert!(!takes(form.clone(), bad), "{form:?}: {bad}");
    }
}

#[test]
fn an_answer_is_complete_where_nothing_may_follow() {
    for (form, text, complete) in [
        (schema(json!({"type": "object"})), "{}", true),
        (schema(json!({"enum": ["a", "ab"]})), "\"a\"", true),
        (schema(json!({"type": "integer"})), "17", false),
        (schema(json!({"type": "integer", "minimum": 10, "maximum": 99})), "17", true),
        (Form::Choice(vec!["a".into(), "ab".into()]), "a", false),
        (Form::Regex("a{2}".into()), "aa", true),
    ] {
        let mut matcher = grammar(form.clone()).matcher();
        matcher.follow(&vocabulary().0.encode(text).unwrap()).unwrap();
        assert!(matcher.is_accepting().unwrap(), "{form:?}");
        assert_eq!(matcher.is_complete(), complete, "{form:?}");
        assert_eq!(mask(&mut matcher) == [2045], complete, "the end token is allowed, alone if it is complete: {form:?}");
    }
}

#[test]
fn bytes_of_a_character_may_be_tokens_of_their_own() {
    let tokenizer = byte_fallback();
    let vocabulary = laid(&tokenizer);
    let matcher = || compile(Form::Regex("é€".into()), &vocabulary).unwrap().matcher();
    let byte = |byte: u8| (0..tokenizer.vocab_size() as TokenId).find(|&id| tokenizer.text_bytes(id) == [byte]).unwrap();
    let bytes: Vec<_> = "é€".bytes().map(byte).collect();
    let mut whole = matcher();
    whole.follow(&bytes).unwrap();
    assert!(whole.is_complete());
    assert!(matcher().follow(&[bytes[1]]).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever way a matcher came to some tokens, it is as one that read them from the start.
    #[test]
    fn a_rollback_is_a_fresh_replay(form in 0..4usize, steps in prop::collection::vec((0..6usize, any::<u32>()), 1..60)) {
        let form = match form {
            0 => schema(json!({"type": "object", "properties": {"n": {"type": "number", "minimum": -3, "maximum": 9.5},
                "s": {"type": "string", "maxLength": 5}, "l": {"type": "array", "items": {"enum": [1, "x", null]}}}})),
            1 => Form::Regex("(ab|a|é|[0-9]{1,3}x)*z".into()),
            2 => Form::Lark("start: \"(\" start \")\" start | /[a-z ]*/".into()),
            _ => Form::json_object(),
        };
        let grammar = grammar(form);
        let constraint = Constraint::new(Arc::new(grammar));
        // Two models of one request, whose matchers share what they find out.
        let mut matchers = [constraint.matcher(), constraint.matcher()];
        let mut tokens: Vec<TokenId> = Vec::new();
        for (back, pick) in steps {
            let matcher = &mut matchers[pick as usize % 2];
            tokens.truncate(tokens.len().saturating_sub(if back < 3 { 0 } else { back - 2 }));
            matcher.follow(&tokens).unwrap();
            let mut fresh = constraint.again().matcher();
            fresh.follow(&tokens).unwrap();
            prop_assert_eq!(matcher.is_complete(), fresh.is_complete());
            let allowed = mask(matcher);
            prop_assert_eq!(&allowed, &mask(&mut fresh));
            let next = allowed[pick as usize / 2 % allowed.len()];
            if next != 2045 {
                tokens.push(next);
            }
        }
    }
}

/// Forms that hurt somebody: each is refused or compiled soon, and nothing else happens.
pub fn hostile() -> Vec<(&'static str, Form, bool)> {
    let nest = |open: &str, close: &str, depth: usize| open.repeat(depth) + &close.repeat(depth);
    let mut deep = json!({"type": "integer"});
    for _ in 0..40 {
        deep = json!({"type": "array", "items": deep});
    }
    vec![
        ("not JSON", Form::JsonSchema("{".into()), false),
        ("no schema", schema(json!([1])), false),
        ("nothing", schema(json!(false)), false),
        ("a type that is a number", schema(json!({"type": 5})), false),
        ("an unknown type", schema(json!({"type": "colour"})), false),
        ("a reference to nothing", schema(json!({"$ref": "#/$defs/none"})), false),
        ("a reference elsewhere", schema(json!({"$ref": "https://example.com/schema.json"})), false),
        ("a reference to itself", schema(json!({"$ref": "#"})), false),
        ("a circle of references", schema(json!({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
            "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"})), false),
        ("no end", schema(json!({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}},
            "$ref": "#/$defs/a"})), false),
        ("bounds that cross", schema(json!({"type": "integer", "minimum": 5, "maximum": 4})), false),
        ("nothing in common", schema(json!({"allOf": [{"type": "string"}, {"type": "integer"}]})), false),
        ("too deep", schema(deep), false),
        ("many items", schema(json!({"type": "array", "minItems": 10_000_000, "maxItems": 10_000_001, "items": {"type": "string"}})), false),
        ("a long string", schema(json!({"type": "string", "minLength": 100_000_000})), false),
        ("a keyword that is not built", schema(json!({"type": "array", "uniqueItems": true})), false),
        ("options of the library", schema(json!({"type": "string", "x-guidance": {"lenient": true}})), false),
        ("a pattern that is none", schema(json!({"type": "string", "pattern": "(a"})), false),
        ("a look-behind", Form::Regex("(?<=a)b".into()), false),
        ("an open group", Form::Regex("(a".into()), false),
        ("a huge repetition", Form::Regex("((a{1,1000}){1,1000}){1,1000}".into()), false),
        ("repetitions of repetitions", Form::Regex("((((((a*)*)*)*)*)*)*b".into()), true),
        ("many ways", Form::Regex("(a|aa|aaa)*(a|aa)*(a|b|ab)*x{0,200}".into()), true),
        ("a needle behind anything", Form::Regex("(.*)(a|b)(.{400})".into()), false),
        ("deep groups", Form::Regex(nest("(", ")", 30_000)), false),
        ("deep rules", Form::Lark(format!("start: {}\"a\"{}", "(".repeat(30_000), ")".repeat(30_000))), false),
        ("no rule", Form::Lark("hello".into()), false),
        ("an unknown rule", Form::Lark("start: nobody".into()), false),
        ("another notation", Form::Lark("root ::= \"a\"".into()), false),
        ("a rule that ends nowhere", Form::Lark("start: \"a\" start".into()), false),
        ("a special token", Form::Lark("start: <|im_end|>".into()), false),
        ("a token by number", Form::Lark("start: <[2046]>".into()), false),
        ("only the empty text", Form::Lark("start: \"\"".into()), false),
        ("too long", Form::Regex("a".repeat(300_000)), false),
    ]
}

#[test]
fn explore() {
    for (name, form, good) in hostile() {
        let start = std::time::Instant::now();
        let f = form.clone();
        let result = std::thread::Builder::new().stack_size(64 << 20).spawn(move || compile(f, &vocabulary().1)).unwrap().join();
        eprintln!("{name}: want {good} {:?} {:?}", start.elapsed(), result.map(|r| r.map(|_| ()).map_err(|e| e.0)));
    }
}

#[tokio::test]
async fn a_form_is_compiled_once() {
    let text = Arc::new(ModelText::new(demo(), None, &Value::Null));
    let compiler = Compiler::new(1, Duration::from_secs(60));
    let form = || schema(json!({"type": "integer"}));
    let (one, two) = tokio::join!(compiler.grammar(form(), &text), compiler.grammar(form(), &text));
    assert!(Arc::ptr_eq(&one.unwrap(), &two.unwrap()));
    assert!(matches!(compiler.grammar(Form::Regex("(".into()), &text).await, Err(Refused::Form(_))));
    for n in 0..100 {
        compiler.grammar(Form::Regex(format!("a{{{n}}}b")), &text).await.unwrap();
    }
    assert!(compiler.kept_len() <= 64);
}
