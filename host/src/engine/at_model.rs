//! What a model's thread does to the world around it.

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Sender;

use super::deliver::Events;
use super::keeper::Upkeep;
use super::shared::{Live, Shared};
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

impl AtModel {
    /// Names of a route and of its policy, for the log.
    fn names(&self, route: RouteId) -> (String, String) {
        let info = self.shared.registry().info(route);
        info.map_or_else(Default::default, |info| (info.title(), info.policy.clone().unwrap_or_default()))
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
                    let (route, model) = (RouteId(route), self.model);
                    let (name, plugin) = self.names(route);
                    let then =
                        if disables { "the route takes no new requests" } else { "its requests follow on_error" };
                    let model_name = &self.shared.models[model.index()].name;
                    tracing::error!(
                        plugin,
                        route = name,
                        model = model_name,
                        hook,
                        step,
                        "{message}; the policy is not called again at this model, and {then}"
                    );
                    self.shared.policy_failed(route);
                    if disables {
                        self.shared.disable(route, model, hook);
                    }
                }
                Effect::PolicyNote { route, step, note } => {
                    let (route, plugin) = self.names(RouteId(route));
                    let model = &self.shared.models[self.model.index()].name;
                    tracing::warn!(plugin, route, model, hook = note.hook.name(), step, "{}", note.message);
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
