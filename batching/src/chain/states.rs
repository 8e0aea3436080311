//! The reachable states and the transitions between them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::grid::Grid;
use crate::system::{Setting, System};

use super::{ChainError, Limits};

/// How many certain transitions in a row are left out.
const FOLDED: u32 = 8;

/// A model in a state: requests that wait, those of the running batch (0 = idle), grains left of its step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    waiting: u32,
    batch: u32,
    left: u32,
}

/// Models that a chain can have: states are copied often, so they have a fixed size.
const MODELS: usize = 8;

type Places = [Place; MODELS];

/// A chain over states numbered in the order in which they were first reached.
pub(super) struct States {
    pub count: usize,
    /// By state, 1 + 2 M numbers: what happens until the next, on average. Milliseconds; by model the requests
    /// whose step ends; by model the batches that end.
    pub rewards: Vec<f64>,
    /// Transitions in the order of their sources: `starts[i]..starts[i + 1]` are those of state i.
    pub starts: Vec<usize>,
    pub targets: Vec<u32>,
    pub probabilities: Vec<f64>,
    /// By state: a number for how many requests are at each model.
    pub groups: Vec<u32>,
    pub group_count: usize,
}

/// Multiplies and folds: the packed states differ in few bits.
#[derive(Default)]
struct Fold(u64);

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.0.rotate_left(29) ^ word) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
    fn write_u128(&mut self, word: u128) {
        self.write_u64(word as u64);
        self.write_u64((word >> 64) as u64);
    }
}

type Numbers<K> = HashMap<K, u32, BuildHasherDefault<Fold>>;

/// Ways in which the requests of a batch can part: how many go to each model, and how probably.
struct Splits {
    /// `models` counts for each way.
    counts: Vec<u32>,
    probabilities: Vec<f64>,
}

impl Splits {
    /// All multinomial outcomes of `batch` requests with a probability above `tail`, scaled to sum to 1.
    fn new(batch: usize, row: &[f64], log_factorials: &[f64], tail: f64) -> Self {
        let mut splits = Self { counts: Vec::new(), probabilities: Vec::new() };
        let mut counts = vec![0; row.len()];
        splits.extend(&mut counts, 0, batch, log_factorials[batch], row, log_factorials);
        let kept: Vec<bool> = splits.probabilities.iter().map(|p| *p > tail).collect();
        let mut keep = kept.iter();
        splits.counts = splits
            .counts
            .chunks(row.len())
            .filter(|_| keep.next().copied().unwrap_or(false))
            .flatten()
            .copied()
            .collect();
        let mut keep = kept.iter();
        splits.probabilities.retain(|_| keep.next().copied().unwrap_or(false));
        let sum: f64 = splits.probabilities.iter().sum();
        splits.probabilities.iter_mut().for_each(|p| *p /= sum);
        splits
    }

    fn extend(&mut self, counts: &mut [u32], model: usize, rest: usize, log: f64, row: &[f64], factorials: &[f64]) {
        let Some(&p) = row.get(model) else {
            if rest == 0 {
                self.counts.extend_from_slice(counts);
                self.probabilities.push(log.exp());
            }
            return;
        };
        let most = if p > 0.0 { rest } else { 0 };
        // The last model takes all that is left.
        let least = if row[model + 1..].iter().any(|p| *p > 0.0) { 0 } else { most };
        for count in least..=most {
            counts[model] = count as u32;
            let term = if count == 0 { 0.0 } else { count as f64 * p.ln() - factorials[count] };
            self.extend(counts, model + 1, rest - count, log + term, row, factorials);
        }
        counts[model] = 0;
    }
}

pub(super) struct Builder<'a> {
    system: &'a System,
    setting: &'a Setting,
    grid: &'a Grid,
    limits: Limits,
    /// By model and batch size.
    splits: Vec<Vec<Splits>>,
    /// By model: whether all its requests go to one place.
    certain: Vec<bool>,
    /// By model: bits of its counts and of its grains in a packed state.
    bits: (u32, Vec<u32>),
    numbers: Numbers<u128>,
    keys: Vec<u128>,
    /// Transitions out of the state that is worked on, and what it earns on the way.
    row: Vec<(u32, f64)>,
    reward: Vec<f64>,
}

impl<'a> Builder<'a> {
    pub fn new(
        system: &'a System,
        requests: usize,
        setting: &'a Setting,
        grid: &'a Grid,
        limits: Limits,
    ) -> Result<Self, ChainError> {
        if system.len() > MODELS {
            return Err(ChainError::TooLarge(limits.states));
        }
        let count_bits = usize::BITS - requests.leading_zeros();
        let grain_bits: Vec<u32> = (0..system.len()).map(|m| u32::BITS - grid.longest(m).leading_zeros()).collect();
        if 2 * count_bits * system.len() as u32 + grain_bits.iter().sum::<u32>() > u128::BITS {
            return Err(ChainError::TooLarge(limits.states));
        }
        let mut log_factorials = vec![0.0];
        for n in 1..=requests {
            log_factorials.push(log_factorials[n - 1] + (n as f64).ln());
        }
        let ways = |row: &Vec<f64>| combinations(requests, row.iter().filter(|p| **p > 0.0).count());
        if system.routing.iter().map(ways).sum::<f64>() > limits.transitions as f64 {
            return Err(ChainError::TooLarge(limits.states));
        }
        let of = |row: &Vec<f64>| (0..=requests).map(|b| Splits::new(b, row, &log_factorials, limits.tail)).collect();
        Ok(Self {
            splits: system.routing.iter().map(of).collect(),
            certain: system.routing.iter().map(|row| row.iter().filter(|p| **p > 0.0).count() == 1).collect(),
            bits: (count_bits, grain_bits),
            numbers: Numbers::default(),
            keys: Vec::new(),
            row: Vec::new(),
            reward: Vec::new(),
            system,
            setting,
            grid,
            limits,
        })
    }

    /// All states reached from all requests waiting at the entry.
    pub fn build(mut self, requests: usize) -> Result<States, ChainError> {
        let models = self.system.len();
        let mut places = Places::default();
        places[self.system.entry].waiting = requests as u32;
        let mut states = States {
            count: 0,
            rewards: Vec::new(),
            starts: vec![0],
            targets: Vec::new(),
            probabilities: Vec::new(),
            groups: Vec::new(),
            group_count: 0,
        };
        self.reward = vec![0.0; 1 + 2 * models];
        // The first launch may branch too; all its states lead to the same recurrent ones.
        self.launch(places, models, 1.0, 0)?;
        let mut groups: Numbers<u128> = Numbers::default();
        while let Some(&key) = self.keys.get(states.count) {
            let places = self.unpack(key);
            let group = places[..models].iter().fold(0, |all, p| all << self.bits.0 | u128::from(p.waiting + p.batch));
            let next = groups.len() as u32;
            states.groups.push(*groups.entry(group).or_insert(next));
            self.row.clear();
            self.reward.fill(0.0);
            self.complete(places, 1.0, 0)?;
            states.targets.extend(self.row.iter().map(|(target, _)| target));
            states.probabilities.extend(self.row.iter().map(|(_, probability)| probability));
            states.starts.push(states.targets.len());
            states.rewards.extend_from_slice(&self.reward);
            states.count += 1;
            if states.targets.len() > self.limits.transitions {
                return Err(ChainError::TooLarge(self.limits.states));
            }
        }
        states.group_count = groups.len();
        Ok(states)
    }

    fn pack(&self, places: &Places) -> u128 {
        places.iter().zip(&self.bits.1).fold(0, |key, (place, grains)| {
            let key = key << self.bits.0 | u128::from(place.waiting);
            (key << self.bits.0 | u128::from(place.batch)) << grains | u128::from(place.left)
        })
    }

    fn unpack(&self, mut key: u128) -> Places {
        let mut places = Places::default();
        let mut take = |bits: u32| {
            let value = key & ((1 << bits) - 1);
            key >>= bits;
            value as u32
        };
        for (place, &grains) in places[..self.system.len()].iter_mut().zip(&self.bits.1).rev() {
            place.left = take(grains);
            place.batch = take(self.bits.0);
            place.waiting = take(self.bits.0);
        }
        places
    }

    /// Let time pass until steps end, part their requests, and start what can start.
    fn complete(&mut self, mut places: Places, probability: f64, folded: u32) -> Result<(), ChainError> {
        let running = || places.iter().enumerate().filter(|(_, place)| place.batch > 0);
        let Some(passed) = running().map(|(_, place)| place.left).min() else { return Err(ChainError::Stuck) };
        let count = running().count();
        // Alone, a model is not stretched, and nothing but the end of its step ends it.
        let alone = if count == 1 { running().map(|(model, _)| self.system.models[model].stretch).sum() } else { 1.0 };
        self.reward[0] += probability * f64::from(passed) * self.grid.grain / alone * self.system.sigma(count);
        let mut ended = [0; MODELS];
        for (model, place) in places.iter_mut().enumerate().filter(|(_, place)| place.batch > 0) {
            place.left -= passed;
            if place.left == 0 {
                ended[model] = place.batch;
                self.reward[1 + model] += probability * f64::from(place.batch);
                self.reward[1 + self.system.len() + model] += probability;
                place.batch = 0;
            }
        }
        self.part(places, &ended, 0, probability, folded)
    }

    /// Every way in which the batches `ended` of the models from `model` on part, all at the same moment.
    fn part(
        &mut self,
        places: Places,
        ended: &[u32; MODELS],
        model: usize,
        probability: f64,
        folded: u32,
    ) -> Result<(), ChainError> {
        let models = self.system.len();
        let Some(model) = (model..models).find(|model| ended[*model] > 0) else {
            return self.launch(places, models, probability, folded);
        };
        let batch = ended[model] as usize;
        for way in 0..self.splits[model][batch].probabilities.len() {
            let splits = &self.splits[model][batch];
            let counts = &splits.counts[way * models..(way + 1) * models];
            let share = splits.probabilities[way];
            let mut next = places;
            next.iter_mut().zip(counts).for_each(|(place, count)| place.waiting += count);
            self.part(next, ended, model + 1, probability * share, folded)?;
        }
        Ok(())
    }

    /// Start every model below `above` that can start, from the highest down.
    fn launch(&mut self, mut places: Places, above: usize, probability: f64, folded: u32) -> Result<(), ChainError> {
        for model in (0..above).rev() {
            let Place { waiting, batch, .. } = places[model];
            let held =
                |(running, place): (usize, &Place)| place.batch > 0 && place.left <= self.grid.holds[model][running];
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
    fn emit(&mut self, places: Places, probability: f64, folded: u32) -> Result<(), ChainError> {
        if self.limits.fold && folded < FOLDED && self.is_certain(&places) {
            return self.complete(places, probability, folded + 1);
        }
        let key = self.pack(&places);
        let next = self.keys.len() as u32;
        let number = *self.numbers.entry(key).or_insert(next);
        if number == next {
            if self.keys.len() >= self.limits.states {
                return Err(ChainError::TooLarge(self.limits.states));
            }
            self.keys.push(key);
        }
        self.row.push((number, probability));
        Ok(())
    }

    /// Whether all requests whose step ends next have one place to go to.
    fn is_certain(&self, places: &Places) -> bool {
        let running = || places.iter().zip(&self.certain).filter(|(place, _)| place.batch > 0);
        let passed = running().map(|(place, _)| place.left).min();
        running().filter(|(place, _)| Some(place.left) == passed).all(|(_, certain)| *certain)
    }
}

/// Ways to part at most `requests` requests among `models` models.
fn combinations(requests: usize, models: usize) -> f64 {
    (1..=models).fold(1.0, |ways, i| ways * (requests + i) as f64 / i as f64)
}
