//! What a run's `manifest.json` and the lines of its `requests` files say. Pure.

use serde::{Deserialize, Serialize};

use super::columns::{FIXED, FixedColumn, HIDDEN, TOPK_IDS, TOPK_VALUES};
use crate::request::SamplingParams;

pub const FORMAT: &str = "tokenrouter-recording";
/// Raised when a reader of the last version would misread the new one.
pub const VERSION: u32 = 1;

/// Everything about one run but its rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: String,
    pub version: u32,
    /// Program and version that wrote it.
    pub program: String,
    pub run: u32,
    /// Milliseconds since 1970 (UTC).
    pub started_unix_ms: u64,
    pub settings: Settings,
    /// Indexed by `writers` and `decision_model`.
    pub models: Vec<Model>,
    /// Indexed by `route`.
    pub routes: Vec<Route>,
    pub columns: Vec<Column>,
    pub shards: Vec<Shard>,
    pub requests: Vec<RequestFile>,
    /// Evaluations in `shards`.
    pub rows: u64,
    /// Evaluations lost because the disk was slower than the models.
    pub dropped_rows: u64,
    /// Requests lost for the same reason, or because too many were under way.
    pub dropped_requests: u64,
    /// Why the run wrote no more: `shutdown`, `max_bytes`, or an error. Missing while it goes on, and for
    /// good if it was killed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stopped: Option<String>,
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub hidden: bool,
    pub top_k: u32,
    pub sample: f64,
    pub requests: bool,
    pub shard_rows: u32,
    pub max_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    pub name: String,
    /// How its shards' names begin.
    pub files: String,
    pub description: String,
    pub hidden_size: u32,
    pub vocab_size: u32,
    /// Width of the `topk` columns of its shards; 0 without them.
    pub top_k: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Route {
    pub name: String,
    /// `None` for a bare model.
    pub plugin: Option<Plugin>,
    pub settings: serde_json::Value,
    /// In the policy's order.
    pub models: Vec<Member>,
    /// Index into this route's `models`.
    pub entry: usize,
    /// Whether its requests are recorded.
    pub recorded: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plugin {
    pub name: String,
    pub version: String,
    pub sha256: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    pub name: String,
    pub role: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Column {
    pub name: String,
    /// As safetensors names it.
    pub dtype: String,
    pub meaning: String,
}

/// A safetensors file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shard {
    pub file: String,
    pub model: String,
    pub rows: u64,
    pub bytes: u64,
    pub sha256: String,
}

/// A file with one JSON object a line: [`RequestLine`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestFile {
    pub file: String,
    pub rows: u64,
    pub bytes: u64,
    pub sha256: String,
}

/// One request that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestLine {
    pub id: u64,
    /// Index into the manifest's routes.
    pub route: u32,
    pub sampling: Sampling,
    pub max_tokens: u32,
    pub prompt_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub prompt_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub token_ids: Option<Vec<u32>>,
    /// The model that wrote each token.
    pub writers: Vec<u32>,
    /// `stop`, `length`, `failed` or `cancelled`.
    pub end: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
    /// Known of requests that ended with `stop` or `length`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub handoffs: Option<u32>,
    /// When it came, microseconds since the start of the run.
    pub started_us: u64,
    /// From its coming to its end, microseconds.
    pub wall_us: u64,
}

/// How its tokens were drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    pub seed: u64,
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub min_tokens: u32,
    pub ignore_eos: bool,
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub logit_bias: Vec<(u32, f32)>,
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub stop_token_ids: Vec<u32>,
}

impl From<&SamplingParams> for Sampling {
    fn from(params: &SamplingParams) -> Self {
        Self {
            seed: params.seed,
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            min_tokens: params.min_tokens,
            ignore_eos: params.ignore_eos,
            logit_bias: params.logit_bias.clone(),
            stop_token_ids: params.stop_token_ids.clone(),
        }
    }
}

impl Manifest {
    /// The columns that every shard has under `settings`.
    pub fn columns(settings: &Settings) -> Vec<Column> {
        let hidden = settings.hidden.then_some(HIDDEN);
        let logits = (settings.top_k > 0).then_some([TOPK_VALUES, TOPK_IDS]);
        FIXED.into_iter().chain(hidden).chain(logits.into_iter().flatten()).map(Column::from).collect()
    }

    /// Enter the names of signals that only some routes have.
    pub fn add_own_columns<'a>(&mut self, names: impl Iterator<Item = &'a str>) {
        for name in names {
            if !self.has_column(name) {
                let kind = if name.starts_with("net_") { "score of a router net" } else { "raw logit of a token" };
                let meaning = format!("{kind}; NaN where the row's route has none");
                self.columns.push(Column { name: name.into(), dtype: "F32".into(), meaning });
            }
        }
    }

    pub fn has_column(&self, name: &str) -> bool {
        self.columns.iter().any(|column| column.name == name)
    }

    /// The text of the file.
    pub fn to_json(&self) -> Result<Vec<u8>, String> {
        let mut text = serde_json::to_vec_pretty(self).map_err(|e| e.to_string())?;
        text.push(b'\n');
        Ok(text)
    }
}

impl From<FixedColumn> for Column {
    fn from(column: FixedColumn) -> Self {
        Self { name: column.name.into(), dtype: column.dtype.to_string(), meaning: column.meaning.into() }
    }
}

/// How the names of each model's files begin: its name with `_` for what a file's name had better not hold,
/// and its index where two would be the same.
pub fn file_prefixes(models: &[String]) -> Vec<String> {
    let plain = |name: &String| -> String {
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        name.chars().map(|c| if fits(c) { c } else { '_' }).collect()
    };
    let plain: Vec<String> = models.iter().map(plain).collect();
    let unique = |name: &String| plain.iter().filter(|other| *other == name).count() == 1;
    plain.iter().enumerate().map(|(i, name)| if unique(name) { name.clone() } else { format!("{i}+{name}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_file_names_of_their_own() {
        let prefixes = file_prefixes(&["a/b".into(), "a_b".into(), "c:1".into(), "..".into()]);
        assert_eq!(prefixes, ["0+a_b", "1+a_b", "c_1", ".."]);
    }

    #[test]
    fn columns_are_listed_once() {
        let settings = Settings { hidden: true, top_k: 2, sample: 1.0, requests: false, shard_rows: 1, max_bytes: 1 };
        let mut manifest = Manifest {
            format: FORMAT.into(),
            version: VERSION,
            program: "p".into(),
            run: 0,
            started_unix_ms: 0,
            columns: Manifest::columns(&settings),
            settings,
            models: Vec::new(),
            routes: Vec::new(),
            shards: Vec::new(),
            requests: Vec::new(),
            rows: 0,
            dropped_rows: 0,
            dropped_requests: 0,
            stopped: None,
        };
        let known = manifest.columns.len();
        manifest.add_own_columns(["net_a", "token_logit_3", "net_a", "entropy"].into_iter());
        let added: Vec<&str> = manifest.columns[known..].iter().map(|c| &*c.name).collect();
        assert_eq!(added, ["net_a", "token_logit_3"]);
        let text = manifest.to_json().unwrap();
        assert_eq!(serde_json::from_slice::<Manifest>(&text).unwrap(), manifest);
        let dtype = |name: &str| manifest.columns.iter().find(|c| c.name == name).map(|c| c.dtype.clone());
        assert_eq!([dtype("hidden"), dtype("topk_ids"), dtype("request")].map(Option::unwrap), ["F16", "I32", "I64"]);
    }
}
