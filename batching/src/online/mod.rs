//! Thresholds that follow the traffic: what the last seconds showed is tuned for, every few seconds.
//!
//! [`Online::choose`] takes sums over all steps ([`Seen`]) and answers with a new ladder, or with none while the
//! present one is as good. It does no I/O and keeps no time: the caller passes both, and calls `choose` off the hot
//! path, because it searches.

mod latency;
mod seen;
mod window;

use std::time::Duration;

use crate::grid::Grain;
use crate::search::{self, Options};
use crate::system::{Fault, Setting, System, check_requests, most_waiting};

pub use seen::{Seen, Steps};
pub use window::stretch;
use window::{Estimate, Unknown, Window};

/// What the past counts after an interval.
const KEEP: f64 = 0.6;
/// Relative change of routes, step times or stretches from which on thresholds are chosen again.
const MOVED: f64 = 0.05;
/// Predicted gain without which the present thresholds stay, and thresholds of 1 are preferred.
const GAIN: f64 = 0.005;
/// As the search is repeated every few seconds, beside the work.
const OPTIONS: Options = Options { fixed: Vec::new(), holds: Vec::new(), grain: Grain::Auto, threads: 1, haste: 8 };
/// Parts of the way from thresholds of 1 to the best ones that are compared under a limit.
const WAY: [f64; 5] = [1.0, 0.75, 0.5, 0.25, 0.0];
/// Numbers of requests for which thresholds are searched; between them they lie on a line.
const SEARCHED: [usize; 16] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, MOST];
/// The largest of them. Step times of larger batches need not be told apart.
pub const MOST: usize = 256;

/// How to tune.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// By model.
    pub names: Vec<String>,
    pub entry: usize,
    /// By model, a ladder over the active requests from 1; the last step holds for more. Taken while too little
    /// is known.
    pub ladders: Vec<Vec<u32>>,
    /// By model: stretch while others run, until it can be told.
    pub stretch: Vec<f64>,
    /// How often thresholds are chosen.
    pub interval: Duration,
    /// Limits in milliseconds on the 99th percentile of the time per token and of the time to the first token.
    pub p99_tpot_ms: Option<f64>,
    pub p99_ttft_ms: Option<f64>,
}

/// Ladders that took the place of others.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// By model, a step for each number of active requests from 1; the last one holds for more.
    pub ladders: Vec<Vec<u32>>,
    pub reason: Reason,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// Too little is known: the configured ladders.
    Thin,
    /// Tuned for up to so many requests, because something has changed; for as many the prediction is this share
    /// faster than before.
    Tuned { requests: usize, gain: f64, why: &'static str },
}

/// The tuner of models that share requests.
#[derive(Clone, Debug)]
pub struct Online {
    config: Config,
    window: Window,
    /// End of the present interval.
    next: Duration,
    /// Most active requests of the present interval, and of those before with a slow fall.
    active: usize,
    most: usize,
    /// Milliseconds, of the present interval.
    tpot: Vec<f64>,
    ttft: Vec<f64>,
    /// What predicted times per token are multiplied with, and how far thresholds may go, as limits were not kept.
    caution: f64,
    reach: f64,
    /// Present ladders, and what the last search was for.
    ladders: Vec<Vec<u32>>,
    tuned: Option<(Estimate, usize)>,
    /// What the last readings tell.
    estimate: Result<Estimate, Unknown>,
    /// Why the last search found nothing.
    failed: Option<Fault>,
}

impl Online {
    /// With the configured ladders. Times of calls count from the same moment as `now`.
    pub fn new(config: Config, now: Duration) -> Result<Self, Fault> {
        let models = config.names.len();
        if models == 0 {
            return Err(Fault::NoModels);
        }
        for (field, given) in [("ladders", config.ladders.len()), ("stretch", config.stretch.len())] {
            if given != models {
                return Err(Fault::Count { field, given, wanted: models });
            }
        }
        if config.entry >= models {
            return Err(Fault::Entry { entry: config.entry, models });
        }
        Ok(Self {
            window: Window::new(&config.stretch),
            next: now + config.interval,
            active: 0,
            most: 0,
            tpot: Vec::new(),
            ttft: Vec::new(),
            caution: 1.0,
            reach: 1.0,
            ladders: config.ladders.clone(),
            tuned: None,
            estimate: Err(Unknown::Thin),
            failed: None,
            config,
        })
    }

    /// So many requests are active now.
    pub fn active(&mut self, requests: usize) {
        self.active = self.active.max(requests);
    }

    /// Milliseconds a token of a request (over some tens of tokens), or to its first one.
    pub fn tpot(&mut self, ms: f64) {
        self.tpot.push(ms);
    }

    pub fn ttft(&mut self, ms: f64) {
        self.ttft.push(ms);
    }

    /// What the last readings tell: the models that requests came to, ascending, and the system that they make
    /// up. `None`: too little, or nothing that could run.
    pub fn estimate(&self) -> Option<(&[usize], &System)> {
        self.estimate.as_ref().ok().map(|estimate| (&estimate.members[..], &estimate.system))
    }

    /// Too little is known: the configured ladders.
    pub fn thin(&self) -> bool {
        self.estimate == Err(Unknown::Thin)
    }

    /// What is wrong with what was seen, or with the last search. The ladders stay meanwhile.
    pub fn fault(&self) -> Option<&Fault> {
        match &self.estimate {
            Err(Unknown::Fault(fault)) => Some(fault),
            _ => self.failed.as_ref(),
        }
    }

    /// By model: the last stretch that could be told, or the assumed one.
    pub fn stretches(&self) -> Vec<f64> {
        self.window.stretches()
    }

    /// Present ladders, by model.
    pub fn ladders(&self) -> &[Vec<u32>] {
        &self.ladders
    }

    /// Other ladders are in force than were chosen.
    pub fn set_ladders(&mut self, ladders: &[Vec<u32>]) -> Result<(), Fault> {
        if ladders.len() != self.config.names.len() {
            let (given, wanted) = (ladders.len(), self.config.names.len());
            return Err(Fault::Count { field: "ladders", given, wanted });
        }
        self.ladders = ladders.to_vec();
        Ok(())
    }

    /// When the interval is over: other ladders, if they promise more. `seen`: by model, since the start.
    pub fn choose(&mut self, now: Duration, seen: &[Seen]) -> Option<Choice> {
        if now < self.next {
            return None;
        }
        self.next = now + self.config.interval;
        self.window.turn(KEEP, seen);
        self.most = self.active.max(self.most - self.most.div_ceil(8));
        self.active = 0;
        let limits_moved = self.feel_limits();
        let most = self.most.clamp(1, MOST);
        self.estimate = self.window.estimate(&self.config.names, self.config.entry);
        let estimate = match &self.estimate {
            Ok(estimate) => estimate,
            Err(Unknown::Thin) => {
                (self.tuned, self.failed) = (None, None);
                return self.change(self.config.ladders.clone(), Reason::Thin);
            }
            Err(Unknown::Fault(_)) => return None,
        };
        let why = match &self.tuned {
            None => Some("enough was seen"),
            Some((tuned, _)) if moved(tuned, estimate).is_some() => moved(tuned, estimate),
            Some((_, requests)) if *requests < most => Some("more requests"),
            Some(_) => limits_moved.then_some("times against the limits"),
        };
        let why = why?;
        let found = self.tune(estimate, most);
        self.tuned = Some((estimate.clone(), most));
        self.take(found, most, why)
    }

    /// What a search has found. One that failed is not repeated before something has changed.
    fn take(
        &mut self,
        found: Result<(Vec<Vec<u32>>, f64), Fault>,
        requests: usize,
        why: &'static str,
    ) -> Option<Choice> {
        match found {
            Ok((ladders, gain)) => {
                self.failed = None;
                self.change(ladders, Reason::Tuned { requests, gain, why })
            }
            Err(fault) => {
                self.failed = Some(fault);
                None
            }
        }
    }

    fn change(&mut self, ladders: Vec<Vec<u32>>, reason: Reason) -> Option<Choice> {
        if ladders == self.ladders {
            return None;
        }
        self.ladders.clone_from(&ladders);
        Some(Choice { ladders, reason })
    }

    /// Take back what limits do not allow, slowly give again what they do. Whether anything moved.
    fn feel_limits(&mut self) -> bool {
        let before = (self.caution, self.reach);
        let (tpot, ttft) = (percentile_99(&mut self.tpot), percentile_99(&mut self.ttft));
        if let Some((limit, tpot)) = self.config.p99_tpot_ms.zip(tpot) {
            if tpot > limit {
                self.caution = (self.caution * 1.1).min(3.0);
            } else if tpot < 0.85 * limit {
                self.caution = (self.caution / 1.05).max(1.0);
            }
        }
        if let Some((limit, ttft)) = self.config.p99_ttft_ms.zip(ttft) {
            if ttft > limit {
                self.reach /= 2.0;
            } else if ttft < 0.85 * limit {
                self.reach = (self.reach + 0.1).min(1.0);
            }
        }
        before != (self.caution, self.reach)
    }

    /// Ladders for the estimate up to `most` requests, and the gain that is predicted for so many.
    fn tune(&self, Estimate { members, system }: &Estimate, most: usize) -> Result<(Vec<Vec<u32>>, f64), Fault> {
        check_requests(most)?;
        let mut searched: Vec<(usize, Vec<u32>)> = Vec::new();
        for requests in SEARCHED.into_iter().take_while(|n| *n < most).chain([most]) {
            let hint = self.present(members, requests);
            searched.push((requests, self.thresholds(system, requests, &Setting::new(hint))?));
        }
        let at = |requests: usize, model: usize| {
            let after = searched.partition_point(|(n, _)| *n < requests);
            match (after.checked_sub(1).and_then(|before| searched.get(before)), searched.get(after)) {
                // Rounded down, so that sums stay below the line between two sums that do not lock up.
                (Some((low, a)), Some((high, b))) if *high > requests => {
                    let (a, b) = (f64::from(a[model]), f64::from(b[model]));
                    (a + (b - a) * (requests - low) as f64 / (high - low) as f64).floor() as u32
                }
                (_, Some((_, b))) => b[model],
                (_, None) => 1,
            }
        };
        // Those that no request comes to wait for none.
        let mut ladders = vec![vec![1]; self.config.names.len()];
        for (place, &model) in members.iter().enumerate() {
            ladders[model] = (1..=most).map(|requests| at(requests, place)).collect();
        }
        let rate = |min_batch: &[u32]| {
            let point = search::rates(system, most, &Setting::new(min_batch.to_vec()), &OPTIONS)?;
            Ok(point.rates.throughput)
        };
        let gain = match searched.last() {
            Some((_, best)) => rate(best)? / rate(&self.present(members, most))? - 1.0,
            None => 0.0,
        };
        Ok((ladders, gain))
    }

    /// Present thresholds of some models, or all 1 where they would lock up.
    fn present(&self, members: &[usize], requests: usize) -> Vec<u32> {
        let step = |ladder: &Vec<u32>| ladder.get(requests - 1).or(ladder.last()).copied().unwrap_or(1).max(1);
        let present: Vec<u32> = members.iter().map(|model| step(&self.ladders[*model])).collect();
        if most_waiting(&present) < requests as u64 { present } else { vec![1; present.len()] }
    }

    /// The thresholds for `requests`: the best ones that keep the limits.
    fn thresholds(&self, system: &System, requests: usize, present: &Setting) -> Result<Vec<u32>, Fault> {
        let best = search::best(system, requests, &OPTIONS, Some(present))?;
        let eager = Setting::new(vec![1; system.len()]);
        let rate = |setting: &Setting| Ok(search::rates(system, requests, setting, &OPTIONS)?.rates.throughput);
        let reached = |part: f64| {
            let shorter = |b: &u32| 1 + (f64::from(b - 1) * part * self.reach).floor() as u32;
            Setting::new(best.setting.min_batch.iter().map(shorter).collect())
        };
        if let Some(limit) = self.config.p99_tpot_ms {
            let mut tried: Vec<(f64, f64, Setting)> = Vec::new();
            for setting in WAY.map(reached) {
                // Where it is not known the limit may be missed.
                if let Some(tpot) = latency::p99_tpot_ms(system, requests, &setting)? {
                    tried.push((self.caution * tpot, rate(&setting)?, setting));
                }
            }
            let kept = tried.iter().filter(|(tpot, ..)| *tpot <= limit).max_by(|a, b| a.1.total_cmp(&b.1));
            let nearest = || tried.iter().min_by(|a, b| a.0.total_cmp(&b.0));
            return Ok(kept.or_else(nearest).map_or(eager.min_batch, |(.., setting)| setting.min_batch.clone()));
        }
        let best = reached(1.0);
        let top = rate(&best)?;
        // Of nearly equal ones the first.
        let choices = [&eager, present, &best];
        for setting in choices.into_iter().filter(|setting| self.reach == 1.0 || *setting != present) {
            if rate(setting)? >= top * (1.0 - GAIN) {
                return Ok(setting.min_batch.clone());
            }
        }
        Ok(best.min_batch)
    }
}

/// In what one system differs from the other so much that its best thresholds may.
fn moved(one: &Estimate, other: &Estimate) -> Option<&'static str> {
    if one.members != other.members {
        return Some("other models have requests");
    }
    let (one, other) = (&one.system, &other.system);
    let far = |a: f64, b: f64| (a - b).abs() > MOVED * a.max(b);
    let routes = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).any(|(a, b)| far(*a, *b) && (a - b).abs() > 0.005);
    if one.routing.iter().zip(&other.routing).any(routes) {
        return Some("other routes");
    }
    let slower = |(a, b): (&crate::Model, &crate::Model)| {
        let sizes = a.step_ms.len().min(b.step_ms.len());
        let mean = |model: &crate::Model| (1..=sizes).map(|size| model.step(size)).sum::<f64>() * model.stretch;
        far(mean(a), mean(b)) || far(a.stretch, b.stretch)
    };
    one.models.iter().zip(&other.models).any(slower).then_some("other step times")
}

/// Empties `values`.
fn percentile_99(values: &mut Vec<f64>) -> Option<f64> {
    let mut values = std::mem::take(values);
    values.sort_by(f64::total_cmp);
    let rank = (0.99 * values.len() as f64).ceil() as usize;
    values.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_that_fails_is_told_and_leaves_the_ladders() {
        let config = Config {
            names: vec!["m".into()],
            entry: 0,
            ladders: vec![vec![1]],
            stretch: vec![1.0],
            interval: Duration::from_secs(1),
            p99_tpot_ms: None,
            p99_ttft_ms: None,
        };
        let mut online = Online::new(config, Duration::ZERO).unwrap();
        assert!(online.take(Ok((vec![vec![1, 2]], 0.1)), 2, "a test").is_some());
        assert_eq!(online.take(Err(Fault::Concurrency(0)), 2, "a test"), None);
        assert_eq!((online.fault(), online.ladders()), (Some(&Fault::Concurrency(0)), &[vec![1, 2]][..]));
        assert_eq!(online.take(Ok((vec![vec![1, 2]], 0.1)), 2, "a test"), None);
        assert_eq!(online.fault(), None);
    }
}
