//! What a model's thread does to the world around it.

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Sender;

use super::deliver::Events;
use super::faults::AtWork;
use super::keeper::Upkeep;
use super::shared::{Live, Shared};
use crate::policy::monitor::Names;
use crate::request::{Event, ModelDown, ModelId, RouteId, Told};
use crate::subserver::worker::Surroundings;
use crate::subserver::{Effect, Message};

pub(super) const MODEL_PANICKED: &str = "its thread ended by a panic (see the log)";

/// A model's view of the shared state.
pub(super) struct AtModel {
    pub shared: Arc<Shared>,
    pub model: ModelId,
    pub events: Sender<Events>,
}

/// Whom a line of the log is about.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub route: String,
    pub plugin: String,
    pub model: String,
    /// Lines like it that were left out since the last, where there are any.
    pub untold: Option<u64>,
}

impl AtModel {
    /// What the log says of `route`, whose policy `fails` in `hook` or goes on as it should not. `None`: enough was
    /// told of it, as clients bring it about by ever other settings.
    pub fn line(&self, route: RouteId, hook: &'static str, fails: bool, at: Instant) -> Option<Line> {
        let model = self.shared.models[self.model.index()].name.clone();
        let info = self.shared.registry().info(route);
        let Some(info) = info else {
            return Some(Line { route: String::new(), plugin: String::new(), model, untold: None });
        };
        let (route, plugin) = (info.name.clone(), info.policy.clone().unwrap_or_default());
        let names = Names { route, model: model.clone(), plugin: plugin.clone() };
        let untold = match info.variant {
            None => None,
            Some(_) => Some(self.shared.faults.tell(AtWork { names, hook, fails }, at)?).filter(|untold| *untold > 0),
        };
        Some(Line { route: info.title(), plugin, model, untold })
    }

    /// The model's thread has ended by a panic. Nobody answers there, so all that may need it fails, after what
    /// is on its way to the clients.
    pub fn model_panicked(&self) {
        let (shared, model) = (&self.shared, self.model);
        let down = ModelDown { model: shared.models[model.index()].name.clone(), message: MODEL_PANICKED.into() };
        shared.model_down(model, down.clone());
        shared.coordinator.bury(model).into_iter().for_each(|model| shared.post(model, Message::Wake));
        let uses = |live: &Live| live.route.models.iter().any(|&(m, _)| m == model);
        let hit: Vec<_> =
            shared.live().iter().filter(|(_, l)| uses(l)).map(|(&id, live)| (id, live.route.clone())).collect();
        let failed = hit.iter().map(|&(id, _)| (id, Told::now(Event::Failed(down.clone().into())))).collect();
        // They are taken until every model's thread has ended.
        let _ = self.events.send(failed);
        hit.into_iter().for_each(|(id, route)| shared.bury(id, &route));
        let _ = shared.upkeep.send(Upkeep::ModelGone(model));
    }
}

impl Surroundings for AtModel {
    fn carry_out(&self, effects: &mut dyn Iterator<Item = Effect>, at: Instant) {
        let mut events = Vec::new();
        let mut letters: Vec<Vec<Message>> = Vec::new();
        for effect in effects {
            match effect {
                Effect::Send(message) => {
                    let to = message.to.index();
                    let (model, message) = (message.to, Message::Peer(message));
                    self.shared.coordinator.sent(model, &message);
                    letters.resize_with(letters.len().max(to + 1), Vec::new);
                    letters[to].push(message);
                }
                Effect::Event(id, event) => events.push((id, Told { at, event })),
                Effect::ModelDown(down) => self.shared.model_down(self.model, down),
                Effect::PolicyFailed { route, hook, step, message, disables } => {
                    let route = RouteId(route);
                    let then =
                        if disables { "the route takes no new requests" } else { "its requests follow on_error" };
                    if let Some(Line { route, plugin, model, untold }) = self.line(route, hook, true, at) {
                        tracing::error!(
                            plugin,
                            route,
                            model,
                            hook,
                            step,
                            untold,
                            "{message}; the policy is not called again at this model, and {then}"
                        );
                    }
                    self.shared.policy_failed(route);
                    if disables {
                        self.shared.disable(route, self.model, hook);
                    }
                }
                Effect::PolicyNote { route, step, note } => {
                    let hook = note.hook.name();
                    if let Some(Line { route, plugin, model, untold }) = self.line(RouteId(route), hook, false, at) {
                        tracing::warn!(plugin, route, model, hook, step, untold, "{}", note.message);
                    }
                }
                Effect::Detached(detached) => {
                    let _ = self.shared.upkeep.send(Upkeep::Detached(self.model, detached));
                }
            }
        }
        // Events first: what a receiver of a hand-off commits must come behind them.
        if !events.is_empty() {
            // They are taken until every model's thread has ended.
            let _ = self.events.send(events);
        }
        for (inbox, letter) in self.shared.inboxes.iter().zip(letters) {
            if !letter.is_empty() {
                let _ = inbox.send(letter);
            }
        }
    }

    fn wake(&self, model: ModelId) {
        self.shared.post(model, Message::Wake);
    }
}
