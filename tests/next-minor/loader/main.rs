//! Loads the plugins given as arguments into a host of the next minor version, runs one step in each,
//! and prints a line about it.

use std::path::Path;

use tokenrouter_plugin_api::host::{ABI_VERSION, Library, Metadata, metadata};
use tokenrouter_plugin_api::{Context, Decision, ModelDescription, NoServices, RouteBatch, SignalColumns};

/// The record, wherever it is in the file: this program trusts what the test gives it.
fn record(path: &Path) -> Option<Metadata> {
    std::fs::read(path).ok()?.windows(metadata::BYTES).find_map(|window| metadata::decode(window).ok())
}

fn step(library: &Library) -> Result<String, String> {
    let models = ["slm", "llm"].map(|role| ModelDescription { name: role.to_owned(), role: role.to_owned() });
    let context =
        Context { route: "r", model: 0, models: &models, entry: 0, vocab_size: 10, eos: &[], services: &NoServices };
    let mut instance = library.create(&context, r#"{"threshold": 0.5}"#)?;
    let requirements = instance.requirements()?;
    let mut out = [Decision::STAY; 2];
    let signals = SignalColumns { entropy_norm: &[0.4, 0.6], ..SignalColumns::default() };
    let batch = RouteBatch { request_ids: &[1, 2], signals, ..RouteBatch::default() };
    instance.route(&batch, &mut out)?;
    instance.close()?;
    Ok(format!("{:?} {:?}", requirements.signals, out.map(|decision| decision.kind())))
}

fn main() {
    for path in std::env::args().skip(1) {
        let path = Path::new(&path);
        let Some(metadata) = record(path) else {
            println!("no record");
            continue;
        };
        let found = Library::load(path, &metadata)
            .map_err(|e| e.to_string())
            .and_then(|library| Ok(format!("{} next {:?} {}", library.name(), library.next(), step(&library)?)));
        match found {
            Ok(found) => println!("host {ABI_VERSION} plugin {} {found}", metadata.abi),
            Err(error) => println!("error {error}"),
        }
    }
}
