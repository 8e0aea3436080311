//! `tokenrouter replay`: a policy offline, over recorded signals.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};
use tokenrouter_plugin_api::net::WeightsInfo;
use tokenrouter_plugin_api::{LogLevel, ModelDescription, Services, TokenId};

use super::output::{Failure, write_stdout};
use super::plugin::{Roles, settings};
use super::{build, select};
use crate::config::{self, Config};
use crate::engine::TokenText;
use crate::policy::check::parse_roles;
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

Exit status is 0, 1 when the policy fails, and 2 when the input does not fit: a trace without a
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
    let trace = replay::read(&arguments.trace, arguments.recorded.as_deref()).map_err(Failure::input)?;
    let subject = match (&arguments.config, &arguments.route) {
        (Some(config), Some(route)) => configured(arguments, config, route)?,
        _ => given(arguments, &trace)?,
    };
    let Subject { plugin, settings, .. } = &subject;
    let policy = &plugin.policy;
    validate_settings(policy.settings_schema(), settings).map_err(Failure::input)?;
    let services: Vec<&dyn Services> = subject.services.iter().map(|services| services as &dyn Services).collect();
    let place = Place {
        route: &subject.route,
        models: &subject.models,
        entry: subject.entry,
        vocab_size: subject.vocab_size,
        eos: &subject.eos,
        services: &services,
    };
    let team = || Team::new(&**policy, &settings.to_string(), &place, &trace);
    let hint = |e: replay::TeamError| match (&e, &arguments.config) {
        (replay::TeamError::Refused(_), None) => Failure::input(format!(
            "{e} (--roles small=slm,large=llm names models and their roles; --config and --route give it settings, roles and \
             tokenizers)"
        )),
        _ => Failure::input(e),
    };
    let (mut along, mut own) = (team().map_err(hint)?, team().map_err(hint)?);
    let played = replay::play(&trace, &mut along, &mut own).map_err(|e| match e {
        replay::PlayError::Failed(_) => Failure::work(e),
        replay::PlayError::Unfollowed { .. } => Failure::input(e),
    })?;
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
        notes: &trace.notes,
        text: &text,
    };
    if let Some(path) = &arguments.csv {
        let named = |e: &dyn std::fmt::Display| Failure::work(format!("--csv {}: {e}", path.display()));
        let file = std::fs::File::create(path).map_err(|e| named(&e))?;
        report.csv(file).map_err(|e| named(&e))?;
    }
    let shown = if arguments.json { format!("{:#}\n", report.json()) } else { report.table() };
    write_stdout(&shown)
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
