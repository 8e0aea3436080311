//! Models that are each served alone over HTTP, in this process, as people serve them without a router.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::http::Client;
use crate::api::{self, AppState, SamplingDefaults};
use crate::engine::Engine;
use crate::runner::Runner;
use crate::text::ModelText;

/// Time that connections have to close.
const CLOSING: Duration = Duration::from_secs(2);

pub struct Servers {
    runtime: Runtime,
    /// By model.
    servers: Vec<Server>,
}

struct Server {
    engine: Arc<Engine>,
    client: Arc<Client>,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<io::Result<()>>,
}

impl Servers {
    /// Each engine on a port of its own, with its model's text.
    pub fn start(engines: Vec<(Engine, Arc<ModelText>)>) -> Result<Self, String> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(|e| e.to_string())?;
        let start = |(engine, text): (Engine, Arc<ModelText>)| {
            let engine = Arc::new(engine);
            let state = Arc::new(AppState::new(engine.clone(), vec![text], vec![SamplingDefaults::default()]));
            let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).map_err(|e| e.to_string())?;
            let address = listener.local_addr().map_err(|e| e.to_string())?;
            let (stop, stopped) = oneshot::channel::<()>();
            let serving = runtime.spawn(api::serve(listener, state, async { drop(stopped.await) }));
            let client = Arc::new(Client::new(&format!("http://{address}"), None)?);
            Ok(Server { engine, client, stop, serving })
        };
        let servers = engines.into_iter().map(start).collect::<Result<_, String>>()?;
        Ok(Self { runtime, servers })
    }

    /// Clients of the servers, by model, and what runs them.
    pub fn clients(&self) -> (Vec<Arc<Client>>, Handle) {
        (self.servers.iter().map(|server| server.client.clone()).collect(), self.runtime.handle().clone())
    }

    /// End them, and give the runners back, by model. `None` for a model that went down, or whose server does not
    /// let go of it.
    pub fn stop(self) -> Vec<Option<Box<dyn Runner>>> {
        let mut engines = Vec::with_capacity(self.servers.len());
        for Server { engine, stop, serving, .. } in self.servers {
            drop(stop);
            // A server that fails to end keeps its engine; that shows below.
            let _ = self.runtime.block_on(serving);
            engines.push(engine);
        }
        self.runtime.shutdown_timeout(CLOSING);
        engines.into_iter().map(|engine| Arc::try_unwrap(engine).ok()?.stop().pop().flatten()).collect()
    }
}
