//! Fields of other servers' interfaces that would change the answer but are not built. One list for all
//! endpoints: a field is never refused at one and ignored at another.

use serde_json::Value;

use super::error::ApiError;
use super::reader::{Fields, real};
use super::state::Route;
use super::structured::{self, off};

/// Fields with the value that asks for nothing, and what to do instead.
type Refused = (&'static [&'static str], fn(&Value) -> bool, &'static str);

const REFUSED: &[Refused] = &[
    (&["structural_tag"], off, "ask with `json_schema`, or with a grammar in `grammar`"),
    (&["stop_regex"], off, "give strings in `stop`, or the form of the whole answer in `regex`"),
    (&["tools", "functions"], off, "leave it out"),
    (&["tool_choice", "function_call"], no_call, "leave it out"),
    (&["modalities"], text_alone, "answers are text; leave it out"),
    (&["audio", "prediction", "web_search_options", "documents"], off, "leave it out"),
    (&["input_embeds", "prompt_embeds", "image_data", "video_data", "audio_data"], off, "give the prompt as text"),
    (&["reasoning_effort"], no_effort, "set what the model's template reads in chat_template_kwargs"),
    (&["route"], off, "name the route in `model`"),
    (&["policy"], off, "a route's policy is the operator's; name another route in `model`"),
    (&["policy_settings"], off, "give `settings` in `routing`"),
    (&["chat_template"], off, "put a template into the model's directory"),
    (&["suffix"], off, "write the whole prompt for the model's own fill-in-the-middle tokens"),
    (&["allowed_token_ids", "bad_words"], off, "use `logit_bias`"),
    (&["best_of"], one, "use `n` and choose among the choices"),
    (&["use_beam_search", "early_stopping"], off, "leave it out"),
    (&["num_beams", "length_penalty", "typical_p", "tfs_z"], one, "leave it out"),
    (
        &["no_repeat_ngram_size", "top_a", "xtc_probability", "dry_multiplier", "mirostat", "mirostat_mode"],
        off,
        "leave it out",
    ),
    (&["logits_processors", "custom_logit_processor", "lora_path", "lora_request"], off, "leave it out"),
    (&["logprob_token_ids"], off, "use `token_ids_logprob` of /generate"),
    (&["return_hidden_states", "kv_transfer_params"], off, "leave it out"),
    (
        &["truncation_side"],
        left,
        "`truncate_prompt_tokens` keeps the prompt's end; cut the prompt yourself to keep its beginning",
    ),
];

/// Accepted and without effect: they name the caller, or concern only what is refused above.
pub(super) const WITHOUT_EFFECT: &[&str] = &[
    "user",
    "prompt_cache_key",
    "parallel_tool_calls",
    "store",
    "metadata",
    "service_tier",
    "spaces_between_special_tokens",
];

/// Names of the fields that no endpoint has.
pub(super) fn refused_names() -> impl Iterator<Item = &'static str> {
    REFUSED.iter().flat_map(|(names, ..)| *names).copied()
}

/// Refuse what is not built. Every object that an endpoint reads sampling fields from goes through here.
pub fn refuse_unbuilt(fields: &mut Fields) -> Result<(), ApiError> {
    for (names, neutral, remedy) in REFUSED {
        for name in *names {
            fields.refuse(name, *neutral, remedy)?;
        }
    }
    let unread = |name: &String| !structured::FIELDS.iter().any(|(read, _)| read == name);
    for name in fields.names_with_prefix("guided_").into_iter().filter(unread) {
        fields.refuse(&name, off, "leave it out, or ask with `guided_json`, `guided_regex` or the like")?;
    }
    for name in WITHOUT_EFFECT {
        fields.take(name);
    }
    Ok(())
}

/// Read `add_special_tokens`, which must be what the endpoint does anyway, unless the model's tokenizer
/// adds none or the prompt is not text.
pub fn special_tokens(fields: &mut Fields, route: &Route, added: bool, is_text: bool) -> Result<(), ApiError> {
    let given = fields.boolean("add_special_tokens")?;
    if given.is_some_and(|given| given != added) && is_text && route.text.adds_special_tokens() {
        let remedy = "leave it out, or give the prompt to /v1/completions as token ids";
        return Err(ApiError::unsupported(&fields.name("add_special_tokens"), remedy));
    }
    Ok(())
}

fn left(value: &Value) -> bool {
    off(value) || value == "left"
}

fn one(value: &Value) -> bool {
    real(value) == Some(1.0)
}

fn no_call(value: &Value) -> bool {
    // With no tools to choose from, `auto` is `none`.
    off(value) || matches!(value.as_str(), Some("none" | "auto"))
}

fn no_effort(value: &Value) -> bool {
    off(value) || value.as_str() == Some("none")
}

fn text_alone(value: &Value) -> bool {
    off(value) || value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind == "text"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(field: &str, value: Value) -> bool {
        let mut fields = Fields::of("body", json!({field: value})).unwrap();
        match refuse_unbuilt(&mut fields) {
            Ok(()) => false,
            Err(error) => {
                assert_eq!((error.status.as_u16(), error.code), (400, "unsupported_parameter"));
                assert_eq!(error.param, Some(format!("body.{field}")));
                true
            }
        }
    }

    #[test]
    fn what_would_change_the_answer() {
        for field in ["guided_anything", "structural_tag", "audio"] {
            assert!(refused(field, json!({})), "{field}: an empty object asks for something");
        }
        for (field, value) in [
            ("guided_whitespace_pattern", json!(" ")),
            ("stop_regex", json!("a")),
            ("function_call", json!({"name": "f"})),
            ("functions", json!([{}])),
            ("tools", json!([{}])),
            ("tool_choice", json!("required")),
            ("modalities", json!(["text", "audio"])),
            ("logits_processors", json!(["x"])),
            ("lora_path", json!("x")),
            ("length_penalty", json!(0.8)),
            ("length_penalty", json!(0)),
            ("no_repeat_ngram_size", json!(2)),
            ("typical_p", json!(0.5)),
            ("chat_template", json!("x")),
            ("suffix", json!("x")),
            ("best_of", json!(2)),
        ] {
            assert!(refused(field, value.clone()), "{field}: {value}");
        }
    }

    #[test]
    fn what_asks_for_nothing() {
        let listed = REFUSED.iter().flat_map(|(names, ..)| *names).chain(&["guided_anything"]);
        for field in listed {
            assert!(!refused(field, Value::Null), "{field}");
        }
        for (field, value) in [
            ("guided_decoding_backend", json!("")),
            ("tools", json!([])),
            ("tool_choice", json!("none")),
            ("function_call", json!("auto")),
            ("modalities", json!(["text"])),
            ("length_penalty", json!(1.0)),
            ("no_repeat_ngram_size", json!(0)),
            ("typical_p", json!("1")),
            ("best_of", json!(1)),
        ] {
            assert!(!refused(field, value.clone()), "{field}: {value}");
        }
    }

    #[test]
    fn special_tokens_matter_where_some_are_added() {
        use std::sync::Arc;

        use crate::engine::ServedRoute;
        use crate::request::RouteId;
        use crate::text::ModelText;
        use crate::text::tokenizer_fixtures::{byte_fallback, demo};

        let route = |text| Route {
            served: Arc::new(ServedRoute::unconnected(RouteId(0), "r")),
            settings: None,
            name: "r".into(),
            text: Arc::new(text),
            defaults: Default::default(),
            vocab: 1,
            context: 1,
            room: 1,
            eos: Arc::new([]),
            model_names: Arc::new([]),
        };
        let adds = route(ModelText::new(byte_fallback(), None, &json!({"bos_token": "<s>", "add_bos_token": true})));
        let plain = route(ModelText::new(demo(), None, &Value::Null));
        let read = |route: &Route, given: Value, added, is_text| {
            let mut fields = Fields::of("body", json!({"add_special_tokens": given})).unwrap();
            special_tokens(&mut fields, route, added, is_text).is_ok()
        };
        assert!(!read(&adds, json!(false), true, true));
        assert!(!read(&adds, json!(true), false, true));
        for (route, given, is_text) in [
            (&adds, json!(true), true),
            (&adds, json!(null), true),
            (&adds, json!(false), false),
            (&plain, json!(false), true),
        ] {
            assert!(read(route, given, true, is_text));
        }
    }
}
