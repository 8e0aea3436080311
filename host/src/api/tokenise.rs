//! Text becomes tokens, apart from the threads that serve connections: long prompts take a while.

use std::sync::Arc;
use std::time::SystemTime;

use axum::http::StatusCode;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use super::error::ApiError;
use super::prompt::{Echo, Encoded};
use super::prompts::{Prompt, Prompts};
use super::state::Route;
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

/// As many texts are worked on at once as there are cores; the others wait without a thread.
#[derive(Debug)]
pub struct TextWork(Arc<Semaphore>);

impl Default for TextWork {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self(Arc::new(Semaphore::new(cores)))
    }
}

impl TextWork {
    /// Do `work` in its turn. A client that leaves before has cost nothing.
    async fn run<T, W>(&self, work: W) -> Result<T, ApiError>
    where
        T: Send + 'static,
        W: FnOnce() -> Result<T, ApiError> + Send + 'static,
    {
        let closed = |_| ApiError::internal("The server no longer reads texts.");
        let turn = Arc::clone(&self.0).acquire_owned().await.map_err(closed)?;
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

    /// Tokens of all prompts.
    pub async fn prompts(
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
        self.run(move || prompts.list.into_iter().map(one).collect()).await
    }

    /// Tokens of texts, however long they are: nothing is computed of them. `added`: with those that prompts get.
    pub async fn texts(&self, route: &Route, texts: Vec<String>, added: bool) -> Result<Vec<Vec<TokenId>>, ApiError> {
        let model = Arc::clone(&route.text);
        let one = move |text: String| {
            let ids = if added { model.encode_prompt(&text) } else { model.tokenizer.encode(&text) };
            ids.map_err(|e| ApiError::value("prompt", format!("`prompt`: {e}.")))
        };
        self.run(move || texts.into_iter().map(one).collect()).await
    }

    /// Tokens of a conversation. `continues`: of its last message without an end. `most`: the last ones alone.
    pub async fn chat(
        &self,
        route: &Route,
        messages: Vec<Value>,
        options: Map<String, Value>,
        continues: bool,
        most: Option<usize>,
    ) -> Result<Vec<TokenId>, ApiError> {
        let route = route.clone();
        self.run(move || {
            let last = messages.last().and_then(|message| message["content"].as_str()).unwrap_or_default().to_owned();
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
            let rendered = if continues { continued(rendered, &last)? } else { rendered };
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

/// A rendered conversation up to the end of its last message, whose content is `last`. White space at its end stays
/// as far as the template has written it.
fn continued(mut rendered: String, last: &str) -> Result<String, ApiError> {
    let refuse = |message: &str| Err(ApiError::value("continue_final_message", message));
    let trimmed = last.trim();
    if trimmed.is_empty() {
        return refuse("`continue_final_message` needs a last message that is not empty.");
    }
    let Some(start) = rendered.rfind(trimmed) else {
        return refuse("The model's chat template changes the last message, so it cannot be continued.");
    };
    let whole = last.trim_start();
    let length = if rendered[start..].starts_with(whole) { whole.len() } else { trimmed.len() };
    rendered.truncate(start + length);
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
    use super::*;

    #[test]
    fn the_last_message_has_no_end() {
        let cut = |rendered: &str, last| continued(rendered.into(), last).ok();
        assert_eq!(cut("<a>Hi<e><a>Hi the<e>\n", "Hi the").as_deref(), Some("<a>Hi<e><a>Hi the"));
        assert_eq!(cut("<a>Hi <e>", " Hi ").as_deref(), Some("<a>Hi "), "the template keeps the space");
        assert_eq!(cut("<a>Hi<e>", "Hi ").as_deref(), Some("<a>Hi"), "the template trims it");
        assert_eq!(cut("<a>HI<e>", "Hi"), None);
        assert_eq!(cut("<a><e>", " "), None);
    }

    #[tokio::test]
    async fn a_panic_keeps_its_words_to_itself() {
        let work = TextWork::default();
        let error = work.run::<(), _>(|| panic!("a secret")).await.unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (500, "internal_error"));
        assert!(!error.message.contains("secret") && !error.message.contains("panic"), "{}", error.message);
    }

    #[tokio::test]
    async fn a_client_that_leaves_in_the_queue_costs_nothing() {
        let work = TextWork(Arc::new(Semaphore::new(1)));
        let busy = Arc::clone(&work.0).acquire_owned().await.unwrap();
        let (ran, runs) = std::sync::mpsc::channel();
        {
            let mut waiting = Box::pin(work.run(move || {
                ran.send(()).unwrap();
                Ok(())
            }));
            assert!(futures_poll(waiting.as_mut()).is_pending());
        }
        drop(busy);
        work.run(|| Ok(())).await.unwrap();
        assert!(runs.try_recv().is_err());
    }

    fn futures_poll<F: Future>(future: std::pin::Pin<&mut F>) -> std::task::Poll<F::Output> {
        future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
    }
}
