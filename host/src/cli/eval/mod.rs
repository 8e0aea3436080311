//! `tokenrouter eval`

mod args;
mod bar;
mod points;
mod results;
mod session;
mod store;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::Metadata;
use std::io::{self, Write};
use std::path::Path;
use std::time::SystemTime;

use tokio::signal::unix::{SignalKind, signal};

pub use args::Eval;

use super::build::{self, Prepared};
use super::output::{Failure, write_stdout};
use super::progress::Progress;
use super::record;
use super::select;
use crate::config::{self, Config};
use crate::eval::answer::AnswerRule;
use crate::eval::bisect::Next;
use crate::eval::dataset::{self, Question};
use crate::eval::report;
use crate::eval::resume::Digest;
use crate::eval::summary::{Point, Row, Summary};
use crate::eval::sweep::{Sweep, config_lines, shown};
use crate::record::Recording;
use points::Target;
use session::Session;
use store::Store;

pub fn run(arguments: &Eval) -> Result<(), Failure> {
    let config = Config::load(&arguments.config, &config::environment()).map_err(Failure::input)?;
    let names = if arguments.all { owned(&select::all(&config)) } else { arguments.routes.clone() };
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for (index, name) in names.iter().enumerate() {
        select::known(&config, name)?;
        if names[..index].contains(name) {
            return Err(Failure::input(format!("--route {name:?} is given twice")));
        }
    }
    let rule = AnswerRule::new(arguments.answer_pattern.as_deref())
        .map_err(|e| Failure::input(format!("--answer-pattern: {e}")))?;
    let sweeps = arguments.sweeps.iter().map(|text| Sweep::parse(text)).collect::<Result<Vec<_>, _>>();
    let sweeps = sweeps.map_err(|e| Failure::input(format!("--sweep {e}")))?;
    if let Some(twice) = (1..sweeps.len()).find(|i| sweeps[..*i].iter().any(|s| s.setting == sweeps[*i].setting)) {
        return Err(Failure::input(format!("--sweep: `{}` is swept twice", sweeps[twice].setting)));
    }
    results::check_places(arguments, &config)?;
    let data = read(&arguments.dataset)?;
    let file = arguments.dataset.display().to_string();
    let limit = arguments.limit.map(|limit| limit as usize);
    let questions = dataset::parse(&data, &file, limit).map_err(Failure::input)?;

    if arguments.record {
        if config.record.is_none() {
            return Err(Failure::input("--record: the configuration has no [record] table; add one with a directory"));
        }
        record::check(&config)?;
    }
    let prepared = build::prepare(select::only(config, &names))?;
    let plan = match arguments.target_share {
        Some(share) => Plan::Search(Box::new(Target::new(share, arguments, &prepared)?)),
        None => Plan::Points(points::listed(&names, &sweeps, &prepared)?),
    };
    let digest = digest(arguments, &prepared, &data, &plan)?;
    let store = Store::open(arguments.output.as_deref(), &digest, arguments.restart)?;
    if let Some(path) = store.path().filter(|_| store.len() > 0) {
        // It is for information only; where it cannot be written nothing is lost.
        let _ = writeln!(io::stderr(), "{} answers are taken over from {}", store.len(), path.display());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::work)?;
    runtime.block_on(evaluate(arguments, &prepared, &questions, rule, store, plan))
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(file).map_err(|e| Failure::input(format!("--dataset: {} cannot be read: {e}", file.display())))
}

/// What is evaluated.
enum Plan<'a> {
    Points(Vec<Point>),
    Search(Box<Target<'a>>),
}

/// Digest of everything that decides the answers and how they are judged.
fn digest(arguments: &Eval, prepared: &Prepared, data: &[u8], plan: &Plan<'_>) -> Result<String, Failure> {
    let mut digest = Digest::default();
    let mut add = |name: &str, part: &str| digest.add(name, part.as_bytes());
    add("version", env!("CARGO_PKG_VERSION"));
    let config = std::fs::read_to_string(&arguments.config)
        .map_err(|e| Failure::input(format!("{}: cannot be read: {e}", arguments.config.display())))?;
    add("config", &config);
    add("environment", &format!("{:?}", config::environment()));
    for directory in &prepared.directories {
        add("model", &contents(directory).map_err(|e| Failure::input(format!("{}: {e}", directory.display())))?);
    }
    for file in prepared.router_weights() {
        add("router", &router(&file).map_err(|e| Failure::input(format!("{}: {e}", file.display())))?);
    }
    for plugin in &prepared.plugins {
        add("plugin", &plugin.sha256);
    }
    match plan {
        Plan::Points(points) => points.iter().for_each(|point| add("point", &format!("{point:?}"))),
        Plan::Search(target) => {
            add("search", &format!("{} {:?} {:?}", target.setting, arguments.routes, target.search))
        }
    }
    let Eval { limit, system, answer_pattern, max_tokens, sampling, .. } = arguments;
    add("asking", &format!("{limit:?} {system:?} {answer_pattern:?} {max_tokens} {sampling:?}"));
    digest.add("dataset", data);
    Ok(digest.finish())
}

/// Names, sizes and times of the files of a model: enough to notice that it has changed.
fn contents(directory: &Path) -> io::Result<String> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        // Weights may be links.
        let about = std::fs::metadata(entry.path())?;
        if about.is_file() {
            files.push(stamp(&entry.file_name(), &about)?);
        }
    }
    files.sort();
    Ok(files.join("\n"))
}

/// The same of the weights of a router, and of the file beside them that describes it.
fn router(weights: &Path) -> io::Result<String> {
    let beside = weights.with_extension("json");
    let weights = stamp(weights.as_os_str(), &std::fs::metadata(weights)?)?;
    match std::fs::metadata(&beside) {
        Ok(about) => Ok(format!("{weights}\n{}", stamp(beside.as_os_str(), &about)?)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(weights),
        Err(e) => Err(e),
    }
}

fn stamp(name: &OsStr, about: &Metadata) -> io::Result<String> {
    Ok(format!("{name:?} {} {:?}", about.len(), about.modified()?))
}

async fn evaluate(
    arguments: &Eval,
    prepared: &Prepared,
    questions: &[Question],
    rule: AnswerRule,
    store: Store,
    plan: Plan<'_>,
) -> Result<(), Failure> {
    let runners = prepared.load(&Progress::stderr())?;
    let mut session = Session {
        arguments,
        prepared,
        questions,
        rule,
        store,
        interrupt: signal(SignalKind::interrupt()).map_err(Failure::work)?,
        now: SystemTime::now(),
        prompts: HashMap::new(),
    };
    let mut summaries = Vec::new();
    let outcome = match plan {
        Plan::Points(points) => {
            let routes = points.iter().filter_map(|point| points::route(point, prepared)).collect();
            let infos = runners.iter().map(|runner| runner.info().clone()).collect();
            // Complete on disk when it goes, after the engine.
            let recording = match arguments.record {
                true => record::start(prepared, infos, points::served(&points, prepared))?,
                false => None,
            };
            let engine = prepared.engine(runners, routes, recording.as_ref().map(Recording::observer))?;
            session.check(&engine, &points)?;
            for (number, point) in points.iter().enumerate() {
                let number = if points.len() > 1 { format!("{}/{} ", number + 1, points.len()) } else { String::new() };
                summaries.push(session.evaluate(&engine, point, &number).await?);
            }
            None
        }
        Plan::Search(mut target) => {
            let end = search(&mut session, &mut target, runners, &mut summaries).await?;
            Some((end, target))
        }
    };
    let meta = results::meta(arguments, questions.len(), outcome.as_ref().map(|(end, _)| end));
    let rows: Vec<Row> = summaries.iter().flat_map(|summary| session.store.rows(&summary.point)).collect();
    results::write(arguments, meta, &summaries, &rows)?;
    session.store.remove()?;
    write_stdout(&report::table(&summaries))?;
    outcome.map_or(Ok(()), |(end, target)| conclude(&end, &target, &summaries))
}

/// Measure what the search asks for, each value in a new engine with the same loaded models.
async fn search(
    session: &mut Session<'_>,
    target: &mut Target<'_>,
    mut runners: Vec<Box<dyn crate::runner::Runner>>,
    summaries: &mut Vec<Summary>,
) -> Result<Next, Failure> {
    loop {
        let value = match target.search.next() {
            Next::Try(value) => value,
            end => {
                summaries.sort_by(|a, b| a.large_share().total_cmp(&b.large_share()));
                return Ok(end);
            }
        };
        let point = target.point(value)?;
        let routes = points::route(&point, session.prepared).into_iter().collect();
        let engine = session.prepared.engine(runners, routes, None)?;
        session.check(&engine, std::slice::from_ref(&point))?;
        let summary = session.evaluate(&engine, &point, &format!("{}: ", summaries.len() + 1)).await?;
        target.search.measured(value, summary.large_share());
        summaries.push(summary);
        runners = engine
            .stop()
            .into_iter()
            .collect::<Option<_>>()
            .ok_or_else(|| Failure::work("a model has stopped working; see the log"))?;
    }
}

/// Say what the search has found.
fn conclude(end: &Next, target: &Target<'_>, summaries: &[Summary]) -> Result<(), Failure> {
    let (Next::Found { value, share } | Next::NotFound { value, share, .. }) = end else { return Ok(()) };
    let point = target.point(*value)?;
    let setting = target.setting;
    let large = point.models.last().map_or("", String::as_str);
    if let Some([a, b]) = target.search.against_direction() {
        let percent = |share: f64| 100.0 * share;
        write_stdout(&format!(
            "\nThe share does not follow {setting} in one direction: it is {:.1} % at {} and {:.1} % at {}.\n\
             Other values may give the same share.\n",
            percent(a.1),
            a.0,
            percent(b.1),
            b.0
        ))?;
    }
    if let Next::NotFound { reason, .. } = end {
        return Err(Failure::work(format!(
            "--target-share: no value of {setting} was found: {reason}; the closest is {} with {:.1} %",
            shown(&serde_json::json!(value)),
            100.0 * share
        )));
    }
    let accuracy = summaries.iter().find(|summary| summary.point == point).map_or(f64::NAN, Summary::accuracy);
    let lines = config_lines(&point.route, &point.settings).map_err(Failure::work)?;
    write_stdout(&format!(
        "\n{}: {large} writes {:.1} % of the tokens, accuracy {:.1} %\n\n{lines}",
        point.label,
        100.0 * share,
        100.0 * accuracy
    ))
}
