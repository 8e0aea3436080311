//! The configuration of a server, read anew while it works.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

use super::args::Serve;
use super::build::Prepared;
use super::front::{InForce, Secrets};
use super::output::Failure;
use super::serve::load;
use crate::api::{Refused, Reloaded};
use crate::engine::{Engine, RouteChanges, StartError};
use crate::request::ModelId;
use crate::subserver::coordinator::Ladders;

/// Keeps a server in step with its configuration.
pub struct Reloader {
    arguments: Serve,
    engine: Arc<Engine>,
    /// Of the configuration in force.
    config_sha256: Arc<ArcSwap<String>>,
    /// What the engine serves.
    current: Mutex<Prepared>,
    front: InForce,
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        match failure.status {
            2 => Self::Config(failure.line()),
            _ => Self::Work(failure.line()),
        }
    }
}

/// `told` is what is said of `error`.
fn refused(error: &StartError, told: Failure) -> Refused {
    match error {
        StartError::AtStartOnly { .. } => Refused::Restart(told.line()),
        _ => told.into(),
    }
}

impl Reloader {
    /// `config_sha256` is kept true.
    pub fn new(
        arguments: Serve,
        prepared: Prepared,
        engine: Arc<Engine>,
        config_sha256: Arc<ArcSwap<String>>,
        front: InForce,
    ) -> Self {
        config_sha256.store(Arc::new(prepared.config.sha256()));
        Self { arguments, engine, config_sha256, current: Mutex::new(prepared), front }
    }

    /// Take over what has changed since: all of it, or nothing. Takes as long as making plugins and reading
    /// router weights does.
    pub fn reload(&self) -> Result<Reloaded, Refused> {
        // It is replaced as a whole, so a panic elsewhere cannot spoil it.
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let config = load(&self.arguments).map_err(Failure::input)?;
        let config = config.taken_over(&current.config).map_err(|e| Refused::Restart(e.to_string()))?;
        let secrets = Secrets::read(&config)?;
        let next = current.with_config(config)?;
        // A reload is the operator's word that a disabled route may be tried again.
        let served = self.engine.routes();
        let disabled: Vec<_> = served.iter().filter(|route| route.disabled().is_some()).collect();
        let disabled = |name: &str| disabled.iter().any(|route| route.name == name);
        refuse_recorded(&current, &next, &next.changes(&current, disabled))?;
        // Behind the routes nothing may fail.
        self.engine.check_ladders(&ladders(&next)).map_err(Failure::work)?;
        let wanted = next.wanted(&current, disabled);
        let routes = self.engine.set_routes(wanted).map_err(|error| refused(&error, next.start_failure(&error)))?;
        let models = self.set_waits(&current, &next)?;
        self.config_sha256.store(Arc::new(next.config.sha256()));
        self.front.replace(secrets);
        *current = next;
        Ok(Reloaded { routes, models })
    }

    /// Names of the models that wait otherwise from now on.
    fn set_waits(&self, before: &Prepared, next: &Prepared) -> Result<Vec<String>, Failure> {
        if ladders(before) != ladders(next) {
            self.engine.set_ladders(ladders(next)).map_err(Failure::work)?;
        }
        let (before, models) = (&before.config.models, &next.config.models);
        let mut changed = Vec::new();
        for (index, (old, new)) in before.iter().zip(models).enumerate() {
            if (old.max_wait, old.hold) != (new.max_wait, new.hold) {
                self.engine.set_waits(ModelId(index as u32), new.max_wait, new.hold);
            }
            if (&old.min_batch, old.max_wait, old.hold) != (&new.min_batch, new.max_wait, new.hold) {
                changed.push(new.name.clone());
            }
        }
        Ok(changed)
    }
}

fn ladders(of: &Prepared) -> Ladders {
    of.config.models.iter().map(|model| model.min_batch.clone()).collect()
}

/// The manifest of a recording lists its routes, which hold for all of it: one that is made anew would leave it.
fn refuse_recorded(before: &Prepared, next: &Prepared, changes: &RouteChanges) -> Result<(), Refused> {
    let RouteChanges { added, changed, removed, .. } = changes;
    let recorded =
        [("is new", added), ("has changed, or is disabled and to be tried again", changed), ("is gone", removed)];
    let recorded = recorded.iter().flat_map(|(what, names)| names.iter().map(move |name| (*what, name)));
    match recorded.into_iter().find(|(_, name)| before.config.records(name)) {
        None => Ok(()),
        Some((what, name)) => Err(Refused::Restart(format!(
            "{}: [routes.{name}] {what}, and it is recorded under [record], which lists the routes of the start; \
             restart to change it",
            next.config.file.display()
        ))),
    }
}
