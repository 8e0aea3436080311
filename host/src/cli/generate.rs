//! `tokenrouter generate`

use std::io::{self, IsTerminal, Read, Write};
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use super::args::Generate;
use super::asking;
use super::build::{self, Prepared};
use super::output::{Failure, stdout_is_coloured, write_stdout};
use super::printer::Printer;
use super::progress::Progress;
use super::select;
use crate::api::{Choice, End, Entry, finish_reason, logprob};
use crate::config::{self, Config};
use crate::engine::{Engine, RouteInfo};
use crate::request::{NewRequest, TokenId};
use crate::text::ModelText;

pub fn run(arguments: &Generate) -> Result<(), Failure> {
    let config = Config::load(&arguments.config, &config::environment()).map_err(Failure::input)?;
    select::known(&config, &arguments.route)?;
    let prompt = match arguments.prompt.as_deref() {
        Some("-") => {
            let mut text = String::new();
            io::stdin().read_to_string(&mut text).map_err(|e| Failure::input(format!("--prompt -: {e}")))?;
            text
        }
        prompt => prompt.unwrap_or_default().into(),
    };
    let prepared = build::prepare(select::only(config, &[&arguments.route]))?;
    let engine = prepared.start(&Progress::stderr())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::work)?;
    runtime.block_on(generate(arguments, &prompt, &prepared, &engine))
}

async fn generate(arguments: &Generate, prompt: &str, prepared: &Prepared, engine: &Engine) -> Result<(), Failure> {
    let route = engine.route(&arguments.route).ok_or_else(|| Failure::work("the route is not in the engine"))?;
    let (id, route) = (route.id, &*route);
    let (entry, _) = &route.models[route.entry];
    let text = prepared.texts[entry.index()].clone();
    let prompt = tokens(arguments, prompt, &text)?;
    let request = NewRequest {
        route: id,
        prompt: prompt.clone(),
        max_tokens: arguments.max_tokens,
        sampling: asking::sampling(&arguments.sampling, 0),
        return_signals: arguments.json,
        cache_salt: None,
    };
    let stream = engine.submit(request).map_err(|e| Failure::input(format!("--prompt: {e}")))?;
    let choice = Choice::new(stream, &prompt, text, asking::ending(route, engine));
    if arguments.json {
        print_json(choice, route, engine, prompt.len()).await
    } else {
        print(choice, route, engine).await
    }
}

/// The prompt as tokens.
fn tokens(arguments: &Generate, prompt: &str, text: &ModelText) -> Result<Vec<TokenId>, Failure> {
    if let Some(ids) = &arguments.prompt_ids {
        return Ok(ids.clone());
    }
    if arguments.raw {
        return text.encode_prompt(prompt).map_err(Failure::input);
    }
    let tokens = asking::chat(text, arguments.system.as_deref(), prompt, SystemTime::now()).ok_or_else(|| {
        Failure::input(format!(
            "--route {:?}: the model has no chat template; continue the text with --raw",
            arguments.route
        ))
    })?;
    tokens.map_err(|e| Failure::input(format!("--prompt: {e}")))
}

/// Index among the route's models of the one that wrote `entry`.
fn writer(route: &RouteInfo, entry: &Entry) -> usize {
    route.models.iter().position(|(m, _)| *m == entry.committed.model).unwrap_or_default()
}

async fn print(mut choice: Choice, route: &RouteInfo, engine: &Engine) -> Result<(), Failure> {
    let names = route.models.iter().map(|(m, _)| engine.models()[m.index()].name.clone()).collect();
    let mut printer = Printer::new(names, io::stdout().is_terminal(), stdout_is_coloured());
    let mut interrupt = std::pin::pin!(tokio::signal::ctrl_c());
    loop {
        let piece = tokio::select! {
            piece = choice.next() => piece,
            _ = &mut interrupt => {
                write_stdout(&(printer.end("") + "\n"))?;
                return Err(Failure::work("interrupted"));
            }
        };
        let piece = match piece {
            Ok(piece) => piece,
            Err(error) => {
                write_stdout(&(printer.end("") + "\n"))?;
                return Err(Failure::work(error));
            }
        };
        let text: String = piece.entries.iter().map(|entry| printer.token(writer(route, entry), &entry.text)).collect();
        write_stdout(&text)?;
        if let Some(end) = piece.end {
            write_stdout(&(printer.end("") + "\n"))?;
            // The answer is out; a legend that cannot be written is no failure.
            let _ = writeln!(io::stderr(), "{}", printer.legend(end.handoffs, finish_reason(&end)));
            return Ok(());
        }
    }
}

async fn print_json(
    mut choice: Choice,
    route: &RouteInfo,
    engine: &Engine,
    prompt_tokens: usize,
) -> Result<(), Failure> {
    let (mut text, mut entries): (String, Vec<Entry>) = Default::default();
    let end = loop {
        let piece = choice.next().await.map_err(Failure::work)?;
        text += &piece.text;
        entries.extend(piece.entries);
        if let Some(end) = piece.end {
            break end;
        }
    };
    let answer = answer_json(&text, &entries, &end, route, engine, prompt_tokens);
    write_stdout(&format!("{answer:#}\n"))
}

fn answer_json(
    text: &str,
    entries: &[Entry],
    end: &End,
    route: &RouteInfo,
    engine: &Engine,
    prompt_tokens: usize,
) -> Value {
    let name = |entry: &Entry| engine.models()[entry.committed.model.index()].name.as_str();
    let mut by_model: Map<String, Value> =
        route.models.iter().map(|(m, _)| (engine.models()[m.index()].name.clone(), 0.into())).collect();
    for entry in entries {
        if let Some(count) = by_model.get_mut(name(entry)) {
            *count = (count.as_u64().unwrap_or_default() + 1).into();
        }
    }
    let tokens = entries.iter().map(|entry| {
        let committed = &entry.committed;
        let signals = committed.signals.as_deref().map(Vec::as_slice).unwrap_or_default();
        json!({
            "id": committed.token,
            "text": entry.text,
            "model": name(entry),
            "logprob": logprob(committed.logprob),
            "signals": signals.iter().map(|(name, value)| (name.to_string(), json!(value))).collect::<Map<_, _>>(),
        })
    });
    json!({
        "route": route.name,
        "text": text,
        "finish_reason": finish_reason(end),
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": entries.len(),
            "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
            "tokens_by_model": by_model,
            "handoffs": end.handoffs,
        },
        "tokens": tokens.collect::<Vec<_>>(),
    })
}
