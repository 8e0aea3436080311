use super::*;
use tokenrouter_plugin_api::{DecisionKind, ModelDescription, NoServices, SignalColumns};

fn create(model: ModelIndex, roles: &[&str], settings: &str) -> Result<RStitch, String> {
    let models: Vec<_> =
        roles.iter().map(|role| ModelDescription { name: format!("m-{role}"), role: role.to_string() }).collect();
    let entry = roles.iter().position(|&role| role == "slm").unwrap_or(0) as ModelIndex;
    let context =
        Context { route: "r", model, models: &models, entry, vocab_size: 10, eos: &[], services: &NoServices };
    RStitch::create(&context, settings).map_err(|e| e.message)
}

fn route(policy: &mut RStitch, entropy_norm: &[f32]) -> Vec<DecisionKind> {
    let ids: Vec<u64> = (0..entropy_norm.len() as u64).collect();
    let signals = SignalColumns { entropy_norm, ..SignalColumns::default() };
    let mut out = vec![Decision::STAY; ids.len()];
    policy.route(&RouteBatch { request_ids: &ids, signals, ..RouteBatch::default() }, &mut out);
    out.iter().map(|d| d.kind().unwrap()).collect()
}

use DecisionKind::{Stay, To};

#[test]
fn small_hands_over_above_the_threshold_only() {
    let mut policy = create(0, &["slm", "llm"], r#"{"threshold": 0.25}"#).unwrap();
    assert_eq!(route(&mut policy, &[0.0, 0.25, 0.26, f32::NAN, 1.0]), [Stay, Stay, To(1), Stay, To(1)]);
    let handoff = policy.send(&RequestView::new(1, 0, 0, 1, 9, &[5]), 1);
    assert_eq!(handoff, Handoff::drop_candidate());
}

#[test]
fn large_goes_on_until_it_is_certain() {
    let mut policy = create(0, &["llm", "slm"], r#"{"threshold": 0.25}"#).unwrap();
    assert_eq!(route(&mut policy, &[0.26, 0.25, 0.0, f32::NAN]), [Stay, To(1), To(1), To(1)]);
    assert_eq!(policy.send(&RequestView::new(1, 0, 0, 1, 9, &[5]), 1), Handoff::default());
}

#[test]
fn default_threshold() {
    let mut policy = create(0, &["slm", "llm"], "{}").unwrap();
    assert_eq!(route(&mut policy, &[0.029, 0.031]), [Stay, To(1)]);
    assert_eq!(policy.requirements(), Requirements::signals(SignalSet::ENTROPY_NORM));
}

#[test]
fn refuses_other_roles_and_settings() {
    for roles in [&["slm", "llm", "llm"][..], &["slm", "slm"], &["slm"], &["small", "large"], &["slm", "llm", "x"]] {
        let error = create(0, roles, "{}").unwrap_err();
        assert!(error.starts_with("rstitch needs exactly two models, with the roles \"slm\" and \"llm\""), "{error}");
        assert!(error.contains(&format!("m-{0} = \"{0}\"", roles[0])), "{error}");
    }
    let error = |settings| create(0, &["slm", "llm"], settings).unwrap_err();
    assert_eq!(error(r#"{"threshold": 1.5}"#), "threshold is 1.5; set it to 0 or more and 1 or less");
    assert!(error(r#"{"treshold": 0.1}"#).contains("unknown field `treshold`"));
    assert!(error(r#"{"threshold": "0.1"}"#).contains("invalid type"));
}

#[test]
fn schema_is_json() {
    let schema: serde_json::Value = serde_json::from_str(RStitch::SETTINGS_SCHEMA).unwrap();
    assert_eq!(schema["properties"]["threshold"]["default"], Settings::default().threshold);
}
