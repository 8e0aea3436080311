//! The made-up route that a policy is checked on.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use tokenrouter_plugin_api::net::WeightsInfo;
use tokenrouter_plugin_api::{Context, LogLevel, ModelDescription, ModelIndex, Services, TokenId};

use super::watched::Watched;
use crate::policy::{PolicyFactory, PolicyFailure, nets};

/// Tokens of the made-up vocabulary.
pub const VOCABULARY: u32 = 1000;
/// The end token of every model.
pub const EOS: TokenId = VOCABULARY - 1;
/// Tokens from here to the end token get the texts that a policy asks for.
const FIRST_ASKED: TokenId = 900;

/// A policy, and where it is to work.
pub struct Setup<'a> {
    pub factory: &'a dyn PolicyFactory,
    /// The first is the entry.
    pub models: &'a [ModelDescription],
    pub settings: &'a Value,
}

/// `NAME=ROLE` or `NAME`, separated by commas.
pub fn parse_roles(text: &str) -> Result<Arc<[ModelDescription]>, String> {
    let mut models: Vec<ModelDescription> = Vec::new();
    for item in text.split(',').map(str::trim) {
        let (name, role) = item.split_once('=').unwrap_or((item, item));
        if name.is_empty() || role.is_empty() {
            return Err(format!("`{item}` is not NAME=ROLE; write for example small=slm,large=llm"));
        }
        if models.iter().any(|m| m.name == name) {
            return Err(format!("model `{name}` is there twice; give each model a name of its own"));
        }
        models.push(ModelDescription { name: name.into(), role: role.into() });
    }
    Ok(models.into())
}

impl Setup<'_> {
    /// An instance at one model, with any settings.
    pub fn create_with(&self, model: usize, settings: &str) -> Result<Watched, PolicyFailure> {
        let context = Context {
            route: "check",
            model: model as ModelIndex,
            models: self.models,
            entry: 0,
            vocab_size: VOCABULARY,
            eos: &[EOS],
            services: &MadeUp::default(),
        };
        Watched::create(self.factory, &context, settings)
    }

    /// An instance at each model.
    pub fn team(&self) -> Result<Vec<Watched>, PolicyFailure> {
        let settings = self.settings.to_string();
        (0..self.models.len()).map(|model| self.create_with(model, &settings)).collect()
    }
}

/// A vocabulary of single bytes and short words. Any other text that is asked for becomes a token too: which
/// special tokens the models of a policy have is not known here.
#[derive(Default)]
struct MadeUp {
    asked: Mutex<Vec<String>>,
}

impl Services for MadeUp {
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        match id {
            0..256 => Some(vec![id as u8]),
            256..FIRST_ASKED => Some(format!(" w{id}").into_bytes()),
            EOS => Some(b"<end>".to_vec()),
            _ => asked.get((id.checked_sub(FIRST_ASKED)?) as usize).map(|text| text.clone().into_bytes()),
        }
    }

    fn token_id(&self, text: &str) -> Option<TokenId> {
        if let Some(id) =
            (0..FIRST_ASKED).chain([EOS]).find(|&id| self.token_bytes(id).as_deref() == Some(text.as_bytes()))
        {
            return Some(id);
        }
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let at = asked.iter().position(|known| known == text).unwrap_or(asked.len());
        let id = FIRST_ASKED + at as TokenId;
        if id >= EOS {
            return None;
        }
        if at == asked.len() {
            asked.push(text.to_owned());
        }
        Some(id)
    }

    fn weights(&self, path: &str) -> Result<WeightsInfo, String> {
        nets::describe(Path::new("."), path)
    }

    fn log(&self, level: LogLevel, message: &str) {
        tracing::debug!(?level, "{message}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_by_name() {
        let models = parse_roles("small=slm, large").unwrap();
        let pairs: Vec<_> = models.iter().map(|m| (m.name.as_str(), m.role.as_str())).collect();
        assert_eq!(pairs, [("small", "slm"), ("large", "large")]);
        for (text, part) in [("", "`` is not NAME=ROLE"), ("a=", "`a=` is not"), ("a,b,a=x", "`a` is there twice")] {
            let error = parse_roles(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn any_text_has_a_token() {
        let services = MadeUp::default();
        let id = services.token_id("<|defer|>").unwrap();
        assert_eq!((services.token_id("<|defer|>"), services.token_id("\n")), (Some(id), Some(10)));
        assert_eq!(services.token_bytes(id).unwrap(), b"<|defer|>");
        assert_eq!(services.token_bytes(id + 1), None);
        let ids: Vec<_> = (0..200).filter_map(|i| services.token_id(&format!("text {i}"))).collect();
        assert!(ids.iter().all(|&id| id > FIRST_ASKED && id < EOS) && ids.len() < 100, "{ids:?}");
    }
}
