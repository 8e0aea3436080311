//! From the text of a plan to [`Plan`]. Pure.

use std::time::Duration;

use super::trace::trace;
use crate::config::batching::{BatchingConfig, batching};
use crate::config::error::Fault;
use crate::config::read::waiting;
use crate::config::tree::{self, Field, Key, Section};
use crate::plain::suggestion;
use crate::runner::simulated::Latency;
use crate::simulation::plan::{Arrivals, Lengths, Plan, PlannedLoad, PlannedModel};

/// How far sums of probabilities may be from 1.
const ROUNDING: f64 = 1e-6;
/// Most instances of a model.
const INSTANCES: usize = 256;
/// Most cells of requests.
const CELLS: usize = 4096;

/// Read a plan. `read` gives the text of a file that it names.
pub fn plan(text: &str, read: &dyn Fn(&str) -> Result<String, String>) -> Result<Plan, Fault> {
    let mut root = Field { name: String::new(), node: tree::parse(text)? }.section()?;
    let batching = match root.take("batching") {
        Some(field) => fixed(&field)?,
        None => BatchingConfig::default(),
    };
    let Some(simulation) = root.take("simulation") else {
        return Err(Fault { origin: None, message: "has no [simulation]; add it with `arrivals` and `output`".into() });
    };
    let models = root.take("models").map(|f| Ok(f.section()?.rest())).transpose()?.unwrap_or_default();
    root.end()?;
    if models.is_empty() {
        return Err(Fault { origin: None, message: "has no model; add a table [models.NAME] with `step_ms`".into() });
    }
    let names: Vec<String> = models.iter().map(|(key, _)| key.name.clone()).collect();
    let mut hosts = Vec::new();
    let planned = models.iter().map(|(key, field)| model(key, field, &names, &mut hosts));
    let planned = planned.collect::<Result<Vec<_>, Fault>>()?;
    let mut section = simulation.section()?;
    let entry = match section.take("entry") {
        Some(field) => index(&field, &field.text()?, &names)?,
        None => 0,
    };
    let seed = section.take("seed").map(|f| f.integer(0..=i64::MAX)).transpose()?.unwrap_or(0) as u64;
    let delay = section.take("network_ms").map(|f| time(&f, 0.0)).transpose()?.unwrap_or_default();
    let load = load(&mut section, read)?;
    section.end()?;
    let plan = Plan { models: planned, entry, schedule: batching.schedule, delay, load, seed };
    reachable(&plan, &models)?;
    if plan.cells() > CELLS {
        let message =
            format!("the numbers of hosts of the models have no common multiple up to {CELLS}; even them out");
        return Err(Fault { origin: None, message });
    }
    Ok(plan)
}

/// `[batching]` without a tuner.
fn fixed(field: &Field) -> Result<BatchingConfig, Fault> {
    let config = batching(field.section()?)?;
    match config.online {
        Some(_) => {
            let message = "[batching]: mode = \"online\": ladders of a plan are fixed; leave `mode` and its limits out";
            Err(Fault::at(&field.node.origin, message))
        }
        None => Ok(config),
    }
}

/// The number of a model.
fn index(field: &Field, name: &str, names: &[String]) -> Result<usize, Fault> {
    let known = names.iter().map(String::as_str);
    let found = names.iter().position(|model| model == name);
    found.ok_or_else(|| {
        Fault::at(
            &field.node.origin,
            format!("{}: there is no model `{name}`: {}", field.name, suggestion(name, known.collect::<Vec<_>>())),
        )
    })
}

/// Milliseconds, from `least` on.
fn time(field: &Field, least: f64) -> Result<Duration, Fault> {
    Ok(Duration::from_secs_f64(field.number(least..=1e9)? / 1000.0))
}

fn model(key: &Key, field: &Field, names: &[String], hosts: &mut Vec<String>) -> Result<PlannedModel, Fault> {
    let mut section = field.section()?;
    let Some(step) = section.take("step_ms") else {
        return Err(section.fault("has no `step_ms`; add the time of a step, or { BATCH = TIME, … }"));
    };
    let row = section.take("row_ms").map(|f| time(&f, 0.0)).transpose()?.unwrap_or_default();
    let latency = latency(&step, row)?;
    let placed = match (section.take("host"), section.take("hosts")) {
        (Some(_), Some(hosts)) => return Err(hosts.fault("`host` says where it is already; keep one of them")),
        (Some(host), None) => vec![host.text()?],
        (None, Some(list)) => {
            let names = list.array("strings")?.iter().map(Field::text).collect::<Result<Vec<_>, Fault>>()?;
            if names.is_empty() || names.len() > INSTANCES {
                return Err(list.fault(format!("must name 1 to {INSTANCES} hosts, one for each instance of the model")));
            }
            names
        }
        (None, None) => vec![String::new()],
    };
    let mut place = |host: String| {
        let known = hosts.iter().position(|other| *other == host);
        known.unwrap_or_else(|| {
            hosts.push(host);
            hosts.len() - 1
        })
    };
    let placed = placed.into_iter().map(&mut place).collect();
    let factor = |f: &Field| f.number(1.0..=1000.0);
    let stretch = match section.take("stretch") {
        Some(field) if field.is_array() => field.array("numbers")?.iter().map(factor).collect::<Result<_, _>>()?,
        Some(field) => vec![factor(&field)?],
        None => Vec::new(),
    };
    let waiting = waiting(&mut section)?;
    let kv_tokens = section.take("kv_tokens").map(|f| f.integer(1..=1 << 34)).transpose()?.map(|n| n as u64);
    let rows = |field: Option<Field>| match field {
        Some(field) => Ok(field.integer(1..=1 << 30)? as usize),
        None => Ok(1 << 30),
    };
    let (max_rows, prefill_chunk) = (rows(section.take("max_rows"))?, rows(section.take("prefill_chunk"))?);
    let own = index(field, &key.name, names)?;
    let (routing, commit) = routing(&mut section, own, names)?;
    section.end()?;
    let name = key.name.clone();
    Ok(PlannedModel {
        name,
        hosts: placed,
        latency,
        waiting,
        stretch,
        kv_tokens,
        max_rows,
        prefill_chunk,
        routing,
        commit,
    })
}

/// One time, or a table of times by batch size.
fn latency(field: &Field, row: Duration) -> Result<Latency, Fault> {
    const LEAST: f64 = 1e-6;
    let mut points = Vec::new();
    match field.section() {
        Ok(section) => {
            for (key, value) in section.rest() {
                let Some(size) = key.name.parse().ok().filter(|size| (1..=1 << 20).contains(size)) else {
                    let message = format!("{}: a batch size is a whole number from 1 to {}", value.name, 1 << 20);
                    return Err(Fault::at(&key.origin, message));
                };
                points.push((size, time(&value, LEAST)?));
            }
        }
        Err(_) => points.push((1, time(field, LEAST)?)),
    }
    Latency::new(points, row).ok_or_else(|| field.fault("must have a time for at least one batch size, each once"))
}

/// The rows of P and C of model `own`.
fn routing(section: &mut Section, own: usize, names: &[String]) -> Result<(Vec<f64>, Vec<f64>), Fault> {
    let fill = |field: &Field, row: &mut [f64]| {
        for (key, value) in field.section()?.rest() {
            let model = index(field, &key.name, names).map_err(|fault| Fault::at(&key.origin, fault.message))?;
            row[model] = value.number(0.0..=1.0)?;
        }
        Ok(())
    };
    let mut routing = vec![0.0; names.len()];
    match section.take("routing") {
        Some(field) => {
            fill(&field, &mut routing)?;
            let sum: f64 = routing.iter().sum();
            if (sum - 1.0).abs() > ROUNDING {
                let message = format!("{}: the probabilities add up to {sum}, not to 1", field.name);
                return Err(Fault::at(&field.node.origin, message));
            }
        }
        None => routing[own] = 1.0,
    }
    let mut commit = vec![1.0; names.len()];
    if let Some(field) = section.take("commit") {
        fill(&field, &mut commit)?;
        if commit[own] != 1.0 {
            let message =
                format!("{}.{}: a request that stays has committed its token; leave it out", field.name, names[own]);
            return Err(Fault::at(&field.node.origin, message));
        }
    }
    Ok((routing, commit))
}

/// Every model is reached from the entry, and from every model some commit is.
fn reachable(plan: &Plan, models: &[(Key, Field)]) -> Result<(), Fault> {
    let count = plan.models.len();
    let goes = |from: usize, to: usize| plan.models[from].routing[to] > 0.0;
    let closure = |mut reached: Vec<bool>, step: &dyn Fn(usize, usize) -> bool| {
        for _ in 0..count {
            for (from, to) in (0..count * count).map(|pair| (pair / count, pair % count)) {
                reached[to] |= reached[from] && step(from, to);
            }
        }
        reached
    };
    let met = closure((0..count).map(|model| model == plan.entry).collect(), &goes);
    let commits = |model: usize| (0..count).any(|to| goes(model, to) && plan.models[model].commit[to] > 0.0);
    let ends = closure((0..count).map(commits).collect(), &|from, to| goes(to, from));
    let fault = |model: usize, message: &str| {
        let (key, _) = &models[model];
        Err(Fault::at(&key.origin, format!("[models.{}]: {message}", key.name)))
    };
    if let Some(model) = met.iter().position(|met| !met) {
        return fault(model, "no request ever comes here; add it to a `routing`, or leave it out");
    }
    match ends.iter().position(|ends| !ends) {
        Some(model) => fault(model, "no token is ever committed from here on; change `routing` or `commit`"),
        None => Ok(()),
    }
}

fn load(section: &mut Section, read: &dyn Fn(&str) -> Result<String, String>) -> Result<PlannedLoad, Fault> {
    let Some(field) = section.take("arrivals") else {
        return Err(section.fault(
            "has no `arrivals`; add { closed = N }, { poisson = PER_SECOND }, { bursts = N, every_ms = T } or \
             { trace = \"FILE.csv\" }",
        ));
    };
    let mut table = field.section()?;
    let kinds = ["closed", "poisson", "bursts", "trace"].map(|kind| (kind, table.take(kind)));
    let mut given = kinds.into_iter().filter_map(|(kind, field)| Some((kind, field?)));
    let arrivals = match (given.next(), given.next()) {
        (Some(_), Some((_, second))) => return Err(second.fault("arrivals are of one kind; keep one of them")),
        (Some(("closed", field)), None) => Arrivals::Closed(field.integer(1..=1 << 20)? as u32),
        (Some(("poisson", field)), None) => Arrivals::Poisson(field.number(1e-6..=1e9)?),
        (Some(("bursts", field)), None) => {
            let size = field.integer(1..=1 << 20)? as u32;
            let Some(every) = table.take("every_ms") else {
                return Err(field.fault("needs the time between two bursts; add `every_ms`"));
            };
            Arrivals::Bursts { size, every: time(&every, 0.0)? }
        }
        (Some((_, field)), None) => {
            let text = read(&field.text()?).map_err(|e| field.fault(e))?;
            Arrivals::Trace(trace(&text).map_err(|e| field.fault(e))?)
        }
        (None, _) => return Err(field.fault("must be one of closed, poisson, bursts and trace")),
    };
    table.end()?;
    let traced = match &arrivals {
        Arrivals::Trace(trace) => Some(trace),
        _ => None,
    };
    let requests = match (section.take("requests"), traced) {
        (Some(field), Some(_)) => return Err(field.fault("the trace has its requests; leave it out")),
        (Some(field), None) => field.integer(1..=1 << 26)? as u32,
        (None, Some(trace)) => trace.len() as u32,
        (None, None) => return Err(section.fault("has no `requests`; add how many there are in all")),
    };
    let prompt = section.take("prompt").map(|f| lengths(&f)).transpose()?.unwrap_or(Lengths(1, 1));
    let output = match (section.take("output"), traced) {
        (Some(field), _) => lengths(&field)?,
        (None, Some(trace)) if trace.iter().all(|arrival| arrival.output.is_some()) => Lengths(1, 1),
        (None, _) => return Err(section.fault("has no `output`; add the tokens of an answer, or [LEAST, MOST]")),
    };
    Ok(PlannedLoad { requests, arrivals, prompt, output })
}

/// A number of tokens, or the least and the most of them.
fn lengths(field: &Field) -> Result<Lengths, Fault> {
    let tokens = |f: &Field| Ok(f.integer(1..=1 << 30)? as u32);
    if !field.is_array() {
        let length = tokens(field)?;
        return Ok(Lengths(length, length));
    }
    match field.array("integers")?.iter().map(tokens).collect::<Result<Vec<_>, Fault>>()?[..] {
        [least, most] if least <= most => Ok(Lengths(least, most)),
        _ => Err(field.fault("must be a number of tokens, or [LEAST, MOST]")),
    }
}

#[cfg(test)]
mod tests;
