//! Modules in text form, and rows for them to decide about.

use tokenrouter::policy::wasm::WasmPlugin;
use tokenrouter::policy::{PolicyFactory, PolicyFailure, PolicyInstance};
use tokenrouter_plugin_api::{
    Context, Decision, DecisionKind, ModelDescription, ModelIndex, NO_MODEL, NoServices, RouteBatch, SignalColumns,
};

/// The least section.
pub const MANIFEST: &str = r#"{"abi": 1, "name": "p", "version": "1", "signals": ["entropy"]}"#;
/// The least exports, without `tr_route`.
pub const EXPORTS: &str = r#"(memory (export "memory") 1) (global (export "tr_block") i32 (i32.const 0))"#;

pub fn section(json: &str) -> String {
    format!("(@custom \"tokenrouter:policy\" \"{}\")", json.replace('"', "\\\""))
}

pub fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// A module with the usual section and exports, and `rest`.
pub fn module(rest: &str) -> Vec<u8> {
    wat(&format!("(module {} {EXPORTS} {rest})", section(MANIFEST)))
}

/// A module that does `body` for each call and then stays. `$first`: the position of the first row.
pub fn doing(body: &str) -> Vec<u8> {
    module(&format!(
        r#"(func (export "tr_route") (param $rows i32) (result i32) (local $first i32)
             (local.set $first (i32.load (i32.const 0x2800)))
             {body} (local.get $rows))"#
    ))
}

/// A module that does `body` where a row's position is 1000, as no rehearsal has it.
pub fn trapped(body: &str) -> Vec<u8> {
    doing(&format!("(if (i32.eq (local.get $first) (i32.const 1000)) (then {body}))"))
}

pub fn load(bytes: &[u8]) -> Result<WasmPlugin, String> {
    WasmPlugin::from_bytes(bytes.to_vec(), None).map_err(|e| e.to_string())
}

/// An instance at `model` of a route with these roles; the entry has the first role of all.
pub fn at(
    factory: &dyn PolicyFactory,
    model: ModelIndex,
    roles: &[&str],
    entry: ModelIndex,
    settings: &str,
) -> Result<Box<dyn PolicyInstance>, PolicyFailure> {
    let models: Vec<_> =
        roles.iter().map(|role| ModelDescription { name: format!("m-{role}"), role: role.to_string() }).collect();
    let context = Context { route: "r", model, models: &models, entry, vocab_size: 9, eos: &[], services: &NoServices };
    factory.create(&context, settings)
}

/// An instance at the first of two models.
pub fn create(bytes: &[u8]) -> Result<Box<dyn PolicyInstance>, String> {
    at(&load(bytes)?, 0, &["a", "b"], 0, "{}").map_err(|e| e.to_string())
}

/// The decisions about rows with these positions and these values of every signal.
pub fn decide(
    policy: &mut dyn PolicyInstance,
    positions: &[u32],
    signal: &[f32],
) -> Result<Vec<DecisionKind>, PolicyFailure> {
    let rows = positions.len();
    let ids: Vec<u64> = (0..rows as u64).collect();
    let slots: Vec<u32> = (0..rows as u32).collect();
    let (last_models, remaining) = (vec![NO_MODEL; rows], vec![9; rows]);
    let batch = RouteBatch {
        request_ids: &ids,
        slots: &slots,
        positions,
        last_models: &last_models,
        remaining: &remaining,
        signals: SignalColumns { entropy: signal, entropy_norm: signal, ..SignalColumns::default() },
        ..RouteBatch::default()
    };
    let mut out = vec![Decision::STAY; rows];
    policy.route(&batch, &mut out)?;
    Ok(out.iter().map(|decision| decision.kind().unwrap()).collect())
}
