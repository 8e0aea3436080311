//! The fields that all endpoints share: how tokens are drawn and when an answer ends.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tokenrouter_plugin_api::random::philox;

use super::error::ApiError;
use super::http::random_u64;
use super::reader::{Fields, real, shown, whole};
use super::structured::{self, Wanted};
use crate::constraint::Constraint;
use crate::request::{SamplingParams, TokenId};
use crate::text::TextError;

/// Most choices of one prompt.
pub const MAX_N: i64 = 64;
/// Most stop strings, and the most bytes of one.
pub const MAX_STOPS: usize = 16;
pub const MAX_STOP_BYTES: usize = 1024;
pub const MAX_STOP_TOKENS: usize = 128;
pub const MAX_SALT_BYTES: usize = 256;
pub const MAX_BIASES: usize = 1024;
pub const MAX_BIAS: f64 = 100.0;
pub const MAX_TEMPERATURE: f64 = 2.0;
pub const MIN_REPETITION: f64 = 0.01;
pub const MAX_REPETITION: f64 = 100.0;
/// Of presence and frequency, either way.
pub const MAX_PENALTY: f64 = 2.0;
/// Below this a temperature is 0: the division would leave nothing but the largest logit.
const MIN_TEMPERATURE: f64 = 1e-4;

/// What a model's authors recommend for fields that a request leaves out.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: f64,
    pub top_p: f64,
    pub top_k: i64,
    pub min_p: f64,
    pub repetition_penalty: f64,
}

impl Default for SamplingDefaults {
    /// OpenAI's.
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

impl SamplingDefaults {
    /// Read `generation_config.json` of a model's directory, if it has one.
    pub fn load(directory: &Path) -> Result<Self, TextError> {
        let file = directory.join("generation_config.json");
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(e) => return Err(TextError(format!("{}: {e}. Make the file readable", file.display()))),
        };
        let config: Value = serde_json::from_str(&text)
            .map_err(|e| TextError(format!("{}: not JSON: {e}. Fetch the file again", file.display())))?;
        let defaults = Self::from_generation_config(&config);
        let problem = defaults.problem();
        problem.map_or(Ok(defaults), |problem| {
            Err(TextError(format!("{}: {problem}. Mend the value or remove it", file.display())))
        })
    }

    /// A value that no request could give either.
    fn problem(&self) -> Option<String> {
        [
            ("temperature", self.temperature, 0.0, MAX_TEMPERATURE),
            ("top_p", self.top_p, f64::from(f32::MIN_POSITIVE), 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, MIN_REPETITION, MAX_REPETITION),
        ]
        .into_iter()
        .find(|(_, value, least, most)| !(least..=most).contains(&value))
        .map(|(name, value, least, most)| format!("{name} is {value}; it must be from {least} to {most}"))
    }

    /// `do_sample: false` means greedy; `true` means the values given; without it OpenAI's defaults hold.
    pub fn from_generation_config(config: &Value) -> Self {
        let openai = Self::default();
        match config.get("do_sample").and_then(Value::as_bool) {
            None => openai,
            Some(false) => Self { temperature: 0.0, ..openai },
            Some(true) => {
                let number = |name: &str, default| config.get(name).and_then(real).unwrap_or(default);
                Self {
                    temperature: number("temperature", openai.temperature),
                    top_p: number("top_p", openai.top_p),
                    top_k: config.get("top_k").and_then(whole).unwrap_or(openai.top_k),
                    min_p: number("min_p", openai.min_p),
                    repetition_penalty: number("repetition_penalty", openai.repetition_penalty),
                }
            }
        }
    }
}

/// Names that differ between endpoints.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// Limits of the number of tokens; the first one given counts.
    pub max_tokens: &'static [&'static str],
    pub min_tokens: &'static str,
    /// The least that a limit may be: 0 where a prompt alone can be asked for.
    pub least: i64,
}

/// How an answer is made.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The same for all choices, but for the seed: see [`Self::sampling_of`].
    pub sampling: SamplingParams,
    /// `None`: the endpoint's default.
    pub max_tokens: Option<u32>,
    pub n: usize,
    pub stops: Vec<String>,
    pub include_stop: bool,
    /// What the answer must look like, until it is compiled.
    pub form: Option<Wanted>,
    /// Special tokens are part of the text.
    pub keep_special: bool,
    /// K/V is shared only with requests that have the same salt, or none as well.
    pub cache_salt: Option<Arc<str>>,
    /// `None`: each prompt has a random one.
    seed: Option<u64>,
}

impl Generation {
    /// Read the shared fields. `vocab`: tokens that all models of the route have logits for.
    pub fn read(fields: &mut Fields, names: Names, defaults: &SamplingDefaults, vocab: u32) -> Result<Self, ApiError> {
        let temperature = fields.number("temperature", 0.0..=MAX_TEMPERATURE)?.unwrap_or(defaults.temperature);
        let top_p = fields.number("top_p", 0.0..=1.0)?.unwrap_or(defaults.top_p);
        if top_p as f32 <= 0.0 {
            return Err(ApiError::value(fields.name("top_p"), "`top_p` must be greater than 0."));
        }
        let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(defaults.top_k);
        let min_p = fields.number("min_p", 0.0..=1.0)?.unwrap_or(defaults.min_p);
        let repetition = fields.number("repetition_penalty", MIN_REPETITION..=MAX_REPETITION)?;
        let repetition = repetition.unwrap_or(defaults.repetition_penalty);
        let penalties = -MAX_PENALTY..=MAX_PENALTY;
        let mut max_tokens = None;
        for name in names.max_tokens {
            let given = fields.integer(name, names.least..=i64::from(u32::MAX))?.map(|n| n as u32);
            max_tokens = max_tokens.or(given);
        }
        let min_tokens = fields.integer(names.min_tokens, 0..=i64::from(u32::MAX))?.unwrap_or(0) as u32;
        if let Some(most) = max_tokens.filter(|most| min_tokens > *most) {
            let name = fields.name(names.min_tokens);
            let message = format!("`{name}` is {min_tokens}, but the most tokens allowed are {most}.");
            return Err(ApiError::value(name, message));
        }
        let seed = fields.integer("seed", i64::MIN..=i64::MAX)?.map(|seed| seed as u64);
        let sampling = SamplingParams {
            temperature: if temperature < MIN_TEMPERATURE { 0.0 } else { temperature as f32 },
            top_k: top_k.max(0) as u32,
            top_p: top_p as f32,
            min_p: min_p as f32,
            repetition_penalty: repetition as f32,
            presence_penalty: fields.number("presence_penalty", penalties.clone())?.unwrap_or(0.0) as f32,
            frequency_penalty: fields.number("frequency_penalty", penalties)?.unwrap_or(0.0) as f32,
            seed: 0,
            top_logprobs: None,
            prompt_logprobs: None,
            listed_logprobs: Vec::new(),
            logit_bias: logit_bias(fields, vocab)?,
            min_tokens,
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            stop_token_ids: stop_token_ids(fields, vocab)?,
            constraint: None,
        };
        Ok(Self {
            sampling,
            max_tokens,
            n: fields.integer("n", 1..=MAX_N)?.unwrap_or(1) as usize,
            stops: stops(fields)?,
            include_stop: include_stop(fields)?,
            keep_special: fields.boolean("skip_special_tokens")?.is_some_and(|skip| !skip),
            form: structured::read(fields)?,
            cache_salt: cache_salt(fields)?,
            seed,
        })
    }

    /// The seed of one prompt: the request's, or a new one.
    pub fn prompt_seed(&self) -> u64 {
        self.seed.unwrap_or_else(random_u64)
    }

    /// Sampling parameters of choice number `choice` of a prompt with `seed`: choice 0 has the seed itself,
    /// the others ones derived from it.
    pub fn sampling_of(&self, seed: u64, choice: usize) -> SamplingParams {
        let constraint = self.sampling.constraint.as_ref().map(Constraint::again);
        let mut sampling = SamplingParams { seed, constraint, ..self.sampling.clone() };
        if choice > 0 {
            let (low, high) = (sampling.seed as u32, (sampling.seed >> 32) as u32);
            let bits = philox([low, high], [choice as u32, 0, 0, 0]);
            sampling.seed = u64::from(bits[0]) | u64::from(bits[1]) << 32;
        }
        sampling
    }
}

/// Read `cache_salt`.
pub fn cache_salt(fields: &mut Fields) -> Result<Option<Arc<str>>, ApiError> {
    let name = fields.name("cache_salt");
    let Some(salt) = fields.string("cache_salt")? else { return Ok(None) };
    if salt.is_empty() || salt.len() > MAX_SALT_BYTES {
        let message = format!("`{name}` must have 1 to {MAX_SALT_BYTES} bytes, not {}.", salt.len());
        return Err(ApiError::value(name, message));
    }
    Ok(Some(salt.into()))
}

/// Read `include_stop_str_in_output` and its name in SGLang, `no_stop_trim`.
fn include_stop(fields: &mut Fields) -> Result<bool, ApiError> {
    let names = ["include_stop_str_in_output", "no_stop_trim"];
    names.into_iter().try_fold(false, |any, name| Ok(fields.boolean(name)?.unwrap_or(false) || any))
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let name = fields.name("stop");
    let values = match fields.take("stop") {
        None => Vec::new(),
        Some(Value::Array(items)) => items,
        Some(one) => vec![one],
    };
    if values.len() > MAX_STOPS {
        return Err(ApiError::value(&name, format!("`{name}` may have at most {MAX_STOPS} strings.")));
    }
    let mut stops = Vec::with_capacity(values.len());
    for value in values {
        let Value::String(text) = value else { return Err(ApiError::wrong_type(&name, "a string or strings", &value)) };
        if text.is_empty() || text.len() > MAX_STOP_BYTES {
            let message = format!("Each string of `{name}` must have 1 to {MAX_STOP_BYTES} bytes, not {}.", text.len());
            return Err(ApiError::value(&name, message));
        }
        stops.push(text);
    }
    Ok(stops)
}

fn stop_token_ids(fields: &mut Fields, vocab: u32) -> Result<Vec<TokenId>, ApiError> {
    let name = fields.name("stop_token_ids");
    let ids = fields.list("stop_token_ids", MAX_STOP_TOKENS)?.unwrap_or_default();
    ids.iter().map(|id| token(&name, id, vocab)).collect()
}

fn logit_bias(fields: &mut Fields, vocab: u32) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let name = fields.name("logit_bias");
    let Some(entries) = fields.object("logit_bias")?.map(Fields::entries) else { return Ok(Vec::new()) };
    if entries.len() > MAX_BIASES {
        return Err(ApiError::value(&name, format!("`{name}` may have at most {MAX_BIASES} entries.")));
    }
    let mut biases = Vec::with_capacity(entries.len());
    for (id, bias) in &entries {
        let id = token(&name, &Value::from(id.as_str()), vocab)?;
        let bias = real(bias).ok_or_else(|| ApiError::wrong_type(&name, "a map from token ids to numbers", bias))?;
        if !(-MAX_BIAS..=MAX_BIAS).contains(&bias) {
            let message = format!("`{name}` of token {id} must be between -{MAX_BIAS} and {MAX_BIAS}, got {bias}.");
            return Err(ApiError::value(&name, message));
        }
        biases.push((id, bias as f32));
    }
    Ok(biases)
}

/// A token id in the vocabulary.
pub fn token(name: &str, value: &Value, vocab: u32) -> Result<TokenId, ApiError> {
    let id = whole(value).ok_or_else(|| match value {
        Value::String(_) | Value::Number(_) => {
            ApiError::value(name, format!("`{name}` has {}, which is not a token id.", shown(value)))
        }
        other => ApiError::wrong_type(name, "made of token ids", other),
    })?;
    u32::try_from(id).ok().filter(|&id| id < vocab).ok_or_else(|| {
        ApiError::value(name, format!("`{name}` has token {id}, which is outside the vocabulary of {vocab} tokens."))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::unbuilt::refuse_unbuilt;
    use super::*;

    const NAMES: Names =
        Names { max_tokens: &["max_completion_tokens", "max_tokens"], min_tokens: "min_tokens", least: 1 };

    fn read(body: Value) -> Result<Generation, ApiError> {
        let mut fields = Fields::parse(body.to_string().as_bytes()).unwrap();
        refuse_unbuilt(&mut fields)?;
        Generation::read(&mut fields, NAMES, &SamplingDefaults::default(), 2048)
    }

    #[test]
    fn defaults_of_the_model() {
        let from = SamplingDefaults::from_generation_config;
        assert_eq!(from(&json!({"do_sample": false, "temperature": 0.6})).temperature, 0.0);
        assert_eq!(from(&json!({"temperature": 0.6})), SamplingDefaults::default());
        let sampled = from(&json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95}));
        assert_eq!((sampled.temperature, sampled.top_k, sampled.top_p), (0.6, 20, 0.95));
    }

    #[test]
    fn out_of_range_names_the_field() {
        let cases = [
            ("temperature", json!(-1)),
            ("temperature", json!(999_999)),
            ("top_p", json!(0)),
            ("top_p", json!(1.5)),
            ("top_k", json!(-2)),
            ("min_p", json!(1.1)),
            ("repetition_penalty", json!(0)),
            ("presence_penalty", json!(2.5)),
            ("frequency_penalty", json!(-3)),
            ("n", json!(0)),
            ("n", json!(5_000_000)),
            ("max_tokens", json!(0)),
            ("max_tokens", json!(1.5)),
            ("stop", json!("")),
            ("stop", json!(["a", ""])),
            ("stop", json!([1])),
            ("stop", json!(vec!["x"; 17])),
            ("stop_token_ids", json!([2048])),
            ("stop_token_ids", json!([-1])),
            ("logit_bias", json!({"2048": 1})),
            ("logit_bias", json!({"x": 1})),
            ("logit_bias", json!({"1": 101})),
            ("seed", json!("x")),
            ("cache_salt", json!("")),
            ("cache_salt", json!(1)),
            ("cache_salt", json!("x".repeat(257))),
            ("tools", json!([{}])),
            ("stop_regex", json!("a")),
            ("best_of", json!(2)),
            ("suffix", json!("x")),
        ];
        for (field, value) in cases {
            let error = read(json!({field: value})).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(field)), "{value}");
        }
        let message = read(json!({"max_tokens": 3, "min_tokens": 4})).unwrap_err().message;
        assert!(message.contains('3') && message.contains('4'), "{message}");
    }

    #[test]
    fn null_is_absent_for_every_field() {
        let fields = "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed n stop
            stop_token_ids include_stop_str_in_output min_tokens max_tokens max_completion_tokens ignore_eos logit_bias cache_salt
            tools response_format best_of echo suffix user tool_choice";
        let nulls: serde_json::Map<_, _> = fields.split_whitespace().map(|f| (f.to_owned(), Value::Null)).collect();
        assert_eq!(read(Value::Object(nulls)).unwrap(), read(json!({})).unwrap());
    }

    #[test]
    fn seeds() {
        let unseeded = read(json!({})).unwrap();
        assert_ne!(unseeded.prompt_seed(), unseeded.prompt_seed(), "one for each prompt");
        assert_eq!(read(json!({"seed": 0})).unwrap().prompt_seed(), 0);
        let negative = read(json!({"seed": -1})).unwrap();
        assert_eq!((negative.prompt_seed(), negative.prompt_seed()), (u64::MAX, u64::MAX), "prompts share it");
        assert_eq!(negative.sampling_of(u64::MAX, 0).seed, u64::MAX);
        assert_ne!(negative.sampling_of(u64::MAX, 1).seed, negative.sampling_of(u64::MAX, 2).seed);
        assert_eq!(negative.sampling_of(5, 1), unseeded.sampling_of(5, 1));
    }

    #[test]
    fn max_completion_tokens_goes_first() {
        let both = read(json!({"max_tokens": 3, "max_completion_tokens": "5"})).unwrap();
        assert_eq!(both.max_tokens, Some(5));
    }
}
