//! The reachable states and the transitions between them.

use crate::grid::Grid;
use crate::system::{Setting, System};

use super::layout::{Layout, Place};
use super::numbers::Numbers;
use super::splits::{Splits, combinations};
use super::{ChainError, Limits};

/// How many certain transitions in a row are left out.
const FOLDED: u32 = 8;

/// A chain over states numbered in the order in which they were first reached.
#[derive(Default)]
pub(super) struct States {
    pub count: usize,
    /// By state, 1 + 2 M numbers: what happens until the next, on average. Milliseconds; by model the requests
    /// whose step ends; by model the batches that end.
    pub rewards: Vec<f64>,
    /// Transitions in the order of their sources: `starts[i]..starts[i + 1]` are those of state i.
    pub starts: Vec<usize>,
    pub targets: Vec<u32>,
    pub probabilities: Vec<f64>,
    /// Two partitions of the states, by what changes slowly: how many requests are at each model, and the
    /// running batches of all but the fastest model.
    pub groups: [Groups; 2],
}

/// By state the number of its group, and how many groups there are.
#[derive(Default)]
pub(super) struct Groups {
    pub of: Vec<u32>,
    pub count: usize,
}

/// Builds the chain of M models.
pub(super) struct Builder<'a, const M: usize> {
    system: &'a System,
    setting: &'a Setting,
    grid: &'a Grid,
    limits: Limits,
    layout: Layout<M>,
    /// By model and batch size.
    splits: Vec<Vec<Splits>>,
    /// By model: whether all its requests go to one place.
    certain: [bool; M],
    numbers: Numbers,
    states: States,
    /// What the state that is worked on earns, as in [`States::rewards`].
    reward: Vec<f64>,
}

impl<'a, const M: usize> Builder<'a, M> {
    pub fn new(
        system: &'a System,
        requests: usize,
        setting: &'a Setting,
        grid: &'a Grid,
        limits: Limits,
    ) -> Result<Self, ChainError> {
        let layout = Layout::new(requests, grid).ok_or(ChainError::TooLarge(limits.states))?;
        let mut log_factorials = vec![0.0];
        for n in 1..=requests {
            log_factorials.push(log_factorials[n - 1] + (n as f64).ln());
        }
        let destinations = |row: &[f64]| row.iter().filter(|p| **p > 0.0).count();
        if system.routing.iter().map(|row| combinations(requests, destinations(row))).sum::<f64>()
            > limits.transitions as f64
        {
            return Err(ChainError::TooLarge(limits.states));
        }
        let of = |row: &Vec<f64>| (0..=requests).map(|b| Splits::new(b, row, &log_factorials, limits.tail)).collect();
        Ok(Self {
            splits: system.routing.iter().map(of).collect(),
            certain: std::array::from_fn(|model| destinations(&system.routing[model]) == 1),
            numbers: Numbers::default(),
            states: States { starts: vec![0], ..States::default() },
            reward: vec![0.0; 1 + 2 * M],
            layout,
            system,
            setting,
            grid,
            limits,
        })
    }

    /// All states reached from all requests waiting at the entry.
    pub fn build(mut self, requests: usize) -> Result<States, ChainError> {
        let mut places = [Place::default(); M];
        places[self.system.entry].waiting = requests as u32;
        // The first launch may branch too; all its states lead to the same recurrent ones.
        self.launch(places, M, 1.0, 0)?;
        self.states.targets.clear();
        self.states.probabilities.clear();
        let shortest = |model: &usize| self.grid.steps[*model].first().map_or(0, |draw| draw.low);
        let fastest = (0..M).min_by_key(shortest).unwrap_or(0);
        let mut groups = [Numbers::default(), Numbers::default()];
        while let Some(key) = self.numbers.key(self.states.count) {
            let places = self.layout.unpack(key);
            let push = |key: u64, count: u32| key << self.layout.count_bits | u64::from(count);
            let slow = places.iter().enumerate().filter(|(model, _)| *model != fastest);
            let partitions = [
                places.iter().fold(0, |key, place| push(key, place.waiting + place.batch)),
                slow.fold(0, |key, (_, place)| push(key, place.batch)),
            ];
            for ((of, numbers), group) in self.states.groups.iter_mut().zip(&mut groups).zip(partitions) {
                of.of.push(numbers.number(group));
                of.count = numbers.len();
            }
            self.reward.fill(0.0);
            self.complete(places, 1.0, 0)?;
            self.states.starts.push(self.states.targets.len());
            self.states.rewards.extend_from_slice(&self.reward);
            self.states.count += 1;
        }
        Ok(self.states)
    }

    /// Let time pass until steps end, part their requests, and start what can start.
    fn complete(&mut self, mut places: [Place; M], probability: f64, folded: u32) -> Result<(), ChainError> {
        let running = || places.iter().enumerate().filter(|(_, place)| place.batch > 0);
        let Some(passed) = running().map(|(_, place)| place.left).min() else { return Err(ChainError::Stuck) };
        let count = running().count();
        // Alone, a model is not stretched, and nothing but the end of its step ends it.
        let alone = if count == 1 { running().map(|(model, _)| self.system.models[model].stretch).sum() } else { 1.0 };
        self.reward[0] += probability * f64::from(passed) * self.grid.grain / alone * self.system.sigma(count);
        let mut last = [false; M];
        for (last, place) in last.iter_mut().zip(&mut places).filter(|(_, place)| place.batch > 0) {
            place.left -= passed;
            *last = place.left == 0;
        }
        let together = last.iter().filter(|last| **last).count();
        if self.grid.whole || together == 1 {
            return self.end(places, last, probability, folded);
        }
        for model in (0..M).filter(|model| last[*model]) {
            let only = std::array::from_fn(|other| other == model);
            self.end(places, only, probability / together as f64, folded)?;
        }
        Ok(())
    }

    /// End the steps of the models in `last`.
    fn end(
        &mut self,
        mut places: [Place; M],
        last: [bool; M],
        probability: f64,
        folded: u32,
    ) -> Result<(), ChainError> {
        let mut ended = [0; M];
        for model in (0..M).filter(|model| last[*model]) {
            let batch = std::mem::take(&mut places[model].batch);
            ended[model] = batch;
            self.reward[1 + model] += probability * f64::from(batch);
            self.reward[1 + M + model] += probability;
        }
        self.part(places, &ended, 0, probability, folded)
    }

    /// Every way in which the batches `ended` of the models from `model` on part, all at the same moment.
    fn part(
        &mut self,
        places: [Place; M],
        ended: &[u32; M],
        model: usize,
        probability: f64,
        folded: u32,
    ) -> Result<(), ChainError> {
        let Some(model) = (model..M).find(|model| ended[*model] > 0) else {
            return self.launch(places, M, probability, folded);
        };
        let batch = ended[model] as usize;
        for way in 0..self.splits[model][batch].probabilities.len() {
            let splits = &self.splits[model][batch];
            let counts = &splits.counts[way * M..(way + 1) * M];
            let share = splits.probabilities[way];
            let mut next = places;
            next.iter_mut().zip(counts).for_each(|(place, count)| place.waiting += count);
            self.part(next, ended, model + 1, probability * share, folded)?;
        }
        Ok(())
    }

    /// Start every model below `above` that can start, from the highest down.
    fn launch(
        &mut self,
        mut places: [Place; M],
        above: usize,
        probability: f64,
        folded: u32,
    ) -> Result<(), ChainError> {
        for model in (0..above).rev() {
            let Place { waiting, batch, .. } = places[model];
            let held = |(running, place): (usize, &Place)| {
                let hold = self.grid.holds[model][running];
                hold > 0 && place.batch > 0 && place.left <= hold
            };
            let ready = batch == 0 && waiting > 0 && waiting >= self.setting.min_batch[model];
            if !ready || places.iter().enumerate().any(held) {
                continue;
            }
            let batch = self.system.models[model].batch(waiting as usize);
            let draw = self.grid.steps[model][batch - 1];
            places[model] = Place { waiting: waiting - batch as u32, batch: batch as u32, left: draw.low };
            if draw.more > 0.0 {
                let mut longer = places;
                longer[model].left += 1;
                self.launch(longer, model, probability * draw.more, folded)?;
                return self.launch(places, model, probability * (1.0 - draw.more), folded);
            }
        }
        self.emit(places, probability, folded)
    }

    /// A state after all launches. With folding, one whose next transition is certain is passed through.
    fn emit(&mut self, places: [Place; M], probability: f64, folded: u32) -> Result<(), ChainError> {
        if self.limits.fold && folded < FOLDED && self.is_certain(&places) {
            return self.complete(places, probability, folded + 1);
        }
        // One state alone can have more of them than there is room for.
        if self.states.targets.len() > self.limits.transitions || self.numbers.len() > self.limits.states {
            return Err(ChainError::TooLarge(self.limits.states));
        }
        self.states.targets.push(self.numbers.number(self.layout.pack(&places)));
        self.states.probabilities.push(probability);
        Ok(())
    }

    /// Whether one step ends next, or all that do so end together, and their requests have one place to go to.
    fn is_certain(&self, places: &[Place; M]) -> bool {
        let running = || places.iter().zip(&self.certain).filter(|(place, _)| place.batch > 0);
        let passed = running().map(|(place, _)| place.left).min();
        let mut next = running().filter(|(place, _)| Some(place.left) == passed);
        if self.grid.whole {
            next.all(|(_, certain)| *certain)
        } else {
            next.next().is_some_and(|(_, certain)| *certain) && next.next().is_none()
        }
    }
}
