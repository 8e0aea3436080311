//! Routes that change while requests are under way.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Mutex;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tokenrouter_plugin_api::random::uniform;
use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, Handoff, ModelIndex, PeerView, RequestView, Requirements, RouteBatch, Slot,
};

use super::*;
use crate::policy::{PolicyFactory, PolicyFailure, PolicyInstance};
use crate::runner::net::{MakeReady, Net, NetId, ReadyNet};

const V: &str = "v.safetensors";
const W: &str = "w.safetensors";
const X: &str = "x.safetensors";

/// Hands over after every so many tokens, and has a router network if a file is named.
#[derive(Clone)]
struct Every {
    tokens: u32,
    weights: Option<&'static str>,
    /// As many as there are instances, and one for each that is kept here.
    alive: Arc<()>,
}

struct Instance {
    tokens: u32,
    own: u32,
    wanted: Requirements,
    _alive: Arc<()>,
}

impl Every {
    fn new(tokens: u32) -> Self {
        Self { tokens, weights: None, alive: Arc::default() }
    }

    fn with_net(tokens: u32, weights: &'static str) -> Self {
        Self { weights: Some(weights), ..Self::new(tokens) }
    }

    fn instances(&self) -> usize {
        Arc::strong_count(&self.alive) - 1
    }

    /// A route with the name `name` and this policy. The clone of it is not counted.
    fn route(&self, name: &str, directory: &Path) -> Box<RouteSetup> {
        Box::new(RouteSetup {
            name: name.into(),
            models: vec![(ModelId(0), "a".into()), (ModelId(1), "b".into())],
            entry: 0,
            policy: Arc::new(Factory(self.tokens, self.weights, Arc::downgrade(&self.alive))),
            settings: "{}".into(),
            on_error: OnError::FailRequest,
            excluded: Vec::new(),
            directory: directory.into(),
        })
    }
}

struct Factory(u32, Option<&'static str>, std::sync::Weak<()>);

impl PolicyFactory for Factory {
    fn name(&self) -> &str {
        "every"
    }
    fn settings_schema(&self) -> &str {
        "{}"
    }
    fn create(&self, context: &Context<'_>, _: &str) -> Result<Box<dyn PolicyInstance>, PolicyFailure> {
        let refused = PolicyFailure { plugin: "every".into(), hook: "create", message: "0 tokens".into() };
        let mut wanted = Requirements::default();
        if let Some(weights) = self.1 {
            let mut net = tokenrouter_plugin_api::net::Net::new("score", weights);
            let hidden = net.hidden();
            net.linear(hidden, "gate");
            wanted.nets.push(net);
        }
        let alive = self.2.upgrade().ok_or_else(|| refused.clone())?;
        // Refused at the second model, when there is something to undo at the first.
        if self.0 == 0 && context.model == 1 {
            return Err(refused);
        }
        Ok(Box::new(Instance { tokens: self.0, own: context.model, wanted, _alive: alive }))
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

struct World {
    engine: Engine,
    held: Vec<Arc<Mutex<HashSet<NetId>>>>,
    armed: Arc<AtomicBool>,
    directory: tempfile::TempDir,
}

impl World {
    /// Two models that have room for so many nets.
    fn new(room: usize) -> Self {
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

    fn set(&self, routes: &[(&str, &Every)]) -> Result<RouteChanges, StartError> {
        let new = |&(name, policy): &(&str, &Every)| Wanted::New(policy.route(name, self.directory.path()));
        self.engine.set_routes(routes.iter().map(new).collect())
    }

    /// Nothing but `routes` and the bare models is known anywhere, and no net but `nets` at each model.
    fn settles(&self, routes: usize, nets: usize) {
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

fn text(stream: &mut RequestStream) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    loop {
        match stream.events.blocking_recv().expect("a stream ends with its last event").event {
            Event::Committed { tokens: new, .. } => tokens.extend(new.iter().map(|committed| committed.token)),
            Event::PromptCached { .. } => {}
            Event::Finished { .. } => return tokens,
            Event::Failed(error) => panic!("{error}"),
        }
    }
}

/// What a policy gives alone.
fn alone(tokens: u32, length: u32) -> Vec<TokenId> {
    let world = World::new(0);
    world.set(&[("r", &Every::new(tokens))]).unwrap();
    text(&mut world.engine.submit(request(&world.engine, "r", length)).unwrap())
}

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| (*name).into()).collect()
}

#[test]
fn requests_end_under_the_policy_they_began_with() {
    let world = World::new(0);
    let (two, three) = (Every::new(2), Every::new(3));
    let changes = world.set(&[("r", &two), ("s", &two)]).unwrap();
    assert_eq!(changes, RouteChanges { added: names(&["r", "s"]), ..RouteChanges::default() });
    let mut before: Vec<_> = (0..3).map(|_| world.engine.submit(request(&world.engine, "r", 3000)).unwrap()).collect();
    let kept = Wanted::AsServed("s".into());
    let new = Wanted::New(three.route("r", world.directory.path()));
    let changes = world.engine.set_routes(vec![new, kept]).unwrap();
    assert_eq!((changes.changed, changes.unchanged), (names(&["r"]), names(&["s"])));
    assert_eq!((changes.added, changes.removed), (vec![], vec![]));
    let draining = world.engine.known_routes().into_iter().find(|route| route.state == RouteState::Draining).unwrap();
    assert_eq!((&*draining.info.name, draining.requests), ("r", 3));
    let mut after = world.engine.submit(request(&world.engine, "r", 60)).unwrap();
    assert_eq!(text(&mut after), alone(3, 60));
    let want = alone(2, 3000);
    before.iter_mut().for_each(|stream| assert!(text(stream) == want));
    world.settles(2, 0);
    assert_eq!((two.instances(), three.instances()), (2, 2));
}

#[test]
fn a_removed_route_drains_and_is_gone() {
    let world = World::new(0);
    let two = Every::new(2);
    world.set(&[("r", &two)]).unwrap();
    let mut running = world.engine.submit(request(&world.engine, "r", 3000)).unwrap();
    let late = request(&world.engine, "r", 40);
    let held = world.engine.route("r").unwrap();
    let changes = world.set(&[]).unwrap();
    assert_eq!(changes, RouteChanges { removed: names(&["r"]), ..RouteChanges::default() });
    assert!(world.engine.route("r").is_none());
    // Whoever looked it up before still has it.
    let mut prepared = world.engine.submit(late.clone()).unwrap();
    assert_eq!(text(&mut prepared), alone(2, 40));
    drop(held);
    assert_eq!(text(&mut running).len(), 3000);
    world.settles(0, 0);
    assert_eq!(two.instances(), 0);
    assert_eq!(world.engine.submit(late).err(), Some(SubmitError::NoRoute));
}

/// The client that is gone takes its route with it, too.
#[test]
fn cancelled_requests_hold_no_route() {
    let world = World::new(0);
    let two = Every::new(2);
    world.set(&[("r", &two)]).unwrap();
    let streams: Vec<_> = (0..8).map(|_| world.engine.submit(request(&world.engine, "r", 50_000)).unwrap()).collect();
    world.set(&[]).unwrap();
    drop(streams);
    world.settles(0, 0);
    assert_eq!(two.instances(), 0);
}

#[test]
fn what_is_refused_changes_nothing() {
    let world = World::new(2);
    let (two, bad, wide) = (Every::with_net(2, V), Every::with_net(0, W), Every::with_net(2, X));
    world.set(&[("r", &two)]).unwrap();
    let refused = |routes: &[(&str, &Every)]| {
        let error = world.set(routes).unwrap_err().to_string();
        world.settles(1, 1);
        error
    };
    let error = refused(&[("q", &wide), ("r", &bad)]);
    assert_eq!(error, "route `r`, model `m1`: policy `every` refuses to start: 0 tokens");
    let error = refused(&[("r", &two), ("m0", &two)]);
    assert_eq!(error, "route `m0`: the name is taken by another route or a model; choose another");
    // Two more nets than there is room for.
    let error = refused(&[("a", &Every::with_net(5, W)), ("b", &Every::with_net(5, X))]);
    assert_eq!(error, "route `b`, model `m0`: no room");
    let error = world.engine.set_routes(vec![Wanted::AsServed("q".into())]).unwrap_err();
    assert_eq!(error.to_string(), "route `q`: it is not served, so it cannot be kept");
    assert_eq!((two.instances(), bad.instances(), wide.instances()), (2, 0, 0));
    assert_eq!(text(&mut world.engine.submit(request(&world.engine, "r", 60)).unwrap()), alone(2, 60));
}

#[test]
fn nets_are_shared_and_given_up() {
    let world = World::new(3);
    let [v, w, x] = [V, W, X].map(|weights| Every::with_net(2, weights));
    world.set(&[("r", &v), ("s", &v), ("t", &w)]).unwrap();
    world.settles(3, 2);
    let mut running = world.engine.submit(request(&world.engine, "r", 3000)).unwrap();
    // `v` is in use by a request, `w` is taken over, `x` is new.
    world.set(&[("s", &w), ("t", &x)]).unwrap();
    assert_eq!(world.engine.nets(ModelId(0)), 3);
    assert_eq!(text(&mut running).len(), 3000);
    world.settles(2, 2);
    // The same file with other numbers is another net.
    std::fs::copy(world.directory.path().join(V), world.directory.path().join(X)).unwrap();
    world.set(&[("t", &x)]).unwrap();
    world.settles(1, 1);
    world.set(&[]).unwrap();
    world.settles(0, 0);
}

#[test]
fn a_runner_that_takes_no_nets_later_says_so() {
    let world = World::new(0);
    let error = world.set(&[("r", &Every::with_net(2, V))]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "route `r`, model `m0`: net `score`: the model's runner takes router networks at its start alone; restart the server"
    );
    world.settles(0, 0);
}

#[test]
fn a_model_that_is_gone_holds_nothing_up() {
    let world = World::new(0);
    let (two, three) = (Every::new(2), Every::new(3));
    world.set(&[("r", &two)]).unwrap();
    world.armed.store(true, Ordering::Relaxed);
    let mut hit = world.engine.submit(request(&world.engine, "r", 3000)).unwrap();
    assert!(matches!(last(&mut hit), Event::Failed(RequestError::ModelDown(_))));
    let changes = world.set(&[("r", &three)]).unwrap();
    assert_eq!(changes.changed, names(&["r"]));
    wait_for(|| world.engine.known_routes().len() == 3 && two.instances() == 0);
    assert!(matches!(world.engine.submit(request(&world.engine, "r", 5)), Err(SubmitError::ModelDown(_))));
}

/// Ends the clients however the test ends.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Clients that come and go on threads of their own while routes change at random.
#[test]
fn random_changes_under_random_load() {
    const PERIODS: u32 = 4;
    let world = World::new(1 << 20);
    let files = [V, W, X];
    let texts: Vec<_> = (1..=PERIODS).map(|tokens| alone(tokens, 300)).collect();
    let periods: Mutex<HashMap<RouteId, u32>> = Mutex::default();
    let (done, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    let every: Vec<_> = (1..=PERIODS).map(|tokens| Every::with_net(tokens, files[tokens as usize % 3])).collect();
    std::thread::scope(|scope| {
        let _stop = Stop(&done);
        for client in 0..6 {
            let (world, texts, periods, done, answers) = (&world, &texts, &periods, &done, &answers);
            scope.spawn(move || {
                let mut draws = 0;
                let mut draw = |below: f64| {
                    draws += 1;
                    (uniform(client, draws, 1 << 20) * below) as usize
                };
                while !done.load(Ordering::Relaxed) {
                    let Some(route) = world.engine.route(["r", "s"][draw(2.0)]) else { continue };
                    let length = 1 + draw(300.0);
                    let new = NewRequest { route: route.id, ..request(&world.engine, "m0", length as u32) };
                    let mut stream = world.engine.submit(new).unwrap();
                    let id = route.id;
                    drop(route);
                    if draw(4.0) > 0 {
                        let got = text(&mut stream);
                        // Entered right after the change.
                        wait_for(|| periods.lock().unwrap().contains_key(&id));
                        let period = periods.lock().unwrap()[&id];
                        assert!(got == texts[period as usize - 1][..length], "not the text of its policy");
                        answers.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let mut changes = 0;
        let mut draws = 0;
        while changes < 300 || answers.load(Ordering::Relaxed) < 100 {
            let mut draw = |below: f64| {
                draws += 1;
                (uniform(77, draws, 1 << 20) * below) as usize
            };
            let pick = |name| (draw(5.0) > 0).then(|| (name, &every[draw(4.0)]));
            let wanted: Vec<(&str, &Every)> = ["r", "s"].into_iter().filter_map(pick).collect();
            world.set(&wanted).unwrap();
            let mut periods = periods.lock().unwrap();
            for (name, policy) in wanted {
                periods.insert(world.engine.find_route(name).unwrap(), policy.tokens);
            }
            changes += 1;
        }
    });
    world.set(&[]).unwrap();
    world.settles(0, 0);
    assert!(every.iter().all(|policy| policy.instances() == 0));
}
