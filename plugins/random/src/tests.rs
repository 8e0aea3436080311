use super::*;
use tokenrouter_plugin_api::{DecisionKind, ModelDescription, NoServices, Requirements};

/// The instance at `model` of a route whose entry is `medium`, the second of three models.
fn create(model: ModelIndex, settings: &str) -> Result<Random, String> {
    let models =
        ["small", "medium", "large"].map(|name| ModelDescription { name: name.to_owned(), role: format!("{name}!") });
    let context =
        Context { route: "r", model, models: &models, entry: 1, vocab_size: 10, eos: &[], services: &NoServices };
    Random::create(&context, settings).map_err(|e| e.message)
}

fn with(model: ModelIndex, probabilities: &str) -> Result<Random, String> {
    create(model, &format!(r#"{{"probabilities": {probabilities}}}"#))
}

fn route(policy: &mut Random, seeds: &[u64], positions: &[u32]) -> Vec<DecisionKind> {
    let ids: Vec<u64> = (0..seeds.len() as u64).collect();
    let mut out = vec![Decision::STAY; ids.len()];
    policy.route(&RouteBatch { request_ids: &ids, seeds, positions, ..RouteBatch::default() }, &mut out);
    out.iter().map(|d| d.kind().unwrap()).collect()
}

fn request() -> RequestView<'static> {
    RequestView::new(1, 0, 5, 1, 9, &[3])
}

use DecisionKind::{Stay, To};

#[test]
fn shares_of_the_models() {
    let mut policy = with(1, r#"{"small": 0.1, "large": 0.3}"#).unwrap();
    let (seeds, positions): (Vec<u64>, Vec<u32>) = (0..10_000).map(|i| (i % 10, (i / 10) as u32)).unzip();
    let decisions = route(&mut policy, &seeds, &positions);
    for (decision, expected) in [(To(0), 1000.0), (Stay, 6000.0), (To(2), 3000.0_f64)] {
        let count = decisions.iter().filter(|&&d| d == decision).count();
        assert!((count as f64 - expected).abs() < 250.0, "{decision:?}: {count}");
    }
    assert_eq!(policy.entry(&request()), None, "the entry model computes the prompt");
    assert_eq!(policy.requirements(), Requirements::default());
    const { assert!(STREAM >= 1 << 16) };
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let mut policy = with(1, r#"{"large": 0.5}"#).unwrap();
    let positions: Vec<u32> = (0..200).collect();
    let alone = route(&mut policy, &[7; 200], &positions);
    for position in (0..200).rev() {
        let rows = route(&mut policy, &[8, 7, 9], &[position, position, 3]);
        assert_eq!(rows[1], alone[position as usize]);
        let draw = random::uniform(7, u64::from(position), STREAM);
        assert_eq!(rows[1] == To(2), draw >= 0.5, "the entry's share lies first, as in the route");
    }
    assert_ne!(alone, route(&mut policy, &[8; 200], &positions));
}

#[test]
fn certain_and_impossible_models() {
    let positions: Vec<u32> = (0..500).collect();
    let all = |probabilities| route(&mut with(1, probabilities).unwrap(), &[1; 500], &positions);
    assert_eq!(all(r#"{"large": 1}"#), [To(2); 500]);
    assert_eq!(all(r#"{"small": 0.0, "large": 0.0}"#), [Stay; 500]);
    let both = all(r#"{"small": 0.5, "large": 0.5}"#);
    assert!(!both.contains(&Stay) && both.contains(&To(0)) && both.contains(&To(2)));
}

#[test]
fn a_visit_replaces_one_token() {
    let probabilities = r#"{"large": 1}"#;
    assert_eq!(with(1, probabilities).unwrap().send(&request(), 2), Handoff::drop_candidate().budget(1));
    let mut visited = with(2, probabilities).unwrap();
    assert_eq!(route(&mut visited, &[1, 2], &[0, 1]), [To(1); 2]);
    assert_eq!(visited.send(&request(), 1), Handoff::default());
}

#[test]
fn refuses_wrong_settings() {
    let error = |probabilities| with(1, probabilities).unwrap_err();
    let empty = "probabilities is empty; name at least one model and its probability";
    assert_eq!(error("{}"), empty);
    assert_eq!(create(1, "{}").unwrap_err(), empty);
    assert_eq!(
        error(r#"{"medium": 0.1}"#),
        "probabilities names `medium`, which gets what the others leave; name only the others"
    );
    assert_eq!(
        error(r#"{"tiny": 0.1}"#),
        "probabilities names `tiny`, which route `r` does not have; its models are small, medium, large"
    );
    assert_eq!(error(r#"{"large": -0.1}"#), "probabilities.large is -0.1; set a number of at least 0");
    assert_eq!(error(r#"{"small": 0.75, "large": 0.5}"#), "probabilities sum to 1.25; they must sum to at most 1");
    assert!(create(1, r#"{"probability": 0.1}"#).unwrap_err().contains("unknown field `probability`"));
}

#[test]
fn schema_is_json() {
    let schema: serde_json::Value = serde_json::from_str(Random::SETTINGS_SCHEMA).unwrap();
    assert_eq!(schema["required"][0], "probabilities");
}
