//! What is simulated: models on hosts, how requests move between them, and the load. Pure.

use std::time::Duration;

use tokenrouter_plugin_api::random::uniform;

use crate::runner::simulated::Latency;
use crate::subserver::coordinator::Waiting;
use crate::subserver::gate::{Schedule, may_wait};

/// Streams of random numbers, keyed by the plan's seed.
pub(super) const ROUTES: u64 = 1 << 21;
pub(super) const COMMITS: u64 = 2 << 21;
const ARRIVALS: u64 = 3 << 21;
const PROMPTS: u64 = 4 << 21;
const OUTPUTS: u64 = 5 << 21;

/// Most tokens of a K/V pool that was not given.
const MOST_TOKENS: u64 = 1 << 30;

/// A model and its instances.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedModel {
    pub name: String,
    /// By instance: its host. At least one.
    pub hosts: Vec<usize>,
    pub latency: Latency,
    pub waiting: Waiting,
    /// Factors of the time of a step while 1, 2, … other models of the host run.
    pub stretch: Vec<f64>,
    /// Tokens of the K/V pool; `None`: as many as there can be.
    pub kv_tokens: Option<u64>,
    pub max_rows: usize,
    pub prefill_chunk: usize,
    /// By model: the probability that a request goes there after a step here. Adds up to 1.
    pub routing: Vec<f64>,
    /// By model: the probability that the candidate is committed when it does. 1 for this model itself.
    pub commit: Vec<f64>,
}

/// A request of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    pub at: Duration,
    /// Tokens, where the trace gives them.
    pub prompt: Option<u32>,
    pub output: Option<u32>,
}

/// When requests come.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    /// So many are always under way.
    Closed(u32),
    /// So many a second, at random.
    Poisson(f64),
    /// So many at once, again and again.
    Bursts { size: u32, every: Duration },
    /// As written down.
    Trace(Vec<Arrival>),
}

/// Lengths from the first to the second number of tokens, all as probable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths(pub u32, pub u32);

impl Lengths {
    fn draw(self, random: f64) -> u32 {
        let count = f64::from(self.1 - self.0) + 1.0;
        self.0 + ((random * count) as u32).min(self.1 - self.0)
    }
}

/// The load.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedLoad {
    /// Requests in all.
    pub requests: u32,
    pub arrivals: Arrivals,
    pub prompt: Lengths,
    pub output: Lengths,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// When it comes; in a closed loop those beyond the first come when others have ended.
    pub at: Duration,
    pub prompt: u32,
    pub output: u32,
}

impl Asked {
    fn tokens(&self) -> u64 {
        u64::from(self.prompt) + u64::from(self.output)
    }
}

/// Everything that a simulation needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// At least one.
    pub models: Vec<PlannedModel>,
    /// Where requests start.
    pub entry: usize,
    pub schedule: Schedule,
    /// Of a message between two hosts.
    pub delay: Duration,
    pub load: PlannedLoad,
    pub seed: u64,
}

impl Plan {
    /// What cannot be simulated. The error is one line.
    pub fn check(&self) -> Result<(), String> {
        let groups = self.groups();
        let cells = self.cells();
        let longest = match &self.load.arrivals {
            Arrivals::Trace(_) => self.requests().iter().map(|asked| asked.tokens()).max().unwrap_or(0),
            _ => u64::from(self.load.prompt.1) + u64::from(self.load.output.1),
        };
        if let Some(model) = self.models.iter().find(|model| model.kv_tokens.is_some_and(|tokens| tokens < longest)) {
            return Err(format!(
                "models.{}.kv_tokens: a request may have {longest} tokens; give at least these",
                model.name
            ));
        }
        let at_once = match self.load.arrivals {
            Arrivals::Closed(under_way) => {
                self.check_closed(under_way, &groups, cells)?;
                under_way
            }
            _ => self.load.requests,
        };
        let open = self.models.iter().find(|model| model.kv_tokens.is_none());
        if let Some(model) = open.filter(|_| longest.saturating_mul(u64::from(at_once)) > MOST_TOKENS) {
            return Err(format!(
                "models.{}: all requests at once would take {longest} x {at_once} tokens of K/V; give kv_tokens",
                model.name
            ));
        }
        Ok(())
    }

    fn check_closed(&self, under_way: u32, groups: &[Group], cells: usize) -> Result<(), String> {
        for group in groups {
            let own = (0..under_way as usize).filter(|request| group.cells.contains(&(request % cells))).count();
            if own == 0 {
                let groups = groups.len();
                return Err(format!(
                    "arrivals: {under_way} requests under way leave instances without any; at least {groups} are needed"
                ));
            }
            let ladders = group.instances.iter().map(|(model, _)| self.models[*model].waiting.min_batch.clone());
            let ladders: Vec<Vec<u32>> = ladders.collect();
            let waiting = may_wait(&ladders, own);
            if self.schedule == Schedule::Delayed && waiting >= own as u64 {
                return Err(format!(
                    "min_batch: with {own} requests under way the models could wait for each other for ever: the \
                     thresholds less one add up to {waiting}, which must be below {own}; lower them"
                ));
            }
        }
        Ok(())
    }

    /// The requests in the order in which they come.
    pub fn requests(&self) -> Vec<Asked> {
        let load = &self.load;
        let draw = |request: u32, stream: u64| uniform(self.seed, u64::from(request), stream);
        let mut clock = 0.0;
        let requests = (0..load.requests).map(|request| {
            let traced = match &load.arrivals {
                Arrivals::Trace(trace) => trace.get(request as usize).copied(),
                _ => None,
            };
            let at = match &load.arrivals {
                Arrivals::Closed(_) => Duration::ZERO,
                Arrivals::Poisson(rate) => {
                    clock -= (1.0 - draw(request, ARRIVALS)).ln() / rate;
                    Duration::from_secs_f64(clock)
                }
                Arrivals::Bursts { size, every } => *every * (request / size),
                Arrivals::Trace(_) => traced.map_or(Duration::ZERO, |arrival| arrival.at),
            };
            let length = |given: Option<u32>, lengths: Lengths, stream| {
                given.unwrap_or_else(|| lengths.draw(draw(request, stream)))
            };
            Asked {
                at,
                prompt: length(traced.and_then(|arrival| arrival.prompt), load.prompt, PROMPTS),
                output: length(traced.and_then(|arrival| arrival.output), load.output, OUTPUTS),
            }
        });
        requests.collect()
    }

    /// Instances that serve a request: request r is served by instance r mod n of a model with n. So many
    /// requests see different ones.
    pub fn cells(&self) -> usize {
        fn gcd(a: usize, b: usize) -> usize {
            if b == 0 { a } else { gcd(b, a % b) }
        }
        let counts = self.models.iter().map(|model| model.hosts.len());
        counts.fold(1, |all: usize, count| (all / gcd(all, count)).saturating_mul(count))
    }

    /// The instances that share requests, directly or not: each group stands for itself, as servers of their
    /// own do.
    pub fn groups(&self) -> Vec<Group> {
        let cells = self.cells();
        let instance = |model: usize, cell: usize| (model, cell % self.models[model].hosts.len());
        let mut groups: Vec<Group> = Vec::new();
        for cell in 0..cells {
            let own: Vec<(usize, usize)> = (0..self.models.len()).map(|model| instance(model, cell)).collect();
            let (mut joined, apart): (Vec<Group>, Vec<Group>) =
                groups.into_iter().partition(|group| own.iter().any(|instance| group.instances.contains(instance)));
            joined.push(Group { instances: own, cells: vec![cell] });
            let mut instances: Vec<_> = joined.iter().flat_map(|group| group.instances.iter().copied()).collect();
            instances.sort_unstable();
            instances.dedup();
            let cells = joined.into_iter().flat_map(|group| group.cells).collect();
            groups = apart;
            groups.push(Group { instances, cells });
        }
        groups
    }
}

/// Instances that share requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Model and instance; ascending.
    pub instances: Vec<(usize, usize)>,
    /// Request r belongs to cell r mod [`Plan::cells`].
    pub cells: Vec<usize>,
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn model(name: &str, step_ms: u64, routing: &[f64], commit: &[f64]) -> PlannedModel {
        let max_wait = Duration::from_secs(3600);
        PlannedModel {
            name: name.into(),
            hosts: vec![0],
            latency: Latency::constant(Duration::from_millis(step_ms)),
            waiting: Waiting { min_batch: vec![1], max_wait, hold: Duration::ZERO },
            stretch: Vec::new(),
            kv_tokens: None,
            max_rows: 1 << 30,
            prefill_chunk: 1 << 30,
            routing: routing.into(),
            commit: commit.into(),
        }
    }

    pub fn plan(models: Vec<PlannedModel>, arrivals: Arrivals, requests: u32, output: Lengths) -> Plan {
        let load = PlannedLoad { requests, arrivals, prompt: Lengths(1, 1), output };
        Plan { models, entry: 0, schedule: Schedule::Delayed, delay: Duration::ZERO, load, seed: 1 }
    }

    #[test]
    fn arrivals_follow_their_process() {
        let one = || vec![model("m", 1, &[1.0], &[1.0])];
        let of = |arrivals, requests| plan(one(), arrivals, requests, Lengths(3, 5)).requests();
        let poisson = of(Arrivals::Poisson(50.0), 20_000);
        assert!((poisson[19_999].at.as_secs_f64() - 400.0).abs() < 12.0, "{:?}", poisson[19_999]);
        assert!(poisson.windows(2).all(|pair| pair[0].at < pair[1].at));
        let mean = poisson.iter().map(|asked| f64::from(asked.output)).sum::<f64>() / 20_000.0;
        assert!((mean - 4.0).abs() < 0.02 && poisson.iter().all(|asked| (3..=5).contains(&asked.output)), "{mean}");
        let ms = Duration::from_millis;
        let bursts = of(Arrivals::Bursts { size: 2, every: ms(10) }, 5);
        assert_eq!(bursts.iter().map(|asked| asked.at).collect::<Vec<_>>(), [0, 0, 10, 10, 20].map(ms));
        let traced = Arrival { at: ms(7), prompt: Some(9), output: None };
        let [first] = of(Arrivals::Trace(vec![traced]), 1)[..] else { panic!() };
        assert_eq!((first.at, first.prompt), (ms(7), 9));
    }

    #[test]
    fn instances_that_share_requests_are_one_group() {
        let with = |counts: &[usize]| {
            let instances = |&n: &usize| PlannedModel { hosts: (0..n).collect(), ..model("m", 1, &[1.0], &[1.0]) };
            let models = counts.iter().map(instances).collect();
            plan(models, Arrivals::Closed(1), 1, Lengths(1, 1))
        };
        assert_eq!((with(&[4, 4]).cells(), with(&[4, 4]).groups().len()), (4, 4));
        assert_eq!(with(&[4, 4]).groups()[1].instances, [(0, 1), (1, 1)]);
        assert_eq!((with(&[4, 1]).cells(), with(&[4, 1]).groups().len()), (4, 1));
        assert_eq!((with(&[2, 3]).cells(), with(&[2, 3]).groups().len()), (6, 1));
        let groups = with(&[2, 4]).groups();
        assert_eq!(groups.len(), 2);
        assert_eq!((&groups[0].instances[..], &groups[0].cells[..]), (&[(0, 0), (1, 0), (1, 2)][..], &[0, 2][..]));
    }
}
