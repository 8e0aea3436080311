use super::*;
use DecisionKind::{Stay, To};
use tokenrouter_plugin_api::{DecisionKind, ModelDescription, NoServices, SignalColumns, random};

const ROLES: [&str; 3] = ["slm", "mlm", "llm"];
const SMALL: ModelIndex = 0;
const MEDIUM: ModelIndex = 1;
const LARGE: ModelIndex = 2;

fn create(model: ModelIndex, roles: &[&str], settings: &str) -> Result<Cascade, String> {
    let models: Vec<_> =
        roles.iter().map(|role| ModelDescription { name: format!("m-{role}"), role: role.to_string() }).collect();
    let entry = roles.iter().position(|&role| role == "slm").unwrap_or(0) as ModelIndex;
    create_with_entry(model, &models, entry, settings)
}

fn create_with_entry(
    model: ModelIndex,
    models: &[ModelDescription],
    entry: ModelIndex,
    settings: &str,
) -> Result<Cascade, String> {
    let context = Context { route: "r", model, models, entry, vocab_size: 10, eos: &[], services: &NoServices };
    Cascade::create(&context, settings).map_err(|e| e.message)
}

/// The instances at all three models.
fn cascade(settings: &str) -> [Cascade; 3] {
    [SMALL, MEDIUM, LARGE].map(|model| create(model, &ROLES, settings).unwrap())
}

/// What becomes of rows with these (slot, position, probability); the large model gets no signals.
fn route(policy: &mut Cascade, rows: &[(Slot, u32, f32)]) -> Vec<DecisionKind> {
    let ids: Vec<u64> = (0..rows.len() as u64).collect();
    let slots: Vec<_> = rows.iter().map(|r| r.0).collect();
    let positions: Vec<_> = rows.iter().map(|r| r.1).collect();
    let top1_prob: Vec<_> = rows.iter().map(|r| r.2).collect();
    let asked = policy.requirements().signals.contains(SignalSet::TOP1_PROB);
    let signals = SignalColumns { top1_prob: if asked { &top1_prob } else { &[] }, ..SignalColumns::default() };
    let batch =
        RouteBatch { request_ids: &ids, slots: &slots, positions: &positions, signals, ..RouteBatch::default() };
    let mut out = vec![Decision::STAY; rows.len()];
    policy.route(&batch, &mut out);
    out.iter().map(|d| d.kind().unwrap()).collect()
}

fn request(slot: Slot) -> RequestView<'static> {
    RequestView::new(1, slot, 0, 1, 9, &[5])
}

const OPEN: &str = r#"{"doubt": 0.75, "despair": 0.5, "budget": 1}"#;
const CLOSED: &str = r#"{"doubt": 0.75, "despair": 0.5, "budget": 0}"#;
const PROBABILITIES: [f32; 6] = [0.9, 0.75, 0.74, 0.5, 0.49, f32::NAN];

fn decisions(policy: &mut Cascade) -> Vec<DecisionKind> {
    route(policy, &PROBABILITIES.map(|p| (0, 0, p)))
}

#[test]
fn small_asks_by_how_unsure_it_is() {
    assert_eq!(decisions(&mut cascade(OPEN)[0]), [Stay, Stay, To(MEDIUM), To(MEDIUM), To(LARGE), Stay]);
    assert_eq!(decisions(&mut cascade(CLOSED)[0]), [Stay, Stay, To(MEDIUM), To(MEDIUM), To(MEDIUM), Stay]);
}

#[test]
fn medium_writes_one_token_or_asks() {
    let back = To(SMALL);
    assert_eq!(decisions(&mut cascade(OPEN)[1]), [back, back, To(LARGE), To(LARGE), To(LARGE), back]);
    assert_eq!(decisions(&mut cascade(CLOSED)[1]), [back; 6]);
}

#[test]
fn large_writes_one_token() {
    let [_, _, mut large] = cascade(OPEN);
    assert_eq!(large.requirements(), Requirements::default());
    assert_eq!(decisions(&mut large), [To(SMALL); 6]);
}

#[test]
fn models_are_found_by_role_in_any_order() {
    let mut medium = create(2, &["llm", "slm", "mlm"], OPEN).unwrap();
    assert_eq!(route(&mut medium, &[(0, 0, 0.9), (0, 0, 0.1)]), [To(1), To(0)]);
}

#[test]
fn only_the_writer_keeps_its_candidate() {
    let [mut small, mut medium, mut large] = cascade(OPEN);
    let keeps = |policy: &mut Cascade, to| policy.send(&request(0), to).keep_candidate;
    assert!(!keeps(&mut small, MEDIUM) && !keeps(&mut small, LARGE) && !keeps(&mut medium, LARGE));
    assert!(keeps(&mut medium, SMALL) && keeps(&mut large, SMALL));
}

#[test]
fn the_budget_is_a_share_after_every_token() {
    let affords = |budget, large, position| Settings { budget, ..Settings::default() }.affords(large, position);
    // A quarter: the fourth token is the first that may be the large model's.
    assert!(!affords(0.25, 0, 2) && affords(0.25, 0, 3));
    assert!(!affords(0.25, 1, 6) && affords(0.25, 1, 7));
    assert!(!affords(0.0, 0, u32::MAX - 1) && affords(1.0, 7, 7));
}

#[test]
fn the_count_travels_and_is_forgotten() {
    let [mut small, mut medium, mut large] = cascade(r#"{"doubt": 0.75, "despair": 0.5, "budget": 0.25}"#);
    // Each instance has a slot of its own for the request.
    let handoff = small.send(&request(4), LARGE);
    large.receive(&request(0), &PeerView::new(SMALL, &[], 0, &handoff.payload));
    let handoff = large.send(&request(0), SMALL);
    small.receive(&request(4), &PeerView::new(LARGE, &[6], 0, &handoff.payload));
    let handoff = small.send(&request(4), MEDIUM);
    medium.receive(&request(2), &PeerView::new(SMALL, &[5, 6], 0, &handoff.payload));

    let counts = [(&mut small, 4), (&mut medium, 2), (&mut large, 0)].map(|(p, slot)| *p.large_tokens.get(slot));
    assert_eq!(counts, [1, 1, 1]);
    // At position 3 a request without the large model's token affords one, this one does not.
    assert_eq!(route(&mut small, &[(4, 3, 0.1), (5, 3, 0.1)]), [To(MEDIUM), To(LARGE)]);
    assert_eq!(route(&mut medium, &[(2, 3, 0.1), (5, 3, 0.1)]), [To(SMALL), To(LARGE)]);
    small.finished(4);
    medium.finished(2);
    assert_eq!(route(&mut small, &[(4, 3, 0.1)]), [To(LARGE)]);
    assert_eq!(route(&mut medium, &[(2, 3, 0.1)]), [To(LARGE)]);
}

#[test]
fn a_payload_of_another_size_is_left_alone() {
    let [mut small, ..] = cascade(OPEN);
    *small.large_tokens.get(0) = 3;
    small.receive(&request(0), &PeerView::new(LARGE, &[], 0, &[1, 2]));
    assert_eq!(*small.large_tokens.get(0), 3);
}

/// The probability of the best token at a position, for tests of whole answers.
fn probability(request: u64, position: u32, model: ModelIndex) -> f32 {
    random::uniform(request, u64::from(position), (1 << 16) + u64::from(model)) as f32
}

/// Who writes the tokens of an answer, by the rule as one would write it down.
fn expected(request: u64, tokens: u32, settings: Settings) -> Vec<ModelIndex> {
    let mut writers: Vec<ModelIndex> = Vec::new();
    for position in 0..tokens {
        let in_doubt = |model| f64::from(probability(request, position, model)) < settings.doubt;
        let despairs = f64::from(probability(request, position, SMALL)) < settings.despair;
        let large = writers.iter().filter(|&&w| w == LARGE).count();
        let affordable = (large + 1) as f64 / (position + 1) as f64 <= settings.budget;
        writers.push(match in_doubt(SMALL) {
            false => SMALL,
            true if affordable && (despairs || in_doubt(MEDIUM)) => LARGE,
            true => MEDIUM,
        });
    }
    writers
}

/// A request under way in a server of these tests.
struct Running {
    slots: [Slot; 3],
    at: ModelIndex,
    writers: Vec<ModelIndex>,
}

/// Many requests at once, each at a model of its own, in steps as a server takes them.
#[test]
fn many_requests_at_once_follow_the_rule() {
    const TOKENS: u32 = 60;
    for budget in [0.0, 0.1, 0.25, 0.5, 1.0] {
        let settings = Settings { doubt: 0.7, despair: 0.3, budget };
        let mut policies = cascade(&format!(r#"{{"doubt": 0.7, "despair": 0.3, "budget": {budget}}}"#));
        // The second wave of requests gets the slots of the first, in another order.
        for wave in 0..2u32 {
            let mut running: Vec<_> = (0..8)
                .map(|r| Running { slots: [(r + wave) % 8, 7 - r, (r * 3 + wave) % 8], at: SMALL, writers: vec![] })
                .collect();
            let name = |r: usize| u64::from(wave) * 100 + r as u64;
            while running.iter().any(|r| r.writers.len() < TOKENS as usize) {
                for model in [SMALL, MEDIUM, LARGE] {
                    let ready: Vec<usize> = (0..running.len())
                        .filter(|&r| running[r].at == model && running[r].writers.len() < TOKENS as usize)
                        .collect();
                    let rows: Vec<_> = ready
                        .iter()
                        .map(|&r| {
                            let position = running[r].writers.len() as u32;
                            (running[r].slots[model as usize], position, probability(name(r), position, model))
                        })
                        .collect();
                    for (&r, decision) in ready.iter().zip(route(&mut policies[model as usize], &rows)) {
                        let Running { slots, at, writers } = &mut running[r];
                        let To(to) = decision else {
                            writers.push(model);
                            continue;
                        };
                        let handoff = policies[model as usize].send(&request(slots[model as usize]), to);
                        if handoff.keep_candidate {
                            writers.push(model);
                        }
                        let message = PeerView::new(model, &[], 0, &handoff.payload);
                        policies[to as usize].receive(&request(slots[to as usize]), &message);
                        *at = to;
                    }
                }
            }
            for (r, Running { slots, writers, .. }) in running.iter().enumerate() {
                assert_eq!(*writers, expected(name(r), TOKENS, settings), "budget {budget}, request {}", name(r));
                for (policy, &slot) in policies.iter_mut().zip(slots) {
                    policy.finished(slot);
                }
            }
        }
    }
}

#[test]
fn refuses_other_roles() {
    for roles in [&["slm", "llm"][..], &["slm", "mlm"], &["slm", "mlm", "mlm"], &["slm", "mlm", "llm", "llm"]] {
        let error = create(0, roles, "{}").unwrap_err();
        assert!(error.starts_with("cascade needs exactly three models, with the roles \"slm\" and \"mlm\""), "{error}");
        assert!(error.contains(r#"{ m-slm = "slm", m-"#), "{error}");
    }
}

#[test]
fn refuses_another_entry() {
    let models = ROLES.map(|role| ModelDescription { name: format!("m-{role}"), role: role.to_string() });
    assert_eq!(
        create_with_entry(SMALL, &models, LARGE, "{}").unwrap_err(),
        "cascade begins at model `m-slm`; set entry = \"m-slm\" in route `r`"
    );
}

#[test]
fn refuses_wrong_settings() {
    let error = |settings| create(0, &ROLES, settings).unwrap_err();
    assert_eq!(error(r#"{"doubt": 1.5}"#), "doubt is 1.5; set it to 0 or more and 1 or less");
    assert_eq!(error(r#"{"budget": -1}"#), "budget is -1; set it to 0 or more and 1 or less");
    assert_eq!(
        error(r#"{"doubt": 0.4, "despair": 0.45}"#),
        "despair is 0.45, above doubt, which is 0.4; set despair to 0.4 or less"
    );
    assert!(error(r#"{"dout": 0.1}"#).contains("unknown field `dout`"));
    assert!(error(r#"{"doubt": "0.1"}"#).contains("invalid type"));
    assert!(create(0, &ROLES, r#"{"doubt": 0.4, "despair": 0.4}"#).is_ok());
}

#[test]
fn schema_has_the_defaults() {
    let schema: serde_json::Value = serde_json::from_str(Cascade::SETTINGS_SCHEMA).unwrap();
    let default = |name: &str| schema["properties"][name]["default"].clone();
    let Settings { doubt, despair, budget } = Settings::default();
    assert_eq!([default("doubt"), default("despair"), default("budget")], [doubt, despair, budget]);
}
