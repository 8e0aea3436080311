//! Calls of a policy, and what is left of it after a failure.

use crate::engine::OnError;
use crate::policy::monitor::{Hook, Meter, Note};
use crate::policy::{PolicyFailure, PolicyInstance};

/// A hook failed, now or at an earlier request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    pub hook: &'static str,
    pub message: String,
    /// It failed just now: worth a line in the log.
    pub first: bool,
}

/// Calls of a policy, until it fails.
pub(super) struct Hooks {
    /// `None` for a model alone.
    pub policy: Option<Box<dyn PolicyInstance>>,
    /// `None` where nobody watches: nothing is measured then, and no clock is read.
    pub meter: Option<Meter>,
    pub on_error: OnError,
    failure: Option<PolicyFailure>,
    pub notes: Vec<Note>,
}

impl Drop for Hooks {
    fn drop(&mut self) {
        if let (Some(policy), Some(meter)) = (self.policy.take(), &self.meter) {
            meter.drop_policy(policy);
        }
    }
}

impl Hooks {
    pub fn new(policy: Option<Box<dyn PolicyInstance>>, on_error: OnError) -> Self {
        Self { policy, meter: None, on_error, failure: None, notes: Vec::new() }
    }

    /// Call a hook. `Ok(None)` without a policy, or when a failed one's requests stay local.
    pub fn call<T>(
        &mut self,
        hook: Hook,
        body: impl FnOnce(&mut dyn PolicyInstance) -> Result<T, PolicyFailure>,
    ) -> Result<Option<T>, Failed> {
        if let Some(PolicyFailure { hook, .. }) = &self.failure {
            return match self.on_error {
                OnError::StayLocal | OnError::DisableRoute => Ok(None),
                OnError::FailRequest => Err(Failed { hook, message: self.failure_text(), first: false }),
            };
        }
        let Some(policy) = self.policy.as_deref_mut() else { return Ok(None) };
        let answer = match &mut self.meter {
            Some(meter) => meter.call(hook, policy, body, &mut self.notes),
            None => body(policy),
        };
        answer.map(Some).map_err(|failure| self.poison(failure))
    }

    fn failure_text(&self) -> String {
        self.failure.as_ref().map(ToString::to_string).unwrap_or_default()
    }

    /// The instance is never called again.
    fn poison(&mut self, failure: PolicyFailure) -> Failed {
        let failed = Failed { hook: failure.hook, message: failure.to_string(), first: true };
        self.failure = Some(failure);
        failed
    }

    /// An answer that no request can follow.
    pub fn refuse(&mut self, hook: Hook, message: String) -> Failed {
        let plugin = self.meter.as_ref().map_or(String::new(), |meter| meter.monitor.names.plugin.clone());
        if let Some(meter) = &self.meter {
            meter.monitor.count_failure(hook);
        }
        self.poison(PolicyFailure { plugin, hook: hook.name(), message })
    }
}
