//! A world of sub-servers in virtual time: the real schedulers, policies and protocol on simulated
//! runners, with messages that take time, come twice, overtake each other, or are lost and sent
//! again. One thread; the same seed gives the same history.

mod agenda;
mod chance;
mod ledgers;
pub mod plan;
pub mod run;
pub mod summary;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use agenda::Agenda;
pub use ledgers::{Client, Ending, Ledgers};
use tokenrouter_plugin_api::random::uniform;

use crate::request::{Event, ModelId, RequestId, RequestSpec};
use crate::runner::simulated::Latency;
use crate::subserver::coordinator::{Coordinator, LadderError, Ladders, Waiting};
use crate::subserver::gate::{Gate, Schedule};
use crate::subserver::pacer::Pacer;
use crate::subserver::{Effect, Message, PeerReq, Status, SubServer};

/// Ends of steps on one host that lie closer together than this differ by rounding alone.
const ROUNDING: Duration = Duration::from_nanos(4);

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

#[derive(Clone, Debug)]
enum Happening {
    Deliver(ModelId, Letter),
    Submit(Arc<RequestSpec>),
    Cancel(RequestId),
    Forget(ModelId, RequestId),
    /// The step with this number ends, unless it was rescheduled.
    StepDone(ModelId, u64),
    Look(ModelId),
}

#[derive(Clone, Debug)]
struct Letter {
    message: Message,
    /// The coordinator was told that it is on its way.
    announced: bool,
}

/// A forward under way; its effects come out at its end.
#[derive(Clone, Copy, Debug)]
struct Running {
    /// Nanoseconds of undisturbed work that were left at `since`.
    left: f64,
    since: Duration,
    factor: f64,
    end: Duration,
    began: Duration,
    number: u64,
}

struct Place {
    model: SimulatedModel,
    pacer: Pacer,
    running: Option<Running>,
    inbox: Vec<Letter>,
    /// A look that is on the agenda.
    timer: Option<Duration>,
    /// Its gate is to be looked at.
    touched: bool,
    /// How long the steps that have ended took.
    busy: Duration,
}

/// The world.
pub struct World<A> {
    places: Vec<Place>,
    /// By host.
    hosts: Vec<Vec<usize>>,
    /// Entry and all models of each route.
    routes: Vec<(ModelId, Vec<ModelId>)>,
    network: Network,
    coordinator: Arc<Coordinator>,
    seed: u64,
    draws: u64,
    steps: u64,
    now: Duration,
    agenda: Agenda<Happening>,
    live: HashMap<RequestId, Arc<RequestSpec>>,
    effects: Vec<Effect>,
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
        let mut hosts = vec![Vec::new(); models.iter().map(|model| model.host + 1).max().unwrap_or(0)];
        models.iter().enumerate().for_each(|(index, model)| hosts[model.host].push(index));
        let place = |(index, model)| Place {
            model,
            pacer: Pacer::new(coordinator.clone(), ModelId(index as u32)),
            running: None,
            inbox: Vec::new(),
            timer: None,
            touched: false,
            busy: Duration::ZERO,
        };
        Self {
            places: models.into_iter().enumerate().map(place).collect(),
            hosts,
            routes,
            network,
            coordinator,
            seed,
            draws: 0,
            steps: 0,
            now: Duration::ZERO,
            agenda: Agenda::default(),
            live: HashMap::new(),
            effects: Vec::new(),
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
        self.places.iter().map(|p| &p.model.server)
    }

    /// Whether a forward of `model` is under way.
    pub fn is_running(&self, model: ModelId) -> bool {
        self.places[model.index()].running.is_some()
    }

    /// How long the forwards of `model` took that have ended.
    pub fn busy(&self, model: ModelId) -> Duration {
        self.places[model.index()].busy
    }

    /// A request arrives at `at`.
    pub fn submit(&mut self, at: Duration, spec: Arc<RequestSpec>) {
        self.agenda.enter(at, Happening::Submit(spec));
    }

    /// The client of `id` goes away at `at`.
    pub fn cancel(&mut self, at: Duration, id: RequestId) {
        self.agenda.enter(at, Happening::Cancel(id));
    }

    /// Deliver a message of one's own making at `at`. For tests.
    pub fn inject(&mut self, at: Duration, to: ModelId, message: Message) {
        self.agenda.enter(at, Happening::Deliver(to, Letter { message, announced: false }));
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
                let (id, entry) = (spec.id, self.routes[spec.new.route.index()].0);
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
                for model in self.routes[spec.new.route.index()].1.clone() {
                    self.deliver(model, Letter { message: Message::Cancel(id), announced: false });
                }
            }
            Happening::Forget(model, id) => self.forget(model, id),
            Happening::StepDone(model, number) => {
                if self.places[model.index()].running.is_some_and(|running| running.number == number) {
                    self.end_step(model);
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
        if place.running.is_none() && !under_way {
            place.model.server.forget(id);
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
            let open = |place: &Place| place.running.is_none();
            if let Some(model) = self.places.iter().rposition(|place| open(place) && !place.inbox.is_empty()) {
                self.take(model);
            } else if let Some(model) = self.places.iter().rposition(|place| open(place) && place.touched) {
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
            place.model.server.take(letter.message);
        }
        place.touched = true;
        self.carry_out(model, false);
    }

    /// Look at the gate of an idle model, and start a step if it is open.
    fn look(&mut self, model: usize) {
        let now = self.now;
        let place = &mut self.places[model];
        place.touched = false;
        let ready = place.model.server.ready();
        match place.pacer.look(ready, now) {
            Gate::Open => {
                let before = place.model.server.counters();
                place.pacer.start(ready, before, now);
                let rows = place.model.server.step();
                let requests = place.model.server.counters().batched - before.batched;
                let work = place.model.latency.of(requests as usize, rows);
                self.steps += 1;
                let (left, end) = (work.as_nanos() as f64, now + work);
                place.running = Some(Running { left, since: now, factor: 1.0, end, began: now, number: self.steps });
                let host = place.model.host;
                self.agenda.enter(end, Happening::StepDone(ModelId(model as u32), self.steps));
                self.stretch(host);
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

    fn end_step(&mut self, model: ModelId) {
        let place = &mut self.places[model.index()];
        let began = place.running.take().map_or(self.now, |step| step.began);
        place.busy += self.now - began;
        place.touched = true;
        let host = place.model.host;
        self.stretch(host);
        self.carry_out(model.index(), true);
        let place = &mut self.places[model.index()];
        let (ready, counters) = (place.model.server.ready(), place.model.server.counters());
        place.pacer.finish(ready, counters, self.now);
        self.wake(model.index());
    }

    /// The models that run on a host have changed: so have the ends of their steps.
    fn stretch(&mut self, host: usize) {
        if self.hosts[host].iter().all(|&model| self.places[model].model.stretch.is_empty()) {
            return;
        }
        let running = self.hosts[host].iter().filter(|&&model| self.places[model].running.is_some()).count();
        for at in 0..self.hosts[host].len() {
            let model = self.hosts[host][at];
            let place = &mut self.places[model];
            let Some(step) = &mut place.running else { continue };
            let stretch = &place.model.stretch;
            let others = stretch.get(..running - 1).and_then(<[f64]>::last).or(stretch.last().filter(|_| running > 1));
            let factor = others.copied().unwrap_or(1.0);
            if factor == step.factor {
                continue;
            }
            step.left -= (self.now - step.since).as_nanos() as f64 / step.factor;
            (step.since, step.factor) = (self.now, factor);
            self.steps += 1;
            step.number = self.steps;
            step.end = self.now + Duration::from_nanos((step.left.max(0.0) * factor).round() as u64);
            let end = step.end;
            let ends = self.hosts[host].iter().filter_map(|&other| Some(self.places[other].running.as_ref()?.end));
            let same = ends.filter(|other| *other >= self.now && other.abs_diff(end) <= ROUNDING).min();
            let end = same.unwrap_or(end);
            if let Some(step) = &mut self.places[model].running {
                step.end = end;
            }
            self.agenda.enter(end, Happening::StepDone(ModelId(model as u32), self.steps));
        }
    }

    /// Carry out what a model wants done, after a step or after taking messages.
    fn carry_out(&mut self, model: usize, stepped: bool) {
        let mut effects = std::mem::take(&mut self.effects);
        effects.extend(self.places[model].model.server.effects());
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
                Effect::PolicyFailed { .. } | Effect::PolicyMisled { .. } => {}
            }
        }
        self.effects = effects;
    }

    fn draw(&mut self) -> f64 {
        self.draws += 1;
        uniform(self.seed, self.draws, 1 << 20)
    }

    fn send(&mut self, message: PeerReq) {
        let (from, to) = (message.from, message.to);
        let letter = Letter { message: Message::Peer(message), announced: true };
        self.coordinator.sent(to, &letter.message);
        let host = |model: ModelId| self.places[model.index()].model.host;
        if self.network == Network::PERFECT || !self.network.within_hosts && host(from) == host(to) {
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
        if self.network.duplicate > 0.0 && self.draw() < self.network.duplicate {
            let later = at + (most + self.network.resend).mul_f64(self.draw() * 3.0);
            self.agenda.enter(later, Happening::Deliver(to, Letter { announced: false, ..letter.clone() }));
        }
        self.agenda.enter(at, Happening::Deliver(to, letter));
    }

    fn hear(&mut self, id: RequestId, event: Event) {
        let last = !matches!(event, Event::PromptCached { .. } | Event::Committed { .. });
        self.audience.hear(self.now, id, event);
        if last && self.live.remove(&id).is_some() {
            self.live_changed();
        }
    }
}
