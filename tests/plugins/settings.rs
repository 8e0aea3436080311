//! Settings and weights that are wrong: refused at the start, with the place and the value.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use tokenrouter::config::Config;
use tokenrouter::policy::{PolicyFactory, nets, validate_settings};

use crate::support::{library, load};

#[test]
fn case_28_settings() {
    let schema = load(&library("librstitch.so")).settings_schema().to_owned();
    let error = |settings: Value| validate_settings(&schema, &settings).unwrap_err();
    assert!(
        error(json!({"treshold": 0.1})).starts_with("settings/treshold = 0.1: no such setting; it takes threshold")
    );
    assert!(error(json!({"threshold": "0.1"})).starts_with("settings/threshold = \"0.1\": the value is not of type"));
    let long = error(json!({"threshold": "x".repeat(1 << 20)}));
    assert!(long.len() < 1000 && long.contains("(1048578 bytes)"), "{long}");
    // No number at all: JSON has none for it.
    let text = "[models.m]\npath = \"x\"\n[routes.r]\nplugin = \"p\"\nmodels = [\"m\"]\n[routes.r.settings]\nthreshold = VALUE\n";
    for value in ["nan", "inf"] {
        let parsed = Config::parse(&text.replace("VALUE", value), Path::new("c.toml"), &BTreeMap::new());
        let error = parsed.unwrap_err().to_string();
        assert!(
            error.contains("routes.r.settings.threshold = ") && error.contains("must be a finite number"),
            "{error}"
        );
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.toml");
    std::fs::write(&path, b"[models.m]\npath = \"\xff\"\n").unwrap();
    let error = Config::load(&path, &BTreeMap::new()).unwrap_err().to_string();
    assert!(error.contains("is not UTF-8 text"), "{error}");
}

/// A safetensors file with this header, and these many bytes behind it.
fn weights(header: &str, bytes: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; bytes]].concat()
}

#[test]
fn case_28_weights() {
    let dir = tempfile::tempdir().unwrap();
    let error = |bytes: &[u8]| {
        std::fs::write(dir.path().join("w.safetensors"), bytes).unwrap();
        nets::describe(dir.path(), "w.safetensors").unwrap_err()
    };
    let tensor = |name: &str, from: usize, to: usize| {
        format!(r#""{name}": {{"dtype": "F32", "shape": [2], "data_offsets": [{from}, {to}]}}"#)
    };
    let whole = format!("{{{}}}", tensor("a", 0, 8));
    std::fs::write(dir.path().join("w.safetensors"), weights(&whole, 8)).unwrap();
    assert_eq!(nets::describe(dir.path(), "w.safetensors").unwrap().tensors.len(), 1);
    let header_of_2_63 = [&(1u64 << 63).to_le_bytes()[..], whole.as_bytes()].concat();
    for bytes in [
        header_of_2_63,
        weights(&whole, 4),
        weights(&format!("{{{}, {}}}", tensor("a", 0, 8), tensor("b", 4, 12)), 12),
        weights(&format!("{{{}}}", tensor("a", 0, 4)), 4),
        weights(&whole.replace("F32", "F99"), 8),
        weights("{", 0),
        Vec::new(),
    ] {
        let error = error(&bytes);
        assert!(error.contains("w.safetensors") && !error.contains('\n') && error.len() < 500, "{error}");
    }
}
