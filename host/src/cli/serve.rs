//! `tokenrouter serve`

use std::convert::Infallible;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::args::Serve;
use super::build::{self, Prepared};
use super::front::{InForce, Secrets};
use super::listen::{Place, bind_socket, check_files, check_socket, socket_path};
use super::notify::notify;
use super::output::Failure;
use super::plan::table;
use super::progress::Progress;
use super::record;
use super::reload::{Reloader, at_each};
use super::report::{self, PluginInfo};
use crate::api::{self, Access, AppState, Listener, Reload, TraceSettings, Traces};
use crate::config::{self, AdminKey, Config, ConfigError, ServerConfig};
use crate::engine::Engine;
use crate::record::Recording;

pub fn run(arguments: &Serve) -> Result<(), Failure> {
    let config = load(arguments).map_err(Failure::input)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Failure::work)?;
    let result = runtime.block_on(serve(arguments, config));
    // Loading may still be under way after a signal.
    runtime.shutdown_background();
    result
}

/// The configuration with what the command line puts in its place.
pub fn load(arguments: &Serve) -> Result<Config, ConfigError> {
    let mut config = Config::load(&arguments.config, &config::environment())?;
    config.server.host = arguments.host.unwrap_or(config.server.host);
    config.server.port = arguments.port.unwrap_or(config.server.port);
    Ok(config)
}

async fn serve(arguments: &Serve, config: Config) -> Result<(), Failure> {
    let mut signals = Signals::new().map_err(Failure::work)?;
    // One that comes during the start is heard after it.
    let hangup = signal(SignalKind::hangup()).map_err(Failure::work)?;
    let address = SocketAddr::new(config.server.host, config.server.port);
    let (tcp, drain) = (config.server.front.tcp, Drain::of(&config.server));
    let in_force = InForce::new(Secrets::read(&config)?);
    check_socket(&config)?;
    // A port in use shows before minutes of loading.
    let place = tcp.then(|| Place::main(address)).transpose()?;
    let admin_place = match config.server.admin {
        Some(admin) => {
            let place = Place::admin(admin, tcp.then_some(address))?;
            if !admin.ip().is_loopback() && config.server.admin_keys.is_empty() {
                let file = config.file.display();
                tracing::warn!(
                    "{file}: server.admin = \"{admin}\": whoever reaches it may reload; set server.admin_key"
                );
            }
            Some(place)
        }
        None => None,
    };
    let start = move || {
        record::check(&config)?;
        let prepared = build::prepare(config)?;
        let mut recording = None;
        let engine = prepared.start_observed(&Progress::stderr(), |models| {
            recording = record::start(&prepared, models, record::configured(&prepared))?;
            Ok(recording.as_ref().map(Recording::observer))
        })?;
        Ok((prepared, engine, recording))
    };
    // What is recorded is complete on disk when `recording` goes, after the last request has ended.
    let (prepared, engine, recording) = tokio::select! {
        started = tokio::task::spawn_blocking(start) => started.map_err(Failure::work)??,
        () = signals.next() => return Ok(()),
    };
    if let Some(limit) = prepared.config.server.abort_on_hung_plugin {
        engine.abort_on_hung_plugin(limit);
    }
    let engine = Arc::new(engine);
    let mut state = AppState::new(engine.clone(), prepared.texts.clone(), prepared.defaults.clone());
    let server = &prepared.config.server;
    state.max_body_bytes = server.max_body_bytes;
    state.max_requests = server.max_requests;
    state.traces = prepared.config.traces.as_ref().and_then(Traces::start);
    state.front = in_force.door(&prepared.config);
    state.access = Access::new(server.admin.is_some(), server.admin_keys.iter().map(AdminKey::expose));
    // The main address is the last: who is taken there is served.
    let unix = bind_socket(&prepared.config)?;
    let admin = admin_place.map(Place::listen).transpose()?;
    let listener = Listener { tcp: place.map(Place::listen).transpose()?, tls: in_force.tls.clone(), unix };
    check_files(&prepared.config);
    let address = listener.tcp.as_ref().map(|tcp| tcp.local_addr()).transpose().map_err(Failure::work)?;
    let admin = admin.map(|tcp| Listener { tcp: Some(tcp), tls: in_force.tls.clone(), unix: None });
    let admin_address =
        admin.as_ref().and_then(|admin| Some(admin.tcp.as_ref()?.local_addr())).transpose().map_err(Failure::work)?;
    let api_keys = state.front.keys.current().len();
    let mut stdout = io::stdout().lock();
    // Whoever started the server may have closed its output.
    let screen = screen(&prepared, recording.as_ref(), address, admin_address, api_keys);
    let _ = stdout.write_all(screen.as_bytes()).and_then(|()| stdout.flush());
    drop(stdout);
    let reloader = Reloader::new(arguments.clone(), prepared, engine.clone(), state.config_sha256.clone(), in_force);
    let reload = Arc::new(Reload::new(move || reloader.reload()));
    state.reload = Some(reload.clone());
    let state = Arc::new(state);
    let (end_admin, admin_ended) = tokio::sync::oneshot::channel::<()>();
    let admin_served = {
        let state = state.clone();
        async move {
            if let Some(admin) = admin {
                api::serve_admin(admin, state, async { drop(admin_ended.await) }).await;
            }
        }
    };
    notify("READY=1");
    let served = async move {
        let ended = until_stopped(listener, state.clone(), &reload, &engine, signals, hangup, drain).await;
        if let (Ok(()), Some(traces)) = (&ended, &state.traces) {
            traces.flush(LAST_SPANS).await;
        }
        drop(end_admin);
        ended
    };
    tokio::join!(served, admin_served).0
}

/// Time to deliver the last event to clients whose requests are broken off.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Time to send the spans of the last requests, after them.
const LAST_SPANS: Duration = Duration::from_secs(2);

/// How long a server that is told to stop goes on.
#[derive(Clone, Copy)]
struct Drain {
    /// With new requests.
    grace: Duration,
    /// Then, with those under way.
    timeout: Duration,
}

impl Drain {
    fn of(server: &ServerConfig) -> Self {
        Self { grace: server.front.drain_grace, timeout: server.drain_timeout }
    }
}

fn broken_off() -> Failure {
    Failure::work("ended by a second signal; running requests were broken off")
}

/// Serve until the first signal, then let requests finish until the drain is over or the second one.
async fn until_stopped(
    listener: Listener,
    state: Arc<AppState>,
    reload: &Arc<Reload>,
    engine: &Arc<Engine>,
    mut signals: Signals,
    mut hangup: Signal,
    drain: Drain,
) -> Result<(), Failure> {
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let draining = state.clone();
    let mut serving = std::pin::pin!(api::serve(listener, state, async { drop(stopped.await) }));
    let reloads = async {
        at_each(async || hangup.recv().await, reload).await;
        std::future::pending::<Infallible>().await
    };
    tokio::select! {
        ended = &mut serving => return ended.map_err(Failure::work),
        () = signals.next() => {}
        never = reloads => match never {},
    }
    notify("STOPPING=1");
    draining.start_leaving();
    if !drain.grace.is_zero() {
        tracing::warn!(
            seconds = drain.grace.as_secs_f64(),
            "stopping: requests are still taken for drain_grace_s; signal again to end at once"
        );
        tokio::select! {
            ended = &mut serving => return ended.map_err(Failure::work),
            () = tokio::time::sleep(drain.grace) => {}
            () = signals.next() => return Err(broken_off()),
        }
    }
    draining.start_draining();
    engine.stop_accepting();
    tracing::warn!(
        requests = engine.live_requests(),
        "stopping: running requests may finish; signal again to end at once"
    );
    drop(stop);
    tokio::select! {
        ended = &mut serving => ended.map_err(Failure::work),
        () = tokio::time::sleep(drain.timeout) => {
            tracing::warn!(requests = engine.live_requests(), "drain_timeout is over: the requests left are broken off");
            // Their clients are told; one that does not read is not waited for.
            engine.fail_all();
            let told = tokio::time::timeout(LAST_WORDS, &mut serving);
            told.await.unwrap_or(Ok(())).map_err(Failure::work)
        }
        () = signals.next() => Err(broken_off()),
    }
}

/// The signals that stop a server. They count from when this is made.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Everything that is served, at a glance.
fn screen(
    prepared: &Prepared,
    recording: Option<&Recording>,
    address: Option<SocketAddr>,
    admin: Option<SocketAddr>,
    api_keys: usize,
) -> String {
    let config = &prepared.config;
    let recorded = recording.map(|r| record::line(config, r)).unwrap_or_default();
    let scheme = if config.server.front.tls.is_some() { "https" } else { "http" };
    let admin = admin.map(|admin| format!("\nAdmin endpoints at {scheme}://{admin}\n")).unwrap_or_default();
    let socket = socket_path(config).map(|(path, _)| format!("unix:{}", path.display()));
    let places = [address.map(|address| format!("{scheme}://{address}")), socket];
    let place = places.into_iter().flatten().collect::<Vec<_>>().join(" and ");
    let curl = address.map(|address| report::curl(config, &format!("{scheme}://{address}")));
    let traces = config.traces.as_ref().map(traced).unwrap_or_default();
    let hint = curl.map(|curl| format!("\nTry:\n  {curl}\n")).unwrap_or_default();
    format!(
        "\nTokenRouter {} serves {} ({}) at {place}\n\n{}\n{}{recorded}{traces}{admin}{hint}",
        env!("CARGO_PKG_VERSION"),
        config.file.display(),
        keys_needed(api_keys),
        prepared.plan,
        report::routes(config, &plugin_infos(prepared)),
    )
}

/// Who may ask, for the start screen.
fn keys_needed(api_keys: usize) -> String {
    match api_keys {
        0 => "no API key required".into(),
        count => format!("API key required, {count} in force"),
    }
}

/// What is traced, for the start screen.
fn traced(traces: &TraceSettings) -> String {
    let share =
        if traces.sample < 1.0 { format!("{} % of the requests", 100.0 * traces.sample) } else { "requests".into() };
    format!("\nTracing {share}, to {}\n", traces.endpoint)
}

/// The plugin of each route.
pub fn plugin_infos(prepared: &Prepared) -> Vec<PluginInfo> {
    let info = |plugin: &Arc<crate::policy::plugin::Plugin>| PluginInfo {
        name: plugin.policy.name().into(),
        version: plugin.version.clone(),
        path: plugin.path.display().to_string(),
    };
    prepared.plugins.iter().map(info).collect()
}

/// Where each model was found, and the keys that decide how it is run.
pub fn sources(prepared: &Prepared) -> String {
    let mut rows = vec![["model", "directory", "min_batch", "max_rows", "prefill_chunk"].map(String::from)];
    let models = prepared.config.models.iter().zip(&prepared.directories).zip(&prepared.placed);
    for ((model, directory), placed) in models {
        let ladder: Vec<String> = model.min_batch.iter().map(u32::to_string).collect();
        rows.push([
            model.name.clone(),
            directory.display().to_string(),
            ladder.join(","),
            placed.max_rows.to_string(),
            placed.prefill_chunk.to_string(),
        ]);
    }
    table(&rows, 2)
}
