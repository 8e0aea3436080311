use super::*;
use std::cell::RefCell;
use std::collections::BTreeMap;
use tokenrouter_plugin_api::net::WeightsInfo;
use tokenrouter_plugin_api::{DecisionKind, ModelDescription, Services};

mod fixtures;
mod measures_tests;
mod net_refusals;
mod net_tests;
mod rules_tests;
mod settings_tests;

use DecisionKind::{Stay, To};
use fixtures::{Router as File, published};

/// A host with weights files and a log.
#[derive(Default)]
struct Host {
    files: BTreeMap<&'static str, WeightsInfo>,
    log: RefCell<Vec<String>>,
}

impl Services for Host {
    fn weights(&self, path: &str) -> Result<WeightsInfo, String> {
        self.files.get(path).cloned().ok_or_else(|| format!("weights `{path}`: no such file"))
    }
    fn log(&self, _: LogLevel, message: &str) {
        self.log.borrow_mut().push(message.to_owned());
    }
}

impl Host {
    fn with(path: &'static str, file: &File) -> Self {
        Self { files: BTreeMap::from([(path, file.info())]), ..Self::default() }
    }

    /// An instance at model 0 of a route whose models have these roles.
    fn create(&self, roles: [&str; 2], entry: ModelIndex, settings: &str) -> Result<R2r, String> {
        let models = roles.map(|role| ModelDescription { name: format!("m-{role}"), role: role.into() });
        let context =
            Context { route: "r", model: 0, models: &models, entry, vocab_size: 50, eos: &[], services: self };
        R2r::create(&context, settings).map_err(|e| e.message)
    }

    fn small(&self, settings: &str) -> R2r {
        self.create(["slm", "llm"], 0, settings).unwrap()
    }

    fn error(&self, settings: &str) -> String {
        self.create(["slm", "llm"], 0, settings).unwrap_err()
    }
}

/// The decision about a row of each of these (slot, position), with these signals.
fn route(policy: &mut R2r, rows: &[(Slot, u32)], signals: SignalColumns<'_>) -> Vec<DecisionKind> {
    let (slots, positions): (Vec<_>, Vec<_>) = rows.iter().copied().unzip();
    let ids: Vec<u64> = slots.iter().map(|&slot| u64::from(slot)).collect();
    let seeds = vec![7; rows.len()];
    let batch = RouteBatch {
        request_ids: &ids,
        slots: &slots,
        positions: &positions,
        seeds: &seeds,
        signals,
        ..RouteBatch::default()
    };
    let mut out = vec![Decision::STAY; rows.len()];
    policy.route(&batch, &mut out);
    out.iter().map(|decision| decision.kind().unwrap()).collect()
}

fn scores(net_scores: &[f32], net_width: u32) -> SignalColumns<'_> {
    SignalColumns { net_scores, net_width, ..SignalColumns::default() }
}

fn entropies(entropy: &[f32]) -> SignalColumns<'_> {
    SignalColumns { entropy, ..SignalColumns::default() }
}

const NEURAL: &str = r#"{"router": "r2r.pt", "threshold": 0.5}"#;

#[test]
fn the_large_model_writes_from_the_threshold_on() {
    let mut policy = Host::with("r2r.pt", &published()).small(NEURAL);
    let rows = [(0, 0), (1, 0), (2, 5), (3, 5), (4, 5)];
    let signals = scores(&[0.49, 0.5, 0.51, f32::NAN, 1.0], 1);
    assert_eq!(route(&mut policy, &rows, signals), [Stay, To(1), To(1), Stay, To(1)]);
}

#[test]
fn the_third_class_is_the_divergent_one() {
    let mut policy = Host::with("r2r.pt", &published()).small(NEURAL);
    let signals = scores(&[0.1, 0.8, 0.1, 0.1, 0.1, 0.8], 3);
    assert_eq!(route(&mut policy, &[(0, 0), (1, 0)], signals), [Stay, To(1)]);
}

#[test]
fn a_hand_off_drops_the_candidate_and_lasts_one_token() {
    let mut policy = Host::with("r2r.pt", &published()).small(NEURAL);
    let handoff = policy.send(&RequestView::new(1, 0, 0, 1, 9, &[5]), 1);
    assert!(!handoff.keep_candidate);
    assert_eq!((handoff.budget, handoff.rollback, handoff.verify), (Some(1), 0, false));
}

#[test]
fn the_stored_threshold_is_the_default() {
    let mut policy = Host::with("r2r.pt", &published()).small(r#"{"router": "r2r.pt"}"#);
    assert_eq!(route(&mut policy, &[(0, 0), (1, 0)], scores(&[0.62, 0.63], 1)), [Stay, To(1)]);

    let mut file = published();
    file.meta["common_args"]["threshold"] = serde_json::Value::Null;
    assert_eq!(
        Host::with("r2r.pt", &file).error(r#"{"router": "r2r.pt"}"#),
        "threshold is not set, and router `r2r.pt` has no common_args.threshold; set one of them"
    );
    Host::with("r2r.pt", &file).small(NEURAL);
    file.meta["common_args"]["threshold"] = 1.5.into();
    assert_eq!(
        Host::with("r2r.pt", &file).error(NEURAL),
        "router `r2r.pt`: common_args.threshold is 1.5; it must be 0 to 1"
    );
}

#[test]
fn each_strategy_asks_for_what_it_reads() {
    let host = Host::with("r2r.pt", &published());
    let needs = |settings| {
        let needs = host.small(settings).requirements();
        (needs.nets.len(), needs.top_k, needs.signals == SignalSet::ENTROPY, needs.signals.is_empty())
    };
    assert_eq!(needs(NEURAL), (1, 0, false, true));
    assert_eq!(needs(r#"{"strategy": "neural_rolling", "router": "r2r.pt"}"#), (1, 0, false, true));
    assert_eq!(needs(r#"{"strategy": "immediate"}"#), (0, 10, false, true));
    assert_eq!(needs(r#"{"strategy": "immediate", "entropy_threshold": 1}"#), (0, 0, true, false));
    assert_eq!(needs(r#"{"strategy": "immediate", "epistemic_threshold": 1}"#), (0, 10, false, true));
    assert_eq!(needs(r#"{"strategy": "entropy"}"#), (0, 0, true, false));
    assert_eq!(needs(r#"{"strategy": "momentum"}"#), (0, 10, false, true));
    assert_eq!(needs(r#"{"strategy": "rolling"}"#), (0, 10, true, false));
    assert_eq!(needs(r#"{"strategy": "duo_rolling"}"#), (0, 10, false, true));
    assert_eq!(needs(r#"{"strategy": "random"}"#), (0, 0, false, true));
}

#[test]
fn the_large_model_never_hands_over_and_opens_no_file() {
    let mut large = Host::default().create(["llm", "slm"], 1, NEURAL).unwrap();
    assert_eq!(large.requirements(), Requirements::default());
    assert_eq!(route(&mut large, &[(0, 0)], scores(&[1.0], 1)), [Stay]);
}

#[test]
fn uncertainty_comes_from_the_ten_largest_logits() {
    // Equal logits have an aleatoric uncertainty near ln 10; one large logit among small ones, 0.43.
    let mut policy = Host::default().small(r#"{"strategy": "immediate", "aleatoric_threshold": 2.2}"#);
    let flat = [20.0; 10];
    let mut peaked = [1.0; 10];
    peaked[0] = 100.0;
    let values: Vec<f32> = flat.into_iter().chain(peaked).chain([f32::NAN; 10]).collect();
    let signals = SignalColumns { topk_values: &values, top_k: 10, ..SignalColumns::default() };
    assert_eq!(route(&mut policy, &[(0, 0), (1, 0), (2, 0)], signals), [To(1), Stay, Stay]);
}

#[test]
fn entropy_is_in_nats_and_has_its_default() {
    let mut policy = Host::default().small(r#"{"strategy": "entropy", "entropy_threshold": 0.5}"#);
    let signals = entropies(&[0.49, 0.5, f32::NAN]);
    assert_eq!(route(&mut policy, &[(0, 0), (1, 0), (2, 0)], signals), [Stay, To(1), Stay]);
    let mut policy = Host::default().small(r#"{"strategy": "entropy"}"#);
    assert_eq!(route(&mut policy, &[(0, 0), (1, 0)], entropies(&[0.44, 0.46])), [Stay, To(1)]);
}

const ROLLING: &str = r#"{"strategy": "neural_rolling", "router": "r2r.pt", "threshold": 0.5}"#;

#[test]
fn requests_have_their_own_state() {
    let mut policy = Host::with("r2r.pt", &published()).small(ROLLING);
    // Request 0 sees 1, 0.2, 0.4: means 1, 0.6, 0.53. Request 1 sees 0.2 and is small at once.
    assert_eq!(route(&mut policy, &[(0, 0), (1, 0)], scores(&[1.0, 0.2], 1)), [To(1), Stay]);
    assert_eq!(route(&mut policy, &[(1, 1), (0, 1)], scores(&[0.2, 0.2], 1)), [Stay, To(1)]);
    assert_eq!(route(&mut policy, &[(0, 2), (1, 2)], scores(&[0.4, 0.4], 1)), [To(1), Stay]);
}

#[test]
fn a_reused_slot_has_no_state() {
    for (finished, next) in [(false, To(1)), (true, Stay)] {
        let mut policy = Host::with("r2r.pt", &published()).small(ROLLING);
        assert_eq!(route(&mut policy, &[(0, 0)], scores(&[1.0], 1)), [To(1)]);
        if finished {
            policy.finished(0);
        }
        // (1 + 0.4) / 2 reaches the threshold, 0.4 alone does not.
        assert_eq!(route(&mut policy, &[(0, 1)], scores(&[0.4], 1)), [next]);
    }
}

#[test]
fn the_coin_depends_on_seed_and_position_alone() {
    let coin = |p: f64| Host::default().small(&format!(r#"{{"strategy": "random", "reference_prob": {p}}}"#));
    let rows: Vec<_> = (0..400).map(|position| (0, position)).collect();
    let together = route(&mut coin(0.3), &rows, SignalColumns::default());
    let mut policy = coin(0.3);
    let alone: Vec<_> = rows.iter().rev().map(|&row| route(&mut policy, &[row], SignalColumns::default())[0]).collect();
    assert!(together.iter().eq(alone.iter().rev()));
    let large = together.iter().filter(|&&kind| kind == To(1)).count();
    assert!((90..150).contains(&large), "{large} of 400 at 0.3");
    assert!(route(&mut coin(0.0), &rows, SignalColumns::default()).iter().all(|&kind| kind == Stay));
    assert!(route(&mut coin(1.0), &rows, SignalColumns::default()).iter().all(|&kind| kind == To(1)));
}

#[test]
fn a_windowed_router_judges_from_its_window_on() {
    let host = Host::with("multi.pt", &fixtures::multi_hidden());
    let mut policy = host.small(r#"{"strategy": "neural_multi_input", "router": "multi.pt", "threshold": 0.5}"#);
    // The window is 3: positions 0 and 1 go to the large model, whatever the score.
    let rows = [(0, 0), (1, 1), (2, 2), (3, 2), (4, 1), (5, 2)];
    let signals = scores(&[0.0, 0.0, 0.0, 0.5, f32::NAN, f32::NAN], 1);
    assert_eq!(route(&mut policy, &rows, signals), [To(1), To(1), Stay, To(1), To(1), Stay]);
}

#[test]
fn strategy_and_router_fit_each_other() {
    let host = Host::with("multi.pt", &fixtures::multi_hidden());
    assert_eq!(
        host.error(r#"{"router": "multi.pt", "threshold": 0.5}"#),
        "strategy does not fit router `multi.pt`, whose model_type is MultiHiddenStatesClassifier; use \
         `neural_multi_input`"
    );
    let host = Host::with("r2r.pt", &published());
    assert_eq!(
        host.error(r#"{"router": "r2r.pt", "strategy": "neural_multi_input"}"#),
        "strategy does not fit router `r2r.pt`, whose model_type is HiddenStatesTokenLMHeadLogitsClassifier; \
         use `neural` or `neural_rolling`"
    );
}

#[test]
fn refuses_another_entry_and_other_roles() {
    let host = Host::with("r2r.pt", &published());
    for roles in [["slm", "llm"], ["llm", "slm"]] {
        let entry = roles.iter().position(|&role| role == "llm").unwrap() as ModelIndex;
        let error = host.create(roles, entry, NEURAL).unwrap_err();
        assert_eq!(error, "r2r begins at model `m-slm`; set entry = \"m-slm\" in route `r`");
    }
    let error = host.create(["small", "llm"], 0, NEURAL).unwrap_err();
    assert!(error.starts_with("r2r needs exactly two models, with the roles \"slm\" and \"llm\""), "{error}");
}

#[test]
fn tells_when_a_trained_embedding_is_replaced() {
    let mut file = published();
    let host = Host::with("r2r.pt", &file);
    host.small(NEURAL);
    assert_eq!(host.log.borrow().len(), 0, "the published routers freeze it");

    file.meta["init_args"]["freeze_lm_head"] = false.into();
    let host = Host::with("r2r.pt", &file);
    host.small(NEURAL);
    assert!(host.log.borrow()[0].contains("has no token_embeddings.weight"), "{:?}", host.log);

    file.tensor("token_embeddings.weight", &[50, 6]);
    let host = Host::with("r2r.pt", &file);
    host.small(NEURAL);
    assert_eq!(host.log.borrow().len(), 0, "the file has its own");
}
