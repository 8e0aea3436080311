//! Ladders of an engine at work: what they are chosen from, and who chooses.

use std::sync::Arc;

use super::{Engine, Shared, StartError};
use crate::online::{self, Paces, Reading, Source, Tuner};
use crate::request::ModelId;
use crate::subserver::coordinator::{LadderError, Ladders};
use crate::subserver::gate::{Schedule, thresholds};
use crate::subserver::observed::Observed;

impl Source for Arc<Shared> {
    fn read(&self) -> Reading {
        let observed = (0..self.models.len()).map(|model| self.coordinator.observed(ModelId(model as u32)));
        Reading {
            observed: observed.collect(),
            live: self.coordinator.live(),
            most_live: self.coordinator.take_most_live(),
            times: self.paces.get().map(Paces::take).unwrap_or_default(),
            ladders: Ladders::clone(&self.coordinator.ladders().1),
        }
    }

    fn set_ladders(&self, ladders: Ladders) -> Result<(), LadderError> {
        self.coordinator.replace(ladders)?;
        self.wake_all();
        Ok(())
    }
}

impl Engine {
    /// What a model has done since the start, for choosing its ladder.
    pub fn observed(&self, model: ModelId) -> Observed {
        self.shared.coordinator.observed(model)
    }

    /// The ladders in force.
    pub fn ladders(&self) -> Arc<Ladders> {
        self.shared.coordinator.ladders().1
    }

    /// Whether [`Self::set_ladders`] takes them.
    pub(super) fn check_ladders(&self, ladders: &[Vec<u32>]) -> Result<(), LadderError> {
        self.shared.coordinator.check(ladders)
    }

    /// Put other ladders in force, one for each model.
    pub fn set_ladders(&self, ladders: Ladders) -> Result<(), LadderError> {
        self.shared.set_ladders(ladders)
    }

    /// From now on ladders follow the traffic; those in force are taken while too little is known of it.
    pub fn follow(&mut self, settings: online::Settings) -> Result<(), StartError> {
        let fault = |e: &dyn std::fmt::Display| StartError::Tuner { message: e.to_string() };
        let names = self.models().iter().map(|model| model.name.clone()).collect();
        let routes = self.routes();
        let first = routes.first().and_then(|route| route.models.get(route.entry));
        let entry = first.map_or(0, |(model, _)| model.index());
        let tuner = Tuner::new(names, entry, Ladders::clone(&self.ladders()), settings).map_err(|e| fault(&e))?;
        if settings.has_limits() {
            self.shared.paces.get_or_init(Paces::default);
        }
        self.tuner = Some(online::Thread::start(tuner, settings.interval, self.shared.clone()).map_err(|e| fault(&e))?);
        Ok(())
    }

    /// What the tuner knows and has done; `None` where ladders are fixed.
    pub fn tuning(&self) -> Option<online::Status> {
        self.tuner.as_ref().map(online::Thread::status)
    }

    /// By model: requests that must be ready now before it starts.
    pub fn thresholds(&self) -> Vec<u32> {
        match self.shared.coordinator.schedule() {
            Schedule::Delayed => thresholds(&self.ladders(), self.live_requests()),
            Schedule::Eager | Schedule::ModelSync | Schedule::StepSync => vec![1; self.models().len()],
        }
    }
}
