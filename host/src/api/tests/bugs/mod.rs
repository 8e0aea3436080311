//! Faults that other servers have had, each with the tests that show its absence here.
//!
//! Streams, stops and texts are tried with one model and with two that take turns at every token, so that all
//! that may be cut in two is cut between models as well. Names without a path are tests of these modules.
//!
//! | case | fault | tests |
//! | --- | --- | --- |
//! | 1 | characters over several tokens are garbled | `bug_01_*`; `text::detokenizer::texts_come_back` |
//! | 2 | tokens are decoded one by one | `bug_02_*`; `text::detokenizer::pieces_join_to_the_library_decode_of_all` |
//! | 4 | a byte that is no text ends or empties the answer | `bug_04_*`; `text::detokenizer::bytes_of_fallback_tokens` |
//! | 6 | leading white space is lost | `bug_06_*`; `text::detokenizer::sentencepiece_pieces_join_to_the_library_decode` |
//! | 7 | too much is held back for a stop string | `bug_07_*`; `text::stop::holds_only_prefixes` |
//! | 8 | the beginning of a stop string is shown | `bug_08_*`; `text::stop::never_emits_the_start_of_a_stop` |
//! | 10 | what was held back is lost at the end | `bug_10_*`; `text::stop::gives_back_what_did_not_become_a_stop` |
//! | 12 | an empty stop string | `bug_12_*` |
//! | 13 | end tokens of one file or one model only | `bug_13_*` |
//! | 14 | `min_tokens` misses by one, or holds only some ends back | `bug_14_*`, also of the sampler and the system |
//! | 16 | a stream that cannot start never closes | `bug_16_*` |
//! | 17 | `[DONE]` is missing or comes twice | `bug_17_*` |
//! | 18 | a failure in mid-stream looks like an end | `bug_18_*`; `down` |
//! | 19 | `data:` with and without a space | `bug_19_*`, also of `bench::openai` |
//! | 21, 26 | the chunk with the usage has choices, or none comes | `bug_21_*` |
//! | 22 | usage comes unasked | `bug_22_*` |
//! | 24 | streams count otherwise | `bug_24_*`; all that [`said`] tries |
//! | 27 | a chunk of several tokens repeats one's log-probabilities | `bug_27_*` |
//! | 29 | log-probabilities in the form of another endpoint | `bug_29_*` |
//! | 30 | the token is not among the best, or they are not the model's own | `bug_30_*`, also of the sampler and the system |
//! | 32 | echoes with log-probabilities | `prompts::an_echo_with_logprobs_has_an_entry_for_each_token`; `prompts::no_token_may_be_asked_for_with_an_echo` |
//! | 35 | a NaN gives token 0, or takes others with it | `bug_35_*`; `runner::sampler::tests::logits_that_are_not_finite` |
//! | 36 | a seed depends on the others in the batch | `bug_36_*`, also of the system |
//! | 38 | no seed is a constant, 0 is none, or a negative one is refused | `bug_38_*`, also of the system |
//! | 39 | choices are equal, missing, or end with the first | `bug_39_*`, also of the system |
//! | 41 | values beyond all sense | `bug_41_*`; `params::out_of_range_names_the_field` |
//! | 43 | counts without a limit | `bug_43_*` |
//! | 44 | two beginning-of-sequence tokens | `bug_44_*`; `text::model_text::exactly_one_bos` |
//! | 46 | templates that write the date | `text::chat::the_date_is_an_argument`; `text::chat::bug_48_*` |
//! | 47 | templates with marks for training | `text::chat::generation_marks_leave_no_trace`; `text::chat::bug_48_*` |
//! | 48 | templates with Python's methods | `text::chat::python_methods_and_slices`; `text::chat::bug_48_*` |
//! | 50 | JSON in templates | `text::chat::json_as_python_writes_it`; `text::python_json::as_python_writes`; `text::chat::bug_48_*` |
//! | 51 | content in parts, or none | `bug_51_*`; `answers::content_in_parts` |
//! | 52 | prompts without anything | `bug_52_*`; `errors::fields` |
//! | 55 | offsets and echoes of a text that the tokenizer changes | `bug_55_*` |
//! | 56 | null is not the same as nothing | `bug_56_*`; `params::null_is_absent_for_every_field` |
//! | 58 | a form that cannot be compiled | `bug_58_*`; `hostile_forms_hurt_nobody` of the system |
//! | 59 | a form that cannot be read is left out | `bug_59_*`; `structured::what_is_wrong_is_named` |
//! | 62 | unknown fields | `errors::unknown_fields_are_ignored`; `errors::http` |
//! | 63 | content types | `errors::content_types` |
//! | 65 | clients that leave | `bug_65_*`; `streams::clients_that_leave_cancel_their_requests`; `nothing_is_left_behind` of the system |
//! | 68 | idle connections are closed too early | `bug_68_*`; `front::clients_that_send_slowly` |
//! | 71 | a server that cannot serve says that it is well | `bug_71_*`; `down::it_is_refused_and_the_server_is_not_ready_until_a_restart` |
//! | 72 | the signal to stop breaks answers off | `bug_72_*` and `serving_and_draining` of the program; `connections` |
//! | 73 | tokens come twice after a retraction | `bug_73_*`; `traces_with_a_pool_that_is_too_small` of the system |

mod framing;
mod lifecycle;
mod limits;
mod logprobs;
mod numbers;
mod prompts;
mod stops;
mod text;
mod usage;

use serde_json::{Value, json};

use super::fixture::{Server, chat, completion};

const CHATS: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const NATIVE: &str = "/generate";

/// One model, and two that take turns at every token.
const ROUTES: [&str; 2] = ["small", "pair"];

/// A choice of an answer.
#[derive(Debug, PartialEq)]
struct Said {
    text: String,
    finish_reason: Value,
    stop_reason: Value,
    /// The text as a stream of completions has it.
    parts: Vec<String>,
}

/// `body` with the fields of `more`.
fn with(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A request to `path` that is good, for `route`. `fields` are those of chats and completions.
fn asking(path: &str, route: &str, fields: &Value) -> Value {
    let body = match path {
        CHATS => chat(),
        COMPLETIONS => completion(),
        _ => json!({"text": "Hi", "sampling_params": {"max_new_tokens": 200}}),
    };
    let body = with(body, &json!({"model": route}));
    if path == NATIVE { with(body, &json!({"sampling_params": fields})) } else { with(body, fields) }
}

/// The choices that `route` answers with. Chats and completions must say the same, in one piece and as streams, and
/// count the same.
async fn said(server: &Server, route: &str, fields: Value) -> Vec<Said> {
    let chats = said_at(server, CHATS, asking(CHATS, route, &fields)).await;
    let completions = said_at(server, COMPLETIONS, asking(COMPLETIONS, route, &fields)).await;
    let texts = |all: &[Said]| all.iter().map(|said| said.text.clone()).collect::<Vec<_>>();
    assert_eq!(texts(&chats), texts(&completions), "{route} {fields}");
    completions
}

async fn said_at(server: &Server, path: &str, body: Value) -> Vec<Said> {
    let whole = server.ok(path, body.clone()).await;
    let streamed = with(body.clone(), &json!({"stream_options": {"include_usage": true}}));
    let events = server.events(path, streamed).await;
    for count in ["prompt_tokens", "completion_tokens", "total_tokens", "tokens_by_model", "handoffs"] {
        assert_eq!(events.last().unwrap()["usage"][count], whole["usage"][count], "{count}: {body}");
    }
    let of = |(index, choice): (usize, &Value)| {
        assert_eq!(choice["index"], index, "{body}");
        let own = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
        let own: Vec<&Value> = own.filter(|choice| choice["index"] == index).collect();
        let (last, before) = own.split_last().unwrap();
        assert!(before.iter().all(|choice| choice["finish_reason"].is_null()), "{body}");
        for field in ["finish_reason", "stop_reason"] {
            assert_eq!(last[field], choice[field], "{body}");
        }
        let part = |choice: &&Value| choice["delta"]["content"].as_str().or(choice["text"].as_str()).map(String::from);
        let parts: Vec<String> = own.iter().filter_map(part).collect();
        let text = choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap();
        assert_eq!(parts.concat(), text, "{body}");
        let (finish_reason, stop_reason) = (choice["finish_reason"].clone(), choice["stop_reason"].clone());
        Said { text: text.into(), finish_reason, stop_reason, parts }
    };
    whole["choices"].as_array().unwrap().iter().enumerate().map(of).collect()
}

/// [`said`] where there is one choice.
async fn said_once(server: &Server, route: &str, fields: Value) -> Said {
    let mut all = said(server, route, fields).await;
    assert_eq!(all.len(), 1);
    all.remove(0)
}

/// `fields` must be refused with 400 and the name `param`, at every endpoint, also as a stream. The server goes on.
async fn refused(server: &Server, fields: &Value, param: &str) {
    for path in [CHATS, COMPLETIONS, NATIVE] {
        for stream in [false, true] {
            let body = with(asking(path, "pair", fields), &json!({"stream": stream}));
            refused_at(
                server,
                path,
                body,
                if path == NATIVE { format!("sampling_params.{param}") } else { param.into() },
            )
            .await;
        }
    }
}

async fn refused_at(server: &Server, path: &str, body: Value, param: String) {
    let (status, error) = server.json(path, body.clone()).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!(param)), "{path} {body}: {error}");
    assert_eq!(server.state.engine.live_requests(), 0);
}
