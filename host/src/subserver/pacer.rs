//! One model's side of the [`Coordinator`]: when it may start, and what the others learn of its steps.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use super::coordinator::{Coordinator, Ladders, brings_request};
use super::gate::{Gate, Look, Schedule, Underway, gate, hold, thresholds};
use super::message::Message;
use super::observed::SIZES;
use super::{Counters, Stepped};
use crate::request::ModelId;

/// A step that takes longer than expected by this part of it is waited for no longer.
const PATIENCE: u32 = 8;

/// What a model's steps take, by batch size: a moving average. Zero where it is unknown.
#[derive(Debug)]
struct StepTimes([u64; SIZES]);

impl StepTimes {
    fn place(requests: usize) -> usize {
        requests.clamp(1, SIZES) - 1
    }

    /// The time of a step, from the nearest batch size with a known one.
    fn expected(&self, requests: usize) -> Option<Duration> {
        let (smaller, larger) = self.0.split_at(Self::place(requests) + 1);
        let known = smaller.iter().rev().chain(larger).find(|nanos| **nanos > 0);
        known.map(|&nanos| Duration::from_nanos(nanos))
    }

    fn learn(&mut self, requests: usize, nanos: u64) {
        let average = &mut self.0[Self::place(requests)];
        *average = if *average == 0 { nanos } else { *average - *average / 4 + nanos / 4 };
    }
}

/// The gate of one model over time. Owned by the model's thread.
#[derive(Debug)]
pub struct Pacer {
    coordinator: Arc<Coordinator>,
    model: usize,
    waiting_since: Option<Duration>,
    /// The ladders as of `generation`.
    ladders: Arc<Ladders>,
    generation: u64,
    /// The last threshold and the number of live requests that it is for.
    threshold: Option<(usize, u32)>,
    /// Requests that have arrived since the last look.
    arrived: usize,
    /// When those that peers have handed over since the last step were sent.
    handed: Vec<Duration>,
    times: StepTimes,
    /// Of the step under way.
    began: Duration,
    /// By model: its busy clock when the step began.
    busy: Vec<i64>,
    wakes: Vec<usize>,
}

impl Pacer {
    pub fn new(coordinator: Arc<Coordinator>, model: ModelId) -> Self {
        let (generation, ladders) = coordinator.ladders();
        Self {
            model: model.index(),
            waiting_since: None,
            ladders,
            generation,
            threshold: None,
            arrived: 0,
            handed: Vec::new(),
            times: StepTimes([0; SIZES]),
            began: Duration::ZERO,
            busy: vec![0; coordinator.places.len()],
            wakes: Vec::new(),
            coordinator,
        }
    }

    /// `message` has come to the model.
    pub fn arrived(&mut self, message: &Message) {
        if matches!(message, Message::Submit(_)) {
            self.coordinator.places[self.model].observations.begun();
        }
        if brings_request(message) {
            self.arrived += 1;
            if let Message::Peer(peer) = message {
                self.handed.push(peer.sent);
            }
        }
    }

    /// Whether the model may start with `ready` requests. Comes after everything in its inbox was taken and
    /// carried out.
    pub fn look(&mut self, ready: usize, now: Duration) -> Gate {
        self.waiting_since = (ready > 0).then(|| self.waiting_since.unwrap_or(now));
        let arrived = std::mem::take(&mut self.arrived);
        let turns = self.coordinator.turns.as_ref();
        let turn = turns.is_none_or(|turns| turns.look(self.model, ready, arrived, &mut self.wakes));
        let threshold = self.threshold();
        let place = &self.coordinator.places[self.model];
        let peers = || place.peers().filter_map(|peer| self.coordinator.places[peer].underway());
        let (waiting_since, max_wait) = (self.waiting_since, place.max_wait());
        let longest_hold = place.hold();
        let at = |held_until| gate(&Look { ready, threshold, turn, held_until, waiting_since, max_wait, now });
        // Where models take turns nobody ends soon.
        if ready == 0 || longest_hold.is_zero() || self.coordinator.turns.is_some() {
            return at(None);
        }
        let held_until = hold(longest_hold, peers(), now);
        let gate = at(held_until);
        let holding = held_until.is_some() && gate != Gate::Open;
        place.holding.store(holding, Ordering::Release);
        if !holding {
            return gate;
        }
        // A peer that ends now either sees `holding`, and wakes this model, or is seen to have ended.
        fence(Ordering::SeqCst);
        at(hold(longest_hold, peers(), now))
    }

    fn threshold(&mut self) -> u32 {
        if self.coordinator.schedule() != Schedule::Delayed {
            return 1;
        }
        if self.generation != self.coordinator.generation() {
            (self.generation, self.ladders) = self.coordinator.ladders();
            self.threshold = None;
        }
        let live = self.coordinator.live();
        match self.threshold {
            Some((of, threshold)) if of == live => threshold,
            _ => {
                let threshold = thresholds(&self.ladders, live)[self.model];
                self.threshold = Some((live, threshold));
                threshold
            }
        }
    }

    /// A step begins, with at most `ready` requests.
    pub fn start(&mut self, ready: usize, now: Duration) {
        self.began = now;
        let place = &self.coordinator.places[self.model];
        let waited = self.waiting_since.take().map_or(Duration::ZERO, |since| now.saturating_sub(since));
        place.counts.gate_wait.observe_time(waited);
        self.handed.drain(..).for_each(|sent| place.counts.handoff.observe_time(now.saturating_sub(sent)));
        place.holding.store(false, Ordering::Relaxed);
        let underway = |time: Duration| Underway { ends: now + time, overdue: now + time + time / PATIENCE };
        place.expect(self.times.expected(ready).map(underway));
        let nanos = now.as_nanos() as i64;
        place.busy.start(nanos);
        for (busy, place) in self.busy.iter_mut().zip(&self.coordinator.places) {
            *busy = place.busy.read(nanos);
        }
    }

    /// The step under way has handed a request to `model`. Before the hand-off is sent.
    pub fn handed_to(&self, model: ModelId) {
        self.coordinator.places[self.model].observations.handed_to(model.index());
    }

    /// The step has ended at `now`, and what came of it is carried out. It leaves `ready` requests.
    /// `counters` of the model so far.
    pub fn finish(&mut self, ready: usize, stepped: Stepped, counters: &Counters, now: Duration) {
        let places = &self.coordinator.places;
        let place = &places[self.model];
        let moment = now.as_nanos() as i64;
        place.busy.stop(moment);
        place.expect(None);
        let nanos = now.saturating_sub(self.began).as_nanos() as u64;
        if stepped.requests > 0 {
            place.counts.requests.observe(stepped.requests as u64);
            place.counts.rows.observe(stepped.rows as u64);
            place.counts.time.observe(nanos);
        }
        place.observations.counted(counters);
        if stepped.prompt_rows > 0 {
            place.observations.prompt_step(nanos);
        } else if stepped.requests > 0 {
            self.times.learn(stepped.requests, nanos);
            let others = places.iter().zip(&self.busy).enumerate().filter(|(model, _)| *model != self.model);
            // Clocks of other threads may be read a little late.
            let ran = others.map(|(_, (place, before))| (place.busy.read(moment) - before).max(0) as u64);
            place.observations.step(stepped.requests as u64, nanos, ran);
        }
        fence(Ordering::SeqCst);
        let holding = |model: &usize| places[*model].holding.load(Ordering::Acquire);
        self.wakes.extend(place.peers().filter(holding));
        if let Some(turns) = &self.coordinator.turns {
            turns.stepped(self.model, ready, &mut self.wakes);
        }
    }

    /// The models that must look at their gates since the last call.
    pub fn wakes(&mut self) -> impl Iterator<Item = ModelId> {
        self.wakes.drain(..).map(|model| ModelId(model as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::super::coordinator::Waiting;
    use super::super::observed::Observed;
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn pacers(schedule: Schedule, models: [(Vec<u32>, u64); 2]) -> (Arc<Coordinator>, [Pacer; 2]) {
        let waiting = |(min_batch, hold)| Waiting { min_batch, max_wait: ms(1000), hold: ms(hold) };
        let route = [ModelId(0), ModelId(1)];
        let models = models.into_iter().map(waiting).collect();
        let coordinator = Arc::new(Coordinator::new(schedule, models, std::iter::once(&route[..])));
        let pacers = route.map(|model| Pacer::new(coordinator.clone(), model));
        (coordinator, pacers)
    }

    /// A step of so many requests.
    fn stepped(requests: usize) -> Stepped {
        Stepped { rows: requests, requests, evaluated: requests, prompt_rows: 0 }
    }

    fn counted(stepped: Stepped) -> Counters {
        Counters { evaluated: stepped.evaluated as u64, ..Counters::default() }
    }

    fn step(pacer: &mut Pacer, requests: usize, from: u64, to: u64) {
        pacer.start(requests, ms(from));
        pacer.finish(0, stepped(requests), &counted(stepped(requests)), ms(to));
    }

    #[test]
    fn a_model_holds_for_a_peer_that_ends_soon() {
        let (_, [mut small, mut large]) = pacers(Schedule::Delayed, [(vec![1], 10), (vec![1], 0)]);
        // Nothing is known of the first step.
        large.start(3, ms(0));
        assert_eq!(small.look(1, ms(39)), Gate::Open);
        large.finish(0, stepped(3), &counted(stepped(3)), ms(40));
        large.start(5, ms(100));
        assert_eq!(small.look(1, ms(129)), Gate::Open);
        assert_eq!(small.look(1, ms(130)), Gate::Closed(Some(ms(145))));
        assert_eq!(small.look(1, ms(144)), Gate::Closed(Some(ms(145))));
        assert_eq!(small.look(1, ms(145)), Gate::Open, "it is overdue");
        assert_eq!(small.look(1, ms(141)), Gate::Closed(Some(ms(145))));
        large.finish(0, stepped(5), &counted(stepped(5)), ms(142));
        assert_eq!(large.wakes().collect::<Vec<_>>(), [ModelId(0)]);
        assert_eq!(small.look(1, ms(142)), Gate::Open);
        step(&mut large, 5, 200, 240);
        assert_eq!(large.wakes().count(), 0, "nobody waits");
    }

    #[test]
    fn thresholds_follow_requests_and_ladders() {
        let (coordinator, [_, mut large]) = pacers(Schedule::Delayed, [(vec![1], 0), (vec![1, 2, 3], 0)]);
        let open = |pacer: &mut Pacer, ready, live| {
            coordinator.set_live(live);
            pacer.look(ready, ms(1)) == Gate::Open
        };
        assert_eq!([1, 2, 3].map(|live| open(&mut large, 2, live)), [true, true, false]);
        coordinator.replace(vec![vec![1], vec![1]]).unwrap();
        assert!(open(&mut large, 1, 3));
        coordinator.replace(vec![vec![1], vec![9]]).unwrap();
        assert_eq!([3, 4].map(|live| open(&mut large, 3, live)), [true, false], "it cannot lock up");
        let (coordinator, [_, mut eager]) = pacers(Schedule::Eager, [(vec![1], 0), (vec![3], 0)]);
        coordinator.set_live(5);
        assert_eq!(eager.look(1, ms(1)), Gate::Open);
    }

    #[test]
    fn steps_are_observed_with_what_ran_beside_them() {
        let (coordinator, [mut small, mut large]) = pacers(Schedule::Eager, [(vec![1], 0), (vec![1], 0)]);
        step(&mut small, 2, 0, 5);
        large.start(1, ms(8));
        step(&mut small, 2, 10, 17);
        small.start(2, ms(20));
        large.finish(0, stepped(1), &counted(stepped(1)), ms(22));
        small.handed_to(ModelId(1));
        small.finish(0, stepped(2), &counted(stepped(2)), ms(26));
        small.start(1, ms(30));
        small.finish(0, Stepped { prompt_rows: 7, ..stepped(1) }, &counted(stepped(1)), ms(40));
        let seen = coordinator.observed(ModelId(0));
        let of = |observed: &Observed, size: usize| (observed.sizes[size].alone, observed.sizes[size].overlap);
        assert_eq!((seen.sizes[1].steps, of(&seen, 1)), (3.0, (9.0, 9.0)));
        assert_eq!((seen.prompts, seen.prompt_time, seen.evaluated, seen.to), (1, ms(10), 1, vec![0, 1]));
        assert_eq!(of(&coordinator.observed(ModelId(1)), 0), (5.0, 9.0));
    }

    #[test]
    fn steps_and_waits_before_them_are_counted() {
        let (coordinator, [mut small, _]) = pacers(Schedule::Eager, [(vec![1], 0), (vec![1], 0)]);
        assert_eq!(small.look(1, ms(5)), Gate::Open);
        step(&mut small, 3, 8, 10);
        // Nothing was in this one, and nothing had been ready.
        step(&mut small, 0, 20, 21);
        let counts = coordinator.counts(ModelId(0));
        let of = |histogram: &crate::metrics::Histogram| (histogram.read().count(), histogram.read().sum);
        assert_eq!((of(&counts.gate_wait), of(&counts.time)), ((2, 3_000_000), (1, 2_000_000)));
        assert_eq!((of(&counts.requests), of(&counts.rows), of(&counts.handoff)), ((1, 3), (1, 3), (0, 0)));
    }

    #[test]
    fn expected_times_are_those_of_the_nearest_size() {
        let mut times = StepTimes([0; SIZES]);
        assert_eq!(times.expected(3), None);
        times.learn(4, 800);
        times.learn(2, 400);
        times.learn(999, 9000);
        let expected = [1, 2, 3, 4, SIZES - 1, SIZES, 2000].map(|n| times.expected(n).map(|t| t.as_nanos()));
        assert_eq!(expected, [400, 400, 400, 800, 800, 9000, 9000].map(Some));
        times.learn(2, 800);
        assert_eq!(times.expected(2), Some(Duration::from_nanos(500)));
    }
}
