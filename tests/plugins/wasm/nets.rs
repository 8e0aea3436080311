//! Nets that a route describes for a module.

use serde_json::json;
use tokenrouter::policy::PolicyFactory;
use tokenrouter::policy::nets::{HostNet, written};
use tokenrouter_plugin_api::{Decision, DecisionKind, NO_MODEL, Requirements, RouteBatch, SignalColumns, SignalSet};

use super::support::{at, load, section, wat};

/// Hands over where the second of its nets is below a half; the first is another model's.
fn module() -> Vec<u8> {
    let manifest = r#"{"abi": 1, "name": "p", "version": "1", "roles": ["slm", "llm"], "nets": ["judge", "score"]}"#;
    wat(&format!(
        r#"(module {} (memory (export "memory") 1) (global (export "tr_block") i32 (i32.const 0))
             (func (export "tr_route") (param $rows i32) (result i32) (local $row i32)
               (loop $next
                 (if (f32.lt (f32.load offset=0x3800 (i32.shl (local.get $row) (i32.const 2))) (f32.const 0.5))
                   (then (i32.store offset=0x400 (i32.shl (local.get $row) (i32.const 2)) (i32.const 2))))
                 (br_if $next (i32.lt_u (local.tee $row (i32.add (local.get $row) (i32.const 1))) (local.get $rows))))
               (local.get $rows)))"#,
        section(manifest)
    ))
}

fn nets(text: serde_json::Value) -> Vec<HostNet> {
    written(&text).unwrap()
}

fn both() -> Vec<HostNet> {
    nets(json!({
        "score": { "file": "w.pt", "nodes": [{ "op": "hidden" }] },
        "judge": { "file": "w.pt", "at": "llm", "nodes": [{ "op": "hidden" }] },
    }))
}

#[test]
fn each_model_has_its_own() {
    let policy = load(&module()).unwrap().with_nets(both()).unwrap();
    let asks = |model: u32| {
        let instance = at(&*policy, model, &["slm", "llm"], 0, "{}").unwrap();
        let wanted: &Requirements = instance.requirements();
        assert_eq!(wanted.signals, SignalSet::NONE);
        wanted.nets.iter().map(|net| net.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!((asks(0), asks(1)), (vec!["score".to_owned()], vec!["judge".to_owned()]));
    let decide = |model: u32, scores: &[f32]| {
        let mut instance = at(&*policy, model, &["slm", "llm"], 0, "{}").unwrap();
        let rows = scores.len();
        let (ids, words) = (vec![0; rows], vec![0; rows]);
        let batch = RouteBatch {
            request_ids: &ids,
            slots: &words,
            positions: &words,
            remaining: &words,
            last_models: &vec![NO_MODEL; rows],
            signals: SignalColumns { net_scores: scores, net_width: 1, ..SignalColumns::default() },
            ..RouteBatch::default()
        };
        let mut out = vec![Decision::STAY; rows];
        instance.route(&batch, &mut out).unwrap();
        out.iter().map(|decision| decision.kind().unwrap()).collect::<Vec<_>>()
    };
    use DecisionKind::{Stay, To};
    assert_eq!(decide(0, &[0.4, 0.6, f32::NAN, 0.0]), [To(1), Stay, Stay, To(1)]);
    // Where the net is not computed it is no signal.
    assert_eq!(decide(1, &[0.4, 0.6]), [Stay, Stay]);
}

#[test]
fn what_does_not_fit() {
    let plugin = load(&module()).unwrap();
    let error = |nets| plugin.with_nets(nets).err().unwrap();
    assert_eq!(
        error(both()[..1].to_vec()),
        "policy `p` asks for the net `judge`; describe it in [routes.ROUTE.nets.judge]"
    );
    let other = nets(json!({ "x": { "file": "w.pt", "nodes": [] } }));
    assert_eq!(error(other), "policy `p` has no net `x`: it asks for judge, score");
    let error = at(&plugin, 0, &["slm", "llm"], 0, "{}").err().unwrap().to_string();
    assert!(error.contains("asks for the nets judge, score; describe them in [routes.ROUTE.nets]"), "{error}");
    let mut elsewhere = both();
    elsewhere[0].at = Some("mlm".into());
    let policy = plugin.with_nets(elsewhere).unwrap();
    let error = at(&*policy, 0, &["slm", "llm"], 0, "{}").err().unwrap().to_string();
    assert!(error.contains("nets.score.at = \"mlm\": no model of the route has this role; it has slm, llm"), "{error}");
}
