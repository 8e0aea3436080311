//! Where built plugins are, and a context to create instances in.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tokenrouter::policy::PolicyInstance;
use tokenrouter::policy::native::NativePlugin;
use tokenrouter::policy::{PolicyFactory, PolicyFailure};
use tokenrouter_plugin_api::net::{TensorInfo, WeightsInfo};
use tokenrouter_plugin_api::{Context, LogLevel, ModelDescription, Services, TokenId};

/// The directory with this profile's libraries: this test is in its `deps`.
pub fn built() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.ancestors().nth(2).unwrap().to_owned()
}

/// A built library, for example `librstitch.so`.
pub fn library(file: &str) -> PathBuf {
    let path = built().join(file);
    assert!(path.is_file(), "{} is not built; run the tests with `cargo xtask test`", path.display());
    path
}

pub fn load(path: &Path) -> NativePlugin {
    NativePlugin::load(path, None).unwrap()
}

/// Knows one token, 7, and keeps what is logged.
#[derive(Default)]
pub struct Recorder {
    pub lines: Mutex<Vec<(LogLevel, String)>>,
}

impl Services for Recorder {
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        (id == 7).then(|| vec![0xff, 0x37])
    }
    fn token_id(&self, text: &str) -> Option<TokenId> {
        (text == "seven").then_some(7)
    }
    fn weights(&self, path: &str) -> Result<WeightsInfo, String> {
        let tensor = TensorInfo { name: "w".into(), shape: vec![3, 4] };
        if path == "net.pt" { Ok(WeightsInfo::new(vec![tensor], "{}")) } else { Err(format!("no file `{path}`")) }
    }
    fn log(&self, level: LogLevel, message: &str) {
        self.lines.lock().unwrap().push((level, message.to_owned()));
    }
}

/// Create an instance at model 0 of a route with the models `small` (slm) and `large` (llm).
pub fn create_with(
    services: &dyn Services,
    plugin: &NativePlugin,
    settings: &str,
) -> Result<Box<dyn PolicyInstance>, PolicyFailure> {
    let models = [("small", "slm"), ("large", "llm")]
        .map(|(name, role)| ModelDescription { name: name.to_owned(), role: role.to_owned() });
    let context = Context { route: "r", model: 0, models: &models, entry: 0, vocab_size: 1000, eos: &[5, 6], services };
    plugin.create(&context, settings)
}

pub fn create(plugin: &NativePlugin, settings: &str) -> Result<Box<dyn PolicyInstance>, PolicyFailure> {
    create_with(&Recorder::default(), plugin, settings)
}
