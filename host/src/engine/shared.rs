//! What the threads of an engine share, and how requests begin and end there.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use crossbeam_channel::Sender;
use tokio::sync::mpsc::UnboundedSender;

use super::counts::{Ended, Progress};
use super::faults::FaultsAtWork;
use super::keeper::{Registry, Upkeep};
use super::routes::ModelPlace;
use super::table::{Routes, ServedRoute};
use crate::online::{Pace, Paces};
use crate::request::{Event, ModelDown, ModelId, RequestError, RequestId, RouteDisabled, RouteId, Told};
use crate::runner::ModelInfo;
use crate::subserver::Message;
use crate::subserver::coordinator::Coordinator;
use crate::subserver::observe::Observer;

/// What all threads of an engine share.
pub(super) struct Shared {
    pub models: Vec<ModelInfo>,
    /// By model.
    pub places: Vec<ModelPlace>,
    /// What takes requests now.
    pub table: ArcSwap<Routes>,
    /// What some model knows.
    pub registry: Mutex<Registry>,
    pub upkeep: Sender<Upkeep>,
    pub inboxes: Vec<Sender<Vec<Message>>>,
    /// Its number of live requests is the size of `live`.
    pub coordinator: Arc<Coordinator>,
    /// A request is live from its submission until its last event or its cancellation.
    pub live: Mutex<HashMap<RequestId, Live>>,
    /// By model.
    pub down: Vec<OnceLock<ModelDown>>,
    pub stopping: AtomicBool,
    pub observer: Option<Arc<dyn Observer>>,
    /// Where the paces of requests are entered, if somebody wants to know.
    pub paces: OnceLock<Paces>,
    /// Of variants.
    pub faults: FaultsAtWork,
}

pub(super) struct Live {
    pub route: Arc<ServedRoute>,
    pub events: UnboundedSender<Told>,
    pub pace: Pace,
    pub progress: Progress,
}

impl Shared {
    /// The table is valid between any two operations, so a panic elsewhere cannot spoil it.
    pub fn live(&self) -> MutexGuard<'_, HashMap<RequestId, Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn post(&self, to: ModelId, message: Message) {
        // A model whose thread has ended takes no messages; its requests have been failed.
        if let Some(inbox) = self.inboxes.get(to.index()) {
            self.coordinator.sent(to, &message);
            let _ = inbox.send(vec![message]);
        }
    }

    /// The request is over. `Some` for the first caller, who tells those concerned.
    pub fn remove(&self, id: RequestId) -> Option<Live> {
        let removed = {
            let mut live = self.live();
            let removed = live.remove(&id);
            self.coordinator.set_live(live.len());
            removed
        };
        if removed.is_some() {
            self.look_again();
        }
        removed
    }

    /// The number of requests has changed.
    pub fn look_again(&self) {
        if self.coordinator.delays() {
            self.wake_all();
        }
    }

    /// Every model looks at its gate.
    pub fn wake_all(&self) {
        self.inboxes.iter().for_each(|inbox| drop(inbox.send(vec![Message::Wake])));
    }

    /// Stop the request at every model of its route, for a reason that the models do not know.
    pub fn cancel(&self, id: RequestId, ended: Ended) {
        if let Some(live) = self.remove(id) {
            self.observe(|observer| observer.cancelled(id));
            self.bury(id, &live.route);
            live.progress.ended(ended, Instant::now(), &live.route.counted);
        }
    }

    pub fn bury(&self, id: RequestId, route: &ServedRoute) {
        for &(model, _) in &route.models {
            self.post(model, Message::Cancel(id));
        }
    }

    /// Nobody may miss an event because an observer panics.
    pub fn observe(&self, tell: impl FnOnce(&dyn Observer)) {
        if let Some(observer) = &self.observer
            && catch_unwind(AssertUnwindSafe(|| tell(&**observer))).is_err()
        {
            tracing::error!("the observer of requests panicked; what it records of this one is not whole");
        }
    }

    pub fn tell(&self, id: RequestId, told: Told) {
        self.observe(|observer| observer.event(id, &told.event));
        // A receiver that is gone cancels by itself, so a failed send needs no care.
        let Some(ended) = Ended::by(&told.event) else {
            if let Some(Live { route, events, pace, progress }) = self.live().get_mut(&id) {
                if let Event::Committed { tokens, .. } = &told.event {
                    if let Some(paces) = self.paces.get() {
                        pace.tokens(tokens.len() as u64, told.at, paces);
                    }
                    progress.committed(tokens, told.at, &route.counted);
                }
                let _ = events.send(told);
            }
            return;
        };
        if let Some(live) = self.remove(id) {
            if matches!(told.event, Event::Failed(RequestError::NotFinite { .. })) {
                live.route.counted.counts.corrupted.add(1);
            }
            live.progress.ended(ended, told.at, &live.route.counted);
            let _ = live.events.send(told);
        }
    }

    /// Fail a request from outside its sub-servers.
    pub fn fail(&self, id: RequestId, error: RequestError) {
        if let Some(live) = self.remove(id) {
            let ended = if error == RequestError::ShuttingDown { Ended::Abort } else { Ended::Error };
            let told = Told::now(Event::Failed(error));
            self.observe(|observer| observer.event(id, &told.event));
            live.progress.ended(ended, told.at, &live.route.counted);
            // A receiver that is gone needs no word.
            let _ = live.events.send(told);
            self.bury(id, &live.route);
        }
    }

    /// A route that takes requests, or that somebody who held it still does.
    pub fn route(&self, id: RouteId) -> Option<Arc<ServedRoute>> {
        let served = self.table.load().with_id(id).cloned();
        served.or_else(|| self.registry().held(id))
    }

    /// An instance of the route's policy is not called again.
    pub fn policy_failed(&self, route: RouteId) {
        if let Some(info) = self.registry().info(route) {
            info.failed.store(true, Ordering::Release);
        }
    }

    /// From now on the route takes no requests. Those that it has go on.
    pub fn disable(&self, route: RouteId, model: ModelId, hook: &'static str) {
        let Some(info) = self.registry().info(route) else { return };
        let (route, variant, plugin) =
            (info.name.clone(), info.variant.is_some(), info.policy.clone().unwrap_or_default());
        let model = self.models[model.index()].name.clone();
        // Another model's instance may have failed before.
        let _ = info.disabled.set(RouteDisabled { route, variant, plugin, model, hook });
    }

    /// A model can compute nothing any more. One line in the log stands for all requests that it costs.
    pub fn model_down(&self, model: ModelId, down: ModelDown) {
        let line = down.to_string();
        if self.down[model.index()].set(down).is_ok() {
            tracing::error!("{line}; until then requests that need the model fail");
        }
    }
}
