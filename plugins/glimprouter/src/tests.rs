mod host;
mod traces;

use super::*;
use host::{ROLES, Request, Texts, create_at, logits, pair};
use tokenrouter_plugin_api::{DecisionKind, NoServices, SignalColumns, random};

const A: u32 = 0;
const B: u32 = 1;
const BREAK: u32 = 2;
const LINE: u32 = 3;
const TAIL: u32 = 4;
const OPEN: u32 = 5;
const CLOSE: u32 = 6;
const END: u32 = 7;

fn texts() -> Texts {
    Texts(["a", "b", ".\n\n", "\n", "\n\nThe", "</th", "ink>", "</think>"].map(|t| Some(t.into())).into())
}

fn writers(settings: &str, answer: &[(u32, f64)]) -> Vec<usize> {
    written(settings, answer).writers
}

/// An answer whose token `t` both models would write as `answer[t].0`, with entropy `answer[t].1` at either.
fn written(settings: &str, answer: &[(u32, f64)]) -> Request {
    let mut policies = pair(&texts(), settings);
    let mut request = Request::new(&mut policies, [0, 0], &[BREAK, END, A]);
    for _ in answer {
        request.write(&mut policies, |position, _| answer[position]);
    }
    request
}

const LOW: f64 = 0.2;
const HIGH: f64 = 2.0;
const SMALL: usize = 0;
const LARGE: usize = 1;

#[test]
fn the_first_token_of_each_step_decides_who_writes_it() {
    let answer = [
        (A, HIGH),
        (B, LOW),
        (BREAK, LOW),
        (A, LOW),
        (B, HIGH),
        (LINE, HIGH),
        (TAIL, HIGH),
        (A, HIGH),
        (LINE, LOW),
        (LINE, LOW),
        (B, HIGH),
        (TAIL, LOW),
        (A, LOW),
    ];
    let expected = [
        [LARGE, LARGE, LARGE].as_slice(),
        &[SMALL, SMALL, SMALL, SMALL],
        &[LARGE, LARGE, LARGE],
        &[LARGE, LARGE],
        &[SMALL],
    ];
    assert_eq!(writers("{}", &answer), expected.concat());
}

#[test]
fn the_dropped_candidate_leaves_no_trace() {
    let mut policies = pair(&texts(), "{}");
    let mut request = Request::new(&mut policies, [0, 0], &[A]);
    // The small model would end the step at once; the large one writes two tokens.
    let tokens = [A, BREAK, B];
    for _ in 0..3 {
        request.write(&mut policies, |position, model| match model {
            SMALL if position == 0 => (BREAK, HIGH),
            _ => (tokens[position], LOW),
        });
    }
    assert_eq!((&request.tokens[1..], &request.writers[..]), (&tokens[..], &[LARGE, LARGE, SMALL][..]));
}

#[test]
fn the_threshold_itself_and_nan() {
    let mut small = pair(&texts(), "{}").into_iter().next().unwrap();
    // Four equal logits: ln 4.
    let mut at = |threshold: f64, logits: &[f32]| {
        small.threshold = threshold;
        small.finished(0);
        small.decide(0, A, logits).kind().unwrap()
    };
    let even = entropy(&[3.0; 4]);
    assert!((even - 4f64.ln()).abs() < 1e-12);
    assert_eq!(at(even, &[3.0; 4]), DecisionKind::To(1));
    assert_eq!(at(even + 1e-9, &[3.0; 4]), DecisionKind::Stay);
    assert_eq!(at(0.0, &[3.0]), DecisionKind::To(1));
    for logits in [&[f32::NAN, 1.0][..], &[1.0, f32::NAN], &[f32::INFINITY, 1.0], &[f32::NEG_INFINITY; 3], &[]] {
        assert_eq!(at(0.0, logits), DecisionKind::Stay, "{logits:?}");
    }
    let masked = entropy(&[2.0, 1.0, f32::NEG_INFINITY]);
    assert!((masked - entropy(&[2.0, 1.0])).abs() < 1e-12);
    // By hand: p = 3/4 and 1/4.
    assert!((entropy(&[3f32.ln(), 0.0]) - 0.562_335_144_618_808_3).abs() < 1e-6);
}

#[test]
fn the_large_model_writes_all_behind_the_thinking() {
    let all = |settings: &str, tokens: &[u32], entropy| {
        writers(settings, &tokens.iter().map(|&token| (token, entropy)).collect::<Vec<_>>())
    };
    let tokens = [A, OPEN, CLOSE, A, BREAK, B, BREAK, B];
    let from_three = [SMALL, SMALL, SMALL, LARGE, LARGE, LARGE, LARGE, LARGE];
    // The small model's token that ends the thinking is kept.
    assert_eq!(all("{}", &tokens, LOW), from_three);
    assert_eq!(all("{}", &[A, BREAK, END, A, BREAK, B, BREAK, B], LOW), from_three);
    assert_eq!(all(r#"{"token_budget": 3}"#, &[A, BREAK, A, A, BREAK, B, BREAK, B], LOW), from_three);
    assert_eq!(all("{}", &[BREAK, BREAK, BREAK, A, BREAK, B, BREAK, B], LOW), from_three);
    assert_eq!(all(r#"{"stop_on_repeat": false}"#, &[BREAK, BREAK, BREAK, A], LOW), [SMALL; 4]);
    // In a step of the large model, which does not hand back.
    assert_eq!(all("{}", &tokens, HIGH), [LARGE; 8]);
    let mixed = [(A, HIGH), (END, LOW), (BREAK, LOW), (A, LOW), (BREAK, LOW), (A, LOW)];
    assert_eq!(writers("{}", &mixed), [LARGE; 6]);
}

#[test]
fn only_a_dropped_probe_costs_a_second_forward() {
    let all_low = |settings: &str, tokens: &[u32]| {
        written(settings, &tokens.iter().map(|&token| (token, LOW)).collect::<Vec<_>>()).forwards
    };
    assert_eq!(all_low("{}", &[A, BREAK, A, A]), 4);
    assert_eq!(all_low("{}", &[A, END, A, BREAK, A]), 5);
    assert_eq!(all_low(r#"{"first_steps_large": 2}"#, &[A, BREAK, B, BREAK, A]), 5);
    assert_eq!(written("{}", &[(A, HIGH), (BREAK, HIGH), (A, HIGH), (B, HIGH)]).forwards, 4 + 2);
}

#[test]
fn the_small_model_writes_nothing_behind_the_thinking() {
    // Whoever handed it the request.
    let [mut small, _] = pair(&texts(), "{}");
    let view = RequestView::new(1, 0, 0, 1, 9, &[A]);
    small.receive(&view, &PeerView::new(1, &[B, END, A], 0, &[]));
    assert_eq!(small.decide(0, A, &logits(LOW, 8)), Decision::to(1));
    let tokens = [A, B, END, A];
    assert_eq!(small.send(&RequestView::new(1, 0, 0, 1, 9, &tokens), 1), Handoff::drop_candidate());
}

#[test]
fn steps_have_a_most_length_at_both_models() {
    let settings = r#"{"max_step_tokens": 2}"#;
    let answer = [(A, HIGH), (A, LOW), (A, LOW), (A, HIGH), (B, HIGH), (B, HIGH), (A, LOW)];
    assert_eq!(writers(settings, &answer), [LARGE, LARGE, SMALL, SMALL, LARGE, LARGE, SMALL]);
}

#[test]
fn the_first_steps_can_be_the_large_models() {
    let answer = [(A, LOW), (BREAK, LOW), (B, LOW), (BREAK, LOW), (A, LOW), (BREAK, LOW), (B, HIGH)];
    let expected = [LARGE, LARGE, LARGE, LARGE, SMALL, SMALL, LARGE];
    assert_eq!(writers(r#"{"first_steps_large": 2}"#, &answer), expected);
    let [mut small, mut large] = pair(&texts(), r#"{"first_steps_large": 1}"#);
    let view = RequestView::new(1, 0, 0, 1, 9, &[3]);
    assert_eq!((small.entry(&view), large.entry(&view)), (Some(1), Some(1)));
    // Where the small model got the first step all the same.
    assert_eq!(small.decide(0, A, &logits(LOW, 8)).kind(), Some(DecisionKind::To(1)));
    let [mut small, mut large] = pair(&texts(), "{}");
    assert_eq!((small.entry(&view), large.entry(&view)), (Some(0), Some(0)));
}

#[test]
fn interleaved_requests_and_reused_slots_do_not_mix() {
    let tokens = [A, B, A, B, OPEN, LINE, LINE, BREAK, TAIL];
    let draw = |k: u64, t: u64| random::uniform(k, t, 1 << 20);
    let token = |k, t| tokens[(draw(k, t) * tokens.len() as f64) as usize];
    let entropy = |k, t| if draw(k, 1000 + t) < 0.5 { LOW } else { HIGH };
    let answers: Vec<Vec<(u32, f64)>> =
        (0..6).map(|k| (0..40).map(|t| (token(k, t), entropy(k, t))).collect()).collect();
    let alone: Vec<_> = answers.iter().map(|answer| writers("{}", answer)).collect();
    assert!(alone.iter().all(|writers| writers.contains(&SMALL) && writers.contains(&LARGE)), "{alone:?}");
    let mut policies = pair(&texts(), "{}");
    for round in 0..2_u32 {
        let mut requests: Vec<_> =
            (0..6).map(|k| Request::new(&mut policies, [(k + round) % 6, 5 - k], &[A, BREAK])).collect();
        for _ in 0..40 {
            for (request, answer) in requests.iter_mut().zip(&answers) {
                request.write(&mut policies, |position, _| answer[position]);
            }
        }
        for ((request, writers), k) in requests.iter().zip(&alone).zip(0..) {
            assert_eq!(&request.writers, writers, "round {round}, request {k}");
            request.slots.iter().zip(&mut policies).for_each(|(&slot, policy)| policy.finished(slot));
        }
    }
}

#[test]
fn rows_of_a_batch_have_their_own_logits_and_slots() {
    let [mut small, mut large] = pair(&texts(), "{}");
    let width = small.requirements().top_k;
    let values = [LOW, HIGH, LOW, HIGH].map(|entropy| logits(entropy, width as usize)).concat();
    let batch = RouteBatch {
        request_ids: &[1, 2, 3, 4],
        slots: &[3, 0, 7, 1],
        positions: &[0; 4],
        candidates: &[A; 4],
        signals: SignalColumns { topk_values: &values, top_k: width, ..SignalColumns::default() },
        ..RouteBatch::default()
    };
    let mut out = [Decision::STAY; 4];
    small.route(&batch, &mut out);
    assert_eq!(out, [Decision::STAY, Decision::to(1), Decision::STAY, Decision::to(1)]);
    assert_eq!((width, large.requirements()), (8, Requirements::default()), "the vocabulary has 8 tokens");
    let slots = [2, 0, 4, 1];
    let batch = RouteBatch { slots: &slots, candidates: &[A, BREAK, END, TAIL], ..batch };
    let batch = RouteBatch { signals: SignalColumns::default(), ..batch };
    let mut out = [Decision::STAY; 4];
    large.route(&batch, &mut out);
    assert_eq!(out, [Decision::STAY, Decision::to(0), Decision::STAY, Decision::to(0)]);
}

#[test]
fn an_instance_catches_up_from_the_tokens_alone() {
    let settings = r#"{"max_step_tokens": 4}"#;
    // Whatever part of the answer the model held, and knew of, before.
    let answer = [A, LINE, LINE, B, A, A, A, BREAK, B, LINE];
    let tokens = [&[BREAK, END][..], &answer].concat();
    let mut whole = Progress::default();
    let [reference, _] = pair(&texts(), settings);
    answer.iter().for_each(|&token| whole.push(&reference.rules, reference.vocabulary.text(token)));
    for held in 0..=tokens.len() {
        for known in 0..=held.saturating_sub(2) {
            let mut policies = pair(&texts(), settings);
            for policy in &mut policies {
                let progress = policy.requests.get(3);
                answer[..known].iter().for_each(|&t| progress.push(&policy.rules, policy.vocabulary.text(t)));
                let view = RequestView::new(1, 3, 0, 2, 99, &tokens[..held]);
                policy.receive(&view, &PeerView::new(1, &tokens[held..], 0, &[]));
                assert_eq!(policy.requests.get(3), &whole, "held {held}, known {known}");
            }
        }
    }
}

#[test]
fn refuses_wrong_settings_roles_and_hosts() {
    let at = |settings| create_at(0, &ROLES, &texts(), 8, settings).unwrap_err();
    for (settings, message) in [
        (r#"{"threshold": 3}"#, "threshold is 3; set it to 0 or more and 2.9957 (ln 20) or less"),
        (r#"{"threshold": -0.1}"#, "threshold is -0.1; set it to 0 or more and 2.9957 (ln 20) or less"),
        (r#"{"delimiter": ""}"#, "delimiter is empty; set the text that ends a step"),
        (r#"{"thinking_end": ""}"#, "thinking_end is empty; set the text that ends the thinking"),
        (
            r#"{"delimiter": "\n", "thinking_end": "\nend"}"#,
            r#"thinking_end "\nend" contains delimiter "\n" and would be cut by it; change one of them"#,
        ),
        (r#"{"max_step_tokens": 0}"#, "max_step_tokens is 0; set it to 1 or more"),
        (r#"{"token_budget": 0}"#, "token_budget is 0; set it to 1 or more"),
    ] {
        assert_eq!(at(settings), message);
    }
    assert!(at(r#"{"treshold": 0.1}"#).contains("unknown field `treshold`"));
    assert!(at(r#"{"first_steps_large": -1}"#).contains("invalid value"));
    let error = create_at(0, &["slm", "x"], &texts(), 8, "{}").unwrap_err();
    assert!(error.starts_with("glimprouter needs exactly two models"), "{error}");
    let error = create_at(0, &ROLES, &NoServices, 8, "{}").unwrap_err();
    assert_eq!(error, "route `r` has no text for its tokens, which steps are found by; give its models a tokenizer");
    assert!(create_at(0, &ROLES, &texts(), 8, r#"{"threshold": 2.995732273553991}"#).is_ok());
}

#[test]
fn tokens_without_text_are_known() {
    let texts = Texts(vec![Some(b"x".into()), None, Some(b"yz".into()), Some(Vec::new())]);
    let [small, _] = pair(&texts, "{}");
    let text: Vec<_> = [0, 1, 2, 3, 4, u32::MAX].iter().map(|&id| small.vocabulary.text(id)).collect();
    assert_eq!(text, [&b"x"[..], b"", b"yz", b"", b"", b""]);
}

#[test]
fn schema_fits_the_settings() {
    let schema: serde_json::Value = serde_json::from_str(GlimpRouter::SETTINGS_SCHEMA).unwrap();
    let defaults: serde_json::Map<_, _> = schema["properties"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, property)| (name.clone(), property["default"].clone()))
        .collect();
    assert_eq!(defaults.len(), 7);
    let described = create_at(0, &ROLES, &texts(), 8, &serde_json::to_string(&defaults).unwrap()).unwrap();
    let default = create_at(0, &ROLES, &texts(), 8, "{}").unwrap();
    assert_eq!((described.threshold, described.first_steps_large), (default.threshold, default.first_steps_large));
    assert_eq!((described.rules, described.threshold), (default.rules, 1.0));
    let maximum = schema["properties"]["threshold"]["maximum"].as_f64().unwrap();
    assert!((maximum - 20f64.ln()).abs() < 1e-12);
}
