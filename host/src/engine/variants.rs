//! Routes with other settings, for requests that ask for them. A variant is a route of its own beside the one that it
//! is of: made when it is first asked for, and given up for another when nobody uses it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::{fmt, io};

use serde_json::{Map, Value};
use tokio::sync::watch;

use super::faults::Faults;
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
    #[error("a model of route `{route}` does not take these settings now")]
    NotTaken { route: String },
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

/// Settings for a request of a route, other than the route's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnSettings {
    /// In the form that all spellings of the same settings share.
    key: String,
    /// As the policy gets them, as JSON.
    settings: String,
}

/// The variants of one route.
#[derive(Default)]
pub(super) struct Variants {
    /// `None`: requests may set nothing.
    base: Option<Base>,
    slots: Mutex<Slots>,
    /// What went wrong by no fault of a request.
    faults: Mutex<Faults>,
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
    key: String,
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
    /// Nobody makes it yet.
    New(watch::Sender<Outcome>, watch::Receiver<Outcome>),
    Full,
}

/// Of one that nobody has but the slots: others get it from there alone, so it stays so while they are borrowed.
fn is_idle(slot: &Slot) -> bool {
    matches!(&slot.state, State::Ready(route) if Arc::strong_count(route) == 1)
}

impl Slots {
    /// Idle ones stay until another is there in their place: settings that no policy takes push nobody out.
    fn find(&mut self, key: &str, most: usize) -> Found {
        self.clock += 1;
        if let Some(place) = self.all.iter().position(|slot| slot.key == key) {
            let idle = is_idle(&self.all[place]);
            let slot = &mut self.all[place];
            slot.used = self.clock;
            match &slot.state {
                State::Making(outcome) => return Found::Making(outcome.clone()),
                // One that is disabled stays so until a reload.
                State::Ready(route) if !(idle && route.has_failed() && route.disabled().is_none()) => {
                    return Found::Ready(route.clone());
                }
                State::Ready(_) => drop(self.all.swap_remove(place)),
            }
        }
        if self.all.iter().filter(|slot| !is_idle(slot)).count() >= most {
            return Found::Full;
        }
        let (sender, outcome) = watch::channel(None);
        let state = State::Making(outcome.clone());
        self.all.push(Slot { key: key.to_owned(), used: self.clock, state });
        Found::New(sender, outcome)
    }

    /// What was being made is there, or is to be forgotten. The longest idle one makes place for it. Where all others
    /// have come into use meanwhile it is not kept, but for those who wait for it.
    fn settle(&mut self, key: &str, made: Option<&Arc<ServedRoute>>, most: usize) {
        let making = |slot: &Slot| slot.key == key && matches!(slot.state, State::Making(_));
        let Some(place) = self.all.iter().position(making) else { return };
        self.all[place].state = match made {
            Some(route) => State::Ready(route.clone()),
            None => return drop(self.all.swap_remove(place)),
        };
        if self.all.iter().filter(|slot| matches!(slot.state, State::Ready(_))).count() > most {
            let idle = self.all.iter().enumerate().filter(|(_, slot)| is_idle(slot));
            let longest = idle.min_by_key(|(_, slot)| slot.used).map(|(place, _)| place);
            self.all.swap_remove(longest.unwrap_or(place));
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
        let canonical = key(&settings);
        Self { base: Some(Base { setup: setup.clone(), settings, canonical }), ..Self::default() }
    }

    /// Each change of them is whole, so a panic elsewhere cannot spoil them.
    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, fault: impl fmt::Display) {
        let untold = self.faults.lock().unwrap_or_else(PoisonError::into_inner).tell(Instant::now());
        if let Some(untold) = untold {
            tracing::error!(untold, "settings of a request could not be taken: {fault}");
        }
    }

    fn known(&self, key: &str) -> bool {
        self.slots().all.iter().any(|slot| slot.key == key)
    }
}

fn key(settings: &Value) -> String {
    canonical(settings.clone()).to_string()
}

/// Bytes of `value` as JSON.
fn size(value: &Map<String, Value>) -> usize {
    struct Count(usize);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    match serde_json::to_writer(&mut count, value) {
        Ok(()) => count.0,
        // A map with text for keys can be written.
        Err(_) => usize::MAX,
    }
}

impl ServedRoute {
    /// Its settings with those that a request has given in their places. `None` where it comes to the route's own.
    pub fn settings_with(&self, given: Map<String, Value>) -> Result<Option<OwnSettings>, OverrideError> {
        let nothing = Value::Object(Map::new());
        let base = self.variants.base.as_ref();
        let bytes = size(&given);
        if bytes > MAX_BYTES {
            return Err(OverrideError::TooLarge { bytes });
        }
        let merged = self.overrides.merged(base.map_or(&nothing, |base| &base.settings), given);
        let merged = merged.map_err(|key| OverrideError::NotAllowed {
            route: self.name.clone(),
            key,
            keys: self.overrides.names(),
        })?;
        let (Some(base), key) = (base, key(&merged)) else { return Ok(None) };
        if key == base.canonical {
            return Ok(None);
        }
        if !self.variants.known(&key) {
            validate_settings(base.setup.policy.settings_schema(), &merged).map_err(OverrideError::Invalid)?;
        }
        Ok(Some(OwnSettings { key, settings: merged.to_string() }))
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
    asked: OwnSettings,
    sender: watch::Sender<Outcome>,
    outcome: Option<Result<Arc<ServedRoute>, VariantError>>,
}

impl Drop for Making {
    fn drop(&mut self) {
        let failed = || Err(VariantError::Failed { route: self.of.name.clone() });
        let outcome = self.outcome.take().unwrap_or_else(failed);
        let most = self.of.overrides.max_variants;
        self.of.variants.slots().settle(&self.asked.key, outcome.as_ref().ok(), most);
        let _ = self.sender.send(Some(outcome));
    }
}

impl Engine {
    /// The route with the settings `asked` for, from [`ServedRoute::settings_with`], in place of its own. Made if there
    /// is none: who asks for the same meanwhile waits for it, and it is made whether or not anybody does.
    pub async fn variant(&self, of: &Arc<ServedRoute>, asked: &OwnSettings) -> Result<Arc<ServedRoute>, VariantError> {
        let route = of.name.clone();
        let Some(base) = &of.variants.base else { return Err(VariantError::Failed { route }) };
        if self.shared.stopping.load(Ordering::Acquire) {
            return Err(VariantError::Stopping);
        }
        let most = base.setup.overrides.max_variants;
        let found = of.variants.slots().find(&asked.key, most);
        let mut outcome = match found {
            Found::Ready(route) => return Ok(route),
            Found::Making(outcome) => outcome,
            Found::Full => return Err(VariantError::Full { route, most }),
            Found::New(sender, outcome) => {
                // If its thread does not start.
                let outset = Some(Err(VariantError::NotTaken { route: route.clone() }));
                let making = Making { of: of.clone(), asked: asked.clone(), sender, outcome: outset };
                let workshop = Workshop { makers: self.workshop.makers.for_requests(), ..self.workshop.clone() };
                // It waits for models and plugins.
                let thread = std::thread::Builder::new().name("variant".into());
                if let Err(error) = thread.spawn(move || workshop.fill(making)) {
                    of.variants.tell(format_args!("route `{route}`: the thread for it cannot be started: {error}"));
                }
                outcome
            }
        };
        // Each `create` has so long, and so has each model that takes what it made. Nobody looks after the rest.
        let limit = self.workshop.makers.limit.unwrap_or(PATIENCE);
        let limit = (limit + PATIENCE) * (of.models.len() as u32 + 1);
        let Ok(made) = tokio::time::timeout(limit, outcome.wait_for(Option::is_some)).await else {
            return Err(VariantError::Hung { route });
        };
        let made = made.ok().and_then(|made| made.clone());
        made.unwrap_or(Err(VariantError::Failed { route }))
    }
}

impl Workshop {
    fn fill(&self, mut making: Making) {
        making.outcome = None;
        let Making { of, asked, .. } = &making;
        let Some(base) = &of.variants.base else { return };
        let outcome = self.refuse_backlog(of, &base.setup).and_then(|()| {
            let setup = RouteSetup {
                settings: asked.settings.clone(),
                overrides: Default::default(),
                ..RouteSetup::clone(&base.setup)
            };
            self.make_variant(of, setup).map_err(|error| told(&error, of))
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
        let hung = monitors.hung();
        let dropping = hung.iter().any(|hung| hung.hook == Hook::Drop && hung.names.plugin == setup.policy.name());
        if dropping || self.makers.left_of(&*setup.policy).is_some() {
            return Err(VariantError::Hung { route: of.name.clone() });
        }
        let instances = monitors.list().iter().filter(|monitor| monitor.names.route == of.name).count();
        // The route and its variants, as many that are made in their places, and as many that are about to go.
        let most = 3 * (1 + setup.overrides.max_variants) * setup.models.len();
        if instances >= most {
            return Err(VariantError::Leaving { route: of.name.clone() });
        }
        Ok(())
    }
}

/// What those are told who wait for a variant. What is no fault of theirs is for the log.
fn told(error: &StartError, of: &ServedRoute) -> VariantError {
    let route = of.name.clone();
    let answer = match error {
        StartError::Policy { .. } | StartError::OtherNets { .. } => return VariantError::Refused(error.to_string()),
        StartError::Stopping => return VariantError::Stopping,
        StartError::Hung { .. } => VariantError::Hung { route },
        StartError::NotTaken { .. } => VariantError::NotTaken { route },
        _ => VariantError::Failed { route },
    };
    of.variants.tell(error);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_text() {
        let value = serde_json::json!({"a": [1, 2.5, "é\n"], "b": {"c": null}});
        let Value::Object(map) = &value else { unreachable!() };
        assert_eq!(size(map), value.to_string().len());
    }
}
