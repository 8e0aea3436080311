mod long;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::request::TokenId;
use crate::text::tokenizer_fixtures::{byte_fallback, demo};
use crate::text::{ModelText, Tokenizer};

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

/// With an end token, which is no text.
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
    let object = || {
        schema(json!({"type": "object", "properties": {"a": {"type": "integer", "maximum": 20}},
        "required": ["a"], "additionalProperties": false}))
    };
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
fn what_cannot_be_compiled_is_told_in_words() {
    for form in [
        schema(json!({"type": "integer", "minimum": i64::MIN})),
        schema(json!({"type": "number", "multipleOf": 1e-9})),
        schema(json!({"$ref": "#"})),
        Form::Regex(r"[^\s\S]".into()),
        Form::Lark("start: start".into()),
    ] {
        let Err(CompileError(words)) = compile(form.clone(), &vocabulary().1) else { continue };
        assert!(!words.contains("panic") && !words.contains("NoExtensionBias"), "{form:?}: {words}");
        assert!(!words.ends_with('.'), "{form:?}: {words}");
    }
    // Debug builds and release builds alike.
    assert!(compile(schema(json!({"type": "integer", "minimum": i64::MIN})), &vocabulary().1).is_err());
    let choice = Form::Choice(["\u{7f}", "\0\u{8}\"\\/", "é\u{2028}"].map(str::to_owned).to_vec());
    assert!(takes(choice.clone(), "\u{7f}") && takes(choice.clone(), "\0\u{8}\"\\/") && takes(choice, "é\u{2028}"));
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
        assert_eq!(
            mask(&mut matcher) == [2045],
            complete,
            "the end token is allowed, alone if it is complete: {form:?}"
        );
    }
}

#[test]
fn bytes_of_a_character_may_be_tokens_of_their_own() {
    let tokenizer = byte_fallback();
    let vocabulary = laid(&tokenizer);
    let matcher = || compile(Form::Regex("é€".into()), &vocabulary).unwrap().matcher();
    let byte =
        |byte: u8| (0..tokenizer.vocab_size() as TokenId).find(|&id| tokenizer.text_bytes(id) == [byte]).unwrap();
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
        let grammar = Arc::new(grammar);
        let constraint = Constraint::new(Arc::clone(&grammar));
        // Two models of one request, whose matchers share what they find out.
        let mut matchers = [constraint.matcher(), constraint.matcher()];
        let mut tokens: Vec<TokenId> = Vec::new();
        for (back, pick) in steps {
            let matcher = &mut matchers[pick as usize % 2];
            tokens.truncate(tokens.len().saturating_sub(if back < 3 { 0 } else { back - 2 }));
            matcher.follow(&tokens).unwrap();
            let mut fresh = grammar.matcher();
            fresh.follow(&tokens).unwrap();
            prop_assert_eq!(matcher.is_complete(), fresh.is_complete());
            let allowed = mask(matcher);
            prop_assert_eq!(&allowed, &mask(&mut fresh));
            // Another answer, with what those before it have left.
            let mut other = constraint.again().matcher();
            prop_assert_eq!(grammar.spares.count(), 0);
            other.follow(&tokens).unwrap();
            prop_assert_eq!(&allowed, &mask(&mut other));
            drop(other);
            prop_assert_eq!(grammar.spares.count(), 1);
            let next = allowed[pick as usize / 2 % allowed.len()];
            if next != 2045 {
                tokens.push(next);
            }
        }
    }
}

#[test]
fn what_an_answer_leaves_is_bounded_and_whole() {
    let grammar = Arc::new(grammar(Form::Regex("[a-z]*(foo|bar)[0-9]{2}".into())));
    let answers = |count: usize| -> Vec<_> {
        let constraints: Vec<_> = (0..count).map(|_| Constraint::new(Arc::clone(&grammar))).collect();
        constraints.iter().map(Constraint::matcher).collect()
    };
    drop(answers(3));
    assert_eq!(grammar.spares.count(), 3);
    // The matcher outlives its constraint, and has it as long as it lives.
    let mut two = answers(2);
    assert_eq!(grammar.spares.count(), 1);
    // One that failed is not lent again.
    let allowed = mask(&mut two[0]);
    let wrong = (0..2048).find(|token| allows(&grammar.texts, *token) && !allowed.contains(token)).unwrap();
    assert!(two[0].advance(wrong).is_err());
    drop(two);
    assert_eq!(grammar.spares.count(), 2);
    drop(answers(500));
    assert!((2..500).contains(&grammar.spares.count()), "{}", grammar.spares.count());
}

/// Some thousand bytes of them took gigabytes.
#[test]
fn repetitions_are_bounded_wherever_they_stand() {
    let many = |count: usize| "a*".repeat(count);
    let pattern = |count: usize| json!({"type": "string", "pattern": many(count)});
    let named = |count: usize| json!({"type": "object", "patternProperties": {many(count): {}}});
    let schema = |schema: Value| Form::JsonSchema(schema.to_string());
    for form in [
        Form::Regex(many(2001)),
        Form::Regex("a{2}".repeat(2001)),
        Form::Lark(format!("start: /{}/", many(2001))),
        schema(pattern(2001)),
        schema(named(2001)),
        schema(json!({"anyOf": [pattern(1000), {"items": pattern(1001)}]})),
    ] {
        let refused = compile(form, &vocabulary().1).unwrap_err().0;
        assert_eq!(refused, "it has 2001 repetitions (`*`, `+`, `{`); at most 2000 are possible");
    }
    let text = json!({"type": "string", "enum": [many(3000)], "description": "+".repeat(3000)});
    compile(schema(text), &vocabulary().1).unwrap();
}

#[test]
fn tokens_without_a_text_are_never_allowed() {
    for form in ["start: <[2046]>", "start: <[2048]>"] {
        assert!(compile(Form::Lark(form.into()), &vocabulary().1).is_err(), "{form}");
    }
    let mut matcher = grammar(Form::Lark("start: \"a\" | <[2046]>".into())).matcher();
    assert!(!mask(&mut matcher).contains(&2046));
    assert!(matcher.advance(2046).is_err());
}

const MINUTE: Patience = Patience { turns: Duration::ZERO, compiling: Duration::from_secs(60) };

/// What a request does for the grammar of a form.
async fn ask(compiler: &Compiler, form: Form, text: &Arc<ModelText>) -> Result<Arc<Grammar>, Refused> {
    let mut patience = compiler.patience();
    match compiler.find(&form, text, &mut patience).await {
        Some(outcome) => outcome,
        None => compiler.compile(form, text, (), &mut patience).await,
    }
}

#[tokio::test]
async fn a_form_is_compiled_once() {
    let text = Arc::new(ModelText::new(demo(), None, &Value::Null));
    let compiler = Compiler::new(MINUTE);
    let form = || schema(json!({"type": "integer"}));
    let (mut patience, mut other) = (compiler.patience(), compiler.patience());
    assert!(compiler.find(&form(), &text, &mut patience).await.is_none());
    // By two that did not find it, one that comes while it is compiled, and one that comes later.
    let (one, two, three) = tokio::join!(
        compiler.compile(form(), &text, (), &mut patience),
        compiler.compile(form(), &text, (), &mut other),
        ask(&compiler, form(), &text),
    );
    let one = one.unwrap();
    for other in [two, three, ask(&compiler, form(), &text).await] {
        assert!(Arc::ptr_eq(&one, &other.unwrap()));
    }
    let wrong = || Form::Regex("(".into());
    for refused in <[_; 2]>::from(tokio::join!(ask(&compiler, wrong(), &text), ask(&compiler, wrong(), &text))) {
        assert!(matches!(refused, Err(Refused::Form(_))), "{refused:?}");
    }
}

#[tokio::test]
async fn all_forms_of_a_request_have_the_time_of_one() {
    let text = Arc::new(ModelText::new(demo(), None, &Value::Null));
    let compiler = Compiler::new(MINUTE);
    let mut patience = compiler.patience();
    compiler.compile(Form::json_object(), &text, (), &mut patience).await.unwrap();
    assert!(patience.compiling < compiler.patience().compiling);
    // What takes much longer than to look whether it is done.
    patience.compiling = Duration::ZERO;
    let long = Form::Choice((0..5000).map(|n| format!("choice {n}")).collect());
    let refused = compiler.compile(long, &text, (), &mut patience).await;
    let Err(Refused::Form(CompileError(message))) = refused else { panic!("{refused:?}") };
    assert!(message.ends_with("takes longer than 60 seconds"), "{message}");
}

#[test]
fn a_grammar_weighs_what_is_made_of_it() {
    let numbers = |count: usize| (0..count).map(|n| format!("{n}x")).collect::<Vec<_>>();
    let rules = |count: usize| (0..count).map(|n| format!("r{n}: \"a\" r{}\n", n + 1)).collect::<String>();
    let chain = |count: usize| Form::Lark(format!("start: r0\n{}r{count}: \"b\"\n", rules(count)));
    for (small, large) in [
        (Form::Regex(numbers(10).join("|")), Form::Regex(numbers(1000).join("|"))),
        (Form::Choice(numbers(10)), Form::Choice(numbers(1000))),
        (chain(10), chain(300)),
        (schema(json!({"const": "a"})), Form::json_object()),
    ] {
        let text = large.bytes() - small.bytes();
        let (less, more) = (grammar(small).bytes(), grammar(large.clone()).bytes());
        assert!(more > less + text, "{less} {more}: {large:?}");
    }
}
