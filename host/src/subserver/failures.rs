//! What follows when a policy fails, or answers what makes no sense.

use tokenrouter_plugin_api::{Decision, DecisionKind};

use super::hooks::Failed;
use super::{Attachment, Effect, MAX_IDLE_HANDOFFS, SubServer};
use crate::engine::OnError;
use crate::policy::monitor::Hook;
use crate::request::{RequestError, RequestId, RouteId};

impl SubServer {
    /// Pass on what a route's policy has to tell here.
    pub(super) fn tell_notes(&mut self, route: RouteId) {
        if let Some(attachment) = self.routes.get_mut(route) {
            let step = self.counters.steps;
            self.effects.extend(attachment.notes().map(|note| Effect::PolicyNote { route: route.0, step, note }));
        }
    }

    pub(super) fn report(&mut self, route: RouteId, Failed { hook, message, first }: Failed) {
        let attachment = self.routes.get(route);
        if first {
            let disables = attachment.is_some_and(|a| a.on_error() == OnError::DisableRoute);
            let (route, step) = (route.0, self.counters.steps);
            self.effects.push(Effect::PolicyFailed { route, hook, step, message, disables });
        }
    }

    /// A policy failed while it was asked about `ids`, all of one route.
    pub(super) fn policy_failed(&mut self, ids: &[RequestId], failed: Failed) {
        let Some(spec) = ids.first().and_then(|id| self.replicas.get(id)).map(|r| r.spec.clone()) else { return };
        let Some(attachment) = self.attachment(&spec) else { return };
        if attachment.on_error() == OnError::FailRequest {
            let route = attachment.name.clone();
            let model = self.runner.info().name.clone();
            for &id in ids {
                self.fail(
                    id,
                    RequestError::Policy {
                        route: route.clone(),
                        model: model.clone(),
                        message: failed.message.clone(),
                    },
                );
            }
        }
        self.report(spec.new.route, failed);
    }
}

/// Decisions about a request were not taken: `round` hand-offs of one that went round too long, else `invalid` others.
pub(super) fn misled(attachment: &mut Attachment, id: RequestId, round: u64, decisions: &[Decision], invalid: u32) {
    if round > 0 {
        let message = || {
            format!("the policy handed request {id} round {MAX_IDLE_HANDOFFS} times without a token; it stays for one")
        };
        return attachment.misled(Hook::Route, 0, round, message);
    }
    let models = attachment.models.len() as u32;
    let nowhere = |d: &&Decision| matches!(d.kind(), Some(DecisionKind::To(to)) if to >= models);
    let unknown = (decisions.iter().filter(nowhere).count() as u64).min(invalid.into());
    attachment.misled(Hook::Route, unknown, u64::from(invalid) - unknown, || {
        let decision = decisions.iter().find(|d| **d != Decision::STAY && **d != Decision::ACCEPT);
        let decision = decision.copied().unwrap_or(Decision::ACCEPT);
        format!("the policy answered {decision:?}, which has no meaning here and was taken as Stay")
    });
}

/// A policy put a token in the candidate's place that the form of the answer does not allow there.
pub(super) fn forbidden(attachment: &mut Attachment, id: RequestId) {
    attachment.misled(Hook::Route, 0, 1, || {
        format!("the policy replaced a candidate of request {id} by a token that the answer's form does not allow there; the candidate stands")
    });
}
