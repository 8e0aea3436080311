//! What the last seconds tell about a system.

use super::seen::{Seen, Steps};
use crate::system::{Model, System, interpolate};

/// Share of a batch size's steps' weight below which its time is not taken.
const THIN: f64 = 2.0;
/// Steps and routed requests of each model without which nothing is known.
const STEPS: f64 = 20.0;
const ROUTED: f64 = 100.0;
/// Standard errors by which shares differ that have changed.
const CHANGED: f64 = 4.0;
/// Standard deviation of the share of a step that overlaps others below which its stretch cannot be told.
const SPREAD: f64 = 0.05;
/// Largest stretch that is believed.
const STRETCH: f64 = 20.0;

impl Seen {
    /// Whether the shares of where requests go differ by more than chance.
    fn differs(&self, other: &Self) -> bool {
        let (n, m) = (self.requests(), other.requests());
        if n < ROUTED || m < ROUTED {
            return false;
        }
        self.routed.iter().zip(&other.routed).any(|(a, b)| {
            let both = (a + b) / (n + m);
            let error = (both * (1.0 - both) * (1.0 / n + 1.0 / m)).sqrt();
            (a / n - b / m).abs() > CHANGED * error
        })
    }

    /// How many times longer steps take while others run, if it can be told. A step of work w of which the share f
    /// overlaps takes t = w / (1 - k f), with k = 1 - 1 / stretch: so 1 / t falls with f, along a line for each size.
    /// What else makes steps longer or shorter does not depend on f and does not bend these lines.
    fn stretch(&self) -> Option<f64> {
        let (mut fall, mut spread, mut squares, mut steps) = (0.0, 0.0, 0.0, 0.0);
        for sums in self.sizes.iter().filter(|sums| sums.steps >= THIN) {
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
}

/// The system that was seen, and which models are in it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Estimate {
    /// Ascending. Models to which no request came are left out.
    pub members: Vec<usize>,
    pub system: System,
}

/// Steps of all models, with weights that fall with their age.
#[derive(Clone, Debug)]
pub(super) struct Window {
    /// The last reading.
    read: Vec<Seen>,
    past: Vec<Seen>,
    /// The last stretch of each model that could be told.
    stretches: Vec<f64>,
}

impl Window {
    pub fn new(stretches: &[f64]) -> Self {
        let none = vec![Seen::none(stretches.len()); stretches.len()];
        Self { read: none.clone(), past: none, stretches: stretches.to_vec() }
    }

    /// Another reading: what was seen until the last one counts `keep` as much, and not at all where routes have
    /// changed.
    pub fn turn(&mut self, keep: f64, seen: &[Seen]) {
        let since = |(seen, before): (&Seen, &Seen)| {
            let mut since = seen.clone();
            since.add(before, -1.0);
            since
        };
        let present: Vec<Seen> = seen.iter().zip(&self.read).map(since).collect();
        self.read = seen.to_vec();
        let changed = present.iter().zip(&self.past).any(|(present, past)| present.differs(past));
        for (present, past) in present.into_iter().zip(&mut self.past) {
            let mut sum = Seen::none(past.routed.len());
            if changed {
                // Times have not changed with the routes.
                sum.add(&Seen { sizes: std::mem::take(&mut past.sizes), ..Seen::none(0) }, keep);
            } else {
                sum.add(past, keep);
            }
            sum.add(&present, 1.0);
            *past = sum;
        }
        for (stretch, past) in self.stretches.iter_mut().zip(&self.past) {
            *stretch = past.stretch().unwrap_or(*stretch);
        }
    }

    pub fn stretches(&self) -> &[f64] {
        &self.stretches
    }

    /// The system that was seen until the last reading; `None` where that is too little.
    pub fn estimate(&self, names: &[String], entry: usize) -> Option<Estimate> {
        let members: Vec<usize> = (0..names.len()).filter(|model| self.past[*model].requests() >= 1.0).collect();
        let model = |&index: &usize| {
            let (seen, stretch) = (&self.past[index], self.stretches[index]);
            let steps: f64 = seen.sizes.iter().map(|sums| sums.steps).sum();
            let work = |sums: &Steps| (sums.alone + sums.overlap / stretch) / sums.steps;
            let known = seen.sizes.iter().enumerate().filter(|(_, sums)| sums.steps >= THIN);
            let known: Vec<(usize, f64)> = known.map(|(size, sums)| (size + 1, work(sums))).collect();
            let enough = steps >= STEPS && seen.requests() >= ROUTED && !known.is_empty();
            enough.then(|| Model { stretch, ..Model::new(names[index].clone(), interpolate(&known)) })
        };
        let models = members.iter().map(model).collect::<Option<Vec<Model>>>()?;
        let shares = |&from: &usize| {
            let to: Vec<f64> = members.iter().map(|&to| self.past[from].routed[to]).collect();
            let all: f64 = to.iter().sum();
            to.into_iter().map(|count| if all > 0.0 { count / all } else { f64::NAN }).collect()
        };
        let routing = members.iter().map(shares).collect();
        let gain = |&from: &usize| vec![self.past[from].tokens / self.past[from].requests(); members.len()];
        let commits = members.iter().map(gain).collect();
        let entry = members.iter().position(|member| *member == entry).unwrap_or(0);
        let system = System { models, routing, commits, sigma: Vec::new(), entry }.checked().ok()?;
        Some(Estimate { members, system })
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
        assert_eq!(window.estimate(&names, 0), None);
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
        // One visit is too little for its time, and no reason to leave it out.
        seen[0].step(6.0, 0.0, &[0, 1, 0], 1.0);
        seen[1].step(9.0, 0.0, &[1, 0, 0], 1.0);
        window.turn(0.5, &seen);
        assert_eq!(window.estimate(&names, 0), None);
    }
}
