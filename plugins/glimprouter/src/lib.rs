//! GlimpRouter (arXiv 2601.05110): a glimpse at the first token of each step of thinking decides which of
//! two models writes the step.
//!
//! At a step's first token the small model's 20 best logits are renormalised. Where their entropy reaches
//! the threshold, the candidate is dropped and the large model writes the whole step; otherwise the small
//! one does. When the thinking is over, the large model writes everything to the end.

mod steps;
mod vocabulary;

use serde::Deserialize;
use steps::{Progress, Rules};
use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, Handoff, ModelIndex, PeerView, PerRequest, Policy, PolicyError, RequestView,
    Requirements, RouteBatch, Side, Slot, export_policy,
};
use vocabulary::Vocabulary;

/// How many of the largest logits the entropy is taken over.
const TOP: u32 = 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    threshold: f64,
    delimiter: String,
    thinking_end: String,
    first_steps_large: u32,
    max_step_tokens: u32,
    token_budget: u32,
    stop_on_repeat: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            threshold: 1.0,
            delimiter: "\n\n".into(),
            thinking_end: "</think>".into(),
            first_steps_large: 0,
            max_step_tokens: 512,
            token_budget: 8192,
            stop_on_repeat: true,
        }
    }
}

impl Settings {
    fn check(&self) -> Result<(), PolicyError> {
        let most = f64::from(TOP).ln();
        let problem = if !(0.0..=most).contains(&self.threshold) {
            format!("threshold is {}; set it to 0 or more and {most:.4} (ln {TOP}) or less", self.threshold)
        } else if self.delimiter.is_empty() {
            "delimiter is empty; set the text that ends a step".into()
        } else if self.thinking_end.is_empty() {
            "thinking_end is empty; set the text that ends the thinking".into()
        } else if self.thinking_end.contains(&self.delimiter) {
            format!(
                "thinking_end {:?} contains delimiter {:?} and would be cut by it; change one of them",
                self.thinking_end, self.delimiter
            )
        } else if self.max_step_tokens == 0 {
            "max_step_tokens is 0; set it to 1 or more".into()
        } else if self.token_budget == 0 {
            "token_budget is 0; set it to 1 or more".into()
        } else {
            return Ok(());
        };
        Err(PolicyError::new(problem))
    }
}

/// GlimpRouter at one of its two models.
#[derive(Debug)]
pub struct GlimpRouter {
    model: ModelIndex,
    side: Side,
    threshold: f64,
    first_steps_large: u32,
    top_k: u32,
    rules: Rules,
    vocabulary: Vocabulary,
    requests: PerRequest<Progress>,
}

/// Entropy in nats of the softmax of `logits`. Logits of -inf have no part in it; NaN where no finite one
/// is left, or one is NaN.
fn entropy(logits: &[f32]) -> f64 {
    let best = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let (mut sum, mut weighted) = (0.0, 0.0);
    for &logit in logits.iter().filter(|&&logit| logit != f32::NEG_INFINITY) {
        let behind = f64::from(logit) - best;
        sum += behind.exp();
        weighted += behind * behind.exp();
    }
    sum.ln() - weighted / sum
}

impl GlimpRouter {
    /// What becomes of `candidate`, whose distribution has these best logits. A candidate that is to stay
    /// in the answer enters the request's progress.
    fn decide(&mut self, slot: Slot, candidate: u32, logits: &[f32]) -> Decision {
        let progress = self.requests.get(slot);
        let forced = progress.steps() < self.first_steps_large;
        if let Side::Small { large } = self.side {
            let uncertain = || forced || entropy(logits) >= self.threshold;
            if progress.thought() || progress.at_step_start() && uncertain() {
                return Decision::to(large);
            }
        }
        progress.push(&self.rules, self.vocabulary.text(candidate));
        match self.side {
            Side::Small { large } if progress.thought() => Decision::to(large),
            Side::Large { small } if progress.at_step_start() && progress.steps() >= self.first_steps_large => {
                Decision::to(small)
            }
            _ => Decision::STAY,
        }
    }
}

impl Policy for GlimpRouter {
    const NAME: &'static str = "glimprouter";
    const SETTINGS_SCHEMA: &'static str = r#"{
        "type": "object",
        "additionalProperties": false,
        "properties": {
            "threshold": {
                "description": "Entropy in nats of the 20 best tokens, renormalised, from which on the large model writes the step.",
                "type": "number", "minimum": 0, "maximum": 2.995732273553991, "default": 1.0
            },
            "delimiter": { "description": "Text that ends a step.", "type": "string", "minLength": 1, "default": "\n\n" },
            "thinking_end": {
                "description": "Text that ends the thinking. It does not contain the delimiter.",
                "type": "string", "minLength": 1, "default": "</think>"
            },
            "first_steps_large": {
                "description": "How many steps the large model writes before the first glimpse.",
                "type": "integer", "minimum": 0, "maximum": 4294967295, "default": 0
            },
            "max_step_tokens": {
                "description": "Tokens after which a step ends without a delimiter.",
                "type": "integer", "minimum": 1, "maximum": 4294967295, "default": 512
            },
            "token_budget": {
                "description": "Tokens of the answer after which the thinking ends.",
                "type": "integer", "minimum": 1, "maximum": 4294967295, "default": 8192
            },
            "stop_on_repeat": {
                "description": "Whether the thinking ends when a step, from the third on, has the text of the one before.",
                "type": "boolean", "default": true
            }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let settings: Settings = serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        settings.check()?;
        Ok(Self {
            model: ctx.model,
            side: ctx.side(Self::NAME)?,
            threshold: settings.threshold,
            first_steps_large: settings.first_steps_large,
            top_k: TOP.min(ctx.vocab_size),
            rules: Rules {
                delimiter: settings.delimiter.into_bytes(),
                thinking_end: settings.thinking_end.into_bytes(),
                max_step_tokens: settings.max_step_tokens,
                token_budget: settings.token_budget,
                stop_on_repeat: settings.stop_on_repeat,
            },
            vocabulary: Vocabulary::read(ctx)?,
            requests: PerRequest::new(),
        })
    }

    fn requirements(&self) -> Requirements {
        let mut requirements = Requirements::default();
        if let Side::Small { .. } = self.side {
            requirements.top_k = self.top_k;
        }
        requirements
    }

    fn entry(&mut self, _request: &RequestView<'_>) -> Option<ModelIndex> {
        let (small, large) = match self.side {
            Side::Small { large } => (self.model, large),
            Side::Large { small } => (small, self.model),
        };
        Some(if self.first_steps_large > 0 { large } else { small })
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        let width = batch.signals.top_k as usize;
        for (row, decision) in out.iter_mut().enumerate() {
            let logits = batch.signals.topk_values.get(row * width..(row + 1) * width).unwrap_or_default();
            *decision = self.decide(batch.slots[row], batch.candidates[row], logits);
        }
    }

    /// A candidate that entered the progress is kept: a step of the large model is whole, and so is the text
    /// that ends the thinking. A candidate that the glimpse was at is dropped.
    fn send(&mut self, request: &RequestView<'_>, _to: ModelIndex) -> Handoff {
        let entered = self.requests.get(request.slot).tokens() > request.generated().len();
        if entered { Handoff::default() } else { Handoff::drop_candidate() }
    }

    /// Catch up on what was written elsewhere, from the tokens themselves.
    fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Acceptance {
        let progress = self.requests.get(request.slot);
        let known = request.prompt_len as usize + progress.tokens();
        for &token in request.tokens.iter().chain(message.tokens).skip(known) {
            progress.push(&self.rules, self.vocabulary.text(token));
        }
        Acceptance::Verify
    }

    fn finished(&mut self, slot: Slot) {
        self.requests.forget(slot);
    }
}

export_policy!(GlimpRouter);

#[cfg(test)]
mod tests;
