//! Engines on simulated models that break.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokenrouter_plugin_api::{Context, Decision, Policy, PolicyError, RouteBatch};

use super::*;
use crate::policy::Linked;
use crate::request::FinishReason;
use crate::request::SamplingParams;
use crate::runner::simulated::SimulatedRunner;
use crate::runner::{RowBatch, RowOutputs, RunnerError};

struct NoText;
impl TokenText for NoText {
    fn token_bytes(&self, _: TokenId) -> Option<Vec<u8>> {
        None
    }
    fn token_id(&self, _: &str) -> Option<TokenId> {
        None
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    Error,
    /// Caught around the forward.
    PanicInForward,
    /// The runner can compute nothing any more.
    Fatal,
    /// Ends the model's thread.
    PanicOutside,
}

/// Breaks once `armed`.
struct Breaking {
    inner: SimulatedRunner,
    fault: Fault,
    armed: Arc<AtomicBool>,
}

impl Runner for Breaking {
    fn info(&self) -> &ModelInfo {
        assert!(self.fault != Fault::PanicOutside || !self.armed.load(Ordering::Relaxed), "outside");
        self.inner.info()
    }
    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        if self.armed.load(Ordering::Relaxed) {
            match self.fault {
                Fault::Error => return Err(RunnerError::new("out of memory")),
                Fault::Fatal => return Err(RunnerError::fatal("the device is gone")),
                Fault::PanicInForward => panic!("inside"),
                Fault::None | Fault::PanicOutside => {}
            }
        }
        self.inner.forward(batch)
    }
}

/// Two models; the second has the fault.
fn engine(fault: Fault) -> (Engine, Arc<AtomicBool>) {
    let armed = Arc::new(AtomicBool::new(false));
    let models = [Fault::None, fault].into_iter().enumerate().map(|(i, fault)| ModelSetup {
        masked: vec![],
        runner: Box::new(Breaking {
            inner: SimulatedRunner::new(&format!("m{i}"), i as u32, 50, 4096),
            fault,
            armed: armed.clone(),
        }),
        text: Arc::new(NoText),
        min_batch: vec![1],
        max_wait: Duration::from_secs(1),
        hold: Duration::ZERO,
        max_rows: 64,
        prefill_chunk: 64,
        prefix_cache: true,
    });
    (Engine::start(models.collect(), Vec::new()).unwrap(), armed)
}

fn request(engine: &Engine, model: &str, max_tokens: u32) -> NewRequest {
    let sampling = SamplingParams { ignore_eos: true, ..SamplingParams::greedy() };
    let route = engine.find_route(model).unwrap();
    NewRequest { route, prompt: vec![1, 2, 3], max_tokens, sampling, return_signals: false, cache_salt: None }
}

fn last(stream: &mut RequestStream) -> Event {
    loop {
        match stream.events.blocking_recv().expect("a stream ends with its last event") {
            Event::PromptCached { .. } | Event::Committed { .. } => {}
            last => return last,
        }
    }
}

fn wait_for(mut is: impl FnMut() -> bool) {
    for _ in 0..5000 {
        if is() {
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    panic!("it never became true");
}

#[test]
fn a_failing_forward_fails_its_requests_and_no_others() {
    for fault in [Fault::Error, Fault::PanicInForward] {
        let (engine, armed) = engine(fault);
        let mut other = engine.submit(request(&engine, "m0", 2000)).unwrap();
        armed.store(true, Ordering::Relaxed);
        let failed = last(&mut engine.submit(request(&engine, "m1", 5)).unwrap());
        assert!(matches!(failed, Event::Failed(RequestError::Model { ref model, .. }) if model == "m1"), "{failed:?}");
        assert!(matches!(last(&mut other), Event::Finished { .. }));
        // The model goes on.
        armed.store(false, Ordering::Relaxed);
        assert!(engine.is_ready());
        let next = last(&mut engine.submit(request(&engine, "m1", 5)).unwrap());
        assert!(matches!(next, Event::Finished { reason: FinishReason::Length, .. }), "{next:?}");
    }
}

#[test]
fn a_model_that_is_down_fails_its_requests_and_takes_no_more() {
    for (fault, message) in [(Fault::Fatal, "the device is gone"), (Fault::PanicOutside, MODEL_PANICKED)] {
        let (engine, armed) = engine(fault);
        let mut hit = [(); 3].map(|()| engine.submit(request(&engine, "m1", 10_000)).unwrap());
        let mut other = engine.submit(request(&engine, "m0", 2000)).unwrap();
        armed.store(true, Ordering::Relaxed);
        let down = ModelDown { model: "m1".into(), message: message.into() };
        for hit in &mut hit {
            assert_eq!(last(hit), Event::Failed(down.clone().into()));
            // Known before the first client hears of it.
            assert_eq!(engine.down_models().collect::<Vec<_>>(), [&down]);
        }
        assert!(!engine.is_ready());
        assert_eq!(engine.submit(request(&engine, "m1", 5)).err(), Some(down.into()));
        assert!(matches!(last(&mut other), Event::Finished { .. }));
        assert!(matches!(last(&mut engine.submit(request(&engine, "m0", 5)).unwrap()), Event::Finished { .. }));
        assert_eq!(engine.live_requests(), 0);
        wait_for(|| {
            let Snapshot { ready, replicas, pages_in_use, .. } = engine.snapshot(ModelId(1));
            (ready, replicas, pages_in_use) == (0, 0, 0)
        });
    }
}

#[test]
fn an_engine_that_ends_tells_its_requests() {
    let (engine, _) = engine(Fault::None);
    let mut streams = [0, 1, 0].map(|m| engine.submit(request(&engine, &format!("m{m}"), 50_000)).unwrap());
    drop(engine);
    for stream in &mut streams {
        assert_eq!(last(stream), Event::Failed(RequestError::ShuttingDown));
    }
}

#[test]
fn requests_can_be_broken_off() {
    let (engine, _) = engine(Fault::None);
    let mut stream = engine.submit(request(&engine, "m0", 50_000)).unwrap();
    engine.stop_accepting();
    assert_eq!(engine.submit(request(&engine, "m0", 5)).err(), Some(SubmitError::ShuttingDown));
    engine.fail_all();
    assert_eq!(last(&mut stream), Event::Failed(RequestError::ShuttingDown));
    wait_for(|| engine.snapshot(ModelId(0)).pages_in_use == 0 && engine.snapshot(ModelId(0)).replicas == 0);
}

#[test]
fn what_cannot_work_is_refused() {
    let (engine, _) = engine(Fault::None);
    let base = request(&engine, "m0", 5);
    let with = |prompt: Vec<u32>, max_tokens| NewRequest { prompt, max_tokens, ..base.clone() };
    assert_eq!(engine.check(&with(vec![], 5)), Err(SubmitError::EmptyPrompt));
    assert_eq!(engine.check(&with(vec![1], 0)), Err(SubmitError::NoTokens));
    assert_eq!(engine.check(&with(vec![50], 5)), Err(SubmitError::TokenOutOfRange { token: 50, vocab: 50 }));
    let long = engine.check(&with(vec![1; 10], 65_530));
    assert_eq!(long, Err(SubmitError::ContextLength { context: 65_536, prompt: 10, max_tokens: 65_530 }));
    assert!(engine.check(&with(vec![1; 10], 65_526)).is_ok());
}

#[test]
fn runners_come_back_for_another_engine() {
    let (engine, _) = engine(Fault::None);
    let greedy = |engine: &Engine| {
        let mut stream = engine.submit(request(engine, "m1", 20)).unwrap();
        let mut tokens = Vec::new();
        while let Some(Event::Committed { tokens: new, .. }) = stream.events.blocking_recv() {
            tokens.extend(new.iter().map(|committed| committed.token));
        }
        tokens
    };
    let before = greedy(&engine);
    let mut running = engine.submit(request(&engine, "m0", 50_000)).unwrap();
    let runners: Vec<_> = engine.stop().into_iter().map(Option::unwrap).collect();
    assert!(matches!(last(&mut running), Event::Failed(RequestError::ShuttingDown)));
    let names: Vec<_> = runners.iter().map(|runner| runner.info().name.clone()).collect();
    assert_eq!(names, ["m0", "m1"]);
    let models = runners.into_iter().map(|runner| ModelSetup {
        masked: vec![],
        runner,
        text: Arc::new(NoText),
        min_batch: vec![1],
        max_wait: Duration::from_secs(1),
        hold: Duration::ZERO,
        max_rows: 64,
        prefill_chunk: 64,
        prefix_cache: true,
    });
    let again = Engine::start(models.collect(), Vec::new()).unwrap();
    assert_eq!(greedy(&again), before);
    assert_eq!(before.len(), 20);
}

#[test]
fn no_runner_comes_back_from_a_model_that_went_down() {
    for fault in [Fault::Fatal, Fault::PanicOutside] {
        let (engine, armed) = engine(fault);
        armed.store(true, Ordering::Relaxed);
        let mut hit = engine.submit(request(&engine, "m1", 10)).unwrap();
        last(&mut hit);
        let runners = engine.stop();
        assert_eq!(runners.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false]);
    }
}

/// Hands every second token to the other model.
struct Alternate {
    own: u32,
}

impl Policy for Alternate {
    const NAME: &'static str = "alternate";
    fn create(context: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self { own: context.model })
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (out, position) in out.iter_mut().zip(batch.positions) {
            if position % 2 == 1 {
                *out = Decision::to(1 - self.own);
            }
        }
    }
}

/// Sees how many forwards are under way at once.
struct Watched {
    inner: SimulatedRunner,
    running: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
}

impl Runner for Watched {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }
    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(running, Ordering::SeqCst);
        std::thread::yield_now();
        let outputs = self.inner.forward(batch);
        self.running.fetch_sub(1, Ordering::SeqCst);
        outputs
    }
}

/// Two models that never wait for long enough to start in spite of their gates, and a route over both.
fn scheduled(schedule: Schedule, min_batch: [Vec<u32>; 2], hold: Duration) -> (Engine, Arc<AtomicUsize>) {
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let models = (0..).zip(min_batch).map(|(i, min_batch)| ModelSetup {
        masked: vec![],
        runner: Box::new(Watched {
            inner: SimulatedRunner::new(&format!("m{i}"), i, 50, 4096),
            running: running.clone(),
            most: most.clone(),
        }),
        text: Arc::new(NoText),
        min_batch,
        max_wait: Duration::from_secs(3600),
        hold,
        max_rows: 64,
        prefill_chunk: 64,
    });
    let route = RouteSetup {
        name: "both".into(),
        models: vec![(ModelId(0), "a".into()), (ModelId(1), "b".into())],
        entry: 0,
        policy: Arc::new(Linked::<Alternate>::default()),
        settings: "{}".into(),
        on_error: OnError::default(),
        excluded: vec![],
        directory: PathBuf::new(),
    };
    (Engine::start_observed(models.collect(), vec![route], schedule, None).unwrap(), most)
}

#[test]
fn every_schedule_ends_every_request() {
    for schedule in Schedule::ALL {
        for hold in [Duration::ZERO, Duration::from_secs(1)] {
            let (engine, most) = scheduled(schedule, [vec![1], vec![1, 2, 3, 4]], hold);
            let names = ["both", "m0", "both", "m1", "both", "both"];
            let mut streams: Vec<_> = (20..)
                .zip(names)
                .map(|(tokens, name)| engine.submit(request(&engine, name, tokens)).unwrap())
                .collect();
            // In the middle of somebody's wait.
            drop(streams.pop());
            for stream in &mut streams {
                let ended = last(stream);
                assert!(
                    matches!(ended, Event::Finished { reason: FinishReason::Length, .. }),
                    "{schedule:?}: {ended:?}"
                );
            }
            let one_at_a_time = matches!(schedule, Schedule::ModelSync | Schedule::StepSync);
            assert!(!one_at_a_time || most.load(Ordering::SeqCst) == 1, "{schedule:?}: {most:?} at once");
            wait_for(|| {
                engine.live_requests() == 0 && [0, 1].iter().all(|&m| engine.snapshot(ModelId(m)).replicas == 0)
            });
            let seen = [0, 1].map(|model| engine.observed(ModelId(model)));
            assert!(seen[0].to[1] >= 15 && seen[0].evaluated > seen[0].to[1], "{schedule:?}: {:?}", seen[0].to);
            let steps: u64 = seen[1].sizes.iter().map(|size| size.alone.steps + size.shared.steps).sum();
            assert_eq!(steps + seen[1].prompts.steps, engine.snapshot(ModelId(1)).counters.steps);
        }
    }
}

#[test]
fn ladders_can_be_replaced_at_work() {
    let (engine, _) = scheduled(Schedule::Delayed, [vec![1, 2], vec![1]], Duration::ZERO);
    let mut other = engine.submit(request(&engine, "m1", 50_000)).unwrap();
    // One of two requests is not enough at m0.
    let mut stream = engine.submit(request(&engine, "m0", 5)).unwrap();
    wait_for(|| engine.snapshot(ModelId(0)).ready == 1);
    assert_eq!(engine.snapshot(ModelId(0)).counters.steps, 0);
    assert_eq!(engine.set_ladders(vec![vec![1]]), Err(LadderError::Count { given: 1, models: 2 }));
    engine.set_ladders(vec![vec![1], vec![1, 2]]).unwrap();
    assert_eq!(*engine.ladders(), [vec![1], vec![1, 2]]);
    assert!(matches!(last(&mut stream), Event::Finished { .. }));
    engine.fail_all();
    assert_eq!(last(&mut other), Event::Failed(RequestError::ShuttingDown));
}
