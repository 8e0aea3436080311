//! Routes with other settings, for requests that ask for them. A variant is a route of its own beside the one that it
//! is of: made when it is first asked for, and given up for another when nobody uses it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Map, Value};
use tokio::sync::watch;

use super::table::ServedRoute;
use super::workshop::{Change, PATIENCE, Workshop};
use super::{Engine, Makers, RouteSetup, StartError};
use crate::policy::monitor::Hook;
use crate::policy::overrides::{MAX_BYTES, canonical};
use crate::policy::validate_settings;

/// Why a request cannot have its settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverrideError {
    #[error("`{key}` cannot be set by a request: {}", allowed(route, keys))]
    NotAllowed { route: String, key: String, keys: Vec<String> },
    #[error("has {bytes} bytes as JSON, and at most {MAX_BYTES} are allowed")]
    TooLarge { bytes: usize },
    /// What the policy's schema says.
    #[error("{0}")]
    Invalid(String),
}

fn allowed(route: &str, keys: &[String]) -> String {
    match keys {
        [] => format!("route `{route}` lets requests set nothing; leave it out"),
        keys => format!("route `{route}` lets requests set `{}`", keys.join("`, `")),
    }
}

/// Why there is no variant with these settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VariantError {
    #[error("all {most} variants of route `{route}` (max_variants) are in use with other settings")]
    Full { route: String, most: usize },
    #[error("variants of route `{route}` that were given up are not gone yet")]
    Leaving { route: String },
    /// The policy does not take these settings.
    #[error("{0}")]
    Refused(String),
    #[error(
        "a hook of the plugin of route `{route}` does not come back; until it does, the route gets no settings that it \
         does not have already"
    )]
    Hung { route: String },
    #[error("the server is shutting down")]
    Stopping,
    #[error("route `{route}` could not be made with these settings; see the server's log")]
    Failed { route: String },
}

/// The variants of one route.
#[derive(Default)]
pub(super) struct Variants {
    /// `None`: requests may set nothing.
    base: Option<Base>,
    slots: Mutex<Slots>,
}

/// What variants are made from.
struct Base {
    setup: Arc<RouteSetup>,
    settings: Value,
    /// The same in one form.
    canonical: String,
}

/// Of the variant that is being made: `None` until it is there, or is not.
type Outcome = Option<Result<Arc<ServedRoute>, VariantError>>;

#[derive(Default)]
struct Slots {
    /// Ascends with each use of one.
    clock: u64,
    all: Vec<Slot>,
}

struct Slot {
    settings: String,
    used: u64,
    state: State,
}

enum State {
    Making(watch::Receiver<Outcome>),
    Ready(Arc<ServedRoute>),
}

enum Found {
    Ready(Arc<ServedRoute>),
    Making(watch::Receiver<Outcome>),
    /// Nobody makes it yet. One that made place for it, if need was.
    New(watch::Sender<Outcome>, watch::Receiver<Outcome>, Option<Arc<ServedRoute>>),
    Full,
}

impl Slots {
    fn find(&mut self, settings: &str, most: usize) -> Found {
        self.clock += 1;
        if let Some(slot) = self.all.iter_mut().find(|slot| slot.settings == settings) {
            slot.used = self.clock;
            return match &slot.state {
                State::Making(outcome) => Found::Making(outcome.clone()),
                State::Ready(route) => Found::Ready(route.clone()),
            };
        }
        let mut left = None;
        if self.all.len() >= most {
            let Some(place) = self.longest_idle() else { return Found::Full };
            if let State::Ready(route) = self.all.swap_remove(place).state {
                left = Some(route);
            }
        }
        let (sender, outcome) = watch::channel(None);
        let state = State::Making(outcome.clone());
        self.all.push(Slot { settings: settings.to_owned(), used: self.clock, state });
        Found::New(sender, outcome, left)
    }

    /// Others get a route from here alone, so one that nobody else holds stays so while this is borrowed.
    fn longest_idle(&self) -> Option<usize> {
        let idle = |slot: &Slot| matches!(&slot.state, State::Ready(route) if Arc::strong_count(route) == 1);
        let slots = self.all.iter().enumerate().filter(|(_, slot)| idle(slot));
        slots.min_by_key(|(_, slot)| slot.used).map(|(place, _)| place)
    }

    /// What was being made is there, or is to be forgotten.
    fn settle(&mut self, settings: &str, route: Option<&Arc<ServedRoute>>) {
        let making = |slot: &Slot| slot.settings == settings && matches!(slot.state, State::Making(_));
        let Some(place) = self.all.iter().position(making) else { return };
        match route {
            Some(route) => self.all[place].state = State::Ready(route.clone()),
            None => drop(self.all.swap_remove(place)),
        }
    }
}

impl Variants {
    pub fn new(setup: &Arc<RouteSetup>) -> Self {
        if setup.overrides.keys.is_empty() {
            return Self::default();
        }
        // What does not parse has no setting to put another in the place of.
        let settings: Value = serde_json::from_str(&setup.settings).unwrap_or_else(|_| Value::Object(Map::new()));
        let canonical = canonical(settings.clone()).to_string();
        Self { base: Some(Base { setup: setup.clone(), settings, canonical }), slots: Mutex::default() }
    }

    /// Each change of them is whole, so a panic elsewhere cannot spoil them.
    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self, settings: &str) -> bool {
        self.slots().all.iter().any(|slot| slot.settings == settings)
    }
}

impl ServedRoute {
    /// Its settings with those that a request has given in their places, as JSON. `None` where it comes to the route's
    /// own.
    pub fn settings_with(&self, given: Map<String, Value>) -> Result<Option<String>, OverrideError> {
        let nothing = Value::Object(Map::new());
        let base = self.variants.base.as_ref();
        let bytes = Value::Object(given.clone()).to_string().len();
        if bytes > MAX_BYTES {
            return Err(OverrideError::TooLarge { bytes });
        }
        let merged = self.overrides.merged(base.map_or(&nothing, |base| &base.settings), given);
        let merged = merged.map_err(|key| OverrideError::NotAllowed {
            route: self.name.clone(),
            key,
            keys: self.overrides.names(),
        })?;
        let (Some(base), settings) = (base, merged.to_string()) else { return Ok(None) };
        if settings == base.canonical {
            return Ok(None);
        }
        if !self.variants.known(&settings) {
            validate_settings(base.setup.policy.settings_schema(), &merged).map_err(OverrideError::Invalid)?;
        }
        Ok(Some(settings))
    }

    /// How many variants there are.
    pub fn variants(&self) -> usize {
        self.variants.slots().all.len()
    }

    /// The routes have changed. Variants go with their route, and those that are disabled may be tried again.
    pub(super) fn retire_variants(&self, all: bool) {
        let stays = |slot: &Slot| match &slot.state {
            State::Making(_) => true,
            State::Ready(route) => !all && route.disabled().is_none(),
        };
        self.variants.slots().all.retain(stays);
    }
}

/// A variant that is being made. Dropped before it is there, it is forgotten, and those who wait for it are told.
struct Making {
    of: Arc<ServedRoute>,
    settings: String,
    sender: watch::Sender<Outcome>,
    outcome: Option<Result<Arc<ServedRoute>, VariantError>>,
}

impl Drop for Making {
    fn drop(&mut self) {
        let failed = || Err(VariantError::Failed { route: self.of.name.clone() });
        let outcome = self.outcome.take().unwrap_or_else(failed);
        self.of.variants.slots().settle(&self.settings, outcome.as_ref().ok());
        let _ = self.sender.send(Some(outcome));
    }
}

impl Engine {
    /// The route with `settings`, from [`ServedRoute::settings_with`], in place of its own. Made if there is none: who
    /// asks for the same meanwhile waits for it, and it is made whether or not anybody does.
    pub async fn variant(&self, of: &Arc<ServedRoute>, settings: &str) -> Result<Arc<ServedRoute>, VariantError> {
        let route = of.name.clone();
        let Some(base) = &of.variants.base else { return Err(VariantError::Failed { route }) };
        if self.shared.stopping.load(Ordering::Acquire) {
            return Err(VariantError::Stopping);
        }
        let most = base.setup.overrides.max_variants;
        let found = of.variants.slots().find(settings, most);
        let mut outcome = match found {
            Found::Ready(route) => return Ok(route),
            Found::Making(outcome) => outcome,
            Found::Full => return Err(VariantError::Full { route, most }),
            Found::New(sender, outcome, left) => {
                drop(left);
                let making = Making { of: of.clone(), settings: settings.to_owned(), sender, outcome: None };
                let workshop = Workshop { makers: self.workshop.makers.for_requests(), ..self.workshop.clone() };
                // It waits for models and plugins.
                let thread = std::thread::Builder::new().name("variant".into());
                if let Err(error) = thread.spawn(move || workshop.fill(making)) {
                    tracing::error!(route, %error, "the thread that makes a variant of a route cannot be started");
                }
                outcome
            }
        };
        // Each `create` has so long. What comes after may hang as well, where nobody looks.
        let limit = self.workshop.makers.limit.unwrap_or(PATIENCE);
        let Ok(made) = tokio::time::timeout(limit + limit / 4, outcome.wait_for(Option::is_some)).await else {
            return Err(VariantError::Hung { route });
        };
        let made = made.ok().and_then(|made| made.clone());
        made.unwrap_or(Err(VariantError::Failed { route }))
    }
}

impl Workshop {
    fn fill(&self, mut making: Making) {
        let Making { of, settings, .. } = &making;
        let Some(base) = &of.variants.base else { return };
        let outcome = self.refuse_backlog(of, &base.setup).and_then(|()| {
            let setup = RouteSetup {
                settings: settings.clone(),
                overrides: Default::default(),
                ..RouteSetup::clone(&base.setup)
            };
            self.make_variant(of, setup).map_err(|error| told(&error, &of.name))
        });
        making.outcome = Some(outcome);
    }

    fn make_variant(&self, of: &ServedRoute, setup: RouteSetup) -> Result<Arc<ServedRoute>, StartError> {
        let mut change = Change::new(self);
        let route = change.bring(Arc::new(setup), Some(of.id))?;
        change.make_whole()?;
        self.shared.registry().serve_variant(of.id, route.id);
        Ok(route)
    }

    /// Whoever can choose settings must not fill the memory with instances that cannot be made, or dropped.
    fn refuse_backlog(&self, of: &ServedRoute, setup: &RouteSetup) -> Result<(), VariantError> {
        let Makers { monitors, .. } = &self.makers;
        let dropping = monitors.hung().iter().any(|hung| hung.hook == Hook::Drop);
        if dropping || self.makers.left_of(&*setup.policy).is_some() {
            return Err(VariantError::Hung { route: of.name.clone() });
        }
        let instances = monitors.list().iter().filter(|monitor| monitor.names.route == of.name).count();
        // The route and its variants, and as many again that are about to go.
        let most = 2 * (1 + setup.overrides.max_variants) * setup.models.len();
        if instances >= most {
            return Err(VariantError::Leaving { route: of.name.clone() });
        }
        Ok(())
    }
}

/// What those are told who wait for a variant. What is no fault of theirs is for the log.
fn told(error: &StartError, route: &str) -> VariantError {
    let route = route.to_owned();
    match error {
        StartError::Policy { .. } | StartError::OtherNets { .. } => VariantError::Refused(error.to_string()),
        StartError::Stopping => VariantError::Stopping,
        StartError::Hung { .. } => {
            tracing::warn!("settings of a request are not taken: {error}");
            VariantError::Hung { route }
        }
        _ => {
            tracing::error!("settings of a request could not be taken: {error}");
            VariantError::Failed { route }
        }
    }
}
