mod serve;

use super::*;
use crate::compose::{Deferral, MAX_TOKENS, TopTokens};
use serve::{Request, Row, STOP, Written, argmax, ask, create, logsumexp, receive, row, send, serve};
use tokenrouter_plugin_api::{DecisionKind, MAX_PAYLOAD_BYTES, ModelDescription, NoServices, SignalSet};

use DecisionKind::{Draft, Stay, To};

fn kinds(policy: &mut CoLlm, rows: &[Row]) -> Vec<DecisionKind> {
    ask(policy, rows).iter().map(|d| d.kind().unwrap()).collect()
}

/// One row after the other.
fn each(policy: &mut CoLlm, rows: &[Row]) -> Vec<DecisionKind> {
    rows.iter().flat_map(|row| kinds(policy, std::slice::from_ref(row))).collect()
}

fn logit(probability: f64) -> f32 {
    (probability / (1.0 - probability)).ln() as f32
}

#[test]
fn defers_above_the_threshold_only() {
    let cases = [
        ("0.5", 0.0, Stay), // A probability of exactly 0.5.
        ("0.5", 1e-6, To(1)),
        ("0.5", -1e-6, Stay),
        ("0.5", f32::NAN, Stay),
        ("0.5", f32::NEG_INFINITY, Stay),
        ("0.5", f32::INFINITY, To(1)),
        ("1", f32::INFINITY, Stay),
        ("0", f32::NEG_INFINITY, Stay),
        ("0", -80.0, To(1)),
    ];
    for (threshold, defer, want) in cases {
        let mut policy = create(0, &format!(r#"{{"threshold": {threshold}}}"#)).unwrap();
        assert_eq!(kinds(&mut policy, &[row(3, defer)]), [want], "{threshold} {defer}");
    }
    let mut policy = create(0, "{}").unwrap();
    assert_eq!(each(&mut policy, &[row(0, logit(0.149)), row(0, logit(0.151))]), [Stay, To(1)]);
    assert_eq!(send(&mut policy, 0, 0), Handoff::drop_candidate().budget(1));
}

#[test]
fn asks_for_the_deferral_row_at_the_small_model_only() {
    let small = create(0, "{}").unwrap().requirements();
    assert_eq!((small.token_logits, small.masked_tokens, small.top_k), (vec![serve::DEFER], vec![serve::DEFER], 0));
    assert_eq!((small.signals, create(1, "{}").unwrap().requirements()), (SignalSet::NONE, Requirements::default()));
    let composing = |model| create(model, r#"{"strategy": "compose"}"#).unwrap().requirements();
    // The 1024 best tokens of a vocabulary of 8.
    assert_eq!((composing(0).signals, composing(0).top_k), (SignalSet::LOGSUMEXP, serve::VOCAB));
    assert_eq!(composing(0).token_logits, [serve::DEFER]);
    assert_eq!((composing(1).signals, composing(1).top_k), (SignalSet::LOGSUMEXP, serve::VOCAB));
    assert_eq!((composing(1).token_logits, composing(1).masked_tokens), (vec![], vec![]));
}

#[test]
fn thresholds_follow_the_schedule() {
    let at = |schedule: &str, positions: [u32; 4]| {
        let settings = Settings::parse(&format!(r#"{{"schedule": "{schedule}"}}"#)).unwrap();
        positions.map(|t| settings.thresholds.at(t))
    };
    let cases = [
        ("constant", [0.15, 0.15, 0.15, 0.15]),
        ("linear", [1.0, 0.603_333_333_333_333_4, 0.15, 0.15]), // 1 - 0.85 * 7 / 15
        ("cosine", [1.0, 0.619_424_596_888_752_8, 0.15, 0.15]), // 0.15 + 0.425 * (cos 84° + 1)
        ("exponential", [1.0, 0.412_581_028_564_816_2, 0.15, 0.15]), // 0.15 ^ (7 / 15)
    ];
    for (schedule, want) in cases {
        for (got, want) in at(schedule, [0, 7, 15, 16]).into_iter().zip(want) {
            assert!((got - want).abs() < 1e-9, "{schedule}: {got} is not {want}");
        }
    }
    let settings = r#"{"schedule": "linear", "start": 0.8, "warmup_tokens": 4, "threshold": 0.4}"#;
    let mut policy = create(0, settings).unwrap();
    // 0.8, 0.7, 0.6, 0.5 and 0.4 from there on.
    for (position, threshold) in [(0, 0.8), (1, 0.7), (2, 0.6), (3, 0.5), (4, 0.4), (5, 0.4)] {
        let rows = [row(position, logit(threshold - 1e-3)), row(position, logit(threshold + 1e-3))];
        assert_eq!(each(&mut policy, &rows), [Stay, To(1)], "{position}");
    }
}

/// The decisions of the reference implementation on the demo models.
#[test]
fn decides_as_the_recorded_traces() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/goldens/traces");
    for (name, schedule) in [("collm", "constant"), ("collm-linear", "linear")] {
        for number in 1..=3 {
            let trace = std::fs::read_to_string(format!("{folder}/{name}-{number}.json")).unwrap();
            let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
            let settings = format!(r#"{{"schedule": "{schedule}", "threshold": {}}}"#, trace["parameter"]);
            let mut policy = create(0, &settings).unwrap();
            let thresholds = Settings::parse(&settings).unwrap().thresholds;
            let mut deferred = 0;
            for (t, step) in (0..).zip(trace["steps"].as_array().unwrap()) {
                let small = &step["evaluations"][0];
                let [score, threshold] = ["score", "threshold"].map(|field| small[field].as_f64().unwrap());
                let want = if small["handed_off"].as_bool().unwrap() { To(1) } else { Stay };
                assert_eq!(kinds(&mut policy, &[row(t, logit(score))]), [want], "{name}-{number} token {t}");
                assert!((thresholds.at(t) - threshold).abs() < 1e-12, "{name}-{number} token {t}");
                deferred += u32::from(want == To(1));
            }
            assert!(deferred > 0, "{name}-{number}");
        }
    }
}

#[test]
fn a_block_is_kept_up_to_the_first_deferral() {
    const NO: f32 = -9.0;
    const YES: f32 = 9.0;
    let mut policy = create(0, r#"{"tokens_per_call": 3}"#).unwrap();
    let rows = |defer: [f32; 3]| [row(4, defer[0]), row(5, defer[1]), row(6, defer[2])];
    assert_eq!(each(&mut policy, &rows([NO, NO, NO])), [Draft, Draft, Stay]);
    let cases =
        [([YES, NO, YES], 2), ([YES, YES, YES], 2), ([NO, YES, NO], 1), ([NO, YES, YES], 1), ([NO, NO, YES], 0)];
    for (defer, rollback) in cases {
        assert_eq!(each(&mut policy, &rows(defer)), [Draft, Draft, To(1)], "{defer:?}");
        assert_eq!(send(&mut policy, 0, 2), Handoff::drop_candidate().rollback(rollback).budget(1), "{defer:?}");
    }
    assert_eq!(each(&mut policy, &rows([NO, NO, NO])), [Draft, Draft, Stay]);
}

#[test]
fn a_block_ends_early_at_an_end_token_and_at_the_limit() {
    let mut policy = create(0, r#"{"tokens_per_call": 4}"#).unwrap();
    let end = |defer| Row { candidate: 0, ..row(5, defer) };
    let last = |defer| Row { remaining: 1, ..row(5, defer) };
    assert_eq!(each(&mut policy, &[row(4, -9.0), end(-9.0)]), [Draft, Stay]);
    assert_eq!(each(&mut policy, &[row(4, -9.0), last(-9.0)]), [Draft, Stay]);
    assert_eq!(each(&mut policy, &[row(4, 9.0), last(-9.0)]), [Draft, To(1)]);
    assert_eq!(send(&mut policy, 0, 1), Handoff::drop_candidate().rollback(1).budget(1));
    assert_eq!(each(&mut policy, &[row(4, -9.0), end(9.0)]), [Draft, To(1)]);
    assert_eq!(send(&mut policy, 0, 1), Handoff::drop_candidate().budget(1));
    // An end token of the large model is none here.
    assert_eq!(each(&mut policy, &[Row { candidate: 1, ..row(4, -9.0) }]), [Draft]);
}

#[test]
fn requests_do_not_share_a_block() {
    let mut policy = create(0, r#"{"tokens_per_call": 2}"#).unwrap();
    let at = |slot, position, defer| Row { slot, ..row(position, defer) };
    assert_eq!(kinds(&mut policy, &[at(0, 0, 9.0), at(3, 7, -9.0)]), [Draft, Draft]);
    assert_eq!(kinds(&mut policy, &[at(3, 8, 9.0), at(0, 1, -9.0)]), [To(1), To(1)]);
    assert_eq!(send(&mut policy, 3, 1).rollback, 0);
    assert_eq!(send(&mut policy, 0, 1).rollback, 1);
}

#[test]
fn a_reused_slot_starts_a_block() {
    let mut policy = create(0, r#"{"tokens_per_call": 2}"#).unwrap();
    assert_eq!(each(&mut policy, &[row(0, 9.0)]), [Draft]);
    policy.finished(0);
    assert_eq!(each(&mut policy, &[row(0, -9.0), row(1, -9.0)]), [Draft, Stay]);

    let mut large = create(1, r#"{"strategy": "compose"}"#).unwrap();
    receive(&mut large, 0, &deferral(1.0, &[(4, 0.0)]).to_bytes());
    large.finished(0);
    assert_eq!(ask(&mut large, &[row(0, 0.0)]), [Decision::to(0)]);
}

fn deferral(probability: f64, tokens: &[(u32, f32)]) -> Deferral {
    Deferral { probability, base: top(tokens) }
}

fn top(tokens: &[(u32, f32)]) -> TopTokens {
    TopTokens { logsumexp: 0.0, tokens: tokens.to_vec() }
}

/// With a log-sum-exp of 0, a logit is the logarithm of the probability.
fn ln(probability: f32) -> f32 {
    probability.ln()
}

#[test]
fn composes_the_union_of_both_lists() {
    let base = [(1, ln(0.6)), (2, ln(0.3))];
    let reference = top(&[(3, ln(0.5)), (2, ln(0.4))]);
    // p:          token 1 (1-p)*0.6, token 2 (1-p)*0.3 + p*0.4, token 3 p*0.5
    for (p, want) in [(0.0, 1), (0.3, 1), (0.5, 2), (0.7, 2), (0.8, 3), (1.0, 3)] {
        assert_eq!(deferral(p, &base).compose(&reference), Some(want), "{p}");
    }
    let even = deferral(0.5, &[(5, ln(0.5)), (4, ln(0.25))]);
    assert_eq!(even.compose(&top(&[(3, ln(0.5))])), Some(3));
    assert_eq!(even.compose(&top(&[(6, ln(0.5))])), Some(5));
    assert_eq!(deferral(0.5, &[]).compose(&top(&[])), None);
}

#[test]
fn a_payload_is_checked() {
    let whole = deferral(0.25, &[(1, 2.5), (7, -1.0)]);
    let bytes = whole.to_bytes();
    assert_eq!(Deferral::from_bytes(&bytes, 8), Some(whole));
    assert_eq!(Deferral::from_bytes(&bytes, 7), None);
    for cut in [0, 7, 15, 17, bytes.len() - 1] {
        assert_eq!(Deferral::from_bytes(&bytes[..cut], 8), None, "{cut}");
    }
    for broken in [deferral(1.5, &[]), deferral(f64::NAN, &[]), deferral(0.5, &[(1, f32::NAN)])] {
        assert_eq!(Deferral::from_bytes(&broken.to_bytes(), 8), None, "{broken:?}");
    }
    let most = deferral(0.5, &vec![(1, 0.0); MAX_TOKENS as usize]).to_bytes().len();
    assert!((MAX_PAYLOAD_BYTES - 7..=MAX_PAYLOAD_BYTES).contains(&most), "{most}");
}

#[test]
fn the_large_model_writes_the_composed_token() {
    let settings = r#"{"strategy": "compose", "compose_top": 2}"#;
    let [mut small, mut large] = [0, 1].map(|model| create(model, settings).unwrap());
    let logits = |best: &[(usize, f32)]| {
        let mut logits = vec![0.0; serve::VOCAB as usize];
        best.iter().for_each(|&(id, logit)| logits[id] = logit);
        logits
    };
    let at = |slot, best: &[(usize, f32)]| Row { slot, logits: logits(best), ..row(0, 0.0) };
    let rows = [at(0, &[(3, 4.0), (4, 3.9)]), at(1, &[(5, 4.0), (6, 3.9)])];
    assert_eq!(kinds(&mut small, &rows), [To(1), To(1)]);
    for slot in [1, 0] {
        let handoff = send(&mut small, slot, 0);
        assert_eq!((handoff.keep_candidate, handoff.budget, handoff.rollback), (false, None, 0));
        assert_eq!(handoff.payload.len(), 16 + 2 * 8);
        receive(&mut large, slot, &handoff.payload);
    }
    // Each model prefers another token, and both like the same second one.
    let rows = [at(1, &[(1, 4.0), (6, 3.9)]), at(0, &[(1, 4.0), (4, 3.9)])];
    assert_eq!(ask(&mut large, &rows), [Decision::to(0).replacing(6), Decision::to(0).replacing(4)]);
    assert_eq!(send(&mut large, 0, 0), Handoff::default());
    // What was received counts once; without it the large model's own token stands.
    assert_eq!(ask(&mut large, &rows), [Decision::to(0); 2]);
    receive(&mut large, 0, b"not a payload");
    assert_eq!(ask(&mut large, &rows[1..]), [Decision::to(0)]);
}

#[test]
fn a_masked_token_is_not_composed() {
    let mut small = create(0, r#"{"strategy": "compose"}"#).unwrap();
    let mut logits = vec![1.0; serve::VOCAB as usize];
    logits[5] = f32::NEG_INFINITY;
    assert_eq!(kinds(&mut small, &[Row { logits, ..row(0, 0.0) }]), [To(1)]);
    let sent = Deferral::from_bytes(&send(&mut small, 0, 0).payload, serve::VOCAB).unwrap();
    let ids: Vec<u32> = sent.base.tokens.iter().map(|t| t.0).collect();
    assert_eq!((ids, sent.probability), (vec![0, 1, 2, 3, 4, 6, 7], 0.5));
}

/// Co-LLM by its definition, one token at a time.
fn reference(request: &Request, threshold: impl Fn(usize) -> f64, compose: bool) -> Vec<Written> {
    let mut answer: Vec<Written> = Vec::new();
    while !request.is_over(&answer) {
        let tokens: Vec<u32> = answer.iter().map(|w| w.0).collect();
        let [small, large] = [false, true].map(|large| request.logits(large, &tokens));
        let p = 1.0 / (1.0 + (-f64::from(request.defer(&tokens))).exp());
        answer.push(if p <= threshold(tokens.len()) {
            (argmax(&small), false)
        } else if compose {
            let share = |logits: &[f32], id: usize| (f64::from(logits[id]) - logsumexp(logits)).exp();
            let score = |id: usize| ((1.0 - p) * share(&small, id) + p * share(&large, id)) as f32;
            (argmax(&(0..small.len()).map(score).collect::<Vec<_>>()), true)
        } else {
            (argmax(&large), true)
        });
    }
    answer
}

#[test]
fn answers_do_not_depend_on_the_length_of_blocks() {
    let requests: Vec<Request> = (0..200).map(|seed| Request { seed, max_tokens: 1 + seed as u32 % 23 }).collect();
    let linear = |t: usize| if t < 9 { 0.9 - 0.6 * t as f64 / 9.0 } else { 0.3 };
    for (compose, strategy) in [(false, "defer"), (true, "compose")] {
        let want: Vec<_> = requests.iter().map(|request| reference(request, linear, compose)).collect();
        // Answers of both models, deferrals in a row, and every way to end.
        let count = |of: fn(&[Written]) -> bool| want.iter().filter(|answer| of(answer)).count();
        let ends_with = |token, large| want.iter().filter(|answer| answer.last() == Some(&(token, large))).count();
        assert!(count(|a| a.windows(2).any(|w| w[0].1 && w[1].1)) > 50);
        assert!(count(|a| a.windows(3).any(|w| !w[0].1 && w[1].1 && !w[2].1)) > 50);
        assert!(count(|a| a.contains(&(1, false))) > 5);
        for (token, large) in [(0, false), (0, true), (1, true), (STOP, false), (STOP, true)] {
            assert!(ends_with(token, large) > 0, "{token} {large}");
        }
        for tokens_per_call in 1..=6 {
            let settings = format!(
                r#"{{"threshold": 0.3, "schedule": "linear", "start": 0.9, "warmup_tokens": 9,
                     "strategy": "{strategy}", "tokens_per_call": {tokens_per_call}}}"#
            );
            assert_eq!(serve(&settings, &requests), want, "{settings}");
        }
    }
}

#[test]
fn refuses_what_it_cannot_do() {
    let error = |settings: &str| create(0, settings).unwrap_err();
    assert_eq!(error(r#"{"threshold": 1.5}"#), "threshold is 1.5; set it to 0 or more and 1 or less");
    assert_eq!(
        error(r#"{"start": 0.5}"#),
        "start is 0.5, but schedule \"constant\" has no warm-up; set schedule to \"linear\", \"cosine\" or \
         \"exponential\", or remove start"
    );
    assert!(error(r#"{"warmup_tokens": 15}"#).starts_with("warmup_tokens is 15, but schedule \"constant\""));
    assert!(error(r#"{"schedule": "cosine", "start": -0.5}"#).starts_with("start is -0.5; set it to 0 or more"));
    assert!(error(r#"{"schedule": "cosine", "warmup_tokens": 0}"#).starts_with("warmup_tokens is 0; set it to 1"));
    let zero = error(r#"{"schedule": "exponential", "start": 0}"#);
    assert!(zero.starts_with("start is 0, which schedule \"exponential\" cannot reach"), "{zero}");
    assert!(error(r#"{"schedule": "exponential", "threshold": 0}"#).starts_with("threshold is 0, which schedule"));
    assert!(create(0, r#"{"schedule": "linear", "threshold": 0, "start": 0}"#).is_ok());
    assert!(error(r#"{"schedule": "step"}"#).contains("unknown variant `step`"));
    for k in [0, 65] {
        let message = format!("tokens_per_call is {k}; set it from 1 to 64");
        assert_eq!(error(&format!(r#"{{"tokens_per_call": {k}}}"#)), message);
    }
    assert!(error(r#"{"compose_top": 8}"#).starts_with("compose_top is 8, but strategy \"defer\" does not compose"));
    for top in [0, 8191] {
        let error = error(&format!(r#"{{"strategy": "compose", "compose_top": {top}}}"#));
        assert!(error.starts_with(&format!("compose_top is {top}; set it from 1 to 8190")), "{error}");
    }
    assert!(error(r#"{"treshold": 0.1}"#).contains("unknown field `treshold`"));
    assert_eq!(
        error(r#"{"defer_token": "<|later|>"}"#),
        "defer_token is `<|later|>`, which model `m-slm` does not have; give the role \"slm\" to a model tuned for \
         Co-LLM, or set defer_token to the text of its deferral token"
    );
    // The large model need not know the token.
    assert!(create(1, r#"{"defer_token": "<|later|>"}"#).is_ok());
}

#[test]
fn needs_one_model_of_each_role() {
    let models = ["slm", "slm"].map(|role| ModelDescription { name: "m".into(), role: role.into() });
    let services = &NoServices;
    let context = Context { route: "r", model: 0, models: &models, entry: 0, vocab_size: 8, eos: &[], services };
    let error = CoLlm::create(&context, "{}").unwrap_err().message;
    assert!(error.starts_with("collm needs exactly two models, with the roles \"slm\" and \"llm\""), "{error}");
}

#[test]
fn the_schema_tells_the_defaults() {
    let schema: serde_json::Value = serde_json::from_str(CoLlm::SETTINGS_SCHEMA).unwrap();
    let properties = schema["properties"].as_object().unwrap();
    assert_eq!(properties.len(), 8);
    let defaults: serde_json::Map<String, serde_json::Value> =
        properties.iter().filter_map(|(name, p)| Some((name.clone(), p.get("default")?.clone()))).collect();
    assert_eq!(defaults.len(), 5);
    let spelled_out = serde_json::Value::Object(defaults).to_string();
    assert_eq!(Settings::parse(&spelled_out).unwrap(), Settings::parse("{}").unwrap());
    assert_eq!(properties["compose_top"]["maximum"], MAX_TOKENS);
}
