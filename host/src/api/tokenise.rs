//! Text becomes tokens, apart from the threads that serve connections: long prompts take a while.

use std::sync::Arc;
use std::time::SystemTime;

use axum::http::StatusCode;
use serde_json::{Map, Value};

use super::error::ApiError;
use super::front::Slot;
use super::prompt::{Echo, Encoded};
use super::prompts::{Prompt, Prompts};
use super::state::{AppState, Route};
use crate::request::TokenId;

/// Normalisers may shorten a text before it is cut into tokens; by more than this none is expected to.
const NORMALISER_SLACK: usize = 4;

/// What becomes of prompts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prepare {
    /// Their texts are wanted as well; of prompts given as tokens with special tokens if `keep_special`.
    pub echo: bool,
    pub keep_special: bool,
    /// Keep as many of the last tokens.
    pub most: Option<usize>,
}

/// Do `work`, whose `turn` it is until it is done.
async fn during<T, W>(turn: Slot, work: W) -> Result<T, ApiError>
where
    T: Send + 'static,
    W: FnOnce() -> Result<T, ApiError> + Send + 'static,
{
    let task = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        work()
    });
    task.await.map_err(|error| {
        // What a panic says is for the log alone.
        tracing::error!(%error, "reading a text failed");
        ApiError::internal("The text of the request could not be processed; the server's log has the details.")
    })?
}

impl AppState {
    /// Do `work` with a text of the caller in its turn. A client that leaves before has cost nothing.
    pub(super) async fn work<T, W>(&self, work: W) -> Result<T, ApiError>
    where
        T: Send + 'static,
        W: FnOnce() -> Result<T, ApiError> + Send + 'static,
    {
        during(self.turn(self.front.texts(), "texts to read").await?, work).await
    }

    /// Tokens of all prompts.
    pub(super) async fn prompt_tokens(
        &self,
        route: &Route,
        prompts: Prompts,
        field: &'static str,
        prepare: Prepare,
    ) -> Result<Vec<Encoded>, ApiError> {
        for prompt in &prompts.list {
            if let Prompt::Text(prompt) = prompt {
                check_length(route, prompt.len(), field)?;
            }
        }
        let text = Arc::clone(&route.text);
        let one = move |prompt| {
            let failed = |e| ApiError::value(field, format!("`{field}`: {e}."));
            let mut encoded = match prompt {
                Prompt::Tokens(ids) => {
                    let echo = prepare.echo.then(|| Echo::of_tokens(&text.tokenizer, &ids, prepare.keep_special));
                    Encoded { ids, echo }
                }
                Prompt::Text(prompt) if prepare.echo => {
                    let tokens = text.encode_prompt_with_offsets(&prompt).map_err(failed)?;
                    let (ids, offsets) = tokens.into_iter().unzip();
                    Encoded { ids, echo: Some(Echo { text: prompt, offsets }) }
                }
                Prompt::Text(prompt) => Encoded { ids: text.encode_prompt(&prompt).map_err(failed)?, echo: None },
            };
            if encoded.ids.is_empty() {
                let message = format!("`{field}` is empty, and this model has no token to begin with.");
                return Err(ApiError::value(field, message));
            }
            if let Some(most) = prepare.most {
                encoded.truncate(most);
            }
            Ok(encoded)
        };
        self.work(move || prompts.list.into_iter().map(one).collect()).await
    }

    /// Tokens of texts, which may be longer than a context: nothing is computed of them. `added`: with those that prompts
    /// get.
    pub(super) async fn text_tokens(
        &self,
        route: &Route,
        texts: Vec<String>,
        added: bool,
    ) -> Result<Vec<Vec<TokenId>>, ApiError> {
        let bytes: usize = texts.iter().map(String::len).sum();
        if bytes > MOST_TEXT {
            let message = format!("`prompt` has {bytes} bytes; at most {MOST_TEXT} are possible. Send it in parts.");
            return Err(ApiError::value("prompt", message));
        }
        let model = Arc::clone(&route.text);
        let one = move |text: String| {
            let ids = if added { model.encode_prompt(&text) } else { model.tokenizer.encode(&text) };
            ids.map_err(|e| ApiError::value("prompt", format!("`prompt`: {e}.")))
        };
        self.work(move || texts.into_iter().map(one).collect()).await
    }

    /// Tokens of a conversation. `continues`: of its last message without an end. `most`: the last ones alone.
    pub(super) async fn chat_tokens(
        &self,
        route: &Route,
        messages: Vec<Value>,
        options: Map<String, Value>,
        continues: bool,
        most: Option<usize>,
    ) -> Result<Vec<TokenId>, ApiError> {
        let route = route.clone();
        self.work(move || {
            let mut messages = messages;
            if continues {
                mark_end(&mut messages)?;
            }
            let rendered = route.text.render_chat(messages, options, SystemTime::now()).ok_or_else(|| {
                let name = &route.name;
                ApiError::value(
                    "model",
                    format!("The model `{name}` has no chat template. Use /v1/completions instead."),
                )
            })?;
            let rendered = rendered.map_err(|e| {
                ApiError::value("messages", format!("The model's chat template does not take these messages: {e}."))
            })?;
            let rendered = if continues { continued(rendered)? } else { rendered };
            check_length(&route, rendered.len(), "messages")?;
            let mut prompt =
                route.text.encode_chat(&rendered).map_err(|e| ApiError::value("messages", e.to_string()))?;
            if prompt.is_empty() {
                let message = "The model's chat template made an empty prompt of the messages.";
                return Err(ApiError::value("messages", message));
            }
            prompt.drain(..prompt.len().saturating_sub(most.unwrap_or(usize::MAX)));
            Ok(prompt)
        })
        .await
    }
}

/// Most bytes of text whose tokens are told: they may take seconds.
const MOST_TEXT: usize = 256 << 10;

/// Stands at the end of a message that is to be continued while a template renders it: what the template writes behind the
/// message may look like the message. The space tells whether the template trims messages.
const END: &str = "\u{F8FE}end of the last message\u{F8FE} ";

/// Put [`END`] behind the last message.
fn mark_end(messages: &mut [Value]) -> Result<(), ApiError> {
    let content = messages.last_mut().and_then(|message| message.get_mut("content"));
    match content {
        Some(Value::String(text)) if !text.trim().is_empty() => {
            text.push_str(END);
            Ok(())
        }
        _ => {
            let message = "`continue_final_message` needs a last message that is not empty.";
            Err(ApiError::value("continue_final_message", message))
        }
    }
}

/// A rendered conversation up to the end of its last message. White space there stays if the template keeps it.
fn continued(mut rendered: String) -> Result<String, ApiError> {
    let Some(end) = rendered.rfind(END.trim_end()) else {
        let message = "The model's chat template changes the last message, so it cannot be continued.";
        return Err(ApiError::value("continue_final_message", message));
    };
    let kept = rendered[end..].starts_with(END);
    rendered.truncate(end);
    if !kept {
        rendered.truncate(rendered.trim_end().len());
    }
    Ok(rendered)
}

/// Refuse a text that cannot fit whatever its tokens are, before time is spent on finding them.
fn check_length(route: &Route, bytes: usize, field: &str) -> Result<(), ApiError> {
    let longest = route.text.tokenizer.longest_token().max(1);
    let context = route.context as usize;
    if bytes / longest / NORMALISER_SLACK <= context {
        return Ok(());
    }
    let message = format!(
        "This model's maximum context length is {context} tokens. However, your prompt has {bytes} bytes, and no \
         token stands for more than {longest}. Please reduce the length of the prompt."
    );
    Err(ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message).param(field))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::front::Waiting;

    #[test]
    fn the_last_message_has_no_end() {
        let cut = |template: fn(&str) -> String, last: &str| {
            let mut messages = [json!({"content": "Hi"}), json!({"content": last})];
            mark_end(&mut messages)?;
            continued(format!("<a>Hi<e>{}\n", template(messages[1]["content"].as_str().unwrap())))
        };
        let (plain, trims) =
            (|text: &str| format!("<a>{text}<|im_end|>"), |text: &str| format!("<a>{}<e>", text.trim()));
        // Also where it looks like what the template writes behind it.
        for last in ["Hi the", " Hi ", ">", "end", "<|im_end|>", "e"] {
            assert_eq!(cut(plain, last).unwrap(), format!("<a>Hi<e><a>{last}"));
        }
        assert_eq!(cut(trims, " Hi ").unwrap(), "<a>Hi<e><a>Hi");
        assert!(cut(|text| format!("<a>{}<e>", text.to_uppercase()), "Hi").is_err());
        assert!(cut(|_| String::new(), "Hi").is_err());
        assert!(cut(plain, " ").is_err());
    }

    #[tokio::test]
    async fn a_panic_keeps_its_words_to_itself() {
        let turn = Arc::new(Waiting::for_work(1, None)).turn().await.unwrap();
        let error = during::<(), _>(turn, || panic!("a secret")).await.unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (500, "internal_error"));
        assert!(!error.message.contains("secret") && !error.message.contains("panic"), "{}", error.message);
    }

    #[tokio::test]
    async fn a_client_that_leaves_in_the_queue_costs_nothing() {
        let line = Arc::new(Waiting::for_work(1, None));
        let busy = line.turn().await.unwrap();
        let (ran, runs) = std::sync::mpsc::channel();
        {
            let mut waiting = Box::pin(async {
                let work = move || {
                    ran.send(()).unwrap();
                    Ok(())
                };
                during(line.turn().await.unwrap(), work).await
            });
            assert!(futures_poll(waiting.as_mut()).is_pending());
        }
        drop(busy);
        during(line.turn().await.unwrap(), || Ok(())).await.unwrap();
        assert!(runs.try_recv().is_err());
    }

    fn futures_poll<F: Future>(future: std::pin::Pin<&mut F>) -> std::task::Poll<F::Output> {
        future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
    }
}
