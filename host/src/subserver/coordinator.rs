//! What the models of a server share so that their batches suit each other: schedule, ladders, live
//! requests, turns, and who is running. No lock is taken on the way of a step; time is an argument.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::counts::StepCounts;
use super::gate::{Schedule, Underway};
use super::message::{Message, Status};
use super::observed::{BusyClock, Observations, Observed};
use super::turns::Turns;
use crate::request::ModelId;

/// By model: the requests that must be ready before a forward starts, indexed by live requests less one; the
/// last entry serves all beyond.
pub type Ladders = Vec<Vec<u32>>;

/// How one model waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Its entry of [`Ladders`].
    pub min_batch: Vec<u32>,
    /// Longest wait under any schedule.
    pub max_wait: Duration,
    /// It does not start while another model that may hand requests to it ends within this time. Zero: never.
    pub hold: Duration,
}

/// Ladders that cannot take the place of others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LadderError {
    #[error("{given} ladders for {models} models; give each model one")]
    Count { given: usize, models: usize },
    #[error("the ladder of model {model} is empty or asks for no request; its steps must be at least 1")]
    Steps { model: usize },
}

/// One model, as the others see it.
#[derive(Debug)]
pub(super) struct Place {
    /// In nanoseconds.
    max_wait: AtomicU64,
    hold: AtomicU64,
    /// By model: whether it is of a route with this one, so that it may hand requests to it.
    meets: Vec<AtomicBool>,
    pub busy: BusyClock,
    /// Of [`Underway`], in nanoseconds; 0 where nothing is under way or its end is unknown.
    ends: AtomicU64,
    overdue: AtomicU64,
    /// It waits for another model to end.
    pub holding: AtomicBool,
    pub observations: Observations,
    pub counts: StepCounts,
}

impl Place {
    pub fn max_wait(&self) -> Duration {
        Duration::from_nanos(self.max_wait.load(Ordering::Relaxed))
    }

    pub fn hold(&self) -> Duration {
        Duration::from_nanos(self.hold.load(Ordering::Relaxed))
    }

    /// Models of a route with it.
    pub fn peers(&self) -> impl Iterator<Item = usize> {
        (0..).zip(&self.meets).filter(|(_, meets)| meets.load(Ordering::Relaxed)).map(|(peer, _)| peer)
    }

    /// A step began that should end as `underway` says.
    pub fn expect(&self, underway: Option<Underway>) {
        let nanos = |moment: fn(&Underway) -> Duration| underway.as_ref().map_or(0, |u| moment(u).as_nanos() as u64);
        self.overdue.store(nanos(|u| u.overdue), Ordering::Relaxed);
        self.ends.store(nanos(|u| u.ends), Ordering::Release);
    }

    /// The step under way, if its end is known.
    pub fn underway(&self) -> Option<Underway> {
        let ends = self.ends.load(Ordering::Acquire);
        let overdue = || Duration::from_nanos(self.overdue.load(Ordering::Relaxed));
        (ends > 0).then(|| Underway { ends: Duration::from_nanos(ends), overdue: overdue() })
    }
}

/// The shared state of the models of one server.
#[derive(Debug)]
pub struct Coordinator {
    schedule: Schedule,
    ladders: Mutex<Arc<Ladders>>,
    /// Grows when the ladders are replaced, so that the models' threads need not look into the lock.
    generation: AtomicU64,
    /// Some ladder has a step above 1, and the schedule uses it.
    delays: AtomicBool,
    live: AtomicUsize,
    /// The most that were live at once since it was last asked for.
    most_live: AtomicUsize,
    pub(super) turns: Option<Turns>,
    pub(super) places: Vec<Place>,
}

impl Coordinator {
    /// `models` with an entry each, `routes` with the models of each.
    pub fn new<'a>(schedule: Schedule, models: Vec<Waiting>, routes: impl Iterator<Item = &'a [ModelId]>) -> Self {
        let count = models.len();
        let place = |waiting: &Waiting| Place {
            max_wait: AtomicU64::new(nanos(waiting.max_wait)),
            hold: AtomicU64::new(nanos(waiting.hold)),
            meets: (0..count).map(|_| AtomicBool::new(false)).collect(),
            busy: BusyClock::default(),
            ends: AtomicU64::new(0),
            overdue: AtomicU64::new(0),
            holding: AtomicBool::new(false),
            observations: Observations::new(count),
            counts: StepCounts::default(),
        };
        let places = models.iter().map(place).collect();
        let ladders: Ladders = models.into_iter().map(|waiting| waiting.min_batch).collect();
        let turns = matches!(schedule, Schedule::ModelSync | Schedule::StepSync);
        let coordinator = Self {
            schedule,
            delays: AtomicBool::new(delays(schedule, &ladders)),
            ladders: Mutex::new(Arc::new(ladders)),
            generation: AtomicU64::new(0),
            live: AtomicUsize::new(0),
            most_live: AtomicUsize::new(0),
            turns: turns.then(|| Turns::new(count, schedule == Schedule::StepSync)),
            places,
        };
        coordinator.set_routes(routes);
        coordinator
    }

    /// The models of each route, in place of those before.
    pub fn set_routes<'a>(&self, routes: impl Iterator<Item = &'a [ModelId]>) {
        let count = self.places.len();
        let mut meets = vec![vec![false; count]; count];
        for route in routes {
            for (a, b) in route.iter().flat_map(|a| route.iter().map(move |b| (a, b))).filter(|(a, b)| a != b) {
                meets[a.index()][b.index()] = true;
            }
        }
        for (place, meets) in self.places.iter().zip(meets) {
            place.meets.iter().zip(meets).for_each(|(to, meets)| to.store(meets, Ordering::Relaxed));
        }
    }

    /// How long `model` waits from now on. Have it look at its gate.
    pub fn set_waits(&self, model: ModelId, max_wait: Duration, hold: Duration) {
        let place = &self.places[model.index()];
        place.max_wait.store(nanos(max_wait), Ordering::Relaxed);
        place.hold.store(nanos(hold), Ordering::Relaxed);
    }

    pub fn schedule(&self) -> Schedule {
        self.schedule
    }

    /// Requests that have neither ended nor been cancelled.
    pub fn live(&self) -> usize {
        self.live.load(Ordering::Acquire)
    }

    pub fn set_live(&self, live: usize) {
        self.live.store(live, Ordering::Release);
        self.most_live.fetch_max(live, Ordering::Relaxed);
    }

    /// The most requests that were live at once since the last call. For one caller.
    pub fn take_most_live(&self) -> usize {
        self.most_live.swap(self.live(), Ordering::Relaxed)
    }

    /// Whether gates must be looked at when the number of live requests changes: a threshold may fall when it
    /// grows as well as when it falls.
    pub fn delays(&self) -> bool {
        self.delays.load(Ordering::Acquire)
    }

    /// `message` is about to be sent to `to`.
    pub fn sent(&self, to: ModelId, message: &Message) {
        if let Some(turns) = &self.turns
            && brings_request(message)
        {
            turns.sent(to.index());
        }
    }

    /// The thread of `model` has ended. Returns who must look at its gate.
    pub fn bury(&self, model: ModelId) -> Vec<ModelId> {
        let mut wakes = Vec::new();
        if let Some(turns) = &self.turns {
            turns.bury(model.index(), &mut wakes);
        }
        wakes.into_iter().map(|model| ModelId(model as u32)).collect()
    }

    /// The ladders in force, and the generation that they have been since.
    pub fn ladders(&self) -> (u64, Arc<Ladders>) {
        let ladders = self.lock();
        (self.generation.load(Ordering::Acquire), ladders.clone())
    }

    /// Whether [`Self::replace`] takes them.
    pub fn check(&self, ladders: &[Vec<u32>]) -> Result<(), LadderError> {
        let models = self.places.len();
        if ladders.len() != models {
            return Err(LadderError::Count { given: ladders.len(), models });
        }
        if let Some(model) = ladders.iter().position(|ladder| ladder.is_empty() || ladder.contains(&0)) {
            return Err(LadderError::Steps { model });
        }
        Ok(())
    }

    /// Put other ladders in force. Gates notice at their next look: have every model look now.
    pub fn replace(&self, ladders: Ladders) -> Result<(), LadderError> {
        self.check(&ladders)?;
        let mut current = self.lock();
        self.delays.store(delays(self.schedule, &ladders), Ordering::Release);
        *current = Arc::new(ladders);
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Grows with each replacement of the ladders.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// What `model` has done since the start.
    pub fn observed(&self, model: ModelId) -> Observed {
        self.places[model.index()].observations.read()
    }

    /// What `model` counts of its steps.
    pub fn counts(&self, model: ModelId) -> &StepCounts {
        &self.places[model.index()].counts
    }

    /// The list is replaced as a whole, so a panic elsewhere cannot spoil it.
    fn lock(&self) -> std::sync::MutexGuard<'_, Arc<Ladders>> {
        self.ladders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn delays(schedule: Schedule, ladders: &Ladders) -> bool {
    schedule == Schedule::Delayed && ladders.iter().flatten().any(|&b| b > 1)
}

/// Whether the receiver of `message` comes to own a request by it.
pub(super) fn brings_request(message: &Message) -> bool {
    match message {
        Message::Submit(_) => true,
        Message::Peer(peer) => matches!(peer.status, Status::New | Status::Need),
        Message::Cancel(_) | Message::Attach(_) | Message::Detach(..) | Message::Wake | Message::Shutdown => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ladders_are_replaced_as_a_whole() {
        let waiting = || Waiting { min_batch: vec![1], max_wait: Duration::ZERO, hold: Duration::ZERO };
        let coordinator = Coordinator::new(Schedule::Delayed, vec![waiting(), waiting()], std::iter::empty());
        assert!(!coordinator.delays());
        assert_eq!(coordinator.replace(vec![vec![1]]), Err(LadderError::Count { given: 1, models: 2 }));
        assert_eq!(coordinator.replace(vec![vec![1], vec![]]), Err(LadderError::Steps { model: 1 }));
        assert_eq!(coordinator.replace(vec![vec![0], vec![1]]), Err(LadderError::Steps { model: 0 }));
        assert_eq!(coordinator.ladders(), (0, Arc::new(vec![vec![1], vec![1]])));
        assert_eq!(coordinator.replace(vec![vec![1], vec![1, 2]]), Ok(()));
        assert_eq!(coordinator.ladders(), (1, Arc::new(vec![vec![1], vec![1, 2]])));
        assert!(coordinator.delays());
    }

    #[test]
    fn peers_share_a_route() {
        let waiting = || Waiting { min_batch: vec![1], max_wait: Duration::ZERO, hold: Duration::ZERO };
        let routes = [vec![ModelId(0), ModelId(2)], vec![ModelId(2), ModelId(3), ModelId(0)], vec![ModelId(1)]];
        let models = (0..4).map(|_| waiting()).collect();
        let coordinator = Coordinator::new(Schedule::Eager, models, routes.iter().map(|route| &route[..]));
        let peers = || coordinator.places.iter().map(|place| place.peers().collect()).collect::<Vec<Vec<_>>>();
        assert_eq!(peers(), [vec![2, 3], vec![], vec![0, 3], vec![0, 2]]);
        coordinator.set_routes([&[ModelId(1), ModelId(0)][..]].into_iter());
        assert_eq!(peers(), [vec![1], vec![0], vec![], vec![]]);
    }
}
