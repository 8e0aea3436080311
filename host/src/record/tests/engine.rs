//! A whole engine on simulated models, recorded.

use std::collections::BTreeMap;
use std::sync::Mutex;

use tokenrouter_plugin_api::{
    Context, Decision, Handoff, ModelIndex, NO_TOKEN, Policy, PolicyError, RequestView, Requirements, RouteBatch,
    SignalSet,
};

use super::*;
use crate::engine::{Engine, ModelSetup, OnError, RouteSetup, TokenText};
use crate::policy::monitor::DEFAULT_BUDGET;
use crate::policy::overrides::Overrides;
use crate::policy::{Linked, PolicyFactory};
use crate::request::{Committed, RequestId, TokenId};
use crate::subserver::gate::Schedule;
use crate::subserver::observe::{Evaluation, Wanted};

/// The first model's unsure candidates are dropped and the second writes two tokens; some are replaced.
pub(super) struct Hop(ModelIndex);

impl Policy for Hop {
    const NAME: &'static str = "hop";
    fn create(ctx: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self(ctx.model))
    }
    fn requirements(&self) -> Requirements {
        let mut wanted = Requirements::signals(SignalSet::ENTROPY);
        wanted.token_logits = vec![5];
        wanted
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (row, decision) in out.iter_mut().enumerate() {
            if self.0 == 0 && batch.signals.entropy[row] > 0.5 {
                *decision = Decision::to(1);
            } else if batch.positions[row].is_multiple_of(5) {
                *decision = Decision::STAY.replacing(7);
            }
        }
    }
    fn send(&mut self, _: &RequestView<'_>, _: ModelIndex) -> Handoff {
        Handoff::drop_candidate().budget(2)
    }
}

/// Every token from the next model.
pub(super) struct Turns(ModelIndex);

impl Policy for Turns {
    const NAME: &'static str = "turns";
    fn create(ctx: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self((ctx.model + 1) % ctx.models.len() as u32))
    }
    fn route(&mut self, _: &RouteBatch<'_>, out: &mut [Decision]) {
        out.fill(Decision::to(self.0));
    }
}

/// The first model drafts three tokens, the second verifies them and keeps those with even ids.
pub(super) struct Speculate(ModelIndex);

impl Policy for Speculate {
    const NAME: &'static str = "speculate";
    fn create(ctx: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self(ctx.model))
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (row, decision) in out.iter_mut().enumerate() {
            let draft = batch.drafts[row];
            *decision = match self.0 {
                0 if batch.positions[row] % 4 < 3 => Decision::DRAFT,
                0 => Decision::to(1),
                _ if draft != NO_TOKEN && draft.is_multiple_of(2) => Decision::ACCEPT,
                _ => Decision::to(0),
            };
        }
    }
    fn send(&mut self, _: &RequestView<'_>, to: ModelIndex) -> Handoff {
        if to == 1 { Handoff::default().verify() } else { Handoff::default() }
    }
}

struct NoText;
impl TokenText for NoText {
    fn token_bytes(&self, _: TokenId) -> Option<Vec<u8>> {
        None
    }
    fn token_id(&self, _: &str) -> Option<TokenId> {
        None
    }
}

fn setup_of(name: &str, models: &[u32], policy: Arc<dyn PolicyFactory>) -> RouteSetup {
    RouteSetup {
        name: name.into(),
        models: models.iter().map(|&m| (ModelId(m), format!("role{m}"))).collect(),
        entry: 0,
        policy,
        settings: "{}".into(),
        overrides: Overrides::default(),
        on_error: OnError::FailRequest,
        budget: DEFAULT_BUDGET,
        excluded: Vec::new(),
        directory: PathBuf::new(),
    }
}

/// Three models under `hop`, `turns` and `speculate`, watched by `observer`.
pub(super) fn engine(observer: Arc<dyn Observer>) -> Engine {
    let models = (0..3).map(|index| ModelSetup {
        masked: Vec::new(),
        runner: Box::new(model(index)),
        text: Arc::new(NoText),
        min_batch: vec![1],
        max_wait: Duration::from_millis(5),
        hold: Duration::ZERO,
        max_rows: 256,
        prefill_chunk: 64,
        prefix_cache: true,
    });
    let routes = vec![
        setup_of("hop", &[0, 2], Arc::new(Linked::<Hop>::default())),
        setup_of("turns", &[2, 1, 0], Arc::new(Linked::<Turns>::default())),
        setup_of("speculate", &[1, 2], Arc::new(Linked::<Speculate>::default())),
    ];
    Engine::start_observed(models.collect(), routes, Schedule::default(), Some(observer)).unwrap()
}

pub(super) fn routes() -> Vec<Route> {
    let named = [route("hop", &[0, 2], true), route("turns", &[2, 1, 0], true), route("speculate", &[1, 2], true)];
    let alone = [0, 1, 2].map(|m| Route { plugin: None, ..route(&format!("m/{m}"), &[m], m != 1) });
    named.into_iter().chain(alone).collect()
}

/// Every token, its writer and its evaluation agree, for every request of every route.
#[test]
fn every_token_has_its_evaluation() {
    let directory = tempfile::tempdir().unwrap();
    let recording = Recording::start(setup(directory.path(), settings(1 << 30, 100), 3, routes())).unwrap();
    let engine = engine(recording.observer());
    let mut answers = BTreeMap::new();
    let streams: Vec<_> = (0..30).map(|i| (i % 6, engine.submit(request(i % 6, i / 6, 20 + i)).unwrap())).collect();
    for (route, mut stream) in streams {
        let mut tokens: Vec<Committed> = Vec::new();
        let handoffs = loop {
            match stream.events.blocking_recv().unwrap().event {
                Event::PromptCached { .. } | Event::PromptScored { .. } => {}
                Event::Committed { tokens: more, .. } => tokens.extend(more),
                Event::Finished { reason, handoffs } => {
                    assert_eq!(reason, FinishReason::Length);
                    break handoffs;
                }
                Event::Failed(error) => panic!("{error}"),
            }
        };
        answers.insert(stream.id, (route, tokens, handoffs));
    }
    let cancelled = engine.submit(request(1, 0, 5000)).unwrap().id;
    drop(engine);
    let run = recording.directory().clone();
    drop(recording);

    let manifest = manifest(&run);
    assert_eq!((manifest.stopped.as_deref(), manifest.dropped_rows), (Some("shutdown"), 0));
    assert_eq!(manifest.models.iter().map(|m| m.files.as_str()).collect::<Vec<_>>(), ["m_0", "m_1", "m_2"]);
    let lines: BTreeMap<u64, RequestLine> = lines(&run).into_iter().map(|line| (line.id, line)).collect();
    let mut evaluations: BTreeMap<(i64, usize, i32), Vec<Evaluated>> = BTreeMap::new();
    for row in rows(&run) {
        assert_ne!(row.route, 4, "this route is not recorded");
        match (row.route, row.token_logit) {
            // The simulated runner gives the same number for each signal of a row.
            (0, logit) => assert_eq!(logit, Some(row.entropy)),
            (_, logit) => assert!(logit.is_none_or(f32::is_nan), "{row:?}"),
        }
        evaluations.entry((row.request, row.model, row.position)).or_default().push(row);
    }
    evaluations.values_mut().for_each(|rows| rows.sort_by_key(|row| row.time_us));
    let mut decisions = [0; 5];
    for (id, (route, tokens, handoffs)) in &answers {
        let Some(line) = lines.get(id) else {
            assert_eq!(*route, 4);
            continue;
        };
        let ids: Vec<u32> = tokens.iter().map(|t| t.token).collect();
        let writers: Vec<u32> = tokens.iter().map(|t| t.model.0).collect();
        assert_eq!((line.token_ids.as_ref(), &line.writers), (Some(&ids), &writers));
        assert_eq!((line.route, line.end.as_str(), line.handoffs), (*route, "length", Some(*handoffs)));
        assert_eq!(line.prompt_ids.as_ref().map(Vec::len), Some(3));
        let mut in_a_row = 0;
        for (position, token) in (0..).zip(tokens) {
            let goes_on = position > 0 && writers[position as usize - 1] == token.model.0;
            in_a_row = if goes_on { in_a_row + 1 } else { 1 };
            let of = |model: usize| evaluations.get(&(*id as i64, model, position)).map_or(&[][..], Vec::as_slice);
            let by_writer = of(token.model.index());
            // Only drafts that were rejected are evaluated again.
            assert!(*route == 2 || by_writer.len() == 1, "{position}: {by_writer:?}");
            let kept = by_writer.last().unwrap();
            let written = if kept.replacement >= 0 { kept.replacement } else { kept.candidate };
            assert_eq!(written, token.token as i32, "{kept:?}");
            decisions[usize::from(kept.decision)] += 1;
            match route {
                1 => assert_eq!((kept.decision, kept.decision_model), (2, [2, 0, 1][kept.model])),
                2 if token.model.0 == 1 && kept.decision == 1 => {
                    let verified = |row: &Evaluated| row.decision == 3 && row.draft == token.token as i32;
                    // The last tokens of a request are committed without the verifier.
                    assert!(of(2).iter().any(verified) || position + 4 > tokens.len() as i32, "{position}");
                }
                2 => {}
                // The second token of each visit goes back unasked.
                0 if token.model.0 == 2 => assert_eq!(kept.decision, [4, 0][in_a_row % 2], "{kept:?}"),
                0 => assert_eq!(kept.decision, 0, "{kept:?}"),
                _ => assert_eq!(kept.decision, 4, "{kept:?}"),
            }
        }
    }
    assert!([0, 1, 2, 4].iter().all(|&code| decisions[code] > 0), "{decisions:?}");
    assert!(evaluations.values().flatten().any(|row| row.decision == 3));
    assert!(matches!(lines[&cancelled].end.as_str(), "cancelled"), "{:?}", lines[&cancelled]);
    assert_eq!(lines.len(), 26);
}

/// What is made anew under its name goes on in the recording as the route that it was.
#[test]
fn a_route_that_is_made_anew_is_recorded_as_before() {
    let directory = tempfile::tempdir().unwrap();
    let recording = Recording::start(setup(directory.path(), settings(1 << 30, 100), 3, routes())).unwrap();
    let engine = engine(recording.observer());
    let mut ids = Vec::new();
    for _ in 0..3 {
        let route = engine.find_route("turns").unwrap();
        let mut stream = engine.submit(NewRequest { route, ..request(1, 1, 20) }).unwrap();
        while !matches!(stream.events.blocking_recv().unwrap().event, Event::Finished { .. }) {}
        ids.push(stream.id);
        let turns = Arc::new(Linked::<Turns>::default());
        let names = ["hop", "speculate"].map(|name| crate::engine::Wanted::AsServed(name.into()));
        let anew = crate::engine::Wanted::New(Box::new(setup_of("turns", &[2, 1, 0], turns)));
        engine.set_routes(names.into_iter().chain([anew]).collect()).unwrap();
        assert_ne!(engine.find_route("turns"), Some(route));
    }
    drop(engine);
    let run = recording.directory().clone();
    drop(recording);
    let lines = lines(&run);
    assert_eq!(
        lines.iter().map(|line| (line.id, line.route)).collect::<Vec<_>>(),
        ids.iter().map(|&id| (id, 1)).collect::<Vec<_>>()
    );
    let rows = rows(&run);
    for id in ids {
        let positions = rows.iter().filter(|row| row.request == id as i64 && row.route == 1).count();
        assert_eq!(positions, 20);
    }
}

/// Wants nothing computed; counts the evaluations by the scalar signals that were there.
#[derive(Default)]
struct Modest(Mutex<BTreeMap<u32, usize>>);

impl Observer for Modest {
    fn wanted(&self) -> Wanted {
        Wanted::default()
    }
    fn evaluated(&self, evaluation: &Evaluation<'_>) {
        *self.0.lock().unwrap().entry(evaluation.computed.scalars.bits()).or_default() += 1;
    }
    fn submitted(&self, _: RequestId, _: &NewRequest) {}
    fn event(&self, _: RequestId, _: &Event) {}
    fn cancelled(&self, _: RequestId) {}
}

/// As a recording that has stopped is.
#[test]
fn an_observer_that_wants_nothing_costs_nothing() {
    let modest = Arc::new(Modest::default());
    let engine = engine(modest.clone());
    for (route, signals) in [(0, SignalSet::ENTROPY), (3, SignalSet::default())] {
        let mut stream = engine.submit(request(route, 1, 20)).unwrap();
        while !matches!(stream.events.blocking_recv().unwrap().event, Event::Finished { .. }) {}
        let seen = std::mem::take(&mut *modest.0.lock().unwrap());
        assert!(seen.keys().eq([&signals.bits()]) && seen[&signals.bits()] >= 20, "{seen:?}");
    }
}
