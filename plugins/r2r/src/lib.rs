//! R2R, roads to Rome (arXiv 2505.21600): a small model writes; where its token would lead elsewhere
//! than the large model's, the large model writes that one token.
//!
//! By default a small network, the *router*, judges each candidate of the small model from its hidden
//! state, the candidate itself and its largest logits. The other strategies of R2R's code are here too:
//! rules on the uncertainty of the small model's distribution, and a coin. In all of them the small
//! model's candidate is dropped at a hand-off, and after one token the small model goes on.
#![deny(missing_docs)]

mod checkpoint;
mod measures;
mod net;
mod rules;
mod settings;

use tokenrouter_plugin_api::net::Net;
use tokenrouter_plugin_api::{
    Context, Decision, Handoff, LogLevel, ModelIndex, PerRequest, Policy, PolicyError, RequestView, Requirements,
    RouteBatch, Side, SignalColumns, SignalSet, Slot, export_policy,
};

use net::Router;
use rules::{NeuralRule, Row, Rule, State};
use settings::Method;

/// R2R at one of its two models.
#[derive(Debug)]
pub struct R2r {
    side: At,
    states: PerRequest<State>,
}

#[derive(Debug)]
enum At {
    Small {
        large: ModelIndex,
        rule: Rule,
        net: Option<Net>,
    },
    /// Its visits end by their budget.
    Large,
}

/// The rule of a strategy that reads a router's score, with the router itself.
fn with_router(
    ctx: &Context<'_>,
    rule: NeuralRule,
    path: &str,
    threshold: Option<f64>,
) -> Result<(Rule, Net), PolicyError> {
    let router = Router::new(path, &ctx.weights(path)?)?;
    if router.multi != (rule == NeuralRule::Window) {
        let remedy = if router.multi { "use `neural_multi_input`" } else { "use `neural` or `neural_rolling`" };
        return Err(PolicyError::new(format!(
            "strategy does not fit router `{path}`, whose model_type is {}; {remedy}",
            router.model_type
        )));
    }
    let threshold = threshold.or(router.threshold).ok_or_else(|| {
        PolicyError::new(format!(
            "threshold is not set, and router `{path}` has no common_args.threshold; set one of them"
        ))
    })?;
    if router.lacks_embedding {
        let message = format!(
            "router `{path}` was trained with freeze_lm_head = false, but the file has no token_embeddings.weight; \
             the small model's embedding stands in for it, as in R2R's own loader. The file *_all.pt of the same \
             training holds it."
        );
        ctx.services.log(LogLevel::Warn, &message);
    }
    let rule = match rule {
        NeuralRule::Each | NeuralRule::Window => Rule::Score { threshold, window: router.window },
        NeuralRule::Rolling { window } => Rule::RollingScore { threshold, window },
    };
    Ok((rule, router.net))
}

/// What the signals of row `index` say. A column that was not asked for gives NaN.
fn read(batch: &RouteBatch<'_>, index: usize) -> Row {
    let SignalColumns { net_scores, net_width, topk_values, top_k, entropy, .. } = batch.signals;
    let score = row_of(net_scores, net_width, index).last().map_or(f64::NAN, |&score| f64::from(score));
    let largest = row_of(topk_values, top_k, index).get(..measures::TOP);
    let (aleatoric, epistemic) = largest.map_or((f64::NAN, f64::NAN), measures::uncertainty);
    let entropy = entropy.get(index).map_or(f64::NAN, |&entropy| f64::from(entropy));
    Row { score, aleatoric, epistemic, entropy, position: batch.positions[index], seed: batch.seeds[index] }
}

/// Row `index` of a column with `width` values a row.
fn row_of(column: &[f32], width: u32, index: usize) -> &[f32] {
    let width = width as usize;
    column.get(index * width..(index + 1) * width).unwrap_or_default()
}

impl Policy for R2r {
    const NAME: &'static str = "r2r";
    const SETTINGS_SCHEMA: &'static str = settings::SCHEMA;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let method = settings::method(settings)?;
        // The large model never hands over by itself: it would write every answer alone.
        let side = match ctx.side_from_small(Self::NAME)? {
            Side::Large { .. } => At::Large,
            Side::Small { large } => match method {
                Method::Plain(rule) => At::Small { large, rule, net: None },
                Method::Neural { rule, router, threshold } => {
                    let (rule, net) = with_router(ctx, rule, &router, threshold)?;
                    At::Small { large, rule, net: Some(net) }
                }
            },
        };
        Ok(Self { side, states: PerRequest::new() })
    }

    fn requirements(&self) -> Requirements {
        let mut needs = Requirements::default();
        if let At::Small { rule, net, .. } = &self.side {
            needs.nets.extend(net.clone());
            if rule.reads_logits() {
                needs.top_k = measures::TOP as u32;
            }
            if rule.reads_entropy() {
                needs.signals = SignalSet::ENTROPY;
            }
        }
        needs
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        let At::Small { large, rule, .. } = &self.side else { return };
        for (index, decision) in out.iter_mut().enumerate() {
            let state = self.states.get(batch.slots[index]);
            if rule.wants_large(state, &read(batch, index)) {
                *decision = Decision::to(*large);
            }
        }
    }

    fn send(&mut self, _request: &RequestView<'_>, _to: ModelIndex) -> Handoff {
        Handoff::drop_candidate().budget(1)
    }

    fn finished(&mut self, slot: Slot) {
        self.states.forget(slot);
    }
}

export_policy!(R2r);

#[cfg(test)]
mod tests;
