//! How long requests wait at gates.

use std::time::Duration;

use tokenrouter::request::ModelId;
use tokenrouter::simulation::{Ledgers, World};

/// Sees that no model with a ready request is idle for longer than its longest wait. A request that becomes
/// ready meanwhile, or while a step is under way, so waits for that time and the rest of the step at most,
/// if it is in the next step; and the oldest always is.
pub struct Waits(Vec<Wait>);

struct Wait {
    longest: Duration,
    /// Idle with something ready since then.
    since: Option<Duration>,
    steps: u64,
}

impl Waits {
    /// `longest`: by model.
    pub fn new(longest: impl Iterator<Item = Duration>) -> Self {
        Self(longest.map(|longest| Wait { longest, since: None, steps: 0 }).collect())
    }

    /// After each moment of `world`.
    pub fn look(&mut self, world: &World<Ledgers>) -> Result<(), String> {
        let now = world.now();
        for (model, (wait, server)) in self.0.iter_mut().zip(world.servers()).enumerate() {
            let steps = server.counters().steps;
            if let Some(waited) = wait.since.map(|since| now - since).filter(|waited| *waited > wait.longest) {
                return Err(format!("7: model {model} waited for {waited:?}, not {:?} at most", wait.longest));
            }
            let idle = !world.is_running(ModelId(model as u32)) && server.ready() > 0;
            let since = if steps > wait.steps { None } else { wait.since };
            wait.since = idle.then(|| since.unwrap_or(now));
            wait.steps = steps;
        }
        Ok(())
    }
}
