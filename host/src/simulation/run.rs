//! Carrying out a plan.

use std::sync::Arc;
use std::time::Duration;

use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use super::chance::{Blank, Chance};
use super::plan::{Arrivals, Asked, Group, Plan};
use super::{Audience, Network, SimulatedModel, World};
use crate::engine::OnError;
use crate::request::{Event, ModelId, NewRequest, RequestError, RequestId, RequestSpec, RouteId, SamplingParams};
use crate::subserver::{Attachment, Counters, Limits, SubServer, pages_for};

/// How a request fared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fate {
    /// Place among the plan's requests.
    pub number: u32,
    pub prompt: u32,
    pub tokens: u32,
    pub handoffs: u32,
    pub submitted: Duration,
    pub first: Duration,
    pub end: Duration,
}

/// What one instance of a model did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    pub model: usize,
    pub host: usize,
    pub busy: Duration,
    pub counters: Counters,
}

/// What a group of instances came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// In the order of the plan.
    pub fates: Vec<Fate>,
    pub works: Vec<Work>,
    /// Tokens a second between the first tenth of all tokens and the last.
    pub steady: f64,
}

/// Carry out `plan`, its groups side by side. `progress` is told of committed tokens, now and then. Fails if a
/// request was not answered in full.
pub fn run(plan: &Plan, progress: &(dyn Fn(u64) + Sync)) -> Result<Vec<Outcome>, String> {
    let requests = plan.requests();
    let groups = plan.groups();
    groups.par_iter().map(|group| run_group(plan, group, &requests, progress)).collect()
}

/// The clients of one group. Request ids are numbers among the group's requests, from 1.
struct Clients {
    fates: Vec<Fate>,
    ended: Vec<RequestId>,
    failed: Option<(RequestId, RequestError)>,
    committed: u64,
    /// Tokens after which the steady part begins and ends, and what was there when.
    steady: [(u64, Option<(u64, Duration)>); 2],
}

impl Clients {
    fn fate(&mut self, id: RequestId) -> Option<&mut Fate> {
        self.fates.get_mut((id as usize).checked_sub(1)?)
    }
}

impl Audience for Clients {
    fn submitted(&mut self, now: Duration, id: RequestId) {
        if let Some(fate) = self.fate(id) {
            fate.submitted = now;
        }
    }

    fn cancelled(&mut self, _: Duration, _: RequestId) {}

    fn hear(&mut self, now: Duration, id: RequestId, event: Event) {
        let Some(fate) = self.fate(id) else { return };
        match event {
            Event::Committed { start, tokens } => {
                if start == 0 {
                    fate.first = now;
                }
                fate.tokens += tokens.len() as u32;
                self.committed += tokens.len() as u64;
                for (from, reached) in &mut self.steady {
                    if self.committed >= *from && reached.is_none() {
                        *reached = Some((self.committed, now));
                    }
                }
            }
            Event::Finished { handoffs, .. } => {
                (fate.end, fate.handoffs) = (now, handoffs);
                self.ended.push(id);
            }
            Event::PromptCached { .. } | Event::PromptScored { .. } => {}
            Event::Failed(error) => self.failed = Some((id, error)),
        }
    }
}

fn run_group(
    plan: &Plan,
    group: &Group,
    requests: &[Asked],
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Outcome, String> {
    let cells = plan.cells();
    let place = |cell: usize| group.cells.iter().position(|own| *own == cell);
    // Requests of this group, each with its route.
    let own =
        (0u32..).zip(requests).filter_map(|(number, asked)| Some((number, asked, place(number as usize % cells)?)));
    let own: Vec<(u32, &Asked, usize)> = own.collect();
    let spec = |index: usize, &(_, asked, route): &(u32, &Asked, usize)| {
        let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::greedy() };
        let prompt = vec![0; asked.prompt as usize];
        let (route, max_tokens) = (RouteId(route as u32), asked.output);
        let new = NewRequest { route, prompt, max_tokens, sampling, return_signals: false, cache_salt: None };
        Arc::new(RequestSpec::new(index as u64 + 1, new))
    };
    let total: u64 = own.iter().map(|(_, asked, _)| u64::from(asked.output)).sum();
    let fate = |&(number, asked, _): &(u32, &Asked, usize)| Fate {
        number,
        prompt: asked.prompt,
        tokens: 0,
        handoffs: 0,
        submitted: Duration::ZERO,
        first: Duration::ZERO,
        end: Duration::ZERO,
    };
    let clients = Clients {
        fates: own.iter().map(fate).collect(),
        ended: Vec::new(),
        failed: None,
        committed: 0,
        steady: [(total / 10, None), (total - total / 10, None)],
    };
    let network = Network { delay: (plan.delay, plan.delay), ..Network::PERFECT };
    let mut world =
        World::new(models(plan, group, &own), routes(plan, group), (plan.schedule, network), plan.seed, clients);
    let closed = match plan.load.arrivals {
        Arrivals::Closed(under_way) => Some(own.iter().filter(|(number, ..)| *number < under_way).count()),
        _ => None,
    };
    let mut next = closed.unwrap_or(own.len());
    for (index, asked) in own[..next].iter().enumerate() {
        world.submit(asked.1.at, spec(index, asked));
    }
    let mut told = 0;
    while world.advance() {
        let ended = std::mem::take(&mut world.audience.ended).len();
        // In a closed loop the next come when others have ended.
        for (index, asked) in own.iter().enumerate().skip(next).take(ended) {
            world.submit(world.now(), spec(index, asked));
        }
        next += ended;
        if world.audience.committed - told >= 1 << 14 {
            progress(world.audience.committed - told);
            told = world.audience.committed;
        }
    }
    progress(world.audience.committed - told);
    let work = |(index, (&(model, instance), server)): (usize, (&(usize, usize), &SubServer))| Work {
        model,
        host: plan.models[model].hosts[instance],
        busy: world.busy(ModelId(index as u32)),
        counters: server.counters(),
    };
    let works = group.instances.iter().zip(world.servers()).enumerate().map(work).collect();
    let Clients { fates, steady, failed, .. } = world.audience;
    if let Some((id, error)) = failed {
        return Err(format!("request {id} failed: {error}"));
    }
    if let Some(fate) = fates.iter().zip(&own).find(|(fate, (_, asked, _))| fate.tokens != asked.output) {
        let (Fate { number, tokens, .. }, (_, asked, _)) = fate;
        return Err(format!("request {number} was given {tokens} of {} tokens", asked.output));
    }
    let steady = match steady {
        [(_, Some((before, from))), (_, Some((after, to)))] if to > from => {
            (after - before) as f64 / (to - from).as_secs_f64()
        }
        _ => 0.0,
    };
    Ok(Outcome { fates, works, steady })
}

/// By cell of the group: where its requests start, and all its models.
fn routes(plan: &Plan, group: &Group) -> Vec<(ModelId, Vec<ModelId>)> {
    let members = |&cell: &usize| {
        let index = |model: usize| {
            let instance = (model, cell % plan.models[model].hosts.len());
            ModelId(group.instances.binary_search(&instance).unwrap_or_default() as u32)
        };
        let members: Vec<ModelId> = (0..plan.models.len()).map(index).collect();
        (members[plan.entry], members)
    };
    group.cells.iter().map(members).collect()
}

fn models(plan: &Plan, group: &Group, requests: &[(u32, &Asked, usize)]) -> Vec<SimulatedModel> {
    let routes = routes(plan, group);
    let longest = requests.iter().map(|(_, asked, _)| pages_for(asked.prompt as usize + asked.output as usize)).max();
    let at_once = match plan.load.arrivals {
        Arrivals::Closed(under_way) => requests.len().min(under_way as usize),
        _ => requests.len(),
    };
    let all = longest.unwrap_or(1).saturating_mul(at_once);
    let instance = |(index, &(number, instance)): (usize, &(usize, usize))| {
        let model = &plan.models[number];
        let id = ModelId(index as u32);
        let attachment = |(route, (_, members)): (usize, &(ModelId, Vec<ModelId>))| {
            if members[number] != id {
                return None;
            }
            let stream = (route as u64) << 32 | index as u64;
            let seed = plan.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream;
            let policy = Chance::new(number, &model.routing, &model.commit, seed);
            let (own, on_error) = (number as u32, OnError::default());
            Some(Attachment::new("", Some(Box::new(policy)), members.clone(), own, on_error, &[]))
        };
        let attachments = routes.iter().enumerate().map(attachment).collect();
        let pages = model.kv_tokens.map_or(all, |tokens| pages_for(tokens as usize));
        let runner = Blank::new(&model.name, u32::try_from(pages).unwrap_or(u32::MAX));
        let limits = Limits { max_rows: model.max_rows, prefill_chunk: model.prefill_chunk };
        SimulatedModel {
            // Prompts are alike, and stand for different ones.
            server: SubServer::new(id, Box::new(runner), attachments, limits).with_prefix_cache(false),
            latency: model.latency.clone(),
            waiting: model.waiting.clone(),
            host: model.hosts[instance],
            stretch: model.stretch.clone(),
        }
    };
    group.instances.iter().enumerate().map(instance).collect()
}
