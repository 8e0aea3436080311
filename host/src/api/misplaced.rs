//! Fields that one endpoint has and another has not. There they are refused, not ignored: whoever writes
//! `max_new_tokens` into a completion, or `temperature` beside `sampling_params`, means it.

use serde_json::Value;

use super::error::ApiError;
use super::reader::Fields;
use super::structured::off;

/// Fields, the values of them that ask for nothing, and where to ask instead.
pub type Misplaced = (&'static [&'static str], fn(&Value) -> bool, &'static str);

/// What /generate has for log-probabilities.
const NATIVE_LOGPROBS: &[&str] =
    &["return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"];

/// What OpenAI's endpoints have for prompts, streams and log-probabilities.
const OPENAI_SHOWN: &[&str] = &[
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "truncate_prompt_tokens",
    "stream_options",
];

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
const SHOWN: Misplaced = (OPENAI_SHOWN, off, "use `return_logprob` and its fields, or /v1/completions");
const CONVERSATION: Misplaced = (TEMPLATE, off, "use /v1/chat/completions");
const PROMPT: Misplaced = (&["prompt"], off, "give it in `text` or `input_ids`");
const NAME: Misplaced = (&["request_id"], off, "use `rid`");
const LOGPROBS: Misplaced = (NATIVE_LOGPROBS, off, "use `prompt_logprobs` and `logprobs`");
const PARAMS: Misplaced = (&["sampling_params"], off, "give its fields in the body itself");
const LEAST: Misplaced = (&["min_new_tokens"], Value::is_null, "use `min_tokens`");
const NATIVE_NAME: Misplaced = (&["rid"], off, "use `request_id`");

pub const CHAT: &[Misplaced] = &[
    LOGPROBS,
    PARAMS,
    LEAST,
    NATIVE_NAME,
    (&["max_new_tokens"], Value::is_null, "use `max_completion_tokens`"),
    (&["prompt", "echo"], off, "use /v1/completions"),
    (&["text", "input_ids"], off, "use /generate"),
];

pub const COMPLETIONS: &[Misplaced] = &[
    LOGPROBS,
    PARAMS,
    LEAST,
    NATIVE_NAME,
    (&["max_new_tokens"], Value::is_null, "use `max_tokens`"),
    (&["text", "input_ids"], off, "give it in `prompt`"),
    (&["top_logprobs"], off, "use `logprobs`"),
    (&["continue_final_message"], off, "a completion always continues its prompt; leave it out"),
    (&["messages", "chat_template_kwargs", "add_generation_prompt"], off, "use /v1/chat/completions"),
];

pub const GENERATE: &[Misplaced] = &[
    SHOWN,
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
    CONVERSATION,
    PROMPT,
    NAME,
    (&["max_tokens", "max_completion_tokens"], Value::is_null, "use `max_new_tokens`"),
    (&["min_tokens"], Value::is_null, "use `min_new_tokens`"),
    (NATIVE_LOGPROBS, off, BESIDE),
    (&["model", "text", "input_ids", "rid", "stream", "routing", "return_routing"], off, BESIDE),
    (&["sampling_params"], off, "give its fields themselves"),
];

/// Refuse the fields of a list, unless their values ask for nothing.
pub fn refuse(fields: &mut Fields, misplaced: &[Misplaced]) -> Result<(), ApiError> {
    for (names, neutral, remedy) in misplaced {
        for name in *names {
            fields.refuse(name, *neutral, remedy)?;
        }
    }
    Ok(())
}

pub fn names(misplaced: &[Misplaced]) -> impl Iterator<Item = &'static str> {
    misplaced.iter().flat_map(|(names, ..)| *names).copied()
}
