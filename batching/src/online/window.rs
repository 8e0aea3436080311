//! What the last seconds tell about a system.

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

/// Sums over the steps of one batch size. Overlap: milliseconds in which others ran; alone: the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sums {
    steps: f64,
    overlap: f64,
    alone: f64,
    overlap_squares: f64,
    products: f64,
}

impl Sums {
    fn add(&mut self, other: &Self, weight: f64) {
        self.steps += weight * other.steps;
        self.overlap += weight * other.overlap;
        self.alone += weight * other.alone;
        self.overlap_squares += weight * other.overlap_squares;
        self.products += weight * other.products;
    }
}

/// What one model did.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    /// Requests by where they went.
    routed: Vec<f64>,
    tokens: f64,
    /// By batch size from 1.
    sizes: Vec<Sums>,
}

impl Seen {
    fn add(&mut self, other: &Self, weight: f64) {
        self.routed.iter_mut().zip(&other.routed).for_each(|(sum, more)| *sum += weight * more);
        self.tokens += weight * other.tokens;
        self.sizes.resize(self.sizes.len().max(other.sizes.len()), Sums::default());
        self.sizes.iter_mut().zip(&other.sizes).for_each(|(sum, more)| sum.add(more, weight));
    }

    fn requests(&self) -> f64 {
        self.routed.iter().sum()
    }

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

    /// How many times longer steps take while others run, if it can be told: of steps of one size, those that
    /// overlap longer take longer by what the overlap costs.
    fn stretch(&self) -> Option<f64> {
        let (mut squares, mut products, mut steps, mut time) = (0.0, 0.0, 0.0, 0.0);
        for sums in self.sizes.iter().filter(|sums| sums.steps >= THIN) {
            squares += sums.overlap_squares - sums.overlap * sums.overlap / sums.steps;
            products += sums.products - sums.overlap * sums.alone / sums.steps;
            steps += sums.steps;
            time += sums.overlap + sums.alone;
        }
        // Work is alone + overlap / stretch, the same for all steps of a size.
        let spread = (squares / steps).sqrt() / (time / steps);
        (steps >= STEPS && spread > SPREAD && products < 0.0).then(|| (squares / -products).clamp(1.0, STRETCH))
    }
}

/// Steps of all models: of the present interval, and of the past with weights that halve.
#[derive(Clone, Debug)]
pub(super) struct Window {
    present: Vec<Seen>,
    past: Vec<Seen>,
    /// The last stretch of each model that could be told.
    stretches: Vec<f64>,
}

impl Window {
    pub fn new(stretches: &[f64]) -> Self {
        let models = stretches.len();
        let none = vec![Seen { routed: vec![0.0; models], tokens: 0.0, sizes: Vec::new() }; models];
        Self { present: none.clone(), past: none, stretches: stretches.to_vec() }
    }

    /// A step of `model` took `ms`, of which `overlap_ms` while others ran; `routed` by model sums to its batch.
    pub fn step(&mut self, model: usize, ms: f64, overlap_ms: f64, routed: &[u32], tokens: f64) {
        let batch: u32 = routed.iter().sum();
        let Some(index) = (batch as usize).checked_sub(1) else { return };
        let seen = &mut self.present[model];
        seen.routed.iter_mut().zip(routed).for_each(|(sum, count)| *sum += f64::from(*count));
        seen.tokens += tokens;
        seen.sizes.resize(seen.sizes.len().max(index + 1), Sums::default());
        let (overlap, alone) = (overlap_ms.min(ms), (ms - overlap_ms).max(0.0));
        let one = Sums { steps: 1.0, overlap, alone, overlap_squares: overlap * overlap, products: overlap * alone };
        seen.sizes[index].add(&one, 1.0);
    }

    /// End the present interval: what is past counts `keep` as much, and not at all where routes have changed.
    pub fn turn(&mut self, keep: f64) {
        let changed = self.present.iter().zip(&self.past).any(|(present, past)| present.differs(past));
        for (present, past) in self.present.iter_mut().zip(&mut self.past) {
            let none = Seen { routed: vec![0.0; past.routed.len()], tokens: 0.0, sizes: Vec::new() };
            let mut sum = none.clone();
            if changed {
                // Times have not changed with the routes.
                sum.sizes.clone_from(&past.sizes);
                for sums in &mut sum.sizes {
                    let whole = *sums;
                    *sums = Sums::default();
                    sums.add(&whole, keep);
                }
            } else {
                sum.add(past, keep);
            }
            sum.add(present, 1.0);
            *past = sum;
            *present = none;
        }
        for (stretch, past) in self.stretches.iter_mut().zip(&self.past) {
            *stretch = past.stretch().unwrap_or(*stretch);
        }
    }

    /// The system that was seen until the last turn; `None` where that is too little.
    pub fn system(&self, names: &[String], entry: usize) -> Option<System> {
        let model = |(index, seen): (usize, &Seen)| {
            let stretch = self.stretches[index];
            let steps: f64 = seen.sizes.iter().map(|sums| sums.steps).sum();
            let work = |sums: &Sums| (sums.alone + sums.overlap / stretch) / sums.steps;
            let known = seen.sizes.iter().enumerate().filter(|(_, sums)| sums.steps >= THIN);
            let known: Vec<(usize, f64)> = known.map(|(size, sums)| (size + 1, work(sums))).collect();
            let enough = steps >= STEPS && seen.requests() >= ROUTED && !known.is_empty();
            enough.then(|| Model { stretch, ..Model::new(names[index].clone(), interpolate(&known)) })
        };
        let models = self.past.iter().enumerate().map(model).collect::<Option<Vec<Model>>>()?;
        let by_request = |seen: &Seen| seen.routed.iter().map(|count| count / seen.requests()).collect();
        let routing = self.past.iter().map(by_request).collect();
        let gain = |seen: &Seen| vec![seen.tokens / seen.requests(); names.len()];
        let commits = self.past.iter().map(gain).collect();
        System { models, routing, commits, sigma: Vec::new(), entry }.checked().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_are_told_from_overlaps() {
        let mut window = Window::new(&[1.0, 1.0]);
        let names = ["s", "l"].map(String::from);
        for i in 0..200 {
            // 6 ms of work; of the wall time a part overlaps, at 3.4.
            let overlapped_work = f64::from(i % 7);
            let overlap = 3.4 * overlapped_work.min(6.0);
            window.step(0, 6.0 - overlapped_work.min(6.0) + overlap, overlap, &[1, 1], 1.0);
            window.step(1, 20.0, 20.0, &[3, 0], 3.0);
        }
        assert_eq!(window.system(&names, 0), None);
        window.turn(0.5);
        let system = window.system(&names, 0).unwrap();
        assert!((system.models[0].stretch - 3.4).abs() < 1e-9);
        assert!(system.models[0].step_ms.iter().all(|ms| (ms - 6.0).abs() < 1e-9), "{system:?}");
        // Always overlapped: it cannot be told apart, and step and stretch together are right.
        assert_eq!((system.models[1].stretch, system.models[1].step(3)), (1.0, 20.0));
        assert_eq!((system.gain(0), system.gain(1)), (0.5, 1.0));
    }

    #[test]
    fn what_has_changed_is_forgotten() {
        let mut window = Window::new(&[1.0, 1.0]);
        let names = ["s", "l"].map(String::from);
        let mut interval = |there: u32| {
            for _ in 0..100 {
                window.step(0, 6.0, 0.0, &[20 - there, there], 10.0);
                window.step(1, 20.0, 0.0, &[there, 0], 1.0);
            }
            window.turn(0.5);
            window.system(&names, 0).unwrap().routing[0][1]
        };
        assert!((interval(1) - 0.05).abs() < 1e-9);
        assert!((interval(8) - 0.4).abs() < 1e-9);
        assert!((interval(8) - 0.4).abs() < 1e-9);
    }
}
