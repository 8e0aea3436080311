//! Two models that take nets, and a policy to change.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Mutex;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, Handoff, ModelIndex, PeerView, RequestView, Requirements, RouteBatch, Slot,
};

use super::super::*;
use crate::policy::overrides::{Key, Overrides};
use crate::policy::{PolicyFactory, PolicyFailure, PolicyInstance};
use crate::runner::net::{MakeReady, Net, NetId, ReadyNet};

pub const V: &str = "v.safetensors";
pub const W: &str = "w.safetensors";
pub const X: &str = "x.safetensors";

/// Hands over after every so many tokens, and has a router network if a file is named. Takes no 0, panics as it is made
/// with 13, and fails in `route` with 99.
#[derive(Clone)]
pub struct Every {
    pub tokens: u32,
    weights: Option<&'static str>,
    /// What requests may set.
    overrides: Overrides,
    pub on_error: OnError,
    /// As many as there are instances, and one for each that is kept here.
    alive: Arc<()>,
    /// This hook of its instances waits while it is set.
    pub holds: Holds,
}

/// A hook that waits.
#[derive(Clone, Default)]
pub struct Holds {
    hook: Arc<Mutex<Option<Hook>>>,
    waits: Arc<AtomicBool>,
}

impl Holds {
    pub fn set(&self, hook: Option<Hook>) {
        *self.hook.lock().unwrap() = hook;
    }

    /// Whether some instance has come there.
    pub fn waits(&self) -> bool {
        self.waits.load(Ordering::Relaxed)
    }

    fn reach(&self, hook: Hook) {
        while *self.hook.lock().unwrap() == Some(hook) {
            self.waits.store(true, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

struct Instance {
    tokens: u32,
    own: u32,
    wanted: Requirements,
    _alive: Arc<()>,
    holds: Holds,
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.holds.reach(Hook::Drop);
    }
}

impl Every {
    pub fn new(tokens: u32) -> Self {
        let (overrides, on_error) = (Overrides::default(), OnError::FailRequest);
        Self { tokens, weights: None, overrides, on_error, alive: Arc::default(), holds: Holds::default() }
    }

    pub fn with_net(tokens: u32, weights: &'static str) -> Self {
        Self { weights: Some(weights), ..Self::new(tokens) }
    }

    /// Requests may set these, and there are at most so many variants.
    pub fn letting(self, keys: &[&str], max_variants: usize) -> Self {
        let keys = keys.iter().map(|key| Key::parse(key).unwrap()).collect();
        Self { overrides: Overrides { keys, max_variants }, ..self }
    }

    pub fn instances(&self) -> usize {
        Arc::strong_count(&self.alive) - 1
    }

    /// A route with the name `name` and this policy. The clone of it is not counted.
    pub fn route(&self, name: &str, directory: &Path) -> Box<RouteSetup> {
        Box::new(RouteSetup {
            name: name.into(),
            models: vec![(ModelId(0), "a".into()), (ModelId(1), "b".into())],
            entry: 0,
            policy: Arc::new(Factory(Arc::downgrade(&self.alive), self.holds.clone())),
            settings: json!({"tokens": self.tokens, "weights": self.weights}).to_string(),
            overrides: self.overrides.clone(),
            on_error: self.on_error,
            budget: crate::policy::monitor::DEFAULT_BUDGET,
            excluded: Vec::new(),
            directory: directory.into(),
        })
    }
}

struct Factory(std::sync::Weak<()>, Holds);

impl PolicyFactory for Factory {
    fn name(&self) -> &str {
        "every"
    }
    fn settings_schema(&self) -> &str {
        r#"{"properties": {"tokens": {"type": "integer", "minimum": 0, "maximum": 1000}, "weights": {}}}"#
    }
    fn create(&self, context: &Context<'_>, settings: &str) -> Result<Box<dyn PolicyInstance>, PolicyFailure> {
        self.1.reach(Hook::Create);
        let settings: Value = serde_json::from_str(settings).unwrap();
        let tokens = settings["tokens"].as_u64().unwrap() as u32;
        let refused = |message: &str| PolicyFailure { plugin: "every".into(), hook: "create", message: message.into() };
        let mut wanted = Requirements::default();
        if let Some(weights) = settings["weights"].as_str() {
            let mut net = tokenrouter_plugin_api::net::Net::new("score", weights);
            let hidden = net.hidden();
            net.linear(hidden, "gate");
            wanted.nets.push(net);
        }
        let alive = self.0.upgrade().ok_or_else(|| refused("it is gone"))?;
        // Refused at the second model, when there is something to undo at the first.
        match tokens {
            0 if context.model == 1 => return Err(refused("0 tokens")),
            13 => return Err(refused("panicked: 13 tokens")),
            _ => {}
        }
        Ok(Box::new(Instance { tokens, own: context.model, wanted, _alive: alive, holds: self.1.clone() }))
    }
}

impl PolicyInstance for Instance {
    fn requirements(&self) -> &Requirements {
        &self.wanted
    }
    fn entry(&mut self, _: &RequestView<'_>) -> Result<Option<ModelIndex>, PolicyFailure> {
        Ok(None)
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) -> Result<(), PolicyFailure> {
        self.holds.reach(Hook::Route);
        if self.tokens == 99 {
            return Err(PolicyFailure { plugin: "every".into(), hook: "route", message: "99 tokens".into() });
        }
        for (out, position) in out.iter_mut().zip(batch.positions) {
            if position % self.tokens == self.tokens - 1 {
                *out = Decision::to(1 - self.own);
            }
        }
        Ok(())
    }
    fn send(&mut self, _: &RequestView<'_>, _: ModelIndex) -> Result<Handoff, PolicyFailure> {
        Ok(Handoff::default())
    }
    fn receive(&mut self, _: &RequestView<'_>, _: &PeerView<'_>) -> Result<Acceptance, PolicyFailure> {
        Ok(Acceptance::Verify)
    }
    fn finished(&mut self, _: Slot) -> Result<(), PolicyFailure> {
        Ok(())
    }
}

/// A simulated model that takes nets and insists on those that are named.
struct Netted {
    inner: SimulatedRunner,
    nets: HashMap<NetId, Net>,
    /// Refuses nets once it has so many.
    room: usize,
    /// Panics outside a forward once it is armed.
    armed: Arc<AtomicBool>,
    held: Arc<Mutex<HashSet<NetId>>>,
}

impl Runner for Netted {
    fn info(&self) -> &ModelInfo {
        assert!(!self.armed.load(Ordering::Relaxed), "outside");
        self.inner.info()
    }
    fn load_net(&mut self, net: Net) -> Result<NetId, RunnerError> {
        let id = NetId(self.nets.len() as u32);
        self.place_net(id, ReadyNet::new(net)).map(|()| id)
    }
    fn net_maker(&self) -> Option<MakeReady> {
        (self.room > 0).then_some(ReadyNet::new::<Net>)
    }
    fn place_net(&mut self, id: NetId, net: ReadyNet) -> Result<(), RunnerError> {
        if self.nets.len() >= self.room {
            return Err(RunnerError::new("no room"));
        }
        let before = self.nets.insert(id, net.take().expect("a net of ours"));
        self.held.lock().unwrap().insert(id);
        assert!(before.is_none(), "{id:?} is taken");
        Ok(())
    }
    fn remove_net(&mut self, id: NetId) -> Option<ReadyNet> {
        self.held.lock().unwrap().remove(&id);
        self.nets.remove(&id).map(ReadyNet::new)
    }
    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        for net in batch.sequences.iter().flat_map(|s| s.nets) {
            assert!(self.nets.contains_key(net), "{net:?} is named and not there");
        }
        self.inner.forward(batch)
    }
}

pub struct World {
    pub engine: Engine,
    held: Vec<Arc<Mutex<HashSet<NetId>>>>,
    pub armed: Arc<AtomicBool>,
    pub directory: tempfile::TempDir,
}

impl World {
    /// Two models that have room for so many nets.
    pub fn new(room: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for (name, value) in [(V, 1f32), (W, 2.0), (X, 3.0)] {
            let (value, bias) = (value.to_le_bytes(), [0; 4]);
            let tensors = [
                ("gate.weight", TensorView::new(Dtype::F32, vec![1, 1], &value).unwrap()),
                ("gate.bias", TensorView::new(Dtype::F32, vec![1], &bias).unwrap()),
            ];
            safetensors::serialize_to_file(tensors, None, &directory.path().join(name)).unwrap();
        }
        let armed: Arc<AtomicBool> = Arc::default();
        let held: Vec<Arc<Mutex<HashSet<NetId>>>> = (0..2).map(|_| Arc::default()).collect();
        let models = held.iter().enumerate().map(|(i, held)| ModelSetup {
            masked: vec![],
            runner: Box::new(Netted {
                inner: SimulatedRunner::new(&format!("m{i}"), i as u32, 50, 4096),
                nets: HashMap::new(),
                room,
                armed: if i == 1 { armed.clone() } else { Arc::default() },
                held: held.clone(),
            }),
            text: Arc::new(NoText),
            min_batch: vec![1],
            max_wait: Duration::from_secs(1),
            hold: Duration::ZERO,
            max_rows: 64,
            prefill_chunk: 64,
            prefix_cache: true,
        });
        Self { engine: Engine::start(models.collect(), Vec::new()).unwrap(), held, armed, directory }
    }

    pub fn set(&self, routes: &[(&str, &Every)]) -> Result<RouteChanges, StartError> {
        let new = |&(name, policy): &(&str, &Every)| Wanted::New(policy.route(name, self.directory.path()));
        self.engine.set_routes(routes.iter().map(new).collect())
    }

    /// Nothing but `routes` and the bare models is known anywhere, and no net but `nets` at each model.
    pub fn settles(&self, routes: usize, nets: usize) {
        let settled = || {
            let known = self.engine.known_routes();
            let at = |model| self.engine.snapshot(ModelId(model));
            known.len() == routes + 2
                && known.iter().all(|route| route.state == RouteState::Serving && route.requests == 0)
                && (0..2).all(|m| at(m).routes == routes + 1 && (at(m).replicas, at(m).policy_slots) == (0, 0))
                && (0..2).all(|m| {
                    self.engine.nets(ModelId(m)) == nets && self.held[m as usize].lock().unwrap().len() == nets
                })
        };
        wait_for(settled);
    }
}

pub fn text(stream: &mut RequestStream) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    loop {
        match stream.events.blocking_recv().expect("a stream ends with its last event").event {
            Event::Committed { tokens: new, .. } => tokens.extend(new.iter().map(|committed| committed.token)),
            Event::PromptCached { .. } | Event::PromptScored { .. } => {}
            Event::Finished { .. } => return tokens,
            Event::Failed(error) => panic!("{error}"),
        }
    }
}

/// What a policy gives alone.
pub fn alone(tokens: u32, length: u32) -> Vec<TokenId> {
    let world = World::new(0);
    world.set(&[("r", &Every::new(tokens))]).unwrap();
    text(&mut world.engine.submit(request(&world.engine, "r", length)).unwrap())
}
