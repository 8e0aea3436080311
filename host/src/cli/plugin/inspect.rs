//! `tokenrouter plugin inspect`

use std::path::Path;

use serde_json::{Value, json};
use tokenrouter_plugin_api::host::{ABI_VERSION, check_version};

use super::args::Inspect;
use crate::cli::output::{Failure, write_stdout};
use crate::policy::native::gate::{self, Checked};

/// The schema is a text in the plugin's code; the metadata that can be read beforehand does not hold it.
const SCHEMA: &str = "not readable without running it; `tokenrouter plugin check` runs it";

pub fn run(arguments: &Inspect) -> Result<(), Failure> {
    let path = &arguments.file;
    let refused = |reason: &dyn std::fmt::Display| Failure::input(format!("plugin `{}`: {reason}", path.display()));
    let checked = match gate::check(path, None) {
        Ok(checked) => checked,
        Err(error) => {
            if arguments.json {
                write_stdout(&format!("{:#}\n", json!({ "file": path, "loads": false, "gate": error.to_string() })))?;
            }
            return Err(refused(&error));
        }
    };
    let version = check_version(&checked.metadata);
    let reason = version.as_ref().err().map(ToString::to_string);
    let text = if arguments.json {
        format!("{:#}\n", as_json(path, &checked, reason.as_deref()))
    } else {
        as_text(path, &checked, reason.as_deref())
    };
    write_stdout(&text)?;
    version.map_err(|error| refused(&error))
}

/// `reason`: why the gate refuses it.
fn as_text(path: &Path, checked: &Checked, reason: Option<&str>) -> String {
    let Checked { bytes, metadata, sha256 } = checked;
    let gate = match reason {
        None => "passes: a complete shared object for this machine, with a plugin's metadata",
        Some(_) => "refuses it: see the last line",
    };
    [
        ("file", path.display().to_string()),
        ("kind", "native".to_owned()),
        ("name", metadata.name.clone()),
        ("version", metadata.version.clone()),
        ("plugin ABI", format!("{} (this server provides {ABI_VERSION})", metadata.abi)),
        ("settings", SCHEMA.to_owned()),
        ("size", format!("{} bytes", bytes.len())),
        ("sha256", sha256.clone()),
        ("gate", gate.to_owned()),
    ]
    .iter()
    .map(|(name, value)| format!("{name:<12}{value}\n"))
    .collect()
}

fn as_json(path: &Path, checked: &Checked, reason: Option<&str>) -> Value {
    let Checked { bytes, metadata, sha256 } = checked;
    json!({
        "file": path,
        "kind": "native",
        "name": metadata.name,
        "version": metadata.version,
        "abi": metadata.abi.to_string(),
        "server_abi": ABI_VERSION.to_string(),
        "settings_schema": null,
        "settings_schema_note": SCHEMA,
        "bytes": bytes.len(),
        "sha256": sha256,
        "loads": reason.is_none(),
        "gate": reason.unwrap_or("passes"),
    })
}
