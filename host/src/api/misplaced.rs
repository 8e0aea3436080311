//! Fields that one endpoint has and another has not. There they are refused, not ignored: whoever writes
//! `max_new_tokens` into a completion, or `temperature` beside `sampling_params`, means it.

use serde_json::Value;

use super::error::ApiError;
use super::reader::{Fields, nothing};
use super::structured::off;

/// Fields, the values of them that ask for nothing, and where to ask instead.
pub type Misplaced = (&'static [&'static str], fn(&Value) -> bool, &'static str);

/// What /generate has for log-probabilities.
const NATIVE_LOGPROBS: &[&str] =
    &["return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"];

/// What OpenAI's endpoints have for prompts, streams and log-probabilities.
const OPENAI_SHOWN: &[&str] = &[
    "echo",
    "top_logprobs",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "truncate_prompt_tokens",
    "stream_options",
];

/// Of these 0 asks for those of the tokens alone.
const OPENAI_LOGPROBS: &[&str] = &["logprobs", "prompt_logprobs"];

const TEMPLATE: &[&str] = &["messages", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"];

/// In all endpoints, of how tokens are drawn and when an answer ends. Zero and false ask for something.
const SAMPLING: &[&str] = &[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "no_stop_trim",
    "skip_special_tokens",
    "ignore_eos",
    "logit_bias",
    "max_new_tokens",
    "min_new_tokens",
];

const BESIDE: &str = "give it beside `sampling_params`";
const SHOWN: Misplaced = (OPENAI_SHOWN, nothing, "use `return_logprob` and its fields, or /v1/completions");
const SCORES: Misplaced = (OPENAI_LOGPROBS, no, "use `return_logprob` and its fields");
const CONVERSATION: Misplaced = (TEMPLATE, nothing, "use /v1/chat/completions");
const PROMPT: Misplaced = (&["prompt"], off, "give it in `text` or `input_ids`");
const NAME: Misplaced = (&["request_id"], off, "use `rid`");
const LOGPROBS: Misplaced = (NATIVE_LOGPROBS, off, "use `prompt_logprobs` and `logprobs`");
const PARAMS: Misplaced = (&["sampling_params"], nothing, "give its fields in the body itself");
const LEAST: Misplaced = (&["min_new_tokens"], Value::is_null, "use `min_tokens`");

/// Limits under their names at all endpoints.
const LIMITS: [&[&str]; 2] =
    [&["max_tokens", "max_completion_tokens", "max_new_tokens"], &["min_tokens", "min_new_tokens"]];

pub const CHAT: &[Misplaced] = &[
    LOGPROBS,
    PARAMS,
    LEAST,
    (&["max_new_tokens"], Value::is_null, "use `max_completion_tokens`"),
    (&["prompt", "echo"], off, "use /v1/completions"),
    (&["text", "input_ids"], off, "use /generate"),
];

pub const COMPLETIONS: &[Misplaced] = &[
    LOGPROBS,
    PARAMS,
    LEAST,
    (&["max_new_tokens"], Value::is_null, "use `max_tokens`"),
    (&["text", "input_ids"], off, "give it in `prompt`"),
    (&["top_logprobs"], off, "use `logprobs`"),
    (&["continue_final_message"], off, "a completion always continues its prompt; leave it out"),
    (&["messages", "chat_template_kwargs", "add_generation_prompt"], nothing, "use /v1/chat/completions"),
];

pub const GENERATE: &[Misplaced] = &[
    SHOWN,
    SCORES,
    CONVERSATION,
    PROMPT,
    NAME,
    (SAMPLING, Value::is_null, "give it in `sampling_params`"),
    (&["max_tokens", "max_completion_tokens"], Value::is_null, "give `max_new_tokens` in `sampling_params`"),
    (&["min_tokens"], Value::is_null, "give `min_new_tokens` in `sampling_params`"),
];

/// Of `sampling_params`.
pub const SAMPLING_PARAMS: &[Misplaced] = &[
    SHOWN,
    SCORES,
    CONVERSATION,
    PROMPT,
    NAME,
    (&["max_tokens", "max_completion_tokens"], Value::is_null, "use `max_new_tokens`"),
    (&["min_tokens"], Value::is_null, "use `min_new_tokens`"),
    (NATIVE_LOGPROBS, off, BESIDE),
    (&["model", "text", "input_ids", "rid", "stream", "routing", "return_routing"], off, BESIDE),
    (&["sampling_params"], nothing, "give its fields themselves"),
];

fn no(value: &Value) -> bool {
    matches!(value, Value::Null | Value::Bool(false))
}

/// Refuse the fields of a list, unless their values ask for nothing, or for what a field of the endpoint asks for too:
/// clients of many servers give limits under all names.
pub fn refuse(fields: &mut Fields, misplaced: &[Misplaced]) -> Result<(), ApiError> {
    let read = |name: &str| names(misplaced).all(|other| other != name);
    for (listed, neutral, remedy) in misplaced {
        for name in *listed {
            let mut others = LIMITS.iter().filter(|limit| limit.contains(name)).flat_map(|limit| *limit);
            let repeated = others.any(|other| read(other) && fields.same(name, other));
            let neutral: fn(&Value) -> bool = if repeated { |_| true } else { *neutral };
            fields.refuse(name, neutral, remedy)?;
        }
    }
    Ok(())
}

pub fn names(misplaced: &[Misplaced]) -> impl Iterator<Item = &'static str> {
    misplaced.iter().flat_map(|(names, ..)| *names).copied()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn taken(value: Value, list: &[Misplaced]) -> bool {
        refuse(&mut Fields::of("body", value).unwrap(), list).is_ok()
    }

    #[test]
    fn values_that_ask_for_nothing_or_something() {
        for (list, value) in [
            (GENERATE, json!({"stream_options": {}, "chat_template_kwargs": {}, "logprobs": false, "top_logprobs": 0})),
            (COMPLETIONS, json!({"sampling_params": {}, "messages": [], "return_logprob": false})),
            (CHAT, json!({"prompt": "", "echo": false, "max_new_tokens": null})),
        ] {
            assert!(taken(value.clone(), list), "{value}");
        }
        for (list, value) in [
            (GENERATE, json!({"logprobs": 0})),
            (GENERATE, json!({"prompt_logprobs": 0})),
            (GENERATE, json!({"temperature": 0})),
            (GENERATE, json!({"stream_options": {"include_usage": false}})),
            (SAMPLING_PARAMS, json!({"logprobs": 0})),
            (CHAT, json!({"min_new_tokens": 0})),
        ] {
            assert!(!taken(value.clone(), list), "{value}");
        }
    }

    #[test]
    fn limits_under_several_names() {
        for (list, value) in [
            (CHAT, json!({"max_new_tokens": 8, "max_tokens": 8})),
            (COMPLETIONS, json!({"max_new_tokens": 8, "max_tokens": 8, "min_new_tokens": 0, "min_tokens": 0})),
            (SAMPLING_PARAMS, json!({"max_new_tokens": 8, "max_tokens": 8})),
        ] {
            assert!(taken(value.clone(), list), "{value}");
        }
        for (list, value) in [
            (CHAT, json!({"max_new_tokens": 8, "max_tokens": 9})),
            (COMPLETIONS, json!({"max_new_tokens": 8})),
            // Beside `sampling_params` neither is read.
            (GENERATE, json!({"max_new_tokens": 8, "max_tokens": 8})),
        ] {
            assert!(!taken(value.clone(), list), "{value}");
        }
    }
}
