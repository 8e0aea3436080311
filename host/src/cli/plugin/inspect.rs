//! `tokenrouter plugin inspect`

use std::path::Path;

use serde_json::{Value, json};
use tokenrouter_plugin_api::host::{ABI_VERSION, check_version};

use super::args::Inspect;
use crate::cli::output::{Failure, write_stdout};
use crate::policy::PolicyFactory;
use crate::policy::native::gate;
use crate::policy::wasm::WasmPlugin;

/// What can be known of a plugin that does not run.
struct Seen {
    kind: &'static str,
    name: String,
    version: String,
    /// The plugin ABI of a library.
    abi: Option<String>,
    /// A library has it as a text in its code, which would have to run.
    schema: Option<String>,
    bytes: u64,
    sha256: String,
    /// Why this server would not open it all the same.
    refused: Option<String>,
}

pub fn run(arguments: &Inspect) -> Result<(), Failure> {
    let path = &arguments.file;
    let seen = match look(path) {
        Ok(seen) => seen,
        Err(error) => {
            if arguments.json {
                write_stdout(&format!("{:#}\n", json!({ "file": path, "loads": false, "gate": error })))?;
            }
            return Err(Failure::input(error));
        }
    };
    let text = if arguments.json { format!("{:#}\n", as_json(path, &seen)) } else { as_text(path, &seen) };
    write_stdout(&text)?;
    seen.refused.map_or(Ok(()), |reason| Err(Failure::input(reason)))
}

fn look(path: &Path) -> Result<Seen, String> {
    let is_module = path.extension().is_some_and(|extension| extension == "wasm");
    if is_module { module(path) } else { library(path) }
}

/// What `--json` says of a file that passes the gate.
#[cfg(any(test, fuzzing))]
pub(crate) fn said(path: &Path) -> Result<Value, String> {
    look(path).map(|seen| as_json(path, &seen))
}

fn library(path: &Path) -> Result<Seen, String> {
    let named = |reason: &dyn std::fmt::Display| format!("plugin `{}`: {reason}", path.display());
    let checked = gate::check(path, None).map_err(|e| named(&e))?;
    let refused = check_version(&checked.metadata).err().map(|e| named(&e));
    let gate::Checked { bytes, metadata, sha256 } = checked;
    Ok(Seen {
        kind: "native",
        name: metadata.name,
        version: metadata.version,
        abi: Some(metadata.abi.to_string()),
        schema: None,
        bytes: bytes.len() as u64,
        sha256,
        refused,
    })
}

/// A module is checked and compiled; nothing of it is called.
fn module(path: &Path) -> Result<Seen, String> {
    let plugin = WasmPlugin::load(path, None).map_err(|e| e.to_string())?;
    let bytes = std::fs::metadata(path).map_err(|e| format!("plugin `{}`: {e}", path.display()))?.len();
    Ok(Seen {
        kind: "wasm",
        name: plugin.name().to_owned(),
        version: plugin.version().to_owned(),
        abi: None,
        schema: Some(plugin.settings_schema().to_owned()),
        bytes,
        sha256: plugin.sha256().to_owned(),
        refused: None,
    })
}

fn as_text(path: &Path, seen: &Seen) -> String {
    let gate = match seen.refused {
        None => "passes: this server would open it",
        Some(_) => "refuses it: see the last line",
    };
    let settings = match &seen.schema {
        None => "not readable without running it; `tokenrouter plugin check` runs it".to_owned(),
        Some(schema) => match serde_json::from_str::<Value>(schema).unwrap_or_default()["properties"].as_object() {
            Some(properties) if !properties.is_empty() => {
                let names: Vec<&str> = properties.keys().map(String::as_str).collect();
                format!("{} (--json has the schema)", names.join(", "))
            }
            _ => "none".to_owned(),
        },
    };
    let abi = seen.abi.as_ref().map(|abi| ("plugin ABI", format!("{abi} (this server provides {ABI_VERSION})")));
    [
        ("file", path.display().to_string()),
        ("kind", seen.kind.to_owned()),
        ("name", seen.name.clone()),
        ("version", seen.version.clone()),
    ]
    .into_iter()
    .chain(abi)
    .chain([
        ("settings", settings),
        ("size", format!("{} bytes", seen.bytes)),
        ("sha256", seen.sha256.clone()),
        ("gate", gate.to_owned()),
    ])
    .map(|(name, value)| format!("{name:<12}{value}\n"))
    .collect()
}

fn as_json(path: &Path, seen: &Seen) -> Value {
    json!({
        "file": path,
        "kind": seen.kind,
        "name": seen.name,
        "version": seen.version,
        "abi": seen.abi,
        "server_abi": ABI_VERSION.to_string(),
        "settings_schema": seen.schema.as_deref().map(|schema| serde_json::from_str::<Value>(schema).unwrap_or_default()),
        "bytes": seen.bytes,
        "sha256": seen.sha256,
        "loads": seen.refused.is_none(),
        "gate": seen.refused.as_deref().unwrap_or("passes"),
    })
}
