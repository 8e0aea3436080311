use super::*;
use tokenrouter_plugin_api::{DecisionKind, Handoff, ModelDescription, NoServices, Requirements};

const MODELS: [&str; 3] = ["small", "medium", "large"];
const WEIGHTS: &str = r#"{"small": 0.5, "medium": 0.3, "large": 0.2}"#;

fn create(model: ModelIndex, settings: &str) -> Result<Me, String> {
    let models = MODELS.map(|name| ModelDescription { name: name.to_owned(), role: name.to_owned() });
    let context =
        Context { route: "me", model, models: &models, entry: 0, vocab_size: 10, eos: &[], services: &NoServices };
    Me::create(&context, settings).map_err(|e| e.message)
}

/// The instances of a route with this generator, or the default for `None`.
fn instances(weights: &str, generator: Option<&str>) -> Vec<Me> {
    let generator = generator.map_or(String::new(), |name| format!(r#", "generator": "{name}""#));
    let settings = format!(r#"{{"weights": {weights}{generator}}}"#);
    (0..3).map(|model| create(model, &settings).unwrap()).collect()
}

/// Decisions about rows (slot, seed, position).
fn route(policy: &mut Me, rows: &[(Slot, u64, u32)]) -> Vec<DecisionKind> {
    let ids: Vec<u64> = (0..rows.len() as u64).collect();
    let slots: Vec<_> = rows.iter().map(|row| row.0).collect();
    let seeds: Vec<_> = rows.iter().map(|row| row.1).collect();
    let positions: Vec<_> = rows.iter().map(|row| row.2).collect();
    let mut out = vec![Decision::STAY; ids.len()];
    let batch =
        RouteBatch { request_ids: &ids, slots: &slots, seeds: &seeds, positions: &positions, ..RouteBatch::default() };
    policy.route(&batch, &mut out);
    out.iter().map(|d| d.kind().unwrap()).collect()
}

fn request(slot: Slot, seed: u64) -> RequestView<'static> {
    RequestView::new(1, slot, seed, 1, 9, &[3])
}

fn python(seed: u64, count: usize) -> Vec<f64> {
    let mut source = Mersenne::new(seed);
    (0..count).map(|_| source.uniform()).collect()
}

/// The writers of `count` tokens, each drawn at the model that wrote the token before. Model m keeps the
/// request at slot `slots[m]`.
fn writers(policies: &mut [Me], slots: [Slot; 3], seed: u64, count: u32) -> Vec<ModelIndex> {
    let mut writers = vec![policies[0].entry(&request(slots[0], seed)).unwrap()];
    for position in 0..count - 1 {
        let at = writers[position as usize] as usize;
        writers.push(match route(&mut policies[at], &[(slots[at], seed, position)])[0] {
            DecisionKind::To(next) => next,
            _ => at as ModelIndex,
        });
    }
    writers
}

#[test]
fn philox_draws_depend_on_seed_and_position_alone() {
    let mut policies = instances(WEIGHTS, None);
    let weights = policies[0].weights.clone();
    let mut counts = [0; 3];
    for position in 0..4000 {
        let writer = weights.pick(random::uniform(9, u64::from(position) + 1, STREAM));
        counts[writer as usize] += 1;
        for (model, policy) in policies.iter_mut().enumerate() {
            let expected = if writer as usize == model { DecisionKind::Stay } else { DecisionKind::To(writer) };
            assert_eq!(route(policy, &[(position % 7, 9, position)]), [expected]);
        }
    }
    for (count, expected) in counts.iter().zip([2000.0, 1200.0, 800.0_f64]) {
        assert!((f64::from(*count) - expected).abs() < 150.0, "{counts:?}");
    }
    let first = weights.pick(random::uniform(9, 0, STREAM));
    assert!(policies.iter_mut().all(|policy| policy.entry(&request(0, 9)) == Some(first)));
    assert_eq!(policies[0].send(&request(0, 0), 1), Handoff::default(), "the candidate is kept");
    assert_eq!(policies[0].requirements(), Requirements::default());
    // Another seed draws otherwise.
    assert_ne!(writers(&mut policies, [0; 3], 9, 100), writers(&mut policies, [0; 3], 10, 100));
    const { assert!(STREAM >= 1 << 16) };
}

#[test]
fn python_draws_are_pythons_at_every_instance() {
    for seed in [0, 1, 12345, (1 << 40) + 7] {
        let mut policies = instances(WEIGHTS, Some("python"));
        let weights = policies[0].weights.clone();
        let expected: Vec<_> = python(seed, 700).iter().map(|&draw| weights.pick(draw)).collect();
        assert_eq!(writers(&mut policies, [0, 3, 5], seed, 700), expected);
        // An instance that joins late, or is asked twice, draws the same.
        for policy in &mut instances(WEIGHTS, Some("python")) {
            for position in [500, 3, 500] {
                let next = expected[position as usize + 1];
                let stays = next == policy.model;
                let expected = if stays { DecisionKind::Stay } else { DecisionKind::To(next) };
                assert_eq!(route(policy, &[(2, seed, position)]), [expected], "seed {seed}, {position}");
            }
        }
    }
}

#[test]
fn interleaved_and_reused_slots_keep_their_own_draws() {
    let mut policies = instances(WEIGHTS, Some("python"));
    let weights = policies[0].weights.clone();
    let expect = |seed, position: u32| match weights.pick(python(seed, 60)[position as usize + 1]) {
        0 => DecisionKind::Stay,
        next => DecisionKind::To(next),
    };
    let small = &mut policies[0];
    for position in 0..50 {
        let rows = [(0, 5, position), (1, 6, position / 2), (4, 7, position)];
        assert_eq!(route(small, &rows), rows.map(|(_, seed, position)| expect(seed, position)));
    }
    small.finished(1);
    assert_eq!(small.entry(&request(1, 77)), Some(weights.pick(python(77, 1)[0])));
    for position in 0..50 {
        let rows = [(1, 77, position), (0, 5, 50)];
        assert_eq!(route(small, &rows), rows.map(|(_, seed, position)| expect(seed, position)));
    }
}

#[test]
fn reference_traces() {
    for i in 1..=3 {
        let path = format!("{}/../../tests/fixtures/goldens/traces/me-{i}.json", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).unwrap();
        let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
        let (seed, steps) = (trace["seed"].as_u64().unwrap(), trace["steps"].as_array().unwrap());
        // From the text: `serde_json` reads some numbers one unit in the last place off.
        let draws: Vec<f64> =
            text.split("\"draw\": ").skip(1).map(|rest| rest.split(',').next().unwrap().parse().unwrap()).collect();
        assert_eq!(draws.len(), steps.len());
        assert_eq!(python(seed, draws.len()), draws);
        let of = &trace["parameter"];
        let weights = format!(r#"{{"small": {}, "medium": {}, "large": {}}}"#, of[0], of[1], of[2]);
        let writers = writers(&mut instances(&weights, Some("python")), [1, 0, 2], seed, steps.len() as u32);
        let names: Vec<_> = writers.iter().map(|&model| MODELS[model as usize]).collect();
        assert_eq!(serde_json::json!(names), trace["models"], "me-{i}");
    }
}

#[test]
fn a_weight_of_0_silences_a_model() {
    let mut policies = instances(r#"{"small": 0.625, "medium": 0.375, "large": 0}"#, None);
    let drawn = writers(&mut policies, [0; 3], 3, 2000);
    assert!(drawn.contains(&0) && drawn.contains(&1) && !drawn.contains(&2));
    let mut policies = instances(r#"{"small": 0, "medium": 0, "large": 1.0}"#, Some("python"));
    assert_eq!(writers(&mut policies, [0; 3], 3, 50), [2; 50]);
}

#[test]
fn refuses_wrong_settings() {
    let error = |settings: &str| create(0, settings).unwrap_err();
    let weights = |weights: &str| error(&format!(r#"{{"weights": {weights}}}"#));
    assert_eq!(
        weights(r#"{"small": 0.5, "medium": 0.3, "large": 0.3}"#),
        "weights sum to 1.1; they are probabilities and must sum to 1"
    );
    assert_eq!(
        weights(r#"{"small": 0, "medium": 0, "large": 0}"#),
        "weights sum to 0; they are probabilities and must sum to 1"
    );
    assert_eq!(
        weights(r#"{"small": 0.5, "medium": 0.5}"#),
        "weights has none for model `large`; give each model of the route one"
    );
    assert_eq!(
        weights(r#"{"small": 1.2, "medium": -0.4, "large": 0.2}"#),
        "weights.medium is -0.4; set a number of at least 0"
    );
    let generator = error(&format!(r#"{{"weights": {WEIGHTS}, "generator": "numpy"}}"#));
    assert!(generator.contains("unknown variant `numpy`, expected `philox` or `python`"), "{generator}");
    assert!(error("{}").contains("missing field `weights`"));
    assert!(error(&format!(r#"{{"weights": {WEIGHTS}, "draws": [0.5]}}"#)).contains("unknown field `draws`"));
}

#[test]
fn schema_fits_the_settings() {
    let schema: serde_json::Value = serde_json::from_str(Me::SETTINGS_SCHEMA).unwrap();
    assert_eq!(schema["required"][0], "weights");
    let generator = &schema["properties"]["generator"];
    for name in generator["enum"].as_array().unwrap() {
        let generator: Generator = serde_json::from_value(name.clone()).unwrap();
        assert_eq!(generator == Generator::default(), name == &schema["properties"]["generator"]["default"]);
    }
}
