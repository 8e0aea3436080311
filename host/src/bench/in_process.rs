//! Requests to an engine in this process, without HTTP.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use serde_json::Map;

use super::ask::{Answer, Ask, Prompt, Reply, Until};
use crate::engine::{Engine, SubmitError};
use crate::request::{Event, NewRequest, RouteId, SamplingParams, TokenId};
use crate::subserver::coordinator::{LadderError, Ladders};
use crate::text::{Detokenizer, ModelText};

pub struct InProcess {
    engine: Arc<Engine>,
    route: RouteId,
    /// Of the route's entry model.
    text: Arc<ModelText>,
}

impl InProcess {
    pub fn new(engine: Arc<Engine>, route: RouteId, text: Arc<ModelText>) -> Self {
        Self { engine, route, text }
    }

    /// Put other ladders in force.
    pub fn set_ladders(&self, ladders: Ladders) -> Result<(), LadderError> {
        self.engine.set_ladders(ladders)
    }

    /// The engine, where nobody else has it.
    pub fn into_engine(self) -> Option<Engine> {
        Arc::into_inner(self.engine)
    }

    /// Make tokens of what stands alone, so that it is not done under load, and refuse what the engine would
    /// refuse.
    pub fn prepare(&self, ask: &mut Ask) -> Result<(), String> {
        let prompt = self.tokens(&ask.prompt)?;
        let request = self.request(ask, prompt);
        self.engine.check(&request).map_err(|e| e.to_string())?;
        ask.prompt = Prompt::Tokens(request.prompt);
        Ok(())
    }

    /// As the server makes tokens of a prompt.
    fn tokens(&self, prompt: &Prompt) -> Result<Vec<TokenId>, String> {
        match prompt {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(text) => self.text.encode_prompt(text).map_err(|e| e.to_string()),
            Prompt::Messages(messages) => {
                let rendered = self.text.render_chat(messages.clone(), Map::new(), SystemTime::now());
                let rendered = rendered.ok_or("the model has no chat template; use `prompt` in place of `messages`")?;
                self.text.encode_chat(&rendered.map_err(|e| e.to_string())?).map_err(|e| e.to_string())
            }
        }
    }

    fn request(&self, ask: &Ask, prompt: Vec<TokenId>) -> NewRequest {
        NewRequest {
            route: self.route,
            prompt,
            max_tokens: ask.output_len,
            sampling: SamplingParams { seed: ask.seed, ignore_eos: true, ..SamplingParams::greedy() },
            return_signals: false,
            cache_salt: None,
        }
    }

    pub async fn answer(&self, ask: &Ask, told: &AtomicU64, until: Until) -> (Answer, Reply) {
        let prompt = match self.tokens(&ask.prompt) {
            Ok(prompt) => prompt,
            Err(error) => return (Answer::new(Instant::now()).failed(error), Reply::default()),
        };
        let request = self.request(ask, prompt);
        let mut answer = Answer {
            prompt_tokens: request.prompt.len() as u64,
            cached_tokens: Some(0),
            ..Answer::new(Instant::now())
        };
        answer.arrivals.reserve_exact(ask.output_len as usize);
        let mut reply = Reply::default();
        let mut written = vec![0; self.engine.models().len()];
        let followed = until.limit(self.follow(request, &mut answer, &mut reply, &mut written, told)).await;
        let names = self.engine.models().iter().map(|model| model.name.clone());
        answer.by_model = names.zip(written).filter(|(_, tokens)| *tokens > 0).collect();
        if !matches!(ask.prompt, Prompt::Tokens(_)) {
            let mut detokenizer = Detokenizer::default();
            reply.text = reply.tokens.iter().map(|token| detokenizer.push(&self.text.tokenizer, *token)).collect();
            reply.text += &detokenizer.flush();
        }
        match followed {
            None => (answer.broken_off(), reply),
            Some(Ok(())) => (answer, reply),
            Some(Err(failure)) => (answer.failed(failure), reply),
        }
    }

    async fn follow(
        &self,
        request: NewRequest,
        answer: &mut Answer,
        reply: &mut Reply,
        written: &mut [u64],
        counted: &AtomicU64,
    ) -> Result<(), String> {
        let mut stream = self.engine.submit(request).map_err(|e: SubmitError| e.to_string())?;
        answer.id = Some(stream.id);
        loop {
            let told = stream.events.recv().await.ok_or("the engine stopped")?;
            match told.event {
                Event::PromptCached { tokens } => answer.cached_tokens = Some(u64::from(tokens)),
                Event::PromptScored { .. } => {}
                Event::Committed { tokens, .. } => {
                    answer.ended = told.at;
                    answer.tokens += tokens.len() as u64;
                    answer.arrivals.push((answer.ended, tokens.len() as u64));
                    counted.fetch_add(tokens.len() as u64, Ordering::Relaxed);
                    for token in tokens {
                        written[token.model.index()] += 1;
                        reply.tokens.push(token.token);
                    }
                }
                Event::Finished { handoffs, .. } => {
                    answer.handoffs = Some(u64::from(handoffs));
                    return Ok(());
                }
                Event::Failed(error) => return Err(error.to_string()),
            }
        }
    }
}
