//! Steps under way on hosts, where they slow each other down. Pure.

use std::time::Duration;

/// Ends of steps on one host that lie closer together than this differ by rounding alone.
const ROUNDING: Duration = Duration::from_nanos(4);

/// A step under way.
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

#[derive(Debug)]
struct Model {
    host: usize,
    stretch: Vec<f64>,
    running: Option<Running>,
    /// How long the steps that have ended took.
    busy: Duration,
}

/// When a step ends, unless it is told otherwise before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    pub at: Duration,
    pub model: usize,
    pub number: u64,
}

/// All hosts with their models.
#[derive(Debug)]
pub struct Hosts {
    models: Vec<Model>,
    /// By host.
    members: Vec<Vec<usize>>,
    /// By host: whether any of its models is slowed down by others.
    stretched: Vec<bool>,
    numbers: u64,
}

impl Hosts {
    /// By model: its host, and the factors of the time of its steps while 1, 2, … other models of that host run.
    /// The last factor serves all beyond; without one the model is not slowed down.
    pub fn new(models: impl Iterator<Item = (usize, Vec<f64>)>) -> Self {
        let model = |(host, stretch)| Model { host, stretch, running: None, busy: Duration::ZERO };
        let models: Vec<Model> = models.map(model).collect();
        let mut members = vec![Vec::new(); models.iter().map(|model| model.host + 1).max().unwrap_or(0)];
        let mut stretched = vec![false; members.len()];
        for (index, model) in models.iter().enumerate() {
            members[model.host].push(index);
            stretched[model.host] |= !model.stretch.is_empty();
        }
        Self { models, members, stretched, numbers: 0 }
    }

    pub fn same(&self, a: usize, b: usize) -> bool {
        self.models[a].host == self.models[b].host
    }

    pub fn is_running(&self, model: usize) -> bool {
        self.models[model].running.is_some()
    }

    /// How long the steps of `model` took that have ended.
    pub fn busy(&self, model: usize) -> Duration {
        self.models[model].busy
    }

    /// A step of `model` begins that takes `work` undisturbed. Ends that are new go to `ends`.
    pub fn start(&mut self, model: usize, work: Duration, now: Duration, ends: &mut Vec<End>) {
        self.numbers += 1;
        let (left, number, end) = (work.as_nanos() as f64, self.numbers, now + work);
        self.models[model].running = Some(Running { left, since: now, factor: 1.0, end, began: now, number });
        ends.push(End { at: end, model, number });
        self.stretch(self.models[model].host, now, ends);
    }

    /// The end of a step has come. False if it was told otherwise since. Ends that are new go to `ends`.
    pub fn finish(&mut self, end: End, ends: &mut Vec<End>) -> bool {
        let model = &mut self.models[end.model];
        let Some(step) = model.running.take_if(|step| step.number == end.number) else { return false };
        model.busy += end.at - step.began;
        let host = model.host;
        self.stretch(host, end.at, ends);
        true
    }

    /// The models that run on a host have changed: so have the ends of their steps.
    fn stretch(&mut self, host: usize, now: Duration, ends: &mut Vec<End>) {
        if !self.stretched[host] {
            return;
        }
        let running = self.members[host].iter().filter(|&&model| self.is_running(model)).count();
        for &model in &self.members[host] {
            let Model { stretch, running: Some(step), .. } = &self.models[model] else { continue };
            let nth = running.min(stretch.len() + 1);
            let factor = nth.checked_sub(2).and_then(|place| stretch.get(place)).copied().unwrap_or(1.0);
            if factor == step.factor {
                continue;
            }
            let done = (now - step.since).as_nanos() as f64 / step.factor;
            let left = (step.left - done).max(0.0);
            let end = now + Duration::from_nanos((left * factor).round() as u64);
            let others = self.members[host].iter().filter_map(|&other| Some(self.models[other].running?.end));
            let end = others.filter(|at| *at >= now && at.abs_diff(end) <= ROUNDING).fold(end, Duration::min);
            self.numbers += 1;
            let number = self.numbers;
            self.models[model].running = Some(Running { left, since: now, factor, end, number, ..*step });
            ends.push(End { at: end, model, number });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn steps_on_one_host_slow_each_other_down() {
        let models = [(0, vec![2.0, 4.0]), (0, vec![1.5]), (1, vec![9.0]), (0, vec![])];
        let mut hosts = Hosts::new(models.into_iter());
        let mut ends = Vec::new();
        let ended = |hosts: &mut Hosts, ends: &mut Vec<End>| {
            ends.sort_by_key(|end| std::cmp::Reverse(end.at));
            loop {
                let end = ends.pop().unwrap();
                if hosts.finish(end, ends) {
                    return (end.model, end.at);
                }
            }
        };
        hosts.start(0, ms(10), ms(0), &mut ends);
        hosts.start(2, ms(70), ms(0), &mut ends);
        // At 4 model 0 has 6 left, which take 12 beside model 1, which needs 45.
        hosts.start(1, ms(30), ms(4), &mut ends);
        // At 8 model 0 has 4 left, which take 16 beside two; model 1 is not slowed down further.
        hosts.start(3, ms(2), ms(8), &mut ends);
        assert!(hosts.is_running(3));
        assert_eq!(ended(&mut hosts, &mut ends), (3, ms(10)));
        // At 10 model 0 has 3.5 left.
        assert_eq!(ended(&mut hosts, &mut ends), (0, ms(17)));
        // At 17 model 1 has done 13 / 1.5 of its 30.
        let (model, at) = ended(&mut hosts, &mut ends);
        assert_eq!((model, at.as_micros()), (1, 38_333));
        assert_eq!(ended(&mut hosts, &mut ends), (2, ms(70)));
        assert_eq!((hosts.busy(0), hosts.busy(3)), (ms(17), ms(2)));
    }

    #[test]
    fn ends_that_differ_by_rounding_are_one() {
        let mut hosts = Hosts::new([(0, vec![1.3]), (0, vec![1.3])].into_iter());
        let mut ends = Vec::new();
        hosts.start(0, Duration::from_nanos(9_999_999), ms(0), &mut ends);
        hosts.start(1, Duration::from_nanos(10_000_001), ms(0), &mut ends);
        let last: Vec<Duration> = ends.iter().rev().take(2).map(|end| end.at).collect();
        assert_eq!(last[0], last[1]);
    }
}
