//! The observer: evaluations into batches for the writer, requests into lines.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use crossbeam_channel::{Sender, TrySendError};
use tokenrouter_plugin_api::random::uniform;
use tokenrouter_plugin_api::{DecisionKind, SignalSet};

use super::columns::{Columns, Row, Shape};
use super::manifest::{Manifest, Route, Settings};
use super::requests::{Entered, OpenRequests};
use super::writer::{Message, Status};
use crate::request::{Event, ModelId, NewRequest, RequestId, RouteId, SignalName};
use crate::subserver::observe::{Evaluation, Observer, Wanted};

/// Most rows that a model's thread hands over at once ...
const BATCH_ROWS: usize = 64;
/// ... and about how many bytes.
const BATCH_BYTES: usize = 256 << 10;
/// Stream of the draws of which requests are recorded.
const DRAW_STREAM: u64 = 0xfec0;

/// What the recorder knows of a route.
struct RecordedRoute {
    recorded: bool,
    /// Engine's indices of its models, in the policy's order.
    models: Vec<u32>,
}

/// Watches an engine. Locks are held for a few copies at most.
pub struct Recorder {
    started: Instant,
    settings: Settings,
    run: u32,
    routes: Vec<RecordedRoute>,
    /// Routes that took the place of one of the manifest.
    renewed: RwLock<BTreeMap<RouteId, RouteId>>,
    /// By model; each is used by its model's thread alone until the end.
    slots: Vec<Mutex<Slot>>,
    requests: Mutex<OpenRequests>,
    to_writer: Sender<Message>,
    pub(super) status: Arc<Status>,
}

/// Rows of one model on their way to the writer.
struct Slot {
    shape: Shape,
    /// Rows of a full batch.
    batch_rows: usize,
    batch: Columns,
    /// Names of signals that only some routes have, in the order of their first row.
    names: Vec<SignalName>,
    /// By route: places of its own signals in `names`, once known.
    places: Vec<Vec<usize>>,
    /// Scratch.
    own: Vec<(usize, f32)>,
    closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing here leaves a state that is half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slot {
    fn new(shape: Shape, routes: usize, shard_rows: usize) -> Self {
        let row_bytes = 96 + 2 * shape.hidden + 8 * shape.top_k;
        let batch_rows = (BATCH_BYTES / row_bytes).clamp(1, BATCH_ROWS).min(shard_rows);
        let (batch, places) = (Columns::new(shape, batch_rows), vec![Vec::new(); routes]);
        Self { shape, batch_rows, batch, names: Vec::new(), places, own: Vec::new(), closed: false }
    }

    fn take(&mut self) -> Columns {
        std::mem::replace(&mut self.batch, Columns::new(self.shape, self.batch_rows))
    }

    /// Collect the signals that the evaluation's route alone asks for; it is `route` in the manifest.
    fn gather_own(&mut self, route: RouteId, evaluation: &Evaluation<'_>) {
        let signals = evaluation.own_signals();
        let places = &mut self.places[route.index()];
        if places.len() != signals.values(evaluation.row).count() {
            let names = &mut self.names;
            let place = |name: SignalName| {
                names.iter().position(|known| *known == name).unwrap_or_else(|| {
                    names.push(name);
                    names.len() - 1
                })
            };
            *places = signals.names().into_iter().map(place).collect();
        }
        self.own.clear();
        self.own.extend(places.iter().copied().zip(signals.values(evaluation.row)));
    }
}

impl Recorder {
    pub(super) fn new(manifest: &Manifest, shapes: &[Shape], to_writer: Sender<Message>) -> Self {
        let index = |name: &String| manifest.models.iter().position(|model| model.name == *name);
        let route = |route: &Route| RecordedRoute {
            recorded: route.recorded,
            models: route.models.iter().filter_map(|m| index(&m.name)).map(|index| index as u32).collect(),
        };
        let routes: Vec<RecordedRoute> = manifest.routes.iter().map(route).collect();
        let shard_rows = manifest.settings.shard_rows as usize;
        Self {
            started: Instant::now(),
            settings: manifest.settings.clone(),
            run: manifest.run,
            slots: shapes.iter().map(|&shape| Mutex::new(Slot::new(shape, routes.len(), shard_rows))).collect(),
            routes,
            renewed: RwLock::default(),
            requests: Mutex::default(),
            to_writer,
            status: Arc::default(),
        }
    }

    /// The route of the manifest that `route` is, or came from.
    fn listed(&self, route: RouteId) -> RouteId {
        // The engine numbers the routes of its start first.
        if route.index() < self.routes.len() {
            return route;
        }
        self.renewed.read().unwrap_or_else(PoisonError::into_inner).get(&route).copied().unwrap_or(route)
    }

    /// Whether a request is recorded: a function of listed route, run and id, so that no table is needed for it.
    pub(super) fn records(&self, route: RouteId, id: RequestId) -> bool {
        let drawn =
            || self.settings.sample >= 1.0 || uniform(u64::from(self.run), id, DRAW_STREAM) < self.settings.sample;
        !self.status.stopped() && self.routes.get(route.index()).is_some_and(|route| route.recorded) && drawn()
    }

    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    fn send(&self, entered: Entered) {
        let full = match entered {
            Entered::Nothing => false,
            Entered::Lost => true,
            Entered::Ended(line) => {
                matches!(self.to_writer.try_send(Message::Request(line)), Err(TrySendError::Full(_)))
            }
        };
        if full {
            self.status.drop_request();
        }
    }

    /// Hand over the batches that are not full, and take no more rows.
    pub(super) fn close(&self, deadline: Instant) {
        for (model, slot) in self.slots.iter().enumerate() {
            let mut slot = lock(slot);
            slot.closed = true;
            let rows = slot.take();
            let count = rows.rows();
            let message = Message::Rows(ModelId(model as u32), rows);
            if count > 0 && self.to_writer.send_deadline(message, deadline).is_err_and(|e| e.is_timeout()) {
                self.status.drop_rows(count);
            }
        }
        // A writer that is gone has nothing to finish.
        let _ = self.to_writer.send_deadline(Message::Finish, deadline);
    }
}

impl Observer for Recorder {
    fn wanted(&self) -> Wanted {
        if self.status.stopped() {
            return Wanted::default();
        }
        Wanted { scalars: SignalSet::ALL, top_k: self.settings.top_k, hidden: self.settings.hidden }
    }

    fn submitted(&self, id: RequestId, new: &NewRequest) {
        let route = self.listed(new.route);
        if self.records(route, id) {
            let entered = lock(&self.requests).begin(id, route, new, self.settings.requests, self.now_us());
            self.send(entered);
        }
    }

    fn replaced(&self, old: RouteId, new: RouteId) {
        let old = self.listed(old);
        if self.routes.get(old.index()).is_some_and(|route| route.recorded) {
            self.renewed.write().unwrap_or_else(PoisonError::into_inner).insert(new, old);
        }
    }

    fn evaluated(&self, evaluation: &Evaluation<'_>) {
        let &Evaluation { row, columns, computed, hidden, .. } = evaluation;
        let route = self.listed(evaluation.route);
        if !self.records(route, evaluation.request) {
            return;
        }
        let (Some(slot), Some(of)) = (self.slots.get(evaluation.model.index()), self.routes.get(route.index())) else {
            return;
        };
        let mut slot = lock(slot);
        if slot.closed {
            return;
        }
        let (have, top_k) = (computed.top_k as usize, slot.shape.top_k);
        let wide = row * have..row * have + top_k;
        let (values, ids) = (columns.topk_values.get(wide.clone()), columns.topk_ids.get(wide));
        // Only a runner that gave less than it was asked for comes short.
        let (Some(topk_values), Some(topk_ids)) = (values, ids) else { return self.status.drop_rows(1) };
        if have < top_k || (slot.shape.hidden > 0 && hidden.len() != slot.shape.hidden) {
            return self.status.drop_rows(1);
        }
        let scalar = |column: &[f32]| column.get(row).copied().unwrap_or(f32::NAN);
        let (decision, decision_model) = match evaluation.decision.map(|decision| decision.kind()) {
            Some(Some(DecisionKind::Stay)) => (0, None),
            Some(Some(DecisionKind::Draft)) => (1, None),
            Some(Some(DecisionKind::To(to))) => (2, of.models.get(to as usize).copied()),
            Some(Some(DecisionKind::Accept)) => (3, None),
            None => (4, None),
            Some(None) => (u8::MAX, None),
        };
        slot.gather_own(route, evaluation);
        let Slot { batch, names, own, shape, .. } = &mut *slot;
        let row = Row {
            request: evaluation.request,
            position: evaluation.position,
            candidate: evaluation.candidate,
            draft: evaluation.draft,
            decision,
            decision_model,
            replacement: evaluation.decision.and_then(|decision| decision.replacement()),
            logprob: evaluation.logprob,
            scalars: [
                scalar(&columns.entropy),
                scalar(&columns.entropy_norm),
                scalar(&columns.top1_prob),
                scalar(&columns.margin),
                scalar(&columns.logsumexp),
                scalar(&columns.candidate_prob),
            ],
            time_us: self.now_us(),
            route: route.0,
            hidden: if shape.hidden > 0 { hidden } else { &[] },
            topk_values,
            topk_ids,
            own,
        };
        batch.push(&row, names);
        if batch.rows() >= slot.batch_rows {
            let rows = slot.take();
            let count = rows.rows();
            drop(slot);
            if let Err(TrySendError::Full(_)) = self.to_writer.try_send(Message::Rows(evaluation.model, rows)) {
                self.status.drop_rows(count);
            }
        }
    }

    fn event(&self, id: RequestId, event: &Event) {
        let entered = lock(&self.requests).event(id, event, self.now_us());
        self.send(entered);
    }

    fn cancelled(&self, id: RequestId) {
        let entered = lock(&self.requests).cancelled(id, self.now_us());
        self.send(entered);
    }
}
