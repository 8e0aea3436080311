//! Traces that `tokenrouter replay` reads.

use std::path::Path;

use tokenrouter_plugin_api::{
    Context, Decision, ModelDescription, ModelIndex, NoServices, Policy, PolicyError, RouteBatch, Services,
};

use super::{one_line, scratch};
use crate::policy::Linked;
use crate::policy::monitor::Monitors;
use crate::replay::{self, Place, Team, Trace};

/// An answer's JSON.
pub fn replay_answer(bytes: &[u8]) {
    played(&scratch("answer.json", bytes));
}

/// A run: its manifest, its requests after a NUL, and its only shard after another one.
pub fn replay_recording(bytes: &[u8]) {
    let mut parts = bytes.splitn(3, |byte| *byte == 0);
    let manifest = scratch("manifest.json", parts.next().unwrap_or_default());
    for name in ["requests.jsonl", "rows.safetensors"] {
        scratch(name, parts.next().unwrap_or_default());
    }
    played(&manifest);
}

/// Every token from the next model.
struct Turns(ModelIndex);

impl Policy for Turns {
    const NAME: &'static str = "turns";
    fn create(context: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self((context.model + 1) % context.models.len() as ModelIndex))
    }
    fn route(&mut self, _: &RouteBatch<'_>, out: &mut [Decision]) {
        out.fill(Decision::to(self.0));
    }
}

/// A refusal is one line. What is taken can be played: as many tokens come out as were recorded.
fn played(path: &Path) {
    let trace = match replay::read(path, None) {
        Ok(trace) => trace,
        Err(error) => return one_line(&error),
    };
    trace.notes.iter().for_each(|note| one_line(note));
    let described = |name: &String| ModelDescription { name: name.clone(), role: name.clone() };
    let made_up = || (trace.models.iter().map(described).collect(), 0);
    let (models, entry) = trace.route.clone().unwrap_or_else(made_up);
    if let Err(error) = play(&trace, &models, entry) {
        one_line(&error);
    }
}

fn play(trace: &Trace, models: &[ModelDescription], entry: usize) -> Result<(), String> {
    let services: Vec<&dyn Services> = vec![&NoServices; models.len()];
    let place = Place {
        route: "r",
        models,
        entry,
        vocab_size: trace.vocab_size,
        eos: &[],
        services: &services,
        monitors: &Monitors::default(),
    };
    let policy = Linked::<Turns>::default();
    let team = || Team::new(&policy, "{}", &place, trace).map_err(|e| e.to_string());
    let played = replay::play(trace, &mut team()?, &mut team()?).map_err(|e| e.to_string())?;
    assert_eq!(played.len(), trace.requests.len());
    for played in played {
        assert_eq!(played.chosen.len(), played.recorded.len());
        assert!(played.alike <= played.compared);
    }
    Ok(())
}
