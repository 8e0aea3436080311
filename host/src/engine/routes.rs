//! Routes at their models: policy instances with their nets, made and checked.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;

use tokenrouter_plugin_api::net::{self, WeightsInfo};
use tokenrouter_plugin_api::{Context, LogLevel, ModelDescription, Services};

use super::patience::{Made as MadeOf, Makers, NotMade};
use super::{CheckedNets, RouteInfo, RouteSetup, StartError, TokenText};
use crate::policy::monitor::{Hook, Names, not_back};
use crate::policy::{PolicyInstance, nets, said};
use crate::request::{ModelId, TokenId};
use crate::runner::ModelInfo;
use crate::runner::net::{MakeReady, Net, NetDigest, NetId};
use crate::subserver::Attachment;

/// Policies' services, for one model.
struct PolicyServices {
    text: Arc<dyn TokenText>,
    route: String,
    /// Where relative paths of weights start.
    weights: PathBuf,
    /// Lines that were logged.
    lines: Cell<u32>,
}

/// Lines of one instance that reach the log; of the others it is told that there are some.
const MOST_LINES: u32 = 100;

impl Services for PolicyServices {
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        self.text.token_bytes(id)
    }
    fn token_id(&self, text: &str) -> Option<TokenId> {
        self.text.token_id(text)
    }
    fn weights(&self, path: &str) -> Result<WeightsInfo, String> {
        nets::describe(&self.weights, path)
    }
    fn log(&self, level: LogLevel, message: &str) {
        let route = &*self.route;
        let line = self.lines.replace(self.lines.get().saturating_add(1));
        if line >= MOST_LINES {
            if line == MOST_LINES {
                tracing::warn!(route, "the plugin logs more than {MOST_LINES} lines; the rest is left out");
            }
            return;
        }
        let message = said(message);
        match level {
            LogLevel::Error => tracing::error!(route, "{message}"),
            LogLevel::Warn => tracing::warn!(route, "{message}"),
            LogLevel::Info => tracing::info!(route, "{message}"),
            LogLevel::Debug => tracing::debug!(route, "{message}"),
        }
    }
}

/// What is served as `route`, if its models and its entry exist.
pub(super) fn describe(route: &RouteSetup, infos: &[ModelInfo]) -> Result<RouteInfo, StartError> {
    let error = |message: String| StartError::Route { route: route.name.clone(), message };
    let mut models = Vec::new();
    for (model, _) in &route.models {
        models.push(infos.get(model.index()).ok_or_else(|| error(format!("there is no model number {}", model.0)))?);
    }
    let smallest = |of: fn(&ModelInfo) -> u32| models.iter().copied().map(of).min();
    let (Some(context), Some(vocab_size)) = (smallest(|m| m.context), smallest(|m| m.vocab_size)) else {
        return Err(error("it has no models; name at least one under `roles`".into()));
    };
    if route.entry >= models.len() {
        return Err(error("its entry is not one of its models".into()));
    }
    let file = route.policy.file();
    Ok(RouteInfo {
        name: route.name.clone(),
        models: route.models.clone(),
        entry: route.entry,
        policy: Some(route.policy.name().to_owned()),
        version: file.map(|file| file.version.to_owned()),
        sha256: file.map(|file| file.sha256.to_owned()),
        context,
        vocab_size,
        overrides: route.overrides.clone(),
        variant: None,
        disabled: Arc::default(),
        failed: Arc::default(),
    })
}

/// Something is wrong with what `route` wants of a model.
pub(super) fn policy_fault(route: &RouteSetup, info: &ModelInfo) -> impl Fn(String) -> StartError {
    let (route, model) = (route.name.clone(), info.name.clone());
    move |message| StartError::Policy { route: route.clone(), model: model.clone(), message }
}

/// What a policy instance is made for.
struct Made {
    own: usize,
    policy: Box<dyn PolicyInstance>,
}

/// Make the policy instance of `route` at `model` and check what it asks for; `None` where the route does
/// not use the model.
fn make(
    route: &RouteSetup,
    model: ModelId,
    text: &Arc<dyn TokenText>,
    infos: &[ModelInfo],
    makers: &Makers,
) -> Result<Option<Made>, StartError> {
    let Some(own) = route.models.iter().position(|&(m, _)| m == model) else { return Ok(None) };
    let info = &infos[model.index()];
    let error = policy_fault(route, info);
    let described: Vec<ModelDescription> = route
        .models
        .iter()
        .map(|(m, role)| ModelDescription { name: infos[m.index()].name.clone(), role: role.clone() })
        .collect();
    let services = PolicyServices {
        text: text.clone(),
        route: route.name.clone(),
        weights: route.directory.clone(),
        lines: Cell::new(0),
    };
    let (factory, settings, eos) = (route.policy.clone(), route.settings.clone(), info.eos.clone());
    let (entry, vocab_size) = (route.entry as u32, shared_vocabulary(route, infos));
    let create = move || {
        let context = Context {
            route: &services.route,
            model: own as u32,
            models: &described,
            entry,
            vocab_size,
            eos: &eos,
            services: &services,
        };
        factory.create(&context, &settings)
    };
    let names = Names { route: route.name.clone(), model: info.name.clone(), plugin: route.policy.name().to_owned() };
    let made = makers.make(&names, MadeOf::of(&*route.policy, &route.settings), create);
    let policy = made.map_err(|why| not_made(names, why))?.map_err(|e| {
        // What `create` says is for the operator; a panic is not of its choosing.
        if e.hook == "create" && !e.message.starts_with("panicked") {
            return error(format!("policy `{}` refuses to start: {}", e.plugin, e.message));
        }
        StartError::Panicked { route: route.name.clone(), model: info.name.clone(), message: e.to_string() }
    })?;
    let wanted = policy.requirements();
    if let Some(id) = wanted.masked_tokens.iter().chain(&wanted.token_logits).find(|&&id| id >= info.vocab_size) {
        return Err(error(format!("the policy asks for token {id}, but the model has {} tokens", info.vocab_size)));
    }
    if wanted.top_k > info.vocab_size {
        let message =
            format!("the policy asks for the top {} logits, but the model has {}", wanted.top_k, info.vocab_size);
        return Err(error(message));
    }
    // By these names their scores are recorded and shown.
    let name = |net: &net::Net| net.name.clone();
    let twice = wanted.nets.iter().enumerate().find(|(i, net)| wanted.nets[..*i].iter().any(|n| n.name == net.name));
    if let Some(name) = twice.map(|(_, net)| name(net)) {
        return Err(error(format!("the policy asks for two nets with the name `{name}`")));
    }
    let masked = wanted.masked_tokens.len() + route.excluded.len();
    let possible = (shared_vocabulary(route, infos) as usize).saturating_sub(masked);
    let most = |net: &net::Net| {
        net.nodes
            .iter()
            .filter_map(|node| match node.op {
                net::Op::TopLogits { count, .. } => Some(count),
                _ => None,
            })
            .max()
    };
    if let Some(net) = wanted.nets.iter().find(|net| most(net).is_some_and(|count| count as usize > possible)) {
        let message =
            format!("net `{}` reads more top logits than the {possible} tokens that can be sampled", net.name);
        return Err(error(message));
    }
    Ok(Some(Made { own, policy }))
}

fn not_made(names: Names, why: NotMade) -> StartError {
    match why {
        NotMade::Hung(Names { route, model, plugin }, lasted) => {
            let message = format!(
                "{}; nothing is changed, and reloads that need it are refused until it does; take out the route, mend its \
                 plugin or settings, or restart the server",
                not_back(Hook::Create, &plugin, lasted)
            );
            StartError::Hung { route, model, message }
        }
        NotMade::NoThread(e) => {
            let Names { route, model, .. } = names;
            let message = format!("the thread that makes its policy cannot be started: {e}");
            StartError::NotTaken { route, model, message }
        }
    }
}

/// Token ids below this are known to every model of the route.
fn shared_vocabulary(route: &RouteSetup, infos: &[ModelInfo]) -> u32 {
    route.models.iter().map(|(m, _)| infos[m.index()].vocab_size).min().unwrap_or_default()
}

/// Make every policy instance of `route` once, and its nets, without a runner: whatever [`Engine::start`]
/// would refuse in a route is refused here, before any model is loaded. `texts` and `infos` are by model;
/// of the latter, pools and sizes in bytes do not matter. Nets in `checked` are good already; others join them.
/// Tells what the nets stand for, model by model.
pub fn check_route(
    route: &RouteSetup,
    texts: &[Arc<dyn TokenText>],
    infos: &[ModelInfo],
    checked: &mut CheckedNets,
    makers: &Makers,
) -> Result<Vec<NetDigest>, StartError> {
    describe(route, infos)?;
    let mut nets = Vec::new();
    for (index, (text, info)) in texts.iter().zip(infos).enumerate() {
        let model = ModelId(index as u32);
        let Some(made) = make(route, model, text, infos, makers)? else { continue };
        for net in &made.policy.requirements().nets {
            nets.push(checked.check(route, net, model, info).map_err(policy_fault(route, info))?);
        }
    }
    Ok(nets)
}

/// What is fixed about a model for the routes that come to it.
pub(super) struct ModelPlace {
    pub text: Arc<dyn TokenText>,
    /// Tokens that it never samples.
    pub masked: Vec<TokenId>,
    /// `None`: its runner takes nets at the start alone, and cannot give them up.
    pub net_maker: Option<MakeReady>,
}

/// Attach `route` at `model`; `None` where the route does not use it. `load` gets each net to the runner, or sees
/// that it will be there.
pub(super) fn attach(
    route: &RouteSetup,
    model: ModelId,
    place: &ModelPlace,
    infos: &[ModelInfo],
    load: &mut dyn FnMut(&net::Net) -> Result<NetId, StartError>,
    makers: &Makers,
) -> Result<Option<Attachment>, StartError> {
    let Some(Made { own, policy }) = make(route, model, &place.text, infos, makers)? else { return Ok(None) };
    let info = &infos[model.index()];
    let nets = policy.requirements().nets.iter().map(load).collect::<Result<_, _>>()?;
    // What some model of the route does not know must not be sampled by any.
    let mut excluded = route.excluded.clone();
    excluded.extend(&place.masked);
    excluded.extend(shared_vocabulary(route, infos)..info.vocab_size);
    excluded.retain(|&id| id < info.vocab_size);
    let models = route.models.iter().map(|&(m, _)| m).collect();
    let attachment = Attachment::new(&route.name, Some(policy), models, own as u32, route.on_error, &excluded);
    let names = Names { route: route.name.clone(), model: info.name.clone(), plugin: route.policy.name().to_owned() };
    Ok(Some(attachment.with_nets(nets).watched(makers.monitors.add(names, route.budget))))
}

/// The nets that were read for one start or one change of routes. Routes that describe the same net for a model
/// share it, and its weights are read once.
#[derive(Default)]
pub(super) struct Loader(Vec<(ModelId, PathBuf, net::Net, NetDigest)>);

impl Loader {
    /// What `net` stands for, with the net where it was not read before.
    pub fn read(
        &mut self,
        route: &RouteSetup,
        net: &net::Net,
        model: ModelId,
        info: &ModelInfo,
    ) -> Result<(NetDigest, Option<Net>), String> {
        let same = |(m, directory, known, _): &&(_, PathBuf, _, _)| {
            *m == model && *directory == route.directory && known == net
        };
        if let Some(&(.., digest)) = self.0.iter().find(same) {
            return Ok((digest, None));
        }
        let loaded = nets::load(route.policy.name(), net, &route.directory, info)?;
        let digest = loaded.digest();
        self.0.push((model, route.directory.clone(), net.clone(), digest));
        Ok((digest, Some(loaded)))
    }
}
