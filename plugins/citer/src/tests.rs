use super::*;
use tokenrouter_plugin_api::net::{Op, TensorInfo};
use tokenrouter_plugin_api::{DecisionKind, ModelDescription, Services, SignalColumns};

use DecisionKind::{Stay, To};

/// A host with one weights file.
struct Host(WeightsInfo);

impl Services for Host {
    fn weights(&self, path: &str) -> Result<WeightsInfo, String> {
        if path == "citer.pth" { Ok(self.0.clone()) } else { Err(format!("weights `{path}`: no such file")) }
    }
}

impl Host {
    fn create(&self, roles: [&str; 2], entry: ModelIndex, settings: &str) -> Result<Citer, String> {
        let models = roles.map(|role| ModelDescription { name: format!("m-{role}"), role: role.into() });
        let context =
            Context { route: "r", model: 0, models: &models, entry, vocab_size: 50, eos: &[], services: self };
        Citer::create(&context, settings).map_err(|e| e.message)
    }

    fn small(&self, settings: &str) -> Result<Citer, String> {
        self.create(["slm", "llm"], 0, settings)
    }
}

/// A router for hidden states of 8.
fn tensors() -> Vec<TensorInfo> {
    let shapes: [(&str, &[u64]); 11] = [
        ("mlp.0.weight", &[16, 8]),
        ("mlp.0.bias", &[16]),
        ("mlp.1.weight", &[16]),
        ("mlp.1.bias", &[16]),
        ("mlp.1.running_mean", &[16]),
        ("mlp.1.running_var", &[16]),
        ("mlp.1.num_batches_tracked", &[]),
        ("mlp.4.weight", &[8, 16]),
        ("mlp.4.bias", &[8]),
        ("linear.weight", &[1, 8]),
        ("linear.bias", &[1]),
    ];
    shapes.map(|(name, shape)| TensorInfo { name: name.into(), shape: shape.into() }).into()
}

fn host() -> Host {
    Host(WeightsInfo::new(tensors(), "{}"))
}

fn route(policy: &mut Citer, net_scores: &[f32]) -> Vec<DecisionKind> {
    let ids: Vec<u64> = (0..net_scores.len() as u64).collect();
    let signals = SignalColumns { net_scores, net_width: 1, ..SignalColumns::default() };
    let mut out = vec![Decision::STAY; ids.len()];
    policy.route(&RouteBatch { request_ids: &ids, signals, ..RouteBatch::default() }, &mut out);
    out.iter().map(|decision| decision.kind().unwrap()).collect()
}

#[test]
fn the_large_model_writes_below_the_threshold_only() {
    let mut policy = host().small(r#"{"router": "citer.pth", "threshold": 0.5}"#).unwrap();
    assert_eq!(route(&mut policy, &[0.0, 0.49, 0.5, 0.51, f32::NAN, 1.0]), [To(1), To(1), Stay, Stay, Stay, Stay]);
}

#[test]
fn default_threshold_is_098() {
    let mut policy = host().small(r#"{"router": "citer.pth"}"#).unwrap();
    assert_eq!(route(&mut policy, &[0.979, 0.981]), [To(1), Stay]);
    let schema: serde_json::Value = serde_json::from_str(Citer::SETTINGS_SCHEMA).unwrap();
    assert_eq!(schema["properties"]["threshold"]["default"], default_threshold());
}

#[test]
fn a_hand_off_drops_the_candidate_and_lasts_one_token() {
    let mut policy = host().small(r#"{"router": "citer.pth"}"#).unwrap();
    let handoff = policy.send(&RequestView::new(1, 0, 0, 1, 9, &[5]), 1);
    assert!(!handoff.keep_candidate);
    assert_eq!((handoff.budget, handoff.rollback, handoff.verify), (Some(1), 0, false));
}

#[test]
fn the_network_reads_the_hidden_state_alone() {
    let needs = host().small(r#"{"router": "citer.pth"}"#).unwrap().requirements();
    assert_eq!((needs.nets.len(), needs.top_k, needs.signals.is_empty()), (1, 0, true));
    let net = &needs.nets[0];
    assert_eq!(net.weights, "citer.pth");
    let linear = |prefix| Op::Linear { weight: format!("{prefix}.weight"), bias: Some(format!("{prefix}.bias")) };
    let expected = [
        Op::Hidden { back: 0 },
        linear("mlp.0"),
        Op::BatchNorm { prefix: "mlp.1".into(), eps: 1e-5 },
        Op::Relu,
        linear("mlp.4"),
        linear("linear"),
        Op::Sigmoid,
    ];
    assert!(net.nodes.iter().map(|node| &node.op).eq(&expected), "{net:?}");
    for (at, node) in net.nodes.iter().enumerate() {
        let before: Vec<u32> = (at as u32).checked_sub(1).into_iter().collect();
        assert_eq!(node.inputs, before, "a chain");
    }
}

#[test]
fn names_tensors_that_are_missing_or_not_read() {
    let error = |change: fn(&mut Vec<TensorInfo>)| {
        let mut tensors = tensors();
        change(&mut tensors);
        Host(WeightsInfo::new(tensors, "{}")).small(r#"{"router": "citer.pth"}"#).unwrap_err()
    };
    assert_eq!(
        error(|tensors| tensors.retain(|t| t.name != "mlp.1.running_var" && t.name != "linear.bias")),
        "router `citer.pth`: the file lacks linear.bias, mlp.1.running_var; a CITER router is the state dict of its \
         confidence network"
    );
    assert_eq!(
        error(|tensors| tensors.push(TensorInfo { name: "mlp.6.weight".into(), shape: vec![8, 8] })),
        "router `citer.pth`: the file has mlp.6.weight, which the network does not read; a CITER router is the \
         state dict of its confidence network"
    );
    assert_eq!(
        error(|tensors| tensors.iter_mut().filter(|t| t.name == "linear.weight").for_each(|t| t.shape = vec![2, 8])),
        "router `citer.pth`: linear.weight has shape [2, 8]; it must have one row"
    );
}

#[test]
fn the_counter_of_batches_may_be_absent() {
    let tensors = tensors().into_iter().filter(|t| t.name != "mlp.1.num_batches_tracked").collect();
    Host(WeightsInfo::new(tensors, "{}")).small(r#"{"router": "citer.pth"}"#).unwrap();
}

#[test]
fn the_large_model_never_hands_over_and_opens_no_file() {
    let mut large = host().create(["llm", "slm"], 1, r#"{"router": "elsewhere"}"#).unwrap();
    assert_eq!(large.requirements(), Requirements::default());
    assert_eq!(route(&mut large, &[0.0]), [Stay]);
}

#[test]
fn refuses_other_routes_and_settings() {
    let error = |settings: &str| host().small(settings).unwrap_err();
    assert_eq!(error(r#"{"router": "x"}"#), "weights `x`: no such file");
    assert!(error("{}").contains("missing field `router`"));
    assert!(error(r#"{"router": "citer.pth", "treshold": 1}"#).contains("unknown field `treshold`"));
    for value in ["-0.1", "1.1"] {
        let settings = format!(r#"{{"router": "citer.pth", "threshold": {value}}}"#);
        assert_eq!(error(&settings), format!("threshold is {value}; set it to 0 to 1"));
    }
    let settings = r#"{"router": "citer.pth"}"#;
    for (roles, entry) in [(["slm", "llm"], 1), (["llm", "slm"], 0)] {
        let error = host().create(roles, entry, settings).unwrap_err();
        assert_eq!(error, "citer begins at model `m-slm`; set entry = \"m-slm\" in route `r`");
    }
    let error = host().create(["small", "llm"], 0, settings).unwrap_err();
    assert!(error.starts_with("citer needs exactly two models, with the roles \"slm\" and \"llm\""), "{error}");
}
