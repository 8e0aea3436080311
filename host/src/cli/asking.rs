//! From a question and arguments to what the engine takes.

use std::time::SystemTime;

use serde_json::{Map, json};

use super::args::Sampling;
use crate::api::Ending;
use crate::engine::{Engine, RouteInfo};
use crate::request::{SamplingParams, TokenId};
use crate::text::ModelText;

/// Tokens of a conversation of one user message, as the model's template writes it. `None`: it has none.
pub fn chat(
    text: &ModelText,
    system: Option<&str>,
    user: &str,
    now: SystemTime,
) -> Option<Result<Vec<TokenId>, String>> {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let system = system.map(|system| message("system", system));
    let messages = system.into_iter().chain([message("user", user)]).collect();
    Some(match text.render_chat(messages, Map::new(), now)? {
        Ok(rendered) => text.encode_chat(&rendered).map_err(|e| e.to_string()),
        Err(e) => Err(format!("the model's chat template refuses it: {e}")),
    })
}

/// The arguments, with `index` added to the seed.
pub fn sampling(arguments: &Sampling, index: u64) -> SamplingParams {
    SamplingParams {
        temperature: arguments.temperature,
        top_p: arguments.top_p,
        top_k: arguments.top_k,
        seed: arguments.seed.wrapping_add(index),
        ..SamplingParams::default()
    }
}

/// An answer ends with an end token of any of the route's models.
pub fn ending(route: &RouteInfo, engine: &Engine) -> Ending {
    let mut eos: Vec<TokenId> =
        route.models.iter().flat_map(|(m, _)| engine.models()[m.index()].eos.iter().copied()).collect();
    eos.sort_unstable();
    eos.dedup();
    Ending {
        eos: eos.into(),
        stop_tokens: Vec::new(),
        stops: Vec::new(),
        include_stop: false,
        min_tokens: 0,
        keep_special: false,
    }
}
