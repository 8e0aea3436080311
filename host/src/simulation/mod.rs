//! A world of sub-servers in virtual time: the real schedulers, policies and protocol on simulated
//! runners, with messages that take time, come twice, overtake each other, or are lost and sent
//! again. One thread; the same seed gives the same history.

mod agenda;
pub(crate) mod chance;
mod hosts;
mod ledgers;
pub mod plan;
mod routes;
pub mod run;
pub mod summary;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use agenda::Agenda;
use hosts::{End, Hosts};
pub use ledgers::{Client, Ending, Ledgers};
use routes::Route;
use tokenrouter_plugin_api::random::uniform;

use crate::online::{Reading, Times};
use crate::request::{Event, ModelId, RequestId, RequestSpec, RouteId};
use crate::runner::simulated::Latency;
use crate::subserver::coordinator::{Coordinator, LadderError, Ladders, Waiting};
use crate::subserver::gate::{Gate, Schedule};
use crate::subserver::pacer::Pacer;
use crate::subserver::{Attachment, Effect, Message, PeerReq, Status, Stepped, SubServer};

/// How messages between sub-servers fare.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Shortest and longest way.
    pub delay: (Duration, Duration),
    /// Whether messages within a host take it as well; else those arrive at once.
    pub within_hosts: bool,
    /// Probability that a message comes a second time, later.
    pub duplicate: f64,
    /// Probability that a message is lost, noticed, and sent again after `resend`.
    pub lose: f64,
    pub resend: Duration,
}

impl Network {
    /// Messages arrive at once, in order, once.
    pub const PERFECT: Self = Self {
        delay: (Duration::ZERO, Duration::ZERO),
        within_hosts: false,
        duplicate: 0.0,
        lose: 0.0,
        resend: Duration::ZERO,
    };
}

/// A model of the world.
pub struct SimulatedModel {
    pub server: SubServer,
    pub latency: Latency,
    pub waiting: Waiting,
    /// Models on one host slow each other down.
    pub host: usize,
    /// Factors of the time of a step while 1, 2, … other models of the host run; the last serves all beyond.
    /// Empty: it is not slowed down.
    pub stretch: Vec<f64>,
}

/// The clients of a world.
pub trait Audience {
    fn submitted(&mut self, now: Duration, id: RequestId);
    /// The client itself went away.
    fn cancelled(&mut self, now: Duration, id: RequestId);
    /// What the client is told.
    fn hear(&mut self, now: Duration, id: RequestId, event: Event);
}

enum Happening {
    Deliver(ModelId, Letter),
    Submit(Arc<RequestSpec>),
    Cancel(RequestId),
    Forget(ModelId, RequestId),
    Attach(RouteId, Vec<(ModelId, Attachment)>),
    Retire(RouteId),
    StepDone(End),
    Look(ModelId),
}

#[derive(Debug)]
struct Letter {
    message: Message,
    /// The coordinator was told that it is on its way.
    announced: bool,
}

struct Place {
    server: SubServer,
    latency: Latency,
    pacer: Pacer,
    inbox: Vec<Letter>,
    /// What the step under way computes.
    stepped: Stepped,
    /// A look that is on the agenda.
    timer: Option<Duration>,
    /// Its gate is to be looked at.
    touched: bool,
}

/// The world.
pub struct World<A> {
    places: Vec<Place>,
    hosts: Hosts,
    /// By id; they are never forgotten.
    routes: Vec<Route>,
    network: Network,
    coordinator: Arc<Coordinator>,
    seed: u64,
    draws: u64,
    now: Duration,
    agenda: Agenda<Happening>,
    live: HashMap<RequestId, Arc<RequestSpec>>,
    /// Empty between uses.
    effects: Vec<Effect>,
    ends: Vec<End>,
    /// Told of everything that clients are told.
    pub audience: A,
    /// Models that have gone down, in order.
    pub down: Vec<ModelId>,
}

impl<A: Audience> World<A> {
    /// `routes`: for each route its entry and all its models.
    pub fn new(
        models: Vec<SimulatedModel>,
        routes: Vec<(ModelId, Vec<ModelId>)>,
        (schedule, network): (Schedule, Network),
        seed: u64,
        audience: A,
    ) -> Self {
        let waiting = models.iter().map(|model| model.waiting.clone()).collect();
        let coordinator = Coordinator::new(schedule, waiting, routes.iter().map(|(_, models)| &models[..]));
        let coordinator = Arc::new(coordinator);
        let hosts = Hosts::new(models.iter().map(|model| (model.host, model.stretch.clone())));
        let place = |(index, SimulatedModel { server, latency, .. })| Place {
            server,
            latency,
            pacer: Pacer::new(coordinator.clone(), ModelId(index as u32)),
            inbox: Vec::new(),
            stepped: Stepped::default(),
            timer: None,
            touched: false,
        };
        Self {
            places: models.into_iter().enumerate().map(place).collect(),
            hosts,
            routes: routes.into_iter().map(Route::new).collect(),
            network,
            coordinator,
            seed,
            draws: 0,
            now: Duration::ZERO,
            agenda: Agenda::default(),
            live: HashMap::new(),
            effects: Vec::new(),
            ends: Vec::new(),
            audience,
            down: Vec::new(),
        }
    }

    /// Virtual time.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// The sub-servers.
    pub fn servers(&self) -> impl Iterator<Item = &SubServer> {
        self.places.iter().map(|place| &place.server)
    }

    /// Whether a forward of `model` is under way.
    pub fn is_running(&self, model: ModelId) -> bool {
        self.hosts.is_running(model.index())
    }

    /// How long the forwards of `model` took that have ended.
    pub fn busy(&self, model: ModelId) -> Duration {
        self.hosts.busy(model.index())
    }

    /// What a tuner reads; times are for the audience to tell.
    pub fn reading(&self) -> Reading {
        let observed = (0..self.places.len()).map(|model| self.coordinator.observed(ModelId(model as u32)));
        let (live, most_live) = (self.coordinator.live(), self.coordinator.take_most_live());
        let ladders = Ladders::clone(&self.coordinator.ladders().1);
        Reading { observed: observed.collect(), live, most_live, times: Times::default(), ladders }
    }

    /// A request arrives at `at`.
    pub fn submit(&mut self, at: Duration, spec: Arc<RequestSpec>) {
        self.agenda.enter(at, Happening::Submit(spec));
    }

    /// The client of `id` goes away at `at`.
    pub fn cancel(&mut self, at: Duration, id: RequestId) {
        self.agenda.enter(at, Happening::Cancel(id));
    }

    /// `model` loses its replica of `id` at `at`, if it is pending and no message is on its way to it.
    pub fn lose_state(&mut self, at: Duration, model: ModelId, id: RequestId) {
        self.agenda.enter(at, Happening::Forget(model, id));
    }

    /// Put other ladders in force now.
    pub fn set_ladders(&mut self, ladders: Ladders) -> Result<(), LadderError> {
        self.coordinator.replace(ladders)?;
        self.touch_all();
        self.settle();
        Ok(())
    }

    /// Let everything of the next moment happen. False when nothing is left.
    pub fn advance(&mut self) -> bool {
        let Some(at) = self.agenda.next() else { return false };
        self.now = self.now.max(at);
        while self.agenda.next().is_some_and(|at| at <= self.now) {
            match self.agenda.pop() {
                Some(happening) => self.happen(happening),
                None => break,
            }
        }
        self.settle();
        true
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Deliver(to, letter) => self.deliver(to, letter),
            Happening::Submit(spec) => {
                let (id, entry) = (spec.id, self.routes[spec.new.route.index()].entry);
                self.live.insert(id, spec.clone());
                self.audience.submitted(self.now, id);
                self.live_changed();
                let message = Message::Submit(spec);
                self.coordinator.sent(entry, &message);
                self.deliver(entry, Letter { message, announced: true });
            }
            Happening::Cancel(id) => {
                let Some(spec) = self.live.remove(&id) else { return };
                self.audience.cancelled(self.now, id);
                self.live_changed();
                for model in self.routes[spec.new.route.index()].models.clone() {
                    self.deliver(model, Letter { message: Message::Cancel(id), announced: false });
                }
                self.let_go(spec.new.route);
            }
            Happening::Forget(model, id) => self.forget(model, id),
            Happening::Attach(route, attachments) => self.begin_route(route, attachments),
            Happening::Retire(route) => self.end_route(route),
            Happening::StepDone(end) => {
                let current = self.hosts.finish(end, &mut self.ends);
                self.enter_ends();
                if current {
                    self.end_step(end.model);
                }
            }
            Happening::Look(model) => {
                let place = &mut self.places[model.index()];
                place.timer = place.timer.filter(|timer| *timer > self.now);
                place.touched = true;
            }
        }
    }

    fn deliver(&mut self, to: ModelId, letter: Letter) {
        if let Some(place) = self.places.get_mut(to.index()) {
            place.inbox.push(letter);
            place.touched = true;
        }
    }

    fn forget(&mut self, model: ModelId, id: RequestId) {
        let concerns = |m: &Letter| matches!(&m.message, Message::Peer(p) if p.id == id && p.to == model);
        let place = &mut self.places[model.index()];
        let under_way = place.inbox.iter().any(concerns)
            || self.agenda.iter().any(|h| matches!(h, Happening::Deliver(_, m) if concerns(m)));
        if !self.hosts.is_running(model.index()) && !under_way {
            place.server.forget(id);
        }
    }

    fn live_changed(&mut self) {
        self.coordinator.set_live(self.live.len());
        if self.coordinator.delays() {
            self.touch_all();
        }
    }

    fn touch_all(&mut self) {
        self.places.iter_mut().for_each(|place| place.touched = true);
    }

    /// Look at the gates that something has happened to, once all messages of this moment are taken. Models
    /// with higher numbers go first.
    fn settle(&mut self) {
        loop {
            let idle = |(model, _): &(usize, &Place)| !self.hosts.is_running(*model);
            let mut places = self.places.iter().enumerate().filter(idle);
            if let Some((model, _)) = places.clone().rfind(|(_, place)| !place.inbox.is_empty()) {
                self.take(model);
            } else if let Some((model, _)) = places.rfind(|(_, place)| place.touched) {
                self.look(model);
            } else {
                return;
            }
        }
    }

    /// Take what has arrived at an idle model.
    fn take(&mut self, model: usize) {
        let place = &mut self.places[model];
        for letter in place.inbox.drain(..) {
            if letter.announced {
                place.pacer.arrived(&letter.message);
            }
            place.server.take(letter.message);
        }
        place.touched = true;
        self.carry_out(model, false);
    }

    /// Look at the gate of an idle model, and start a step if it is open.
    fn look(&mut self, model: usize) {
        let now = self.now;
        let place = &mut self.places[model];
        place.touched = false;
        let ready = place.server.ready();
        match place.pacer.look(ready, now) {
            Gate::Open => {
                place.pacer.start(ready, now);
                place.stepped = place.server.step();
                let work = place.latency.of(place.stepped.requests, place.stepped.rows);
                self.hosts.start(model, work, now, &mut self.ends);
                self.enter_ends();
            }
            Gate::Closed(Some(moment)) => {
                if place.timer.is_none_or(|timer| timer > moment) {
                    place.timer = Some(moment);
                    self.agenda.enter(moment, Happening::Look(ModelId(model as u32)));
                }
            }
            Gate::Closed(None) => {}
        }
        self.wake(model);
    }

    fn wake(&mut self, model: usize) {
        let wakes: Vec<ModelId> = self.places[model].pacer.wakes().collect();
        wakes.into_iter().for_each(|model| self.places[model.index()].touched = true);
    }

    fn enter_ends(&mut self) {
        self.ends.drain(..).for_each(|end| self.agenda.enter(end.at, Happening::StepDone(end)));
    }

    fn end_step(&mut self, model: usize) {
        self.places[model].touched = true;
        self.carry_out(model, true);
        let place = &mut self.places[model];
        place.pacer.finish(place.server.ready(), place.stepped, place.server.counted(), self.now);
        self.wake(model);
    }

    /// Carry out what a model wants done, after a step or after taking messages.
    fn carry_out(&mut self, model: usize, stepped: bool) {
        let mut effects = self.places[model].server.exchange_effects(std::mem::take(&mut self.effects));
        for effect in effects.drain(..) {
            match effect {
                Effect::Send(message) => {
                    if stepped && matches!(message.status, Status::New | Status::Need) {
                        self.places[model].pacer.handed_to(message.to);
                    }
                    self.send(message);
                }
                Effect::Event(id, event) => self.hear(id, event),
                Effect::ModelDown(_) => self.down.push(ModelId(model as u32)),
                Effect::PolicyFailed { .. } | Effect::PolicyNote { .. } | Effect::Detached(_) => {}
            }
        }
        self.effects = effects;
    }

    fn draw(&mut self) -> f64 {
        self.draws += 1;
        uniform(self.seed, self.draws, 1 << 20)
    }

    fn send(&mut self, message: Box<PeerReq>) {
        let (from, to) = (message.from, message.to);
        let letter = Letter { message: Message::Peer(message), announced: true };
        self.coordinator.sent(to, &letter.message);
        let same_host = self.hosts.same(from.index(), to.index());
        if self.network == Network::PERFECT || !self.network.within_hosts && same_host {
            return self.deliver(to, letter);
        }
        let (least, most) = self.network.delay;
        let mut at = self.now + least;
        if most > least {
            at += (most - least).mul_f64(self.draw());
        }
        while self.network.lose > 0.0 && self.draw() < self.network.lose {
            at += self.network.resend;
        }
        if self.network.duplicate > 0.0
            && self.draw() < self.network.duplicate
            && let Message::Peer(message) = &letter.message
        {
            let copy = Letter { message: Message::Peer(message.clone()), announced: false };
            let later = at + (most + self.network.resend).mul_f64(self.draw() * 3.0);
            self.agenda.enter(later, Happening::Deliver(to, copy));
        }
        self.agenda.enter(at, Happening::Deliver(to, letter));
    }

    fn hear(&mut self, id: RequestId, event: Event) {
        let last = event.is_last();
        self.audience.hear(self.now, id, event);
        if last && let Some(spec) = self.live.remove(&id) {
            self.live_changed();
            self.let_go(spec.new.route);
        }
    }
}
