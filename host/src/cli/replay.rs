//! `tokenrouter replay`: a policy offline, over recorded signals.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use tokenrouter_plugin_api::net::WeightsInfo;
use tokenrouter_plugin_api::{LogLevel, ModelDescription, Services, TokenId};

use super::output::{Failure, unwritten, write_stdout};
use super::plugin::{Roles, settings};
use super::{build, select};
use crate::config::{self, Config};
use crate::engine::TokenText;
use crate::policy::check::parse_roles;
use crate::policy::monitor::Monitors;
use crate::policy::plugin::Plugin;
use crate::policy::{nets, validate_settings};
use crate::replay::{self, Place, Report, Team, Trace};

/// What a policy would have decided where recorded requests went: shares, hand-offs and differences, without models
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  tokenrouter replay recordings/run-00000 --plugin my-policy.wat --settings '{\"threshold\": 0.05}'
  tokenrouter replay recordings/run-00000 --recorded me --config config/demo.toml --route rstitch
  tokenrouter replay answer.json --plugin libmy_policy.so --roles small=slm,large=llm --json
  tokenrouter replay recordings/run-00000 --plugin my-policy.wasm --csv requests.csv

A trace is a run of a recording ([record] in the configuration), or the output of
`tokenrouter generate --json`. Policies that keep drafts cannot be replayed.

Exit status is 0, 1 when the policy fails or does not come back, and 2 when the input does not fit: a trace without a
signal that the policy asks for, settings that its schema refuses.")]
pub struct Replay {
    /// A run of a recording, or a file with an answer's JSON
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// The policy's file: a library, a module or its text
    #[arg(long, value_name = "FILE", required_unless_present = "config", conflicts_with = "config")]
    pub plugin: Option<PathBuf>,
    /// Take the policy, its settings, roles and tokenizers from this configuration's ...
    #[arg(long, value_name = "CONFIG", requires = "route")]
    pub config: Option<PathBuf>,
    /// ... route of this name
    #[arg(long, value_name = "NAME", requires = "config")]
    pub route: Option<String>,
    /// The policy's settings, as JSON [default: those of the route, or {}]
    #[arg(long, value_name = "JSON", value_parser = settings)]
    pub settings: Option<Value>,
    /// The route's models, as NAME=ROLE; the first is the entry [default: those of the trace, or
    /// small=slm,large=llm]
    #[arg(long, value_name = "MODELS", value_parser = parse_roles, conflicts_with = "config")]
    pub roles: Option<Roles>,
    /// Seconds that a hook of the policy may take
    #[arg(long, value_name = "S", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// Replay the requests of this route, where a recording has several
    #[arg(long, value_name = "NAME")]
    pub recorded: Option<String>,
    /// Write JSON
    #[arg(long)]
    pub json: bool,
    /// Write a line for each request to this file, too
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
}

/// A policy, and where it works.
struct Subject {
    plugin: Arc<Plugin>,
    route: String,
    settings: Value,
    models: Vec<ModelDescription>,
    entry: usize,
    vocab_size: u32,
    eos: Vec<Vec<TokenId>>,
    services: Vec<TraceServices>,
}

/// Tokenizers where a configuration names them, and files.
struct TraceServices {
    text: Option<Arc<dyn TokenText>>,
    /// Where relative paths of weights start.
    directory: PathBuf,
}

impl Services for TraceServices {
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        self.text.as_ref()?.token_bytes(id)
    }
    fn token_id(&self, text: &str) -> Option<TokenId> {
        self.text.as_ref()?.token_id(text)
    }
    fn weights(&self, path: &str) -> Result<WeightsInfo, String> {
        nets::describe(&self.directory, path)
    }
    fn log(&self, level: LogLevel, message: &str) {
        tracing::debug!(?level, "{message}");
    }
}

pub fn run(arguments: &Replay) -> Result<(), Failure> {
    let mut trace = replay::read(&arguments.trace, arguments.recorded.as_deref()).map_err(Failure::input)?;
    if let Some(roles) = &arguments.roles {
        check_roles(roles, &trace)?;
    }
    let subject = match (&arguments.config, &arguments.route) {
        (Some(config), Some(route)) => configured(arguments, config, route)?,
        _ => given(arguments, &trace)?,
    };
    let Subject { plugin, settings, .. } = &subject;
    validate_settings(plugin.policy.settings_schema(), settings).map_err(Failure::input)?;
    trace.notes.extend(other_file(&trace, plugin));
    let (monitors, subject, trace) = (Arc::<Monitors>::default(), Arc::new(subject), Arc::new(trace));
    let work = {
        let (monitors, subject, trace, configured) =
            (monitors.clone(), subject.clone(), trace.clone(), arguments.config.is_some());
        move || play(&subject, &trace, &monitors, configured)
    };
    let limit = Duration::from_secs(arguments.timeout);
    let (played, reads_nets) = replay::within(limit, &monitors, work).map_err(Failure::work)??;
    let mut notes = trace.notes.clone();
    notes.extend(reads_nets.then(|| {
        "Scores of router networks are the recorded ones: which weights gave them is not recorded.".to_owned()
    }));
    let Subject { plugin, .. } = &*subject;
    let policy = &plugin.policy;
    let mut models: Vec<String> = subject.models.iter().map(|model| model.name.clone()).collect();
    let writers = trace.requests.iter().flat_map(|request| &request.writers);
    for writer in writers.map(|&writer| &trace.models[writer]) {
        if !models.contains(writer) {
            models.push(writer.clone());
        }
    }
    let text = |token: TokenId| {
        let bytes = subject.services.first()?.token_bytes(token)?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    };
    let report = Report {
        policy: format!("{} {} ({})", policy.name(), plugin.version, plugin.path.display()),
        trace: trace.source.clone(),
        models,
        played: &played,
        notes: &notes,
        text: &text,
    };
    if let Some(path) = &arguments.csv {
        let named = |e: &dyn std::fmt::Display| Failure::work(format!("--csv {}: {e}", path.display()));
        let file = std::fs::File::create(path).map_err(|e| named(&unwritten(&e, "give another file")))?;
        report.csv(file).map_err(|e| named(&format!("cannot be written ({e}); give another file")))?;
    }
    let shown = if arguments.json { format!("{:#}\n", report.json()) } else { report.table() };
    write_stdout(&shown)
}

/// The policy along the recorded course, and on its own; with whether it reads scores of router networks.
fn play(
    subject: &Subject,
    trace: &Trace,
    monitors: &Monitors,
    configured: bool,
) -> Result<(Vec<replay::Played>, bool), Failure> {
    let services: Vec<&dyn Services> = subject.services.iter().map(|services| services as &dyn Services).collect();
    let place = Place {
        route: &subject.route,
        models: &subject.models,
        entry: subject.entry,
        vocab_size: subject.vocab_size,
        eos: &subject.eos,
        services: &services,
        monitors,
    };
    let team = || Team::new(&*subject.plugin.policy, &subject.settings.to_string(), &place, trace);
    let hint = |e: replay::TeamError| match &e {
        replay::TeamError::Refused(_) if !configured => Failure::input(format!(
            "{e} (--roles small=slm,large=llm names models and their roles; --config and --route give it settings, roles and \
             tokenizers)"
        )),
        _ => Failure::input(e),
    };
    let (mut along, mut own) = (team().map_err(hint)?, team().map_err(hint)?);
    let played = replay::play(trace, &mut along, &mut own).map_err(|e| match e {
        replay::PlayError::Failed(_) => Failure::work(e),
        replay::PlayError::Unfollowed { .. } => Failure::input(e),
    })?;
    Ok((played, own.reads_nets()))
}

/// A role for a model that the trace does not have is a slip, unless every model of an answer has its role: a model
/// that wrote nothing there is not in its JSON.
fn check_roles(roles: &Roles, trace: &Trace) -> Result<(), Failure> {
    let known = |name: &String| trace.models.contains(name);
    let all_there = trace.models.iter().all(|model| roles.iter().any(|role| role.name == *model));
    match roles.iter().find(|role| !known(&role.name)) {
        Some(role) if trace.route.is_some() || !all_there => Err(Failure::input(format!(
            "--roles: there is no model `{}` in {}; it has {}",
            role.name,
            trace.source,
            trace.models.join(", ")
        ))),
        _ => Ok(()),
    }
}

/// What is to be known where another file is replayed than was recorded.
fn other_file(trace: &Trace, plugin: &Plugin) -> Option<String> {
    let recorded = trace.plugin.as_ref().filter(|recorded| recorded.sha256 != plugin.sha256)?;
    let short = |digest: &str| digest.chars().take(12).collect::<String>();
    let (name, version) = (&recorded.name, &recorded.version);
    let [was, is] = [&recorded.sha256, &plugin.sha256].map(|digest| short(digest));
    Some(format!("Recorded with {name} {version} (SHA-256 {was}...), not with this file ({is}...)."))
}

/// The policy of `--plugin`, at the models of `--roles` or of the trace.
fn given(arguments: &Replay, trace: &Trace) -> Result<Subject, Failure> {
    let path = arguments.plugin.as_deref().unwrap_or(Path::new(""));
    let plugin = Arc::new(Plugin::load(path, None).map_err(Failure::input)?.with_made_up_nets());
    let (models, entry) = match (&arguments.roles, &trace.route) {
        (Some(roles), _) => (roles.to_vec(), 0),
        (None, Some(route)) => route.clone(),
        (None, None) => (parse_roles("small=slm,large=llm").map_err(Failure::input)?.to_vec(), 0),
    };
    let services = models.iter().map(|_| TraceServices { text: None, directory: ".".into() }).collect();
    Ok(Subject {
        plugin,
        route: "replay".to_owned(),
        settings: arguments.settings.clone().unwrap_or_else(|| json!({})),
        eos: vec![Vec::new(); models.len()],
        models,
        entry,
        vocab_size: trace.vocab_size,
        services,
    })
}

/// The policy of a configuration's route.
fn configured(arguments: &Replay, file: &Path, name: &str) -> Result<Subject, Failure> {
    let config = Config::load(file, &config::environment()).map_err(Failure::input)?;
    select::known(&config, name)?;
    if !config.routes.iter().any(|route| route.name == name) {
        return Err(Failure::input(format!("--route {name:?}: is a model, which has no policy; give a route")));
    }
    let prepared = build::prepare(select::only(config, &[name]))?;
    let route = prepared.route(0);
    let settings = prepared.config.routes[0].settings.clone();
    let mut subject = Subject {
        plugin: prepared.plugins[0].clone(),
        route: route.name.clone(),
        settings: arguments.settings.clone().unwrap_or(settings),
        models: Vec::new(),
        entry: route.entry,
        vocab_size: u32::MAX,
        eos: Vec::new(),
        services: Vec::new(),
    };
    for (model, role) in &route.models {
        let info = &prepared.infos[model.index()];
        subject.models.push(ModelDescription { name: info.name.clone(), role: role.clone() });
        subject.vocab_size = subject.vocab_size.min(info.vocab_size);
        subject.eos.push(info.eos.clone());
        let text: Arc<dyn TokenText> = prepared.texts[model.index()].clone();
        subject.services.push(TraceServices { text: Some(text), directory: route.directory.clone() });
    }
    Ok(subject)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(recorded: bool) -> Trace {
        let described = |name: &str| ModelDescription { name: name.into(), role: name.into() };
        let models = ["small", "large"];
        Trace {
            source: "run: route r".into(),
            route: recorded.then(|| (models.map(described).into(), 0)),
            models: models.map(str::to_owned).into(),
            ..Trace::default()
        }
    }

    #[test]
    fn roles_are_for_models_that_are_there() {
        let check = |roles: &str, recorded| check_roles(&parse_roles(roles).unwrap(), &trace(recorded));
        for recorded in [false, true] {
            assert_eq!(check("large=slm,small=llm", recorded), Ok(()));
            assert_eq!(check("small=slm", recorded), Ok(()));
            let error = check("small=slm,larg=llm", recorded).unwrap_err();
            let says = "--roles: there is no model `larg` in run: route r; it has small, large";
            assert_eq!((error.status, &*error.message), (2, says));
        }
        // It may have written nothing in an answer, but a recording lists it.
        assert_eq!(check("small=slm,large=llm,third=x", false), Ok(()));
        assert!(check("small=slm,large=llm,third=x", true).is_err());
    }

    #[test]
    fn another_file_than_the_recorded_one_is_told() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins/rstitch/rstitch.wat");
        let plugin = Plugin::load(&path, None).unwrap();
        let recorded = |sha256: &str| {
            let (name, version) = ("rstitch".to_owned(), "0.1.0".to_owned());
            let plugin = crate::record::Plugin { name, version, sha256: sha256.to_owned() };
            Trace { plugin: Some(plugin), ..trace(true) }
        };
        assert_eq!(other_file(&trace(false), &plugin), None);
        assert_eq!(other_file(&recorded(&plugin.sha256), &plugin), None);
        let told = other_file(&recorded(&"0".repeat(64)), &plugin).unwrap();
        let this = &plugin.sha256[..12];
        assert_eq!(
            told,
            format!("Recorded with rstitch 0.1.0 (SHA-256 000000000000...), not with this file ({this}...).")
        );
    }
}
