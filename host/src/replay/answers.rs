//! Traces from one answer's JSON: as `tokenrouter generate --json` writes it, with the row of each token that was
//! written, or with `steps`, which have the other rows as well, as the reference traces of the tests.

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenrouter_plugin_api::NO_TOKEN;

use super::{Answer, Request, Row, Trace, prompt_length};

#[derive(Deserialize)]
struct Steps {
    algorithm: String,
    #[serde(default)]
    seed: u64,
    max_new_tokens: u32,
    prompt_ids: Vec<u32>,
    token_ids: Vec<u32>,
    models: Vec<String>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    evaluations: Vec<Map<String, Value>>,
}

#[derive(Deserialize)]
struct Generated {
    route: String,
    usage: Usage,
    tokens: Vec<Token>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    handoffs: u32,
}

#[derive(Deserialize)]
struct Token {
    id: u32,
    model: String,
    signals: Map<String, Value>,
}

pub fn read(text: &[u8]) -> Result<Trace, String> {
    let form = |e: serde_json::Error| {
        format!("is neither a recording nor an answer of `tokenrouter generate --json` ({e}); give one of these")
    };
    let value: Value = serde_json::from_slice(text).map_err(form)?;
    if value.get("steps").is_some() {
        serde_json::from_value(value).map_err(form).and_then(steps)
    } else {
        serde_json::from_value(value).map_err(form).and_then(generated)
    }
}

impl Trace {
    fn model(&mut self, name: &str) -> usize {
        self.models.iter().position(|known| known == name).unwrap_or_else(|| {
            self.models.push(name.to_owned());
            self.columns.push(Default::default());
            self.models.len() - 1
        })
    }

    /// Add the signals of one more row of `model`; answers with its place.
    fn signals(&mut self, model: usize, values: impl Iterator<Item = (String, f32)>) -> usize {
        let columns = &mut self.columns[model];
        let at = columns.rows;
        columns.rows += 1;
        for (name, value) in values {
            let column = columns.scalars.entry(name).or_default();
            column.resize(at, f32::NAN);
            column.push(value);
        }
        columns.scalars.values_mut().for_each(|column| column.resize(at + 1, f32::NAN));
        at
    }
}

fn number(value: &Value) -> Option<f32> {
    // Numbers that JSON does not have are null.
    value.as_f64().map(|number| number as f32).or(value.is_null().then_some(f32::NAN))
}

/// One more than the largest of these ids. `field`: where they stand.
fn vocab_size(field: &str, ids: impl Iterator<Item = u32>) -> Result<u32, String> {
    let mut size = 0;
    for (at, id) in ids.enumerate() {
        // The largest number means that there is none.
        let above = id.checked_add(1).ok_or_else(|| format!("{field}/{at}: {id} is no token's id"))?;
        size = size.max(above);
    }
    Ok(size)
}

fn generated(answer: Generated) -> Result<Trace, String> {
    let prompt = prompt_length(answer.usage.prompt_tokens).map_err(|e| format!("usage: {e}"))?;
    let mut trace = Trace {
        source: format!("route {}", answer.route),
        vocab_size: vocab_size("tokens", answer.tokens.iter().map(|token| token.id))?,
        notes: vec![
            "An answer's JSON has no rows of candidates that were dropped: a recording has ([record]).".to_owned(),
            "So a policy that drops candidates has other hand-offs and shares here, even its own.".to_owned(),
        ],
        ..Trace::default()
    };
    let writers: Vec<usize> = answer.tokens.iter().map(|token| trace.model(&token.model)).collect();
    let mut rows = Vec::new();
    for (place, token) in answer.tokens.iter().enumerate() {
        let model = writers[place];
        let values = token.signals.iter().filter_map(|(name, value)| Some((name.clone(), number(value)?)));
        let at = trace.signals(model, values);
        // Another model's token follows a hand-off from here, or from a row that is not in the answer.
        let stayed = writers.get(place + 1) == Some(&model);
        rows.push(Row {
            model,
            at,
            position: place as u32,
            candidate: token.id,
            draft: NO_TOKEN,
            asked: true,
            answer: stayed.then_some(Answer::Stay),
        });
    }
    trace.requests = vec![Request {
        id: 0,
        seed: 0,
        prompt: vec![NO_TOKEN; prompt],
        max_tokens: rows.len() as u32,
        tokens: answer.tokens.iter().map(|token| token.id).collect(),
        writers,
        handoffs: answer.usage.handoffs,
        rows,
    }];
    Ok(trace)
}

fn steps(answer: Steps) -> Result<Trace, String> {
    let prompt = vocab_size("prompt_ids", answer.prompt_ids.iter().copied())?;
    let written = vocab_size("token_ids", answer.token_ids.iter().copied())?;
    let mut trace =
        Trace { source: format!("route {}", answer.algorithm), vocab_size: prompt.max(written), ..Trace::default() };
    let writers = answer.models.iter().map(|name| trace.model(name)).collect();
    let mut rows: Vec<Row> = Vec::new();
    for (position, step) in answer.steps.iter().enumerate() {
        for evaluation in &step.evaluations {
            let fault = |field: &str| format!("steps/{position}: an evaluation has no `{field}`");
            let name = evaluation.get("model").and_then(Value::as_str).ok_or_else(|| fault("model"))?;
            let candidate = evaluation.get("candidate").and_then(Value::as_u64).ok_or_else(|| fault("candidate"))?;
            let candidate = u32::try_from(candidate).ok().filter(|&id| id != NO_TOKEN);
            let candidate = candidate.ok_or_else(|| fault("candidate that is a token's id"))?;
            let model = trace.model(name);
            let values = evaluation.iter().filter_map(|(name, value)| {
                let name = if name == "entropy_nats" { "entropy" } else { name };
                Some((name.to_owned(), number(value)?))
            });
            let at = trace.signals(model, values);
            rows.push(Row {
                model,
                at,
                position: position as u32,
                candidate,
                draft: NO_TOKEN,
                // Others had nothing to compare: nobody was asked about them.
                asked: evaluation.contains_key("score"),
                answer: None,
            });
        }
    }
    // What was answered about the last row shows nowhere.
    for at in 1..rows.len() {
        let (own, next) = (rows[at - 1].model, rows[at].model);
        rows[at - 1].answer = Some(if next == own { Answer::Stay } else { Answer::To(next) });
    }
    let handoffs = rows.iter().filter(|row| matches!(row.answer, Some(Answer::To(_)))).count() as u32;
    trace.requests = vec![Request {
        id: 0,
        seed: answer.seed,
        prompt: answer.prompt_ids,
        max_tokens: answer.max_new_tokens,
        tokens: answer.token_ids,
        writers,
        handoffs,
        rows,
    }];
    Ok(trace)
}
