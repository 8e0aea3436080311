use super::*;
use tokenrouter_plugin_api::{ModelDescription, NoServices, Requirements};

fn create(model: ModelIndex, settings: &str) -> Result<PerRequestRandom, String> {
    let models =
        ["small", "medium", "large"].map(|name| ModelDescription { name: name.to_owned(), role: format!("{name}!") });
    let context =
        Context { route: "r", model, models: &models, entry: 0, vocab_size: 10, eos: &[], services: &NoServices };
    PerRequestRandom::create(&context, settings).map_err(|e| e.message)
}

const WEIGHTS: &str = r#"{"weights": {"small": 0.5, "medium": 0.3, "large": 0.2}}"#;

fn entry(policy: &mut PerRequestRandom, id: u64, seed: u64) -> ModelIndex {
    policy.entry(&RequestView::new(id, (id % 5) as u32, seed, 1, 9, &[3])).unwrap()
}

#[test]
fn one_draw_a_request_by_its_seed() {
    let mut policy = create(0, WEIGHTS).unwrap();
    let drawn: Vec<_> = (0..4000).map(|seed| entry(&mut policy, 1, seed)).collect();
    for (model, expected) in [(0, 2000.0), (1, 1200.0), (2, 800.0_f64)] {
        let count = drawn.iter().filter(|&&m| m == model).count();
        assert!((count as f64 - expected).abs() < 150.0, "{model}: {count}");
    }
    // Neither order, slot, id nor instance matters.
    let mut other = create(2, WEIGHTS).unwrap();
    for (seed, &model) in drawn.iter().enumerate().rev() {
        assert_eq!(entry(&mut other, seed as u64, seed as u64), model);
    }
    const { assert!(STREAM >= 1 << 16) };
}

#[test]
fn nobody_hands_over_later() {
    for model in 0..3 {
        let mut policy = create(model, WEIGHTS).unwrap();
        let (seeds, positions): (Vec<u64>, Vec<u32>) = (0..300).map(|i| (i % 30, (i / 30) as u32)).unzip();
        let mut out = vec![Decision::STAY; 300];
        let batch = RouteBatch { request_ids: &seeds, seeds: &seeds, positions: &positions, ..RouteBatch::default() };
        policy.route(&batch, &mut out);
        assert_eq!(out, [Decision::STAY; 300]);
        assert_eq!(policy.requirements(), Requirements::default());
    }
}

#[test]
fn a_weight_of_1_is_certain() {
    let mut policy = create(0, r#"{"weights": {"small": 0, "medium": 1.0, "large": 0}}"#).unwrap();
    assert!((0..1000).all(|seed| entry(&mut policy, seed, seed) == 1));
}

#[test]
fn refuses_wrong_settings() {
    let error = |settings: &str| create(0, settings).unwrap_err();
    assert_eq!(
        error(r#"{"weights": {"small": 0.5, "medium": 0.3, "large": 0.1}}"#),
        "weights sum to 0.9; they are probabilities and must sum to 1"
    );
    assert_eq!(
        error(r#"{"weights": {"small": 0.5, "large": 0.5}}"#),
        "weights has none for model `medium`; give each model of the route one"
    );
    assert_eq!(
        error(r#"{"weights": {"small": 1, "slm": 0}}"#),
        "weights names `slm`, which route `r` does not have; its models are small, medium, large"
    );
    assert_eq!(
        error(r#"{"weights": {"small": 2, "medium": -1, "large": 0}}"#),
        "weights.medium is -1; set a number of at least 0"
    );
    assert!(error("{}").contains("missing field `weights`"));
    assert!(error(r#"{"weights": {}, "seed": 1}"#).contains("unknown field `seed`"));
}

#[test]
fn schema_is_json() {
    let schema: serde_json::Value = serde_json::from_str(PerRequestRandom::SETTINGS_SCHEMA).unwrap();
    assert_eq!(schema["required"][0], "weights");
}
