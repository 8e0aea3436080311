//! `tokenrouter tune`

mod args;
pub(crate) mod from;
pub(crate) mod input;
mod plot;
mod report;

use std::io::{IsTerminal, Read, Write};
use std::path::Path;

use hyper::Method;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokenrouter_batching::case::Case;
use tokenrouter_batching::search::{self, Options};
use tokenrouter_batching::{Fault, Grain, Model, Setting, System};

pub use args::Tune;

use super::output::{Failure, write_stdout};
use crate::bench::http::Client;
use plot::Curve;
use report::Step;

/// Most lines of a plot.
const LINES: usize = 7;

pub fn run(arguments: &Tune) -> Result<(), Failure> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    if let Some(file) = &arguments.case {
        if !arguments.json {
            return Err(Failure::input("--case is answered as JSON only; add --json"));
        }
        return answer_case(file, threads);
    }
    let system = system(arguments)?.checked().map_err(Failure::input)?;
    let options = Options {
        fixed: arguments.min_batch.iter().map(|fixed| fixed.0).collect(),
        holds: arguments.hold.iter().map(|hold| hold.0).collect(),
        grain: Grain::Auto,
        threads,
        haste: 1,
    };
    let bar = bar(arguments.concurrency.0.len());
    let requests = arguments.concurrency.0.iter().map(|n| {
        bar.set_message(format!("N = {n}"));
        bar.inc(1);
        *n
    });
    let ladder = search::ladder(&system, requests, &options).map_err(Failure::input)?;
    bar.finish_and_clear();
    let eager = Setting::new(vec![1; system.len()]);
    let steps = ladder.into_iter().map(|(requests, best)| {
        let eager = search::rates(&system, requests, &eager, &options).map_err(Failure::input)?;
        Ok(Step { requests, best, eager })
    });
    let steps: Vec<Step> = steps.collect::<Result<_, Failure>>()?;
    let names: Vec<String> = system.models.iter().map(|model| model.name.clone()).collect();
    if let Some(file) = &arguments.plot {
        draw(file, &system, &steps, &options)?;
    }
    match arguments.json {
        true => write_stdout(&format!("{}\n", report::json(&names, &steps))),
        false => write_stdout(&format!("{}\n{}", report::text(&names, &steps), report::toml(&names, &steps))),
    }
}

/// Numbers of requests so far, on a terminal.
fn bar(count: usize) -> ProgressBar {
    let terminal = std::io::stderr().is_terminal();
    let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(count as u64), target);
    if let Ok(style) = ProgressStyle::with_template("{msg:10} {bar:30}  {pos}/{len}  {elapsed}") {
        bar.set_style(style);
    }
    bar
}

/// What the arguments describe, not checked yet.
fn system(arguments: &Tune) -> Result<System, Failure> {
    let mut system = if let Some(file) = &arguments.system {
        input::described(&read(file)?).map_err(|e| Failure::input(format!("{}: {e}", file.display())))?
    } else if let Some(file) = &arguments.from {
        let measured =
            from::measured(&measurement(file)?).map_err(|e| Failure::input(format!("{}: {e}", file.display())))?;
        let (models, notes) = measured.models();
        let (system, notes) = match (routed(arguments, models), measured.system()) {
            (Some(system), _) => (system?, notes),
            (None, Some(system)) => system,
            (None, None) => {
                let message = "does not tell where steps lead; give --route for each model";
                return Err(Failure::input(format!("{}: {message}", file.display())));
            }
        };
        for note in notes {
            // Who does not read it sees which models there are in the answer.
            let _ = writeln!(std::io::stderr(), "{}: left out: {note}", file.display());
        }
        system
    } else {
        let times = arguments.times.iter().map(|times| times.0.clone());
        let models = names(arguments)?.into_iter().zip(times).map(|(name, times)| Model::new(name, times));
        let alone = arguments.times.len() == 1 && arguments.handoff.is_none() && arguments.routes.is_empty();
        match routed(arguments, models.collect()) {
            Some(system) => system?,
            None if alone => input::routed(
                vec![Model::new("m0", arguments.times[0].0.clone())],
                &[input::Route { from: "m0".into(), to: vec![("m0".into(), 1.0, 1.0)] }],
            )
            .map_err(Failure::input)?,
            None => {
                return Err(Failure::input("--route: missing; say where the steps of each model lead, or --handoff P"));
            }
        }
    };
    let count = system.len();
    for (field, given) in [
        ("--stretch", arguments.stretch.len()),
        ("--max-batch", arguments.max_batch.len()),
        ("--hold", arguments.hold.len()),
        ("--min-batch", arguments.min_batch.len()),
    ] {
        if given != 0 && given != count {
            return Err(Failure::input(Fault::Count { field, given, wanted: count }));
        }
    }
    for (model, stretch) in system.models.iter_mut().zip(&arguments.stretch) {
        model.stretch = *stretch;
    }
    for (model, most) in system.models.iter_mut().zip(&arguments.max_batch) {
        model.max_batch = (*most > 0).then_some(*most);
    }
    Ok(system)
}

fn names(arguments: &Tune) -> Result<Vec<String>, Failure> {
    let count = arguments.times.len();
    match (arguments.names.len(), count) {
        (0, 2) => Ok(["small", "large"].map(String::from).to_vec()),
        (0, _) => Ok((0..count).map(|model| format!("m{model}")).collect()),
        (given, _) if given == count => {
            let names = &arguments.names;
            match names.iter().enumerate().find(|(i, name)| names[..*i].contains(name)) {
                Some((_, name)) => {
                    Err(Failure::input(format!("--names: {name} is there twice; give each its own name")))
                }
                None => Ok(names.clone()),
            }
        }
        (given, wanted) => Err(Failure::input(Fault::Count { field: "--names", given, wanted })),
    }
}

/// `models` with the routes that the arguments give, if they give any.
fn routed(arguments: &Tune, models: Vec<Model>) -> Option<Result<System, Failure>> {
    match arguments.handoff {
        Some(share) => Some(input::replacing(models, share).map_err(Failure::input)),
        None if arguments.routes.is_empty() => None,
        None => Some(input::routed(models, &arguments.routes).map_err(Failure::input)),
    }
}

/// The text of `--from`: of a file, or of a server that runs.
fn measurement(from: &Path) -> Result<String, Failure> {
    let is_url = |from: &&str| from.starts_with("http://") || from.starts_with("https://");
    let Some(url) = from.to_str().filter(is_url) else { return read(from) };
    let fault = |e: String| Failure::input(format!("--from {url}: {e}"));
    let client = Client::new(url.trim_end_matches("/metrics/steps"), None).map_err(fault)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::work)?;
    let body = runtime.block_on(async { client.send(Method::GET, "/metrics/steps", None).await?.whole().await });
    String::from_utf8(body.map_err(fault)?).map_err(|e| fault(e.to_string()))
}

fn read(file: &Path) -> Result<String, Failure> {
    let fault = |e: std::io::Error| Failure::input(format!("{}: {e}", file.display()));
    if file == Path::new("-") {
        let mut text = String::new();
        return std::io::stdin().read_to_string(&mut text).map(|_| text).map_err(fault);
    }
    std::fs::read_to_string(file).map_err(fault)
}

fn answer_case(file: &Path, threads: usize) -> Result<(), Failure> {
    let fault = |e: &dyn std::fmt::Display| Failure::input(format!("--case {}: {e}", file.display()));
    let case: Case = serde_json::from_str(&read(file)?).map_err(|e| fault(&e))?;
    let answer = case.answer(threads).map_err(|e| fault(&e))?;
    let text = serde_json::to_string(&answer).map_err(Failure::work)?;
    write_stdout(&format!("{text}\n"))
}

/// Over the threshold that is largest for the most requests, for up to seven numbers of requests.
fn draw(file: &Path, system: &System, steps: &[Step], options: &Options) -> Result<(), Failure> {
    let Some(last) = steps.last() else { return Ok(()) };
    let model = (0..system.len()).max_by_key(|model| last.best.setting.min_batch[*model]).unwrap_or(0);
    let every = steps.len().div_ceil(LINES);
    let drawn = steps.iter().rev().step_by(every).collect::<Vec<_>>();
    let curves = drawn.into_iter().rev().map(|step| {
        let profile = search::profile(system, step.requests, &step.best.setting, model, options)?;
        let points = profile.iter().map(|point| (point.setting.min_batch[model], point.rates.throughput)).collect();
        Ok(Curve { requests: step.requests, points, best: step.best.setting.min_batch[model] })
    });
    let curves: Vec<Curve> = curves.collect::<Result<_, Fault>>().map_err(Failure::input)?;
    let names: Vec<String> = system.models.iter().map(|model| model.name.clone()).collect();
    let title = format!("throughput of {} over min_batch", names.join(", "));
    let svg = plot::svg(&title, &names[model], &curves).map_err(Failure::work)?;
    std::fs::write(file, svg).map_err(|e| Failure::work(format!("--plot: {} cannot be written: {e}", file.display())))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::args::{Arguments, Command};
    use super::*;

    fn fault(more: &[&str]) -> String {
        let all = ["tokenrouter", "tune"].iter().chain(more);
        let Command::Tune(tune) = Arguments::try_parse_from(all).unwrap().command else { panic!() };
        run(&tune).unwrap_err().message
    }

    #[test]
    fn impossible_inputs_are_one_line_each() {
        let two = |more: &[&'static str]| fault(&[&["--times", "6,27.9"], more].concat());
        let handoff = |more: &[&'static str]| two(&[&["--handoff", "0.35"], more].concat());
        for (error, expected) in [
            (
                two(&["--route", "small:small=0.65,large=0.25", "--route", "large:small=1"]),
                "routes of small sum to 0.9: the probabilities of where its tokens lead must sum to 1",
            ),
            (two(&["--handoff", "1.5"]), "route small -> small = -0.5: must be a probability from 0 to 1"),
            (
                two(&["--handoff", "0"]),
                "large is never reached from small: no route leads to it; leave it out or give one",
            ),
            (
                two(&["--route", "small:large=1", "--route", "large:large=1"]),
                "large is left for ever: no route leads back from it to small; leave small out or give one",
            ),
            (
                two(&["--route", "small:large=1*0", "--route", "large:small=1*0"]),
                "no route commits a token: throughput would be 0; give a commit above 0 on a route that is taken",
            ),
            (
                fault(&["--times", "1e-9,1e9", "--handoff", "0.3"]),
                "step times from 0.000000001 ms to 1000000000 ms: the longest may be 100000 times the shortest at most; \
                 are all in milliseconds?",
            ),
            (two(&[]), "--route: missing; say where the steps of each model lead, or --handoff P"),
            (
                fault(&["--times", "6,-1", "--handoff", "0.35"]),
                "step time of large for a batch of 1 = -1 ms: must be a number above 0",
            ),
            (
                handoff(&["--concurrency", "4", "--min-batch", "3,3"]),
                "min_batch = [3, 3]: locks up with 4 requests, sum(B-1)=4 >= N=4: all could wait at once; lower them until \
                 the sum is below N",
            ),
            (
                handoff(&["--stretch", "0.5,1"]),
                "stretch of small = 0.5: must be a number from 1 (1 = the others do not slow it down)",
            ),
            (handoff(&["--hold", "-1,0"]), "hold of small = -1 ms: must be a number from 0 (0 = never held)"),
            (handoff(&["--stretch", "2"]), "--stretch has 1 entries where 2 are needed, one for each model"),
            (handoff(&["--names", "a"]), "--names has 1 entries where 2 are needed, one for each model"),
        ] {
            assert_eq!(error, expected);
        }
        assert_eq!(fault(&["--case", "x"]), "--case is answered as JSON only; add --json");
        assert!(fault(&["--from", "/nowhere/x.json"]).starts_with("/nowhere/x.json: "));
    }

    #[test]
    fn a_server_is_asked() {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let serve = move || {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut request, mut byte) = (Vec::new(), [0]);
            while !request.ends_with(b"\r\n\r\n") {
                stream.read_exact(&mut byte).unwrap();
                request.push(byte[0]);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{\"loads\": []}").unwrap();
            String::from_utf8(request).unwrap()
        };
        let server = std::thread::spawn(serve);
        let error = fault(&["--from", &url]);
        assert!(error.starts_with(&url) && error.contains("loads: there are none"), "{error}");
        assert!(server.join().unwrap().starts_with("GET /metrics/steps "));
        let error = fault(&["--from", "https://h"]);
        assert!(error.contains("has the scheme https, which is not supported"), "{error}");
        let error = fault(&["--from", "http://127.0.0.1:1"]);
        assert!(error.starts_with("--from http://127.0.0.1:1: 127.0.0.1:1: cannot connect"), "{error}");
    }
}
