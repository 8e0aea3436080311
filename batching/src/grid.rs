//! Step times as whole grains, so that the chain has finitely many states.
//!
//! Grains hold *overlap time*: the wall-clock time that a step takes while others run (its own stretch
//! included, sigma not). In it all running models advance alike, whatever their stretches, and a model that
//! runs alone ends its step before anything else happens. So the chain stays exact with a stretch for
//! each model.

use crate::system::{Fault, Setting, System};

/// Grains of the shortest step: at least this many, because few grains lock the phases of the models to each
/// other (a saturated model at 14/3 in place of 4.65 moved the best threshold from 10 to 7).
const LEAST: u32 = 14;
const MOST: u32 = 40;
/// Largest relative error of a rounded step time. Where no grain keeps it, times stay between two grains.
const ERROR: f64 = 5e-4;
/// Relative error of a whole number of grains.
const WHOLE: f64 = 1e-6;
/// Grains of the shortest step where no grain fits.
const MIXED: u32 = 20;

/// Which grain to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Grain {
    /// The coarsest one, from 1/14 to 1/40 of the shortest step, by which every step time is a whole number of
    /// grains within 5e-4. If there is none, 1/20 of it, and a step between two whole numbers takes one or
    /// the other by chance with the right mean: no mean is off, and the spread is at most half a grain.
    Auto,
    /// This many milliseconds, of which each step time must be a multiple.
    Exact(f64),
}

/// Grains of a step: `low`, or one more with probability `more`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Draw {
    pub low: u32,
    pub more: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Grid {
    /// Milliseconds of a grain.
    pub grain: f64,
    /// By model and batch size from 1.
    pub steps: Vec<Vec<Draw>>,
    /// Whether all step times are whole numbers of grains. Where they are not, steps that end in the same grain
    /// end one after the other in any order: together they would be too often, which favours throughput by
    /// half a grain for each step.
    pub whole: bool,
    /// By waiting and running model: the waiting one is held while that has at most so many grains left.
    pub holds: Vec<Vec<u32>>,
}

/// Overlap time of each model's steps, by batch size from 1 to what it can get.
fn overlap_times(system: &System, requests: usize) -> Vec<Vec<f64>> {
    let of = |model: &crate::Model| (1..=model.batch(requests)).map(|b| model.step(b) * model.stretch).collect();
    system.models.iter().map(of).collect()
}

impl Grid {
    pub fn new(system: &System, requests: usize, setting: &Setting, grain: Grain) -> Result<Self, Fault> {
        let times = overlap_times(system, requests);
        let (grain, steps) = match grain {
            Grain::Auto => automatic(&times),
            Grain::Exact(grain) => (grain, exact(system, &times, grain)?),
        };
        let is_whole = |(time, draw): (&f64, &Draw)| (time / grain - f64::from(draw.low)).abs() <= WHOLE * time / grain;
        let whole = times.iter().flatten().zip(steps.iter().flatten()).all(is_whole);
        // Rounding must not lift a model over a hold that it equals.
        let left = |hold: f64, stretch: f64| (hold * stretch / grain + 1e-6).floor() as u32;
        let against = |hold: f64| system.models.iter().map(|running| left(hold, running.stretch)).collect();
        let holds = setting.hold_ms.iter().map(|&hold| against(hold)).collect();
        Ok(Self { grain, steps, whole, holds })
    }

    /// Grains that a step of `model` can last.
    pub fn longest(&self, model: usize) -> u32 {
        self.steps[model].iter().map(|draw| draw.low + u32::from(draw.more > 0.0)).max().unwrap_or(0)
    }
}

fn exact(system: &System, times: &[Vec<f64>], grain: f64) -> Result<Vec<Vec<Draw>>, Fault> {
    if !(grain.is_finite() && grain > 0.0) {
        return Err(Fault::Delta(grain));
    }
    let one = |model: usize, time: f64| {
        let (exact, low) = (time / grain, (time / grain).round());
        let fits = low >= 1.0 && (exact - low).abs() <= WHOLE * low && low < f64::from(u32::MAX);
        let fault = || Fault::Grain { model: system.models[model].name.clone(), value: time, delta: grain };
        fits.then_some(Draw { low: low as u32, more: 0.0 }).ok_or_else(fault)
    };
    let all = |(model, times): (usize, &Vec<f64>)| times.iter().map(|&time| one(model, time)).collect();
    times.iter().enumerate().map(all).collect()
}

fn automatic(times: &[Vec<f64>]) -> (f64, Vec<Vec<Draw>>) {
    let all = || times.iter().flatten().copied();
    let shortest = all().fold(f64::INFINITY, f64::min);
    let error = |grain: f64| all().map(|t| ((t / grain).round() * grain / t - 1.0).abs()).fold(0.0, f64::max);
    let grain = (LEAST..=MOST).map(|grains| shortest / f64::from(grains)).find(|&grain| error(grain) <= ERROR);
    let draw = |time: f64| match grain {
        Some(grain) => Draw { low: (time / grain).round() as u32, more: 0.0 },
        None => {
            let exact = time * f64::from(MIXED) / shortest;
            // Whole numbers that division has missed are whole numbers.
            let low = (exact + 1e-9).floor();
            let more = exact - low;
            Draw { low: low as u32, more: if more < 1e-9 { 0.0 } else { more } }
        }
    };
    let steps = times.iter().map(|times| times.iter().map(|&time| draw(time)).collect()).collect();
    (grain.unwrap_or(shortest / f64::from(MIXED)), steps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Model;

    fn system(times: &[&[f64]]) -> System {
        let models: Vec<Model> = times.iter().map(|times| Model::new("m", times.to_vec())).collect();
        let row = vec![1.0 / times.len() as f64; times.len()];
        System {
            routing: vec![row.clone(); times.len()],
            commits: vec![row; times.len()],
            models,
            sigma: vec![],
            entry: 0,
        }
    }

    fn grid(system: &System, grain: Grain) -> Result<Grid, Fault> {
        Grid::new(system, 4, &Setting { min_batch: vec![1; system.len()], hold_ms: vec![4.5, 0.0] }, grain)
    }

    #[test]
    fn fractions_are_found() {
        let grid = grid(&system(&[&[6.0], &[27.9]]), Grain::Auto).unwrap();
        assert_eq!((grid.steps[0][0], grid.steps[1][3]), (Draw { low: 20, more: 0.0 }, Draw { low: 93, more: 0.0 }));
        assert!((grid.grain - 0.3).abs() < 1e-12 && grid.whole);
        assert_eq!((grid.holds[0][1], grid.holds[1][0], grid.longest(1)), (15, 0, 93));
    }

    #[test]
    fn a_stretch_counts_while_models_overlap() {
        let mut system = system(&[&[6.0], &[27.9]]);
        system.models[0].stretch = 2.0;
        let grid = grid(&system, Grain::Exact(0.3)).unwrap();
        assert_eq!(
            (grid.steps[0][0].low, grid.steps[1][0].low, grid.holds[0].as_slice()),
            (40, 93, [30, 15].as_slice())
        );
    }

    #[test]
    fn times_that_share_no_grain_keep_their_means() {
        let times = [[1.0, 1.0371, 1.0912, 1.1733], [17.03, 17.217, 17.5551, 18.0017]];
        let system = system(&[&times[0], &times[1]]);
        let grid = grid(&system, Grain::Auto).unwrap();
        for (steps, times) in grid.steps.iter().zip(times) {
            for (draw, time) in steps.iter().zip(times) {
                let mean = (f64::from(draw.low) + draw.more) * grid.grain;
                assert!((mean - time).abs() < 1e-9 * time, "{draw:?} for {time}");
            }
        }
        assert!(grid.steps[0][1].more > 0.0 && !grid.whole);
    }

    #[test]
    fn a_grain_that_does_not_fit_is_refused() {
        let system = system(&[&[6.0], &[27.9]]);
        let error = grid(&system, Grain::Exact(0.5)).unwrap_err().to_string();
        assert_eq!(error, "step time of m = 27.9 ms: not a positive multiple of delta = 0.5 ms; leave delta out");
        assert!(grid(&system, Grain::Exact(0.0)).is_err() && grid(&system, Grain::Exact(40.0)).is_err());
    }
}
