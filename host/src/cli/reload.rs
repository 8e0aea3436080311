//! The configuration of a server, read anew while it works.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

use super::args::Serve;
use super::build::{Prepared, start_failure};
use super::front::{InForce, Secrets};
use super::output::Failure;
use super::serve::load;
use crate::api::{Refused, Reload, Reloaded};
use crate::config::Config;
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
            _ if failure.hung => Self::Hung(failure.line()),
            2 => Self::Config(failure.line()),
            _ => Self::Work(failure.line()),
        }
    }
}

/// Reload at each signal, without end. Signals that come during a reload lead to one more together; `signal` keeps
/// them until then.
pub async fn at_each(mut signal: impl AsyncFnMut() -> Option<()>, reload: &Arc<Reload>) {
    while signal().await.is_some() {
        let reload = reload.clone();
        // It goes on if the server begins to stop meanwhile, and logs what it comes to.
        drop(tokio::spawn(async move { reload.run().await }).await);
    }
}

/// What is said of `error`, which `config` has come to.
fn refused(config: &Config, error: &StartError) -> Refused {
    let told = start_failure(config, error);
    match error {
        StartError::AtStartOnly { .. } => Refused::Restart(told.line()),
        StartError::Stopping => Refused::Stopping,
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
        self.front.may_become(&secrets, &config)?;
        let next = current.with_config(config, self.engine.makers().clone())?;
        // A reload is the operator's word that a disabled route may be tried again.
        let served = self.engine.routes();
        let disabled: Vec<_> = served.iter().filter(|route| route.disabled().is_some()).collect();
        let disabled = |name: &str| disabled.iter().any(|route| route.name == name);
        // What is made anew and stays the same is what the manifest of a recording lists.
        refuse_recorded(&current, &next, &next.changes(&current, |_| false))?;
        let wanted = next.wanted(&current, disabled);
        let ladders = (ladders(&current) != ladders(&next)).then(|| ladders(&next));
        let routes = self.engine.set_routes_and_ladders(wanted, ladders);
        let routes = routes.map_err(|error| refused(&next.config, &error))?;
        let models = self.set_waits(&current, &next);
        self.config_sha256.store(Arc::new(next.config.sha256()));
        self.front.replace(secrets);
        *current = next;
        Ok(Reloaded { routes, models })
    }

    /// Names of the models that wait otherwise from now on.
    fn set_waits(&self, before: &Prepared, next: &Prepared) -> Vec<String> {
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
        changed
    }
}

fn ladders(of: &Prepared) -> Ladders {
    of.config.models.iter().map(|model| model.min_batch.clone()).collect()
}

/// The manifest of a recording lists its routes, which hold for all of it.
fn refuse_recorded(before: &Prepared, next: &Prepared, changes: &RouteChanges) -> Result<(), Refused> {
    let RouteChanges { added, changed, removed, .. } = changes;
    let recorded = [("is new", added), ("has changed", changed), ("is gone", removed)];
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn signals_during_a_reload_are_one() {
        let (began, begins) = std::sync::mpsc::channel();
        let (go_on, may_go_on) = std::sync::mpsc::channel::<()>();
        let may_go_on = Mutex::new(may_go_on);
        let reload = Arc::new(Reload::new(move || {
            began.send(()).unwrap();
            let _ = may_go_on.lock().unwrap().recv();
            Ok(Reloaded::default())
        }));
        let (signals, mut signalled) = tokio::sync::watch::channel(());
        let many = async {
            signals.send(()).unwrap();
            let first = tokio::task::spawn_blocking(move || begins.recv().map(|()| begins));
            let begins = first.await.unwrap().unwrap();
            for _ in 0..50 {
                signals.send(()).unwrap();
                tokio::task::yield_now().await;
            }
            drop((signals, go_on));
            begins
        };
        let (begins, ()) = tokio::join!(many, at_each(async || signalled.changed().await.ok(), &reload));
        drop(reload);
        assert_eq!(begins.iter().count(), 1);
    }

    #[test]
    fn each_refusal_has_its_kind() {
        let text = "[models.m]\npath = \"m\"\n[routes.r]\nplugin = \"p\"\nmodels = [\"m\"]\n";
        let config = Config::parse(text, "c.toml".as_ref(), &Default::default()).unwrap();
        let kind = |error: StartError| refused(&config, &error);
        let (route, model, message) = ("r".to_owned(), "m".to_owned(), "no".to_owned());
        let (at, names) = ("c.toml:3: ", "route `r`, model `m`: no");
        assert_eq!(
            kind(StartError::Policy { route: route.clone(), model: model.clone(), message: message.clone() }),
            Refused::Config(format!("{at}{names}"))
        );
        assert_eq!(
            kind(StartError::AtStartOnly { route: route.clone(), model: model.clone(), message: message.clone() }),
            Refused::Restart(format!("{at}{names}; restart the server"))
        );
        assert_eq!(
            kind(StartError::NotTaken { route: route.clone(), model: model.clone(), message: message.clone() }),
            Refused::Work(names.into())
        );
        assert_eq!(kind(StartError::Hung { route, model, message }), Refused::Hung(names.into()));
        assert_eq!(kind(StartError::Stopping), Refused::Stopping);
    }
}
