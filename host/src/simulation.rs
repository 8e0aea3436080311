//! A world of sub-servers in virtual time: the real schedulers, policies and protocol on simulated
//! runners, with messages that take time, come twice, overtake each other, or are lost and sent
//! again. One thread; the same seed gives the same history.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use tokenrouter_plugin_api::random::uniform;

use crate::request::{Event, FinishReason, Ledger, LedgerError, ModelId, RequestError, RequestId, RequestSpec};
use crate::runner::simulated::Latency;
use crate::subserver::gate::{Gate, gate, thresholds};
use crate::subserver::{Effect, Message, PeerReq, SubServer};

/// How messages between sub-servers fare.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Shortest and longest way.
    pub delay: (Duration, Duration),
    /// Probability that a message comes a second time, later.
    pub duplicate: f64,
    /// Probability that a message is lost, noticed, and sent again after `resend`.
    pub lose: f64,
    pub resend: Duration,
}

impl Network {
    /// Messages arrive at once, in order, once.
    pub const PERFECT: Self =
        Self { delay: (Duration::ZERO, Duration::ZERO), duplicate: 0.0, lose: 0.0, resend: Duration::ZERO };
}

/// A model of the world.
pub struct SimulatedModel {
    pub server: SubServer,
    pub latency: Latency,
    pub min_batch: Vec<u32>,
    pub max_wait: Duration,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    Finished(FinishReason),
    Failed(RequestError),
    Cancelled,
}

/// The client's side of a request.
#[derive(Debug, Default)]
pub struct Client {
    pub ledger: Ledger,
    pub ending: Option<Ending>,
    /// When it ended.
    pub ended_at: Duration,
    /// A contradiction in the ledger, which must never happen.
    pub contradiction: Option<LedgerError>,
    /// Events that came after the last one.
    pub late: u32,
}

#[derive(Clone, Debug)]
enum Happening {
    Deliver(ModelId, Message),
    Submit(Arc<RequestSpec>),
    Cancel(RequestId),
    Forget(ModelId, RequestId),
    StepDone(ModelId),
    Look(ModelId),
}

struct Place {
    model: SimulatedModel,
    /// A forward is under way; its effects come out at its end.
    busy: bool,
    inbox: Vec<Message>,
    waiting_since: Option<Duration>,
}

/// The world.
pub struct World {
    places: Vec<Place>,
    /// Entry and all models of each route.
    routes: Vec<(ModelId, Vec<ModelId>)>,
    network: Network,
    seed: u64,
    draws: u64,
    now: Duration,
    /// Ordered by time, then by when they were entered.
    agenda: BinaryHeap<Reverse<(Duration, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    entered: u64,
    pub clients: BTreeMap<RequestId, Client>,
    specs: BTreeMap<RequestId, Arc<RequestSpec>>,
    live: usize,
    /// Models that have gone down, in order.
    pub down: Vec<ModelId>,
}

impl World {
    /// `routes`: for each route its entry and all its models.
    pub fn new(models: Vec<SimulatedModel>, routes: Vec<(ModelId, Vec<ModelId>)>, network: Network, seed: u64) -> Self {
        let place = |model| Place { model, busy: false, inbox: Vec::new(), waiting_since: None };
        Self {
            places: models.into_iter().map(place).collect(),
            routes,
            network,
            seed,
            draws: 0,
            now: Duration::ZERO,
            agenda: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            entered: 0,
            clients: BTreeMap::new(),
            specs: BTreeMap::new(),
            live: 0,
            down: Vec::new(),
        }
    }

    /// Virtual time.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// The sub-servers.
    pub fn servers(&self) -> impl Iterator<Item = &SubServer> {
        self.places.iter().map(|p| &p.model.server)
    }

    /// A request arrives at `at`.
    pub fn submit(&mut self, at: Duration, spec: Arc<RequestSpec>) {
        self.enter(at, Happening::Submit(spec));
    }

    /// The client of `id` goes away at `at`.
    pub fn cancel(&mut self, at: Duration, id: RequestId) {
        self.enter(at, Happening::Cancel(id));
    }

    /// Deliver a message of one's own making at `at`. For tests.
    pub fn inject(&mut self, at: Duration, to: ModelId, message: Message) {
        self.enter(at, Happening::Deliver(to, message));
    }

    /// `model` loses its replica of `id` at `at`, if it is pending and no message is on its way to it.
    pub fn lose_state(&mut self, at: Duration, model: ModelId, id: RequestId) {
        self.enter(at, Happening::Forget(model, id));
    }

    fn forget(&mut self, model: ModelId, id: RequestId) {
        let concerns = |m: &Message| matches!(m, Message::Peer(p) if p.id == id && p.to == model);
        let place = &mut self.places[model.index()];
        let under_way = place.inbox.iter().any(concerns)
            || self.happenings.values().any(|h| matches!(h, Happening::Deliver(_, m) if concerns(m)));
        if !place.busy && !under_way {
            place.model.server.forget(id);
        }
    }

    fn draw(&mut self) -> f64 {
        self.draws += 1;
        uniform(self.seed, self.draws, 1 << 20)
    }

    fn enter(&mut self, at: Duration, happening: Happening) {
        self.entered += 1;
        self.agenda.push(Reverse((at, self.entered)));
        self.happenings.insert(self.entered, happening);
    }

    /// Let one thing happen. False when nothing is left.
    pub fn advance(&mut self) -> bool {
        let Some(Reverse((at, number))) = self.agenda.pop() else { return false };
        self.now = self.now.max(at);
        match self.happenings.remove(&number) {
            Some(Happening::Deliver(to, message)) => {
                if let Some(place) = self.places.get_mut(to.index()) {
                    place.inbox.push(message);
                }
                self.work(to);
            }
            Some(Happening::Submit(spec)) => {
                self.live += 1;
                self.clients.insert(spec.id, Client::default());
                self.specs.insert(spec.id, spec.clone());
                let entry = self.routes[spec.new.route.index()].0;
                self.enter(self.now, Happening::Deliver(entry, Message::Submit(spec)));
                self.look_again();
            }
            Some(Happening::Cancel(id)) => self.cancel_now(id),
            Some(Happening::Forget(model, id)) => self.forget(model, id),
            Some(Happening::StepDone(model)) => {
                self.places[model.index()].busy = false;
                self.carry_out(model);
                self.work(model);
            }
            Some(Happening::Look(model)) => self.work(model),
            None => {}
        }
        true
    }

    fn end(&mut self, id: RequestId, ending: Ending) -> bool {
        let Some(client) = self.clients.get_mut(&id) else { return false };
        if client.ending.is_some() {
            client.late += 1;
            return false;
        }
        client.ending = Some(ending);
        self.live -= 1;
        client.ended_at = self.now;
        self.look_again();
        true
    }

    /// The gates depend on how many requests there are.
    fn look_again(&mut self) {
        for model in 0..self.places.len() {
            self.enter(self.now, Happening::Look(ModelId(model as u32)));
        }
    }

    fn cancel_now(&mut self, id: RequestId) {
        if self.clients.get(&id).is_some_and(|c| c.ending.is_none()) && self.end(id, Ending::Cancelled) {
            let route = self.specs[&id].new.route.index();
            for model in self.routes[route].1.clone() {
                self.enter(self.now, Happening::Deliver(model, Message::Cancel(id)));
            }
        }
    }

    /// One turn of the decode loop, unless a forward is under way.
    fn work(&mut self, model: ModelId) {
        let ladders: Vec<Vec<u32>> = self.places.iter().map(|p| p.model.min_batch.clone()).collect();
        let threshold = thresholds(&ladders, self.live)[model.index()];
        let now = self.now;
        let place = &mut self.places[model.index()];
        if place.busy {
            return;
        }
        for message in place.inbox.drain(..) {
            place.model.server.take(message);
        }
        let ready = place.model.server.ready();
        place.waiting_since = (ready > 0).then(|| place.waiting_since.unwrap_or(now));
        match gate(ready, threshold, place.waiting_since, place.model.max_wait, now) {
            Gate::Open => {
                // What came out before the forward goes out before it.
                self.carry_out(model);
                let place = &mut self.places[model.index()];
                let rows = place.model.server.step();
                place.waiting_since = None;
                place.busy = true;
                let end = now + place.model.latency.of(rows);
                self.enter(end, Happening::StepDone(model));
            }
            Gate::Closed(moment) => {
                self.carry_out(model);
                if let Some(moment) = moment {
                    self.enter(moment, Happening::Look(model));
                }
            }
        }
    }

    fn carry_out(&mut self, model: ModelId) {
        let effects: Vec<Effect> = self.places[model.index()].model.server.effects().collect();
        for effect in effects {
            match effect {
                Effect::Send(message) => self.send(message),
                Effect::Event(id, event) => self.hear(id, event),
                Effect::ModelDown(_) => self.down.push(model),
                Effect::PolicyFailed { .. } | Effect::PolicyMisled { .. } => {}
            }
        }
    }

    fn send(&mut self, message: PeerReq) {
        let (least, most) = self.network.delay;
        let way = |draw: f64| least + (most - least).mul_f64(draw);
        let mut at = self.now + way(self.draw());
        while self.draw() < self.network.lose {
            at += self.network.resend;
        }
        if self.draw() < self.network.duplicate {
            let later = at + (most + self.network.resend).mul_f64(self.draw() * 3.0);
            self.enter(later, Happening::Deliver(message.to, Message::Peer(message.clone())));
        }
        self.enter(at, Happening::Deliver(message.to, Message::Peer(message)));
    }

    fn hear(&mut self, id: RequestId, event: Event) {
        match event {
            Event::Committed { start, tokens } => {
                let Some(client) = self.clients.get_mut(&id) else { return };
                match (&client.ending, client.ledger.enter(start, tokens)) {
                    // What was on its way when the client left does not matter.
                    (Some(Ending::Cancelled), _) => {}
                    (Some(_), _) => client.late += 1,
                    (None, Err(error)) => client.contradiction = Some(error),
                    (None, Ok(_)) => {}
                }
            }
            Event::PromptCached { .. } => {}
            Event::Finished { reason, .. } => {
                if self.clients.get(&id).is_some_and(|c| c.ending != Some(Ending::Cancelled)) {
                    self.end(id, Ending::Finished(reason));
                }
            }
            Event::Failed(error) => {
                if self.clients.get(&id).is_some_and(|c| c.ending != Some(Ending::Cancelled)) {
                    self.end(id, Ending::Failed(error));
                }
            }
        }
    }
}
