use super::*;
use tokenrouter_plugin_api::{DecisionKind, Handoff, ModelDescription, NoServices, Requirements};

fn create(model: ModelIndex, settings: &str) -> Result<Me, String> {
    let models: Vec<_> = ["small", "medium", "large"]
        .map(|name| ModelDescription { name: name.to_owned(), role: name.to_owned() })
        .into();
    let context =
        Context { route: "me", model, models: &models, entry: 0, vocab_size: 10, eos: &[], services: &NoServices };
    Me::create(&context, settings).map_err(|e| e.message)
}

const WEIGHTS: &str = r#"{"small": 0.5, "medium": 0.3, "large": 0.2}"#;

fn drawn(model: ModelIndex, draws: &str) -> Me {
    create(model, &format!(r#"{{"weights": {WEIGHTS}, "draws": {draws}}}"#)).unwrap()
}

fn route(policy: &mut Me, seeds: &[u64], positions: &[u32]) -> Vec<DecisionKind> {
    let ids: Vec<u64> = (0..seeds.len() as u64).collect();
    let mut out = vec![Decision::STAY; ids.len()];
    policy.route(&RouteBatch { request_ids: &ids, seeds, positions, ..RouteBatch::default() }, &mut out);
    out.iter().map(|d| d.kind().unwrap()).collect()
}

fn request(seed: u64) -> RequestView<'static> {
    RequestView::new(1, 0, seed, 1, 9, &[3])
}

use DecisionKind::{Stay, To};

#[test]
fn shares_are_half_open_in_the_routes_order() {
    let bounds = drawn(0, "[]").bounds;
    for (draw, model) in [(0.0, 0), (0.4999, 0), (0.5, 1), (0.7999, 1), (0.8, 2), (0.999_999, 2)] {
        assert_eq!(pick(&bounds, draw), model, "{draw}");
    }
    assert_eq!(pick(&[0.5, 0.999_999_5], 0.999_999_9), 1);
}

#[test]
fn the_draw_behind_the_candidate_picks_the_next_writer() {
    let mut small = drawn(0, "[0.9, 0.1, 0.6, 0.8]");
    assert_eq!(small.entry(&request(0)), Some(2));
    assert_eq!(route(&mut small, &[0; 5], &[0, 1, 2, 3, u32::MAX]), [Stay, To(1), To(2), Stay, Stay]);
    let mut large = drawn(2, "[0.9, 0.1, 0.6, 0.8]");
    assert_eq!(route(&mut large, &[0; 4], &[0, 1, 2, 3]), [To(0), To(1), Stay, Stay]);
    assert_eq!(large.send(&request(0), 0), Handoff::default());
    assert_eq!(drawn(0, "[]").entry(&request(0)), None);
}

#[test]
fn draws_without_a_record_depend_on_seed_and_position_alone() {
    let settings = format!(r#"{{"weights": {WEIGHTS}}}"#);
    let mut policies: Vec<_> = (0..3).map(|model| create(model, &settings).unwrap()).collect();
    let positions: Vec<u32> = (0..4000).collect();
    let mut counts = [0; 3];
    for &position in &positions {
        let writer = pick(&policies[0].bounds, random::uniform(9, u64::from(position) + 1, STREAM));
        counts[writer as usize] += 1;
        for (model, policy) in policies.iter_mut().enumerate() {
            let expected = if writer as usize == model { Stay } else { To(writer) };
            assert_eq!(route(policy, &[9], &[position]), [expected]);
        }
    }
    for (count, expected) in counts.iter().zip([2000.0, 1200.0, 800.0_f64]) {
        assert!((f64::from(*count) - expected).abs() < 150.0, "{counts:?}");
    }
    // Another seed draws otherwise.
    let all = |policy: &mut Me, seed| route(policy, &vec![seed; 4000], &positions);
    assert_ne!(all(&mut policies[0], 9), all(&mut policies[0], 10));
    const { assert!(STREAM >= 1 << 16) };
    assert_eq!(policies[0].requirements(), Requirements::default());
}

#[test]
fn refuses_wrong_settings() {
    let error = |settings: &str| create(0, settings).unwrap_err();
    assert_eq!(
        error(r#"{"weights": {"small": 0.5, "medium": 0.3, "large": 0.3}}"#),
        "weights sum to 1.1; they are probabilities and must sum to 1"
    );
    assert_eq!(
        error(r#"{"weights": {"small": 0.5, "medium": 0.5}}"#),
        "weights has none for model `large`; give each model of the route one"
    );
    assert_eq!(
        error(r#"{"weights": {"small": 0.5, "tiny": 0.5}}"#),
        "weights names `tiny`, which route `me` does not have; its models are small, medium, large"
    );
    assert_eq!(
        error(r#"{"weights": {"small": 1.2, "medium": -0.4, "large": 0.2}}"#),
        "weights.medium is -0.4; set a number above 0"
    );
    assert_eq!(
        error(&format!(r#"{{"weights": {WEIGHTS}, "draws": [0.5, 1.0]}}"#)),
        "draws[1] is 1; set a number of at least 0 and below 1"
    );
    assert!(error("{}").contains("missing field `weights`"));
    assert!(error(&format!(r#"{{"weights": {WEIGHTS}, "seed": 1}}"#)).contains("unknown field `seed`"));
    // Off by less than the tolerance.
    assert!(create(0, r#"{"weights": {"small": 0.3333333, "medium": 0.3333333, "large": 0.3333334}}"#).is_ok());
}

#[test]
fn schema_is_json() {
    let schema: serde_json::Value = serde_json::from_str(Me::SETTINGS_SCHEMA).unwrap();
    assert_eq!(schema["required"][0], "weights");
}
