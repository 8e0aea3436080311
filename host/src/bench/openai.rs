//! Requests to a server with OpenAI's API, streamed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use hyper::Method;
use serde_json::{Value, json};

use super::ask::{Answer, Ask, Prompt, Reply, Until};
use super::http::{Client, Response};

pub struct OpenAi {
    client: Client,
    model: String,
}

impl OpenAi {
    /// `model` `None`: the only one that the server has.
    pub async fn connect(client: Client, model: Option<&str>) -> Result<Self, String> {
        if let Some(model) = model {
            return Ok(Self { client, model: model.to_owned() });
        }
        let list = client.send(Method::GET, "/v1/models", None).await?.whole().await?;
        let list: Value = serde_json::from_slice(&list).map_err(|e| format!("/v1/models: not JSON: {e}"))?;
        let models = list["data"].as_array().into_iter().flatten();
        let names: Vec<&str> = models.filter_map(|model| model["id"].as_str()).collect();
        match names.as_slice() {
            [] => Err("the server lists no models; name one with --model".into()),
            [only] => Ok(Self { model: (*only).to_owned(), client }),
            several => Err(format!("--model is missing; the server has {}", several.join(", "))),
        }
    }

    pub fn model(&self) -> &str {
        &self.model
    }

    pub async fn answer(&self, ask: &Ask, told: &AtomicU64, until: Until) -> (Answer, Reply) {
        let (path, body) = self.body(ask);
        // Serialising a long prompt is no work of the server's.
        let body = body.to_string();
        let mut events = Events::new(Instant::now());
        let asking = async {
            let response = self.client.send(Method::POST, path, Some(body)).await?;
            follow(response, &mut events, told).await
        };
        // Without an end there is no `usage`; chunks count as tokens then.
        match until.limit(asking).await {
            None => (events.answer.broken_off(), events.reply),
            Some(result) => match result.and_then(|()| events.complete()) {
                Ok(()) => (events.answer, events.reply),
                Err(failure) => (events.answer.failed(failure), events.reply),
            },
        }
    }

    fn body(&self, ask: &Ask) -> (&'static str, Value) {
        let mut body = json!({
            "model": self.model,
            "max_tokens": ask.output_len,
            "temperature": 0,
            "ignore_eos": true,
            // The bits as a signed number: not every server takes more than 63 of them.
            "seed": ask.seed as i64,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        match &ask.prompt {
            Prompt::Tokens(tokens) => body["prompt"] = json!(tokens),
            Prompt::Text(text) => body["prompt"] = json!(text),
            Prompt::Messages(messages) => {
                body["messages"] = json!(messages);
                return ("/v1/chat/completions", body);
            }
        }
        ("/v1/completions", body)
    }
}

async fn follow(mut response: Response<'_>, events: &mut Events, told: &AtomicU64) -> Result<(), String> {
    if !response.status.is_success() {
        return response.whole().await.map(drop);
    }
    let mut lines = Lines::default();
    while let Some(bytes) = response.chunk().await? {
        let now = Instant::now();
        for line in lines.push(&bytes) {
            events.line(&line, now, told)?;
        }
    }
    response.done();
    Ok(())
}

/// Cuts a stream into lines.
#[derive(Default)]
struct Lines(Vec<u8>);

impl Lines {
    /// The lines that `bytes` complete.
    fn push(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        self.0.extend_from_slice(bytes);
        let Some(end) = self.0.iter().rposition(|byte| *byte == b'\n') else { return Vec::new() };
        let rest = self.0.split_off(end + 1);
        let whole = std::mem::replace(&mut self.0, rest);
        whole.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).map(<[u8]>::to_vec).collect()
    }
}

/// The server-sent events of one answer.
struct Events {
    answer: Answer,
    reply: Reply,
    finished: bool,
    counted: bool,
}

impl Events {
    fn new(submitted: Instant) -> Self {
        Self { answer: Answer::new(submitted), reply: Reply::default(), finished: false, counted: false }
    }

    /// A line that came `now`.
    fn line(&mut self, line: &[u8], now: Instant, told: &AtomicU64) -> Result<(), String> {
        let Some(data) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii) else { return Ok(()) };
        if data == b"[DONE]" {
            return Ok(());
        }
        let event: Value = serde_json::from_slice(data).map_err(|e| format!("an event is not JSON: {e}"))?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            return Err(error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned));
        }
        if let Some(choice) = event.pointer("/choices/0") {
            self.choice(choice, now, told);
        }
        if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
            self.usage(usage);
        }
        Ok(())
    }

    fn choice(&mut self, choice: &Value, now: Instant, told: &AtomicU64) {
        let answer = &mut self.answer;
        let delta = &choice["delta"];
        // Reasoning is written by tokens, too, but is no part of the conversation that follows.
        let thought = ["reasoning_content", "reasoning"].iter().find_map(|name| delta[*name].as_str()).unwrap_or("");
        let text = choice["text"].as_str().or(delta["content"].as_str()).unwrap_or("");
        self.reply.text.push_str(text);
        self.finished |= choice["finish_reason"].is_string();
        // Tokens without text make no chunk of their own.
        if !text.is_empty() || !thought.is_empty() || (self.finished && answer.arrivals.is_empty()) {
            answer.arrivals.push((now, 1));
            told.fetch_add(1, Ordering::Relaxed);
        }
        if !answer.arrivals.is_empty() {
            answer.ended = now;
        }
    }

    fn usage(&mut self, usage: &Value) {
        let answer = &mut self.answer;
        let Some(tokens) = usage["completion_tokens"].as_u64() else { return };
        self.counted = true;
        answer.tokens = tokens;
        answer.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or(0);
        answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
        answer.handoffs = usage["handoffs"].as_u64();
        let by_model = usage["tokens_by_model"].as_object().into_iter().flatten();
        answer.by_model = by_model.filter_map(|(name, tokens)| Some((name.clone(), tokens.as_u64()?))).collect();
    }

    /// What every answer that ended well has said.
    fn complete(&self) -> Result<(), String> {
        match (self.finished, self.counted) {
            (true, true) => Ok(()),
            (false, _) => Err("the stream ended before the answer did".into()),
            (true, false) => {
                Err("the server sent no `usage` (stream_options.include_usage), so tokens are unknown".into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The events that come at 10, 20, … ms.
    fn read(chunks: &[&str]) -> Result<(Answer, Reply), String> {
        let zero = Instant::now();
        let (mut events, mut lines, told) = (Events::new(zero), Lines::default(), AtomicU64::new(0));
        for (chunk, at) in chunks.iter().zip(1..) {
            for line in lines.push(chunk.as_bytes()) {
                events.line(&line, zero + Duration::from_millis(10 * at), &told)?;
            }
        }
        events.complete().map(|()| (events.answer, events.reply))
    }

    const USAGE: &str = "data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 3, \"completion_tokens\": 4, \
                         \"tokens_by_model\": {\"a\": 3, \"b\": 1}, \"handoffs\": 2}}\n\ndata: [DONE]\n\n";

    #[test]
    fn a_completion() {
        let (answer, reply) = read(&[
            ": keep-alive\n\ndata: {\"choices\": [{\"text\": \"x",
            "y\", \"finish_reason\": null}], \"usage\": null}\n\n",
            "data: {\"choices\": [{\"text\": \"z\"}]}\r\n\r\n",
            "data: {\"choices\": [{\"text\": \"\", \"finish_reason\": \"length\"}]}\n\n",
            USAGE,
        ])
        .unwrap();
        let times = answer.times().unwrap();
        assert_eq!((times.ttft, times.tpot, times.e2e), (20.0, Some(20.0 / 3.0), Some(40.0)));
        assert_eq!((answer.tokens, answer.prompt_tokens, answer.handoffs, reply.text.as_str()), (4, 3, Some(2), "xyz"));
        assert_eq!(answer.by_model, [("a".to_owned(), 3), ("b".to_owned(), 1)].into());
    }

    /// Servers write `data:` with a space behind it, and without.
    #[test]
    fn bug_19_a_space_behind_data_may_be_missing() {
        let said = |space: &str| {
            let text = format!("data:{space}{{\"choices\": [{{\"text\": \" x\"}}]}}\n\n");
            let end = format!("data:{space}{{\"choices\": [{{\"text\": \"\", \"finish_reason\": \"stop\"}}]}}\n\n");
            let usage = USAGE.replace("data: ", &format!("data:{space}"));
            let (answer, reply) = read(&[&text, &end, &usage]).unwrap();
            (answer.tokens, reply.text)
        };
        for space in ["", " ", "  "] {
            assert_eq!(said(space), (4, " x".to_owned()), "{space:?}");
        }
    }

    #[test]
    fn a_chat_and_an_answer_without_text() {
        let (answer, reply) = read(&[
            "data: {\"choices\": [{\"delta\": {\"role\": \"assistant\", \"content\": \"\"}}]}\n\n",
            "data: {\"choices\": [{\"delta\": {\"reasoning_content\": \"hm\"}}]}\n\n",
            "data: {\"choices\": [{\"delta\": {\"content\": \"x\"}, \"finish_reason\": \"stop\"}]}\n\n",
            USAGE,
        ])
        .unwrap();
        assert_eq!((answer.arrivals.len(), answer.times().unwrap().ttft, reply.text.as_str()), (2, 20.0, "x"));
        let end = "data: {\"choices\": [{\"text\": \"\", \"finish_reason\": \"length\"}]}\n";
        let (answer, _) = read(&["\n", end, USAGE]).unwrap();
        assert_eq!(answer.times().map(|times| (times.ttft, times.e2e)), Some((20.0, Some(20.0))));
    }

    #[test]
    fn streams_that_break() {
        let text = "data: {\"choices\": [{\"text\": \"x\"}]}\n\n";
        for (chunks, message) in [
            (&[text][..], "the stream ended before the answer did"),
            (&[text, "data: {\"choices\": [{\"text\": \"\", \"finish_reason\": \"stop\"}]}\n\n"], "sent no `usage`"),
            (&[text, "data: {\"error\": {\"message\": \"model down\"}}\n\n"], "model down"),
            (&["data: {\n\n"], "an event is not JSON"),
        ] {
            let error = read(chunks).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
