//! Who answers a load.

use std::sync::atomic::AtomicU64;

use super::ask::{Answer, Ask, Reply};
use super::dispatcher::Dispatcher;
use super::in_process::InProcess;
use super::openai::OpenAi;

pub enum Target {
    /// A route of an engine in this process.
    InProcess(InProcess),
    /// Models that are servers of their own, and a dispatcher outside.
    Dispatcher(Dispatcher),
    /// A server with OpenAI's API.
    Url(OpenAi),
}

impl Target {
    /// Do beforehand what needs no answer to an earlier turn, and refuse what would be refused.
    pub fn prepare(&self, ask: &mut Ask) -> Result<(), String> {
        match self {
            Self::InProcess(engine) => engine.prepare(ask),
            Self::Dispatcher(dispatcher) => dispatcher.prepare(ask),
            Self::Url(_) => Ok(()),
        }
    }

    /// Ask and wait for the end. `told` counts the tokens as they come.
    pub async fn answer(&self, ask: &Ask, told: &AtomicU64) -> (Answer, Reply) {
        match self {
            Self::InProcess(engine) => engine.answer(ask, told).await,
            Self::Dispatcher(dispatcher) => dispatcher.answer(ask, told).await,
            Self::Url(server) => server.answer(ask, told).await,
        }
    }
}
