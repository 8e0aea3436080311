//! Each request of all loads as CSV. Pure.

use std::collections::BTreeSet;

use super::load::Measured;

/// A row a request, in the order of loads, sessions and turns. Empty: not known, or it failed.
pub fn rows(measured: &[Measured]) -> Result<Vec<u8>, csv::Error> {
    let answers = || measured.iter().flat_map(|measured| &measured.carried.answers);
    let models: BTreeSet<&String> = answers().flat_map(|answer| answer.by_model.keys()).collect();
    let mut writer = csv::Writer::from_writer(Vec::new());
    let head = "load session turn due_s submitted_s prompt_tokens tokens ttft_ms tpot_ms e2e_ms handoffs failure";
    writer
        .write_record(head.split(' ').map(str::to_owned).chain(models.iter().map(|name| format!("tokens_{name}"))))?;
    for Measured { carried, summary, .. } in measured {
        for answer in &carried.answers {
            let since =
                |time: std::time::Instant| time.saturating_duration_since(carried.began).as_secs_f64().to_string();
            let times = answer.times();
            let number = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
            let own = [
                summary.pace.to_string(),
                answer.session.to_string(),
                answer.turn.to_string(),
                since(answer.due),
                since(answer.submitted),
                answer.prompt_tokens.to_string(),
                answer.tokens.to_string(),
                number(times.map(|times| times.ttft)),
                number(times.and_then(|times| times.tpot)),
                number(times.and_then(|times| times.e2e)),
                answer.handoffs.map(|handoffs| handoffs.to_string()).unwrap_or_default(),
                answer.failure.clone().unwrap_or_default(),
            ];
            let tokens = |name: &&String| match answer.by_model.is_empty() {
                true => String::new(),
                false => answer.by_model.get(*name).copied().unwrap_or(0).to_string(),
            };
            writer.write_record(own.into_iter().chain(models.iter().map(tokens)))?;
        }
    }
    writer.into_inner().map_err(|e| e.into_error().into())
}
