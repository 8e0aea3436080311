//! Views reach a plugin unchanged, answers come back unchanged, and a failing hook is an error.

use tokenrouter::policy::{PolicyFactory, PolicyFailure, PolicyInstance, validate_settings};
use tokenrouter_plugin_api::net::Net;
use tokenrouter_plugin_api::{
    Acceptance, Decision, DecisionKind, LogLevel, MAX_PAYLOAD_BYTES, PeerView, RequestView, Requirements, RouteBatch,
    SignalColumns, SignalSet,
};

use crate::support::{Recorder, create, create_with, library, load};

fn probe(settings: &str) -> Result<Box<dyn PolicyInstance>, PolicyFailure> {
    create(&load(&library("libprobe.so")), settings)
}

/// As the probe computes it.
fn digest(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

fn request(tokens: &[u32]) -> RequestView<'_> {
    let mut request = RequestView::new(u64::MAX - 1, 3, 0xdead_beef_0123, 2, 77, tokens);
    (request.provisional, request.candidate) = (1, 42);
    request
}

fn batch() -> RouteBatch<'static> {
    RouteBatch {
        request_ids: &[u64::MAX, 1],
        slots: &[2, 3],
        seeds: &[4, 1 << 40],
        positions: &[5, 6],
        candidates: &[7, 8],
        drafts: &[9, 10],
        last_models: &[11, u32::MAX],
        remaining: &[12, 13],
        signals: SignalColumns {
            entropy: &[0.25, f32::NAN],
            margin: &[f32::INFINITY, -0.0],
            topk_values: &[1.5, 1.25, 1.0, 0.5],
            topk_ids: &[4, 3, 2, 1],
            top_k: 2,
            token_logits: &[-1.0, -2.0],
            token_logit_count: 1,
            net_scores: &[0.5, -0.5],
            net_width: 1,
            ..SignalColumns::default()
        },
    }
}

#[test]
fn everything_crosses_the_boundary() {
    let plugin = load(&library("libprobe.so"));
    let recorder = Recorder::default();
    let mut instance = create_with(&recorder, &plugin, "{}").unwrap();
    let seen = "r 0 [ModelDescription { name: \"small\", role: \"slm\" }, ModelDescription { name: \"large\", role: \
                \"llm\" }] 0 1000 [5, 6] Some([255, 55]) None Some(7) None Ok(WeightsInfo { tensors: [TensorInfo { name: \"w\", shape: [3, 4] }], \
                metadata: \"{}\" }) Err(\"no file `none`\")";
    assert_eq!(*recorder.lines.lock().unwrap(), [(LogLevel::Warn, seen.to_owned())]);

    let mut requirements = Requirements::signals(SignalSet::ENTROPY | SignalSet::MARGIN);
    (requirements.top_k, requirements.token_logits, requirements.masked_tokens) = (4, vec![1, 2], vec![3]);
    let mut net = Net::new("net", "net.pt");
    let hidden = net.hidden();
    net.linear(hidden, "w");
    requirements.nets.push(net);
    assert_eq!(*instance.requirements(), requirements);

    let request = request(&[10, 11, 12]);
    assert_eq!(instance.entry(&request), Ok(Some(digest(&format!("{request:?}")))));
    let mut out = [Decision::DRAFT; 2];
    instance.route(&batch(), &mut out).unwrap();
    assert_eq!(out, [Decision::DRAFT, Decision::to(digest(&format!("{:?}", batch())))]);
    let handoff = instance.send(&request, 9).unwrap();
    assert_eq!((handoff.keep_candidate, handoff.budget, handoff.rollback, handoff.verify), (false, Some(9), 0, false));
    assert_eq!(String::from_utf8(handoff.payload).unwrap(), format!("{request:?}"));
    let message = PeerView::new(1, &[12, 13], 1, b"\x00payload\xff");
    let expected = Acceptance::Accept(digest(&format!("{request:?} {message:?}")));
    assert_eq!(instance.receive(&request, &message), Ok(expected));
    instance.finished(3).unwrap();
}

#[test]
fn case_also_an_empty_batch_is_routed() {
    let mut instance = probe("{}").unwrap();
    instance.route(&RouteBatch::default(), &mut []).unwrap();
}

type Call = fn(&mut dyn PolicyInstance) -> Result<(), PolicyFailure>;

const CALLS: [(&str, Call); 5] = [
    ("entry", |instance| instance.entry(&request(&[1])).map(drop)),
    ("route", |instance| instance.route(&batch(), &mut [Decision::STAY; 2])),
    ("send", |instance| instance.send(&request(&[1]), 1).map(drop)),
    ("receive", |instance| instance.receive(&request(&[1]), &PeerView::new(1, &[], 0, &[])).map(drop)),
    ("finished", |instance| instance.finished(3)),
];

#[test]
fn case_10_a_panic_is_an_error_that_ends_the_instance_and_nothing_else() {
    let mut other = probe("{}").unwrap();
    for (hook, call) in CALLS {
        let mut instance = probe(&format!(r#"{{"panic": "{hook}"}}"#)).unwrap();
        let failure = call(instance.as_mut()).unwrap_err();
        assert_eq!((failure.plugin.as_str(), failure.hook), ("probe", hook));
        assert!(failure.message.starts_with("panicked at "), "{failure}");
        assert!(failure.message.contains("plugins/probe/lib.rs:"), "{failure}");
        assert!(failure.message.ends_with(&format!(": the {hook} hook was told to panic")), "{failure}");
        for (later, call) in CALLS {
            let failure = call(instance.as_mut()).unwrap_err();
            assert_eq!(failure.hook, later);
            assert_eq!(failure.message, "not called, because an earlier call of this instance failed");
        }
        drop(instance);
        CALLS.iter().for_each(|(_, call)| call(other.as_mut()).unwrap());
    }
}

#[test]
fn case_10_a_panic_while_creating_is_an_error() {
    for hook in ["create", "requirements"] {
        let failure = probe(&format!(r#"{{"panic": "{hook}"}}"#)).err().unwrap();
        assert_eq!(failure.hook, hook);
        assert!(failure.message.ends_with(&format!(": the {hook} hook was told to panic")), "{failure}");
    }
}

#[test]
fn case_10_a_panic_in_drop_stays_inside() {
    let mut instance = probe(r#"{"panic": "drop"}"#).unwrap();
    instance.route(&batch(), &mut [Decision::STAY; 2]).unwrap();
    drop(instance);
    probe("{}").unwrap().finished(1).unwrap();
}

#[test]
fn an_assertion_keeps_its_text() {
    let failure = probe("{}").unwrap().finished(99).unwrap_err();
    assert!(failure.message.contains("slot 99 is not mine"), "{failure}");
}

#[test]
fn an_error_of_create_is_passed_on_as_it_is() {
    let failure = probe(r#"{"error": "the threshold is ten\nand that is too much: ü"}"#).err().unwrap();
    assert_eq!(failure.to_string(), "policy `probe` failed in create: the threshold is ten\nand that is too much: ü");
    let failure = probe(r#"{"unknown": 1}"#).err().unwrap();
    assert!(failure.message.contains("unknown field `unknown`"), "{failure}");
}

/// The caller checks the values; here it matters that they arrive undamaged.
#[test]
fn case_13_wrong_answers_arrive_for_the_caller_to_check() {
    let mut out = [Decision::STAY; 2];
    probe(r#"{"wrong": "kind"}"#).unwrap().route(&batch(), &mut out).unwrap();
    assert_eq!(out.map(|decision| decision.kind()), [Some(DecisionKind::Stay), None]);
    probe(r#"{"wrong": "model"}"#).unwrap().route(&batch(), &mut out).unwrap();
    assert_eq!(out[1].kind(), Some(DecisionKind::To(1_000_000)));
    let mut large = request(&[1]);
    large.slot = 99;
    assert_eq!(probe("{}").unwrap().send(&large, 1).unwrap().payload.len(), MAX_PAYLOAD_BYTES + 1);
}

#[test]
fn an_instance_moves_between_threads() {
    let mut instance = probe(r#"{"panic": "send"}"#).unwrap();
    instance.route(&batch(), &mut [Decision::STAY; 2]).unwrap();
    let mut instance = std::thread::spawn(move || {
        instance.entry(&request(&[1])).unwrap();
        instance
    })
    .join()
    .unwrap();
    assert_eq!(instance.send(&request(&[1]), 0).unwrap_err().hook, "send");
    std::thread::spawn(move || drop(instance)).join().unwrap();
}

#[test]
fn case_25_two_loads_of_one_file_give_two_working_plugins() {
    let path = library("libprobe.so");
    let (first, second) = (load(&path), load(&path));
    let mut one = create(&first, r#"{"panic": "route"}"#).unwrap();
    let mut two = create(&second, "{}").unwrap();
    assert!(one.route(&batch(), &mut [Decision::STAY; 2]).is_err());
    two.route(&batch(), &mut [Decision::STAY; 2]).unwrap();
    assert_eq!(first.sha256(), second.sha256());
}

/// Files with one name in them and different content, as two versions of a plugin.
#[test]
fn case_25_two_versions_work_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libprobe.so");
    let mut bytes = std::fs::read(library("libprobe.so")).unwrap();
    // Behind all that is loaded.
    bytes.extend(b"another build");
    std::fs::write(&path, bytes).unwrap();
    let (first, second) = (load(&library("libprobe.so")), load(&path));
    assert!(first.sha256() != second.sha256() && first.name() == second.name());
    let mut one = create(&first, r#"{"panic": "route"}"#).unwrap();
    let mut two = create(&second, "{}").unwrap();
    assert!(one.route(&batch(), &mut [Decision::STAY; 2]).is_err());
    two.route(&batch(), &mut [Decision::STAY; 2]).unwrap();
}

#[test]
fn case_27_a_file_overwritten_after_loading_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libprobe.so");
    std::fs::copy(library("libprobe.so"), &path).unwrap();
    let plugin = load(&path);
    std::fs::write(&path, b"").unwrap();
    create(&plugin, "{}").unwrap().route(&batch(), &mut [Decision::STAY; 2]).unwrap();
}

#[test]
fn the_shipped_policies_load_and_decide() {
    let rstitch = load(&library("librstitch.so"));
    assert_eq!((rstitch.name(), rstitch.abi().to_string().as_str()), ("rstitch", "1.0"));
    let mut instance = create(&rstitch, r#"{"threshold": 0.5}"#).unwrap();
    assert_eq!(*instance.requirements(), Requirements::signals(SignalSet::ENTROPY_NORM));
    let mut out = [Decision::STAY; 3];
    let signals = SignalColumns { entropy_norm: &[0.4, 0.6, f32::NAN], ..SignalColumns::default() };
    let rows = RouteBatch { request_ids: &[1, 2, 3], signals, ..RouteBatch::default() };
    instance.route(&rows, &mut out).unwrap();
    assert_eq!(out, [Decision::STAY, Decision::to(1), Decision::STAY]);
    let failure = create(&rstitch, r#"{"threshold": 7}"#).err().unwrap();
    assert_eq!(
        failure.to_string(),
        "policy `rstitch` failed in create: threshold is 7; set it to 0 or more and 1 or less"
    );

    let me = load(&library("libme.so"));
    let mut instance = create(&me, r#"{"weights": {"small": 0.5, "large": 0.5}, "generator": "python"}"#).unwrap();
    // random.Random(0).random() is 0.844, 0.757, 0.420, …
    let first = RequestView::new(1, 0, 0, 1, 9, &[5]);
    assert_eq!(instance.entry(&first), Ok(Some(1)));
    let rows = RouteBatch {
        request_ids: &[1, 2],
        slots: &[0, 1],
        seeds: &[0, 0],
        positions: &[0, 1],
        ..RouteBatch::default()
    };
    let mut out = [Decision::STAY; 2];
    instance.route(&rows, &mut out).unwrap();
    assert_eq!(out, [Decision::to(1), Decision::STAY]);
}

#[test]
fn the_shipped_schemas_say_what_is_wrong() {
    let check = |plugin: &str, settings: serde_json::Value| {
        validate_settings(load(&library(plugin)).settings_schema(), &settings)
    };
    assert_eq!(check("librstitch.so", serde_json::json!({})), Ok(()));
    assert_eq!(
        check("librstitch.so", serde_json::json!({ "threshold": 1.5 })).unwrap_err(),
        "settings/threshold = 1.5: the value is greater than the maximum of 1"
    );
    assert_eq!(
        check("libme.so", serde_json::json!({ "weights": { "small": -1 }, "draw": [] })).unwrap_err(),
        "settings/weights/small = -1: the value is less than the minimum of 0; \
         settings/draw = []: no such setting; it takes weights, generator"
    );
}
