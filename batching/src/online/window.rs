//! What the last seconds tell about a system.

use super::seen::{Seen, Steps};
use crate::connected::connected;
use crate::system::{Fault, Model, System, interpolate};

/// Weight of the steps of a size without which they are taken together with the next larger ones.
const THIN: f64 = 2.0;
/// Steps and requests of a model without which nothing is known of it. Its window is as long as it takes to have them.
const STEPS: f64 = 20.0;
const ROUTED: f64 = 100.0;
/// Requests of an interval that tell a model's routes once they are known to have changed.
const FEW: f64 = 20.0;
/// Weight of a model's requests below which it has none any more.
const GONE: f64 = 0.01;
/// Weight of all requests, and the share of it that must be at models that are known: to begin with, and to go on.
const BEGIN: (f64, f64) = (ROUTED, 0.8);
const GO_ON: (f64, f64) = (ROUTED / 10.0, 0.5);
/// Standard errors by which shares differ that have changed.
const CHANGED: f64 = 4.0;
/// Standard deviation of the share of a step that overlaps others below which its stretch cannot be told.
const SPREAD: f64 = 0.05;
/// Largest stretch that is believed.
const STRETCH: f64 = 20.0;

impl Seen {
    /// Whether the shares of where requests go differ by more than chance.
    fn differs(&self, other: &Self) -> bool {
        let (n, m) = (self.routed.iter().sum::<f64>(), other.routed.iter().sum::<f64>());
        if n < ROUTED || m < ROUTED {
            return false;
        }
        self.routed.iter().zip(&other.routed).any(|(a, b)| {
            let both = (a + b) / (n + m);
            let error = (both * (1.0 - both) * (1.0 / n + 1.0 / m)).sqrt();
            (a / n - b / m).abs() > CHANGED * error
        })
    }
}

/// How many times longer steps take while others run, if it can be told; by batch size. A step of work w of which the
/// share f overlaps takes t = w / (1 - k f), with k = 1 - 1 / stretch: so 1 / t falls with f, along a line for each
/// size. What else makes steps longer or shorter does not depend on f and does not bend these lines.
pub fn stretch<'a>(sizes: impl IntoIterator<Item = &'a Steps>) -> Option<f64> {
    let (mut fall, mut spread, mut squares, mut steps) = (0.0, 0.0, 0.0, 0.0);
    for sums in sizes.into_iter().filter(|sums| sums.steps >= THIN) {
        let share = sums.shares / sums.steps;
        let variance = sums.share_squares - share * sums.shares;
        // Covariance of share and rate by the mean rate: k * variance = -relative * (1 - k * share).
        let relative = (sums.products - share * sums.rates) * sums.steps / sums.rates;
        fall -= relative;
        spread += variance - relative * share;
        squares += variance;
        steps += sums.steps;
    }
    let known = steps >= STEPS && (squares / steps).sqrt() > SPREAD && spread > 0.0;
    known.then(|| 1.0 / (1.0 - (fall / spread).clamp(0.0, 1.0 - 1.0 / STRETCH)))
}

/// The system that was seen, and which models are in it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Estimate {
    /// Ascending. Models that no request came to, of which too little is known, or among which and the others no
    /// requests go round are left out.
    pub members: Vec<usize>,
    pub system: System,
}

/// Why there is no estimate.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Unknown {
    Thin,
    /// What was seen describes no system.
    Fault(Fault),
}

/// What is known of one model.
#[derive(Clone, Debug)]
struct Known {
    /// The last reading.
    read: Seen,
    /// With weights that fall with their age, but for as much as is needed to know it.
    past: Seen,
    /// Weight of its requests and of those that began there, which falls with age whatever is needed.
    fresh: f64,
    begun: f64,
    /// There was enough, and requests come still.
    known: bool,
    /// The last one that could be told.
    stretch: f64,
}

impl Known {
    /// `changed`: routes of some model have.
    fn turn(&mut self, keep: f64, present: Seen, changed: bool) {
        self.fresh = keep * self.fresh + present.requests();
        self.begun = keep * self.begun + present.begun;
        let needed = |least: f64, past: f64, present: f64| ((least - present) / past).clamp(keep, 1.0);
        let weight = needed(ROUTED, self.past.requests().max(1.0), present.requests()).max(needed(
            STEPS,
            self.past.steps().max(1.0),
            present.steps(),
        ));
        let mut sum = Seen::none(present.routed.len());
        let gone = self.fresh < GONE;
        if gone || (changed && present.requests() >= FEW) {
            // Times have not changed with the routes.
            sum.add(&Seen { sizes: std::mem::take(&mut self.past.sizes), ..Seen::none(0) }, weight);
        } else {
            sum.add(&self.past, weight);
        }
        sum.add(&present, 1.0);
        self.past = sum;
        self.known = !gone && (self.known || (self.past.requests() >= ROUTED && self.past.steps() >= STEPS));
        self.stretch = stretch(&self.past.sizes).unwrap_or(self.stretch);
    }

    fn model(&self, name: &str) -> Model {
        let mut known: Vec<(usize, f64)> = Vec::new();
        let (mut sums, mut requests) = (Steps::default(), 0.0);
        for (size, steps) in (1..).zip(&self.past.sizes) {
            sums.add(steps, 1.0);
            requests += f64::from(size) * steps.steps;
            if sums.steps >= THIN {
                let ms = (sums.alone + sums.overlap / self.stretch) / sums.steps;
                known.push(((requests / sums.steps).round() as usize, ms));
                (sums, requests) = (Steps::default(), 0.0);
            }
        }
        Model { stretch: self.stretch, ..Model::new(name, interpolate(&known)) }
    }
}

/// Steps of all models.
#[derive(Clone, Debug)]
pub(super) struct Window {
    models: Vec<Known>,
    /// Enough is known of the models with most of the requests.
    enough: bool,
}

impl Window {
    pub fn new(stretches: &[f64]) -> Self {
        let none = Seen::none(stretches.len());
        let model = |&stretch: &f64| Known {
            read: none.clone(),
            past: none.clone(),
            fresh: 0.0,
            begun: 0.0,
            known: false,
            stretch,
        };
        Self { models: stretches.iter().map(model).collect(), enough: false }
    }

    /// Another reading: what was seen until the last one counts `keep` as much, and not at all where routes have
    /// changed.
    pub fn turn(&mut self, keep: f64, seen: &[Seen]) {
        let since = |(seen, model): (&Seen, &mut Known)| {
            let mut since = seen.clone();
            since.add(&model.read, -1.0);
            model.read.clone_from(seen);
            since
        };
        let present: Vec<Seen> = seen.iter().zip(&mut self.models).map(since).collect();
        let changed = present.iter().zip(&self.models).any(|(present, model)| present.differs(&model.past));
        self.models.iter_mut().zip(present).for_each(|(model, present)| model.turn(keep, present, changed));
        let all: f64 = self.models.iter().map(|model| model.fresh).sum();
        let known: f64 = self.models.iter().filter(|model| model.known).map(|model| model.fresh).sum();
        let (least, share) = if self.enough { GO_ON } else { BEGIN };
        self.enough = all >= least && known >= share * all;
    }

    pub fn stretches(&self) -> Vec<f64> {
        self.models.iter().map(|model| model.stretch).collect()
    }

    /// The system that was seen until the last reading. Where requests end, others begin.
    pub fn estimate(&self, names: &[String], entry: usize) -> Result<Estimate, Unknown> {
        if !self.enough {
            return Err(Unknown::Thin);
        }
        let known: Vec<usize> = (0..names.len()).filter(|model| self.models[*model].known).collect();
        let begun: f64 = self.models.iter().map(|model| model.begun).sum();
        let begin = |model: usize| match begun > 0.0 {
            true => self.models[model].begun / begun,
            false => f64::from(u8::from(model == entry)),
        };
        let routed = |from: usize, to: usize| {
            let past = &self.models[from].past;
            past.routed[to] + past.ended * begin(to)
        };
        let counts = |models: &[usize]| -> Vec<Vec<f64>> {
            models.iter().map(|&from| models.iter().map(|&to| routed(from, to)).collect()).collect()
        };
        let members: Vec<usize> = connected(&counts(&known)).into_iter().map(|place| known[place]).collect();
        if members.is_empty() {
            return Err(Unknown::Thin);
        }
        let mut routing = counts(&members);
        for row in &mut routing {
            let all: f64 = row.iter().sum();
            row.iter_mut().for_each(|count| *count /= all);
        }
        let gain = |&from: &usize| {
            let past = &self.models[from].past;
            vec![past.tokens / past.requests(); members.len()]
        };
        let commits = members.iter().map(gain).collect();
        let models = members.iter().map(|&model| self.models[model].model(&names[model])).collect();
        let entry = members.iter().position(|member| *member == entry).unwrap_or(0);
        let system = System { models, routing, commits, sigma: Vec::new(), entry }.checked().map_err(Unknown::Fault)?;
        Ok(Estimate { members, system })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_are_told_from_overlaps() {
        let mut window = Window::new(&[1.0, 1.0]);
        let mut seen = vec![Seen::none(2); 2];
        let names = ["s", "l"].map(String::from);
        for i in 0..200 {
            // 6 ms of work; of the wall time a part overlaps, at 3.4.
            let overlapped_work = f64::from(i % 7);
            let overlap = 3.4 * overlapped_work.min(6.0);
            seen[0].step(6.0 - overlapped_work.min(6.0) + overlap, overlap, &[1, 1], 1.0);
            seen[1].step(20.0, 20.0, &[3, 0], 3.0);
        }
        assert_eq!(window.estimate(&names, 0), Err(Unknown::Thin));
        window.turn(0.5, &seen);
        let system = window.estimate(&names, 0).unwrap().system;
        assert!((system.models[0].stretch - 3.4).abs() < 1e-9);
        assert!(system.models[0].step_ms.iter().all(|ms| (ms - 6.0).abs() < 1e-9), "{system:?}");
        // Always overlapped: it cannot be told apart, and step and stretch together are right.
        assert_eq!((system.models[1].stretch, system.models[1].step(3)), (1.0, 20.0));
        assert_eq!((system.gain(0), system.gain(1)), (0.5, 1.0));
    }

    /// Steps of 5 to 7 ms of work, whatever overlaps, at a stretch of 1.5.
    #[test]
    fn stretches_are_told_from_steps_of_random_length() {
        let mut window = Window::new(&[1.0, 1.0]);
        let mut seen = vec![Seen::none(2); 2];
        let mut random = crate::random::Random::new(5);
        for _ in 0..4000 {
            let work = 5.0 + 2.0 * random.uniform();
            let share = random.uniform();
            let ms = work / (1.0 - share * (1.0 - 1.0 / 1.5));
            seen[0].step(ms, share * ms, &[1, 1], 1.0);
        }
        window.turn(0.5, &seen);
        assert!((window.stretches()[0] - 1.5).abs() < 0.05, "{:?}", window.stretches());
    }

    #[test]
    fn what_has_changed_is_forgotten() {
        let mut window = Window::new(&[1.0, 1.0]);
        let mut seen = vec![Seen::none(2); 2];
        let names = ["s", "l"].map(String::from);
        let mut interval = |there: u32| {
            for _ in 0..100 {
                seen[0].step(6.0, 0.0, &[20 - there, there], 10.0);
                seen[1].step(20.0, 0.0, &[there, 0], 1.0);
            }
            window.turn(0.5, &seen);
            window.estimate(&names, 0).unwrap().system.routing[0][1]
        };
        assert!((interval(1) - 0.05).abs() < 1e-9);
        assert!((interval(8) - 0.4).abs() < 1e-9);
        assert!((interval(8) - 0.4).abs() < 1e-9);
    }

    #[test]
    fn models_without_requests_are_left_out() {
        let mut window = Window::new(&[1.0; 3]);
        let mut seen = vec![Seen::none(3); 3];
        let names = ["s", "idle", "l"].map(String::from);
        for _ in 0..100 {
            seen[0].step(6.0, 0.0, &[3, 0, 1], 3.0);
            seen[2].step(20.0, 0.0, &[1, 0, 0], 1.0);
        }
        window.turn(0.5, &seen);
        let estimate = window.estimate(&names, 0).unwrap();
        assert_eq!((estimate.members, estimate.system.routing), (vec![0, 2], vec![vec![0.75, 0.25], vec![1.0, 0.0]]));
        // One visit is too little for its time, and no reason to know nothing of the others.
        seen[0].step(6.0, 0.0, &[0, 1, 0], 1.0);
        seen[1].step(9.0, 0.0, &[1, 0, 0], 1.0);
        window.turn(0.5, &seen);
        assert_eq!(window.estimate(&names, 0).unwrap().members, [0, 2]);
    }
}
