//! Files of plugins.

use serde_json::{Value, json};
use tokenrouter_plugin_api::host::check_version;
use tokenrouter_plugin_api::{Context, Decision, ModelDescription, NO_MODEL, NoServices, RouteBatch, SignalColumns};

use super::{one_line, parts, scratch};
use crate::cli::plugin::inspect;
use crate::policy::native::gate;
use crate::policy::wasm::compile::CompileError;
use crate::policy::wasm::manifest::Manifest;
use crate::policy::wasm::{Reason, WasmPlugin, text};
use crate::policy::{PolicyFactory, PolicyInstance, validate_settings};

/// A library: what passes the gate says what it is in words that can be printed, and `plugin inspect`
/// says the same.
pub fn elf_gate(bytes: &[u8]) {
    let metadata = match gate::check_elf(bytes) {
        Ok(metadata) => metadata,
        Err(error) => return one_line(&error.to_string()),
    };
    for text in [&metadata.name, &metadata.version, &metadata.symbol] {
        one_line(text);
    }
    if let Err(error) = check_version(&metadata) {
        one_line(&error.to_string());
    }
    let said = inspect::said(&scratch("plugin.so", bytes)).expect("what the gate let pass");
    assert_eq!(said["name"], *metadata.name);
    assert_eq!(said["version"], *metadata.version);
    assert_eq!(said["abi"], metadata.abi.to_string());
    assert_eq!(said["bytes"], bytes.len());
    assert_eq!(said["loads"], check_version(&metadata).is_ok());
}

/// A module: refused in one short line, or compiled in time; then it decides or fails, within its limits.
pub fn wasm_loader(bytes: &[u8]) {
    loaded(WasmPlugin::from_bytes(bytes.to_vec(), None));
}

/// WebAssembly text: translated or refused in one short line, then as any module.
pub fn wat_text(bytes: &[u8]) {
    if bytes.len() as u64 <= text::MAX_BYTES {
        loaded(WasmPlugin::from_text(bytes, None));
    }
}

fn loaded(plugin: Result<WasmPlugin, Reason>) {
    let plugin = match plugin {
        Ok(plugin) => plugin,
        Err(reason) => {
            let bounded = !matches!(reason, Reason::Compile(CompileError::TooSlow | CompileError::Failed));
            assert!(bounded, "the gate let pass what the compiler cannot do: {reason}");
            one_line(&reason.to_string());
            return assert!(reason.to_string().len() < 1000, "not a short line: {reason}");
        }
    };
    let schema: Value = serde_json::from_str(plugin.settings_schema()).expect("a schema is JSON");
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let settings: Value = required.map(|name| (name.to_owned(), json!(1))).collect::<serde_json::Map<_, _>>().into();
    if validate_settings(plugin.settings_schema(), &settings).is_err() {
        return;
    }
    let models = ["slm", "llm"].map(|role| ModelDescription { name: role.into(), role: role.into() });
    for model in 0..2 {
        let context =
            Context { route: "r", model, models: &models, entry: 0, vocab_size: 9, eos: &[], services: &NoServices };
        match plugin.create(&context, &settings.to_string()) {
            Ok(mut instance) => decide(&mut *instance),
            Err(failure) => one_line(&failure.to_string()),
        }
    }
}

/// Two rows; every decision has a meaning.
fn decide(instance: &mut dyn PolicyInstance) {
    let signal = [0.25, f32::NAN];
    let batch = RouteBatch {
        request_ids: &[0, 1],
        slots: &[0, 1],
        positions: &[1, 1000],
        last_models: &[NO_MODEL, 1],
        remaining: &[9, 1],
        signals: SignalColumns {
            entropy: &signal,
            entropy_norm: &signal,
            top1_prob: &signal,
            margin: &signal,
            logsumexp: &signal,
            candidate_prob: &signal,
            ..SignalColumns::default()
        },
        ..RouteBatch::default()
    };
    let mut decisions = [Decision::STAY; 2];
    match instance.route(&batch, &mut decisions) {
        Ok(()) => assert!(decisions.iter().all(|decision| decision.kind().is_some()), "{decisions:?}"),
        Err(failure) => one_line(&failure.to_string()),
    }
    if let Err(failure) = instance.finished(0) {
        one_line(&failure.to_string());
    }
}

/// The section of a module, and settings after a NUL: settings that its schema allows are numbers.
pub fn wasm_manifest(bytes: &[u8]) {
    let mut parts = parts(bytes);
    let (section, settings) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let manifest = match Manifest::parse(section) {
        Ok(manifest) => manifest,
        Err(error) => {
            one_line(&error.to_string());
            return assert!(error.to_string().len() < 500, "not a short line: {error}");
        }
    };
    assert_eq!(Manifest::parse(section), Ok(manifest.clone()));
    let schema = manifest.settings_schema();
    let defaults = validate_settings(&schema, &json!({}));
    assert_eq!(defaults.is_ok(), manifest.numbers("{}").is_ok(), "{defaults:?}");
    let Ok(settings @ Value::Object(_)) = serde_json::from_slice(settings) else { return };
    if validate_settings(&schema, &settings).is_ok() {
        let numbers = manifest.numbers(&settings.to_string()).expect("what the schema allows");
        assert_eq!(numbers.len(), manifest.settings.len());
        assert!(numbers.iter().all(|number| number.is_finite()), "{numbers:?}");
    }
}
