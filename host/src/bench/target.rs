//! Who answers a load.

use std::sync::atomic::AtomicU64;

use super::ask::{Answer, Ask, Reply, Until};
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

    /// Ask and wait for the end, or until the time is over. `told` counts the tokens as they come.
    pub async fn answer(&self, ask: &Ask, told: &AtomicU64, until: Until) -> (Answer, Reply) {
        match self {
            Self::InProcess(engine) => engine.answer(ask, told, until).await,
            Self::Dispatcher(dispatcher) => dispatcher.answer(ask, told, until).await,
            Self::Url(server) => server.answer(ask, told, until).await,
        }
    }
}
