//! What one point of an evaluation came to.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::statistics::wilson;

/// A route with certain settings, or a model alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Unique: the route, with the settings that the sweep changes in brackets.
    pub name: String,
    /// Route or model in the configuration.
    pub route: String,
    /// What the sweep changes, such as `threshold=0.03`; empty without a sweep.
    pub label: String,
    /// All settings of the route; null for a model alone.
    pub settings: Value,
    /// Its models, in the policy's order. The last one counts as the large one.
    pub models: Vec<String>,
}

impl Point {
    /// Whether it is a model without a policy.
    pub fn is_bare(&self) -> bool {
        self.settings.is_null()
    }
}

/// One answered question.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Name of the point.
    pub point: String,
    /// Number of the question, from 0.
    pub index: usize,
    /// Its line in the dataset, from 1.
    pub line: usize,
    /// The whole answer.
    pub text: String,
    /// The answer found in the text.
    pub found: Option<String>,
    /// The answer of the dataset.
    pub expected: String,
    pub correct: bool,
    /// Tokens that each model wrote, the one that ended the answer included.
    pub tokens_by_model: BTreeMap<String, u64>,
    /// How often the next token had another writer than the one before.
    pub switches: u64,
    pub finish_reason: String,
    /// From the submission to the end of the answer.
    pub seconds: f64,
    /// From the start of the point to the end of the answer, interruptions left out.
    pub point_seconds: f64,
}

/// All rows of a point, counted.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    pub point: Point,
    pub questions: usize,
    pub correct: usize,
    /// In the order of the point's models.
    pub tokens_by_model: Vec<(String, u64)>,
    pub switches: u64,
    pub seconds: f64,
    pub finish_reasons: BTreeMap<String, usize>,
}

impl Summary {
    /// Count `rows`, all of which are of `point`.
    pub fn new<'a>(point: &Point, rows: impl IntoIterator<Item = &'a Row>) -> Self {
        let mut summary = Self {
            point: point.clone(),
            questions: 0,
            correct: 0,
            tokens_by_model: point.models.iter().map(|model| (model.clone(), 0)).collect(),
            switches: 0,
            seconds: 0.0,
            finish_reasons: BTreeMap::new(),
        };
        rows.into_iter().for_each(|row| summary.add(row));
        summary
    }

    /// Count one more.
    pub fn add(&mut self, row: &Row) {
        self.questions += 1;
        self.correct += usize::from(row.correct);
        for (model, tokens) in &mut self.tokens_by_model {
            *tokens += row.tokens_by_model.get(model).copied().unwrap_or_default();
        }
        self.switches += row.switches;
        self.seconds = self.seconds.max(row.point_seconds);
        *self.finish_reasons.entry(row.finish_reason.clone()).or_default() += 1;
    }

    pub fn tokens(&self) -> u64 {
        self.tokens_by_model.iter().map(|(_, tokens)| tokens).sum()
    }

    /// Right answers to questions, from 0 to 1.
    pub fn accuracy(&self) -> f64 {
        ratio(self.correct as u64, self.questions as u64)
    }

    /// Bounds of the accuracy: a 95 % Wilson score interval.
    pub fn accuracy_interval(&self) -> (f64, f64) {
        wilson(self.correct, self.questions)
    }

    /// Share of all tokens that `model` wrote, from 0 to 1; `None` if the point does not have it.
    pub fn share(&self, model: &str) -> Option<f64> {
        let (_, tokens) = self.tokens_by_model.iter().find(|(name, _)| name == model)?;
        Some(ratio(*tokens, self.tokens()))
    }

    /// Share of all tokens that the last model wrote.
    pub fn large_share(&self) -> f64 {
        ratio(self.tokens_by_model.last().map_or(0, |(_, tokens)| *tokens), self.tokens())
    }

    /// Tokens of an answer, on average.
    pub fn mean_tokens(&self) -> f64 {
        ratio(self.tokens(), self.questions as u64)
    }

    pub fn handoffs_per_100_tokens(&self) -> f64 {
        100.0 * ratio(self.switches, self.tokens())
    }

    pub fn switches_per_request(&self) -> f64 {
        ratio(self.switches, self.questions as u64)
    }

    pub fn tokens_per_second(&self) -> f64 {
        if self.seconds > 0.0 { self.tokens() as f64 / self.seconds } else { 0.0 }
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn point(route: &str, label: &str, models: &[&str]) -> Point {
        let name = if label.is_empty() { route.into() } else { format!("{route}[{label}]") };
        let settings = if models.len() > 1 { serde_json::json!({}) } else { Value::Null };
        let models = models.iter().map(|m| (*m).into()).collect();
        Point { name, route: route.into(), label: label.into(), settings, models }
    }

    pub fn row(point: &Point, index: usize, correct: bool, tokens: &[u64], switches: u64) -> Row {
        Row {
            point: point.name.clone(),
            index,
            line: index + 1,
            text: "Answer: 1".into(),
            found: Some("1".into()),
            expected: "1".into(),
            correct,
            tokens_by_model: point.models.iter().cloned().zip(tokens.iter().copied()).collect(),
            switches,
            finish_reason: "stop".into(),
            seconds: 0.5,
            point_seconds: index as f64 + 1.0,
        }
    }

    #[test]
    fn counts() {
        let point = point("r", "t=1", &["small", "large"]);
        let mut cut = row(&point, 2, false, &[10, 0], 0);
        cut.finish_reason = "length".into();
        let rows = [row(&point, 0, true, &[30, 10], 3), row(&point, 1, true, &[5, 5], 1), cut];
        let summary = Summary::new(&point, &rows);
        assert_eq!((summary.questions, summary.correct, summary.tokens(), summary.seconds), (3, 2, 60, 3.0));
        assert_eq!((summary.share("small"), summary.share("large")), (Some(0.75), Some(0.25)));
        assert_eq!((summary.share("medium"), summary.large_share()), (None, 0.25));
        assert_eq!((summary.mean_tokens(), summary.tokens_per_second()), (20.0, 20.0));
        assert_eq!(
            (summary.switches_per_request(), summary.handoffs_per_100_tokens()),
            (4.0 / 3.0, 100.0 * 4.0 / 60.0)
        );
        assert_eq!(summary.finish_reasons, BTreeMap::from([("length".into(), 1), ("stop".into(), 2)]));
    }

    #[test]
    fn nothing_is_no_division() {
        let summary = Summary::new(&point("small", "", &["small"]), &[]);
        assert_eq!((summary.accuracy(), summary.mean_tokens(), summary.large_share()), (0.0, 0.0, 0.0));
        assert_eq!((summary.tokens_per_second(), summary.handoffs_per_100_tokens()), (0.0, 0.0));
    }
}
