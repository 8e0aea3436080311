//! A model behind HTTP, as a runner: each token is a call that carries the whole sequence.
//!
//! An engine over such runners is the dispatcher of standard serving: it has the route's policies, and the models
//! are servers that know of no route. What one engine computes together would wait for each other, so
//! a dispatcher has an engine for each request that is under way.

use std::sync::Arc;

use hyper::Method;
use serde_json::{Value, json};
use tokenrouter_plugin_api::SignalSet;
use tokio::runtime::Handle;

use super::http::Client;
use crate::runner::{Columns, ModelInfo, RowBatch, RowOutputs, Rows, Runner, RunnerError, Sample, SignalRequest};

/// Tokens that a call can leave out.
const MASKED: usize = 1024;

pub struct Remote {
    info: ModelInfo,
    client: Arc<Client>,
    /// Runs the client; the runner's thread waits for it.
    runtime: Handle,
}

impl Remote {
    /// `info`: of the model that `client`'s server has, under the same name.
    pub fn new(info: ModelInfo, client: Arc<Client>, runtime: Handle) -> Self {
        Self { info, client, runtime }
    }

    fn call(&self, rows: &Rows<'_>, signals: &SignalRequest) -> Result<(Sample, Columns), RunnerError> {
        if let Some(refusal) = refusal(rows, signals) {
            return Err(RunnerError::new(refusal));
        }
        let fault = |message: String| RunnerError::new(format!("standard serving: {message}"));
        let routing = signals.scalars != SignalSet::NONE;
        let body = body(&self.info.name, rows, routing).to_string();
        let answer = async { self.client.send(Method::POST, "/generate", Some(body)).await?.whole().await };
        let answer = self.runtime.block_on(answer).map_err(fault)?;
        let answer: Value = serde_json::from_slice(&answer).map_err(|e| fault(format!("not JSON: {e}")))?;
        read(&answer, signals.scalars).map_err(fault)
    }
}

/// Why no call can give what is asked for; `None` if one can.
pub(super) fn refusal(rows: &Rows<'_>, signals: &SignalRequest) -> Option<String> {
    if rows.sampled > 1 {
        Some("standard serving verifies no drafts, as a call gives one token".into())
    } else if signals.top_k > 0 || !signals.token_logits.is_empty() {
        Some("standard serving has scalar signals only, no logits of single tokens".into())
    } else if rows.masked.len() > MASKED {
        Some(format!("standard serving cannot leave out {} tokens; {MASKED} at most", rows.masked.len()))
    } else {
        None
    }
}

/// Greedy, as the bench asks: what a policy may have set besides is the seed.
fn body(model: &str, rows: &Rows<'_>, routing: bool) -> Value {
    let mut sampling =
        json!({"max_new_tokens": 1, "temperature": 0, "ignore_eos": true, "seed": rows.sampling.seed as i64});
    if !rows.masked.is_empty() {
        let bias: serde_json::Map<String, Value> =
            rows.masked.iter().map(|id| (id.to_string(), (-100).into())).collect();
        sampling["logit_bias"] = bias.into();
    }
    json!({
        "model": model,
        "input_ids": rows.context[..rows.end],
        "sampling_params": sampling,
        "return_routing": routing,
    })
}

/// A token and the signals of `wanted`.
fn read(answer: &Value, wanted: SignalSet) -> Result<(Sample, Columns), String> {
    let token = answer.pointer("/output_ids/0").and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
    let token = token.ok_or("an answer has no token in `output_ids`")?;
    let entry = answer.pointer("/routing/0");
    let mut columns = Columns::default();
    for (signal, name, column) in [
        (SignalSet::ENTROPY, "entropy", &mut columns.entropy),
        (SignalSet::ENTROPY_NORM, "entropy_norm", &mut columns.entropy_norm),
        (SignalSet::TOP1_PROB, "top1_prob", &mut columns.top1_prob),
        (SignalSet::MARGIN, "margin", &mut columns.margin),
        (SignalSet::LOGSUMEXP, "logsumexp", &mut columns.logsumexp),
        (SignalSet::CANDIDATE_PROB, "candidate_prob", &mut columns.candidate_prob),
    ] {
        if wanted.contains(signal) {
            let value = entry.and_then(|entry| entry["signals"].get(name)).ok_or(format!("no signal `{name}` came"))?;
            // JSON has no NaN; null stands for it.
            column.push(value.as_f64().map_or(f32::NAN, |value| value as f32));
        }
    }
    let logprob = entry.and_then(|entry| entry["logprob"].as_f64()).map_or(f32::NAN, |logprob| logprob as f32);
    Ok((Sample { token, logprob, top_logprobs: Vec::new(), finite: true }, columns))
}

impl Runner for Remote {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        let [rows] = batch.sequences.as_slice() else {
            return Err(RunnerError::new("standard serving: a dispatcher's engine has one request at a time"));
        };
        let (sample, signals) = self.call(rows, &batch.signals)?;
        Ok(RowOutputs { samples: vec![sample], signals, ..RowOutputs::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::SamplingParams;

    #[test]
    fn a_call_has_the_whole_sequence() {
        let sampling = SamplingParams { seed: u64::MAX, ..SamplingParams::greedy() };
        let rows = Rows {
            context: &[1, 2, 3, 4],
            start: 2,
            end: 3,
            pages: &[],
            sampled: 1,
            scored: 0,
            sampling: &sampling,
            prompt_len: 2,
            masked: &[9],
            nets: &[],
            allowed: &[],
        };
        let body = body("small", &rows, true);
        assert_eq!((&body["input_ids"], &body["return_routing"]), (&json!([1, 2, 3]), &json!(true)));
        assert_eq!(
            (&body["sampling_params"]["seed"], &body["sampling_params"]["logit_bias"]["9"]),
            (&json!(-1), &json!(-100))
        );
    }

    #[test]
    fn what_comes_back() {
        let answer = json!({
            "output_ids": [7],
            "routing": [{"id": 7, "logprob": -0.5, "signals": {"entropy": 1.5, "margin": null}}],
        });
        let (sample, columns) = read(&answer, SignalSet::ENTROPY | SignalSet::MARGIN).unwrap();
        assert_eq!((sample.token, sample.logprob, columns.entropy.as_slice()), (7, -0.5, &[1.5][..]));
        assert!(columns.margin[0].is_nan() && columns.top1_prob.is_empty());
        assert_eq!(read(&answer, SignalSet::TOP1_PROB).unwrap_err(), "no signal `top1_prob` came");
        assert!(read(&json!({"output_ids": []}), SignalSet::NONE).is_err());
    }
}
