use super::*;
use tokenrouter_plugin_api::{DecisionKind, ModelDescription, NoServices, SignalColumns};

fn create(model: ModelIndex, roles: &[&str], settings: &str) -> Result<QueryLevel, String> {
    let models: Vec<_> =
        roles.iter().map(|role| ModelDescription { name: format!("m-{role}"), role: role.to_string() }).collect();
    let context =
        Context { route: "r", model, models: &models, entry: 0, vocab_size: 10, eos: &[], services: &NoServices };
    QueryLevel::create(&context, settings).map_err(|e| e.message)
}

const ROLES: [&str; 2] = ["slm", "llm"];

/// The instances at the small and the large model.
fn both(settings: &str) -> [QueryLevel; 2] {
    [0, 1].map(|model| create(model, &ROLES, settings).unwrap())
}

fn route(policy: &mut QueryLevel, positions: &[u32], entropy: &[f32]) -> Vec<DecisionKind> {
    let ids: Vec<u64> = (0..positions.len() as u64).collect();
    let signals = SignalColumns { entropy, ..SignalColumns::default() };
    let mut out = vec![Decision::STAY; ids.len()];
    policy.route(&RouteBatch { request_ids: &ids, positions, signals, ..RouteBatch::default() }, &mut out);
    out.iter().map(|d| d.kind().unwrap()).collect()
}

fn request(seed: u64) -> RequestView<'static> {
    RequestView::new(1, 0, seed, 1, 9, &[3])
}

use DecisionKind::{Stay, To};

#[test]
fn the_first_entropy_decides_from_the_threshold_on() {
    let [mut small, mut large] = both(r#"{"threshold": 0.25}"#);
    let entropy = [0.0, 0.249, 0.25, 9.0, f32::NAN];
    assert_eq!(route(&mut small, &[0; 5], &entropy), [Stay, Stay, To(1), To(1), Stay]);
    assert_eq!(small.send(&request(0), 1), Handoff::drop_candidate());
    assert_eq!(route(&mut large, &[0; 5], &[]), [Stay; 5]);
    for policy in [&mut small, &mut large] {
        assert_eq!(policy.entry(&request(0)), Some(0), "the small model computes the prompt");
    }
    assert_eq!(small.requirements(), Requirements::signals(SignalSet::ENTROPY));
    assert_eq!(large.requirements(), Requirements::default());
}

#[test]
fn later_tokens_stay() {
    let [mut small, mut large] = both("{}");
    let positions = [0, 1, 2, 0, 7];
    assert_eq!(route(&mut small, &positions, &[0.999, 1.0, 5.0, 1.0, 5.0]), [Stay, Stay, Stay, To(1), Stay]);
    assert_eq!(route(&mut large, &positions, &[]), [Stay; 5]);
}

#[test]
fn the_order_of_the_models_does_not_matter() {
    let mut large = create(0, &["llm", "slm"], "{}").unwrap();
    let mut small = create(1, &["llm", "slm"], "{}").unwrap();
    assert_eq!((large.entry(&request(0)), small.entry(&request(0))), (Some(1), Some(1)));
    assert_eq!(route(&mut small, &[0], &[2.0]), [To(0)]);
}

#[test]
fn a_share_of_the_seeds_goes_to_the_large_model() {
    let [mut small, mut large] = both(r#"{"mode": "share", "share": 0.3}"#);
    let drawn: Vec<_> = (0..4000).map(|seed| small.entry(&request(seed)).unwrap()).collect();
    let count = drawn.iter().filter(|&&model| model == 1).count();
    assert!((1050..1350).contains(&count), "{count}");
    for (seed, &model) in drawn.iter().enumerate().rev() {
        assert_eq!(large.entry(&request(seed as u64)), Some(model), "both instances agree");
        assert_eq!(model == 1, random::uniform(seed as u64, 0, STREAM) < 0.3);
    }
    for policy in [&mut small, &mut large] {
        assert_eq!(policy.requirements(), Requirements::default());
        assert_eq!(route(policy, &[0, 1], &[9.0, 9.0]), [Stay; 2]);
    }
    for (share, model) in [("0", 0), ("1", 1)] {
        let [mut small, _] = both(&format!(r#"{{"mode": "share", "share": {share}}}"#));
        assert!((0..1000).all(|seed| small.entry(&request(seed)) == Some(model)));
    }
    const { assert!(STREAM >= 1 << 16) };
}

#[test]
fn refuses_wrong_settings_and_roles() {
    let error = |settings| create(0, &ROLES, settings).unwrap_err();
    for (settings, message) in [
        (r#"{"share": 0.5}"#, "share is 0.5, but mode is \"entropy\"; remove it or set mode = \"share\""),
        (
            r#"{"mode": "share", "share": 0.5, "threshold": 2}"#,
            "threshold is 2, but mode is \"share\"; remove it or set mode = \"entropy\"",
        ),
        (r#"{"mode": "share"}"#, "share is missing; with mode = \"share\" set it to 0 or more and 1 or less"),
        (r#"{"mode": "share", "share": 1.5}"#, "share is 1.5; set it to 0 or more and 1 or less"),
        (r#"{"threshold": -0.5}"#, "threshold is -0.5; set it to 0 or more"),
    ] {
        assert_eq!(error(settings), message);
    }
    assert!(error(r#"{"mode": "oracle"}"#).contains("unknown variant `oracle`, expected `entropy` or `share`"));
    assert!(error(r#"{"thresholds": {}}"#).contains("unknown field `thresholds`"));
    let error = create(0, &["slm", "llm", "mlm"], "{}").unwrap_err();
    assert!(error.starts_with("query_level needs exactly two models"), "{error}");
}

#[test]
fn schema_fits_the_settings() {
    let schema: serde_json::Value = serde_json::from_str(QueryLevel::SETTINGS_SCHEMA).unwrap();
    let threshold = &schema["properties"]["threshold"]["description"];
    assert!(threshold.as_str().unwrap().contains(&format!("{:?}", Settings::DEFAULT_THRESHOLD)));
    let [small, _] = both("{}");
    assert_eq!(small.rule, Rule::Entropy(Settings::DEFAULT_THRESHOLD));
    let mode = schema["properties"]["mode"]["default"].clone();
    assert!(matches!(serde_json::from_value(mode).unwrap(), Mode::Entropy));
}
