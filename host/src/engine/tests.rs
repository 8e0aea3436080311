//! Engines on simulated models that break.

mod constrained;
mod reload;
mod schedules;
mod variants;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::at_model::MODEL_PANICKED;
use super::*;
use crate::request::{Event, FinishReason, SamplingParams};
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
        match stream.events.blocking_recv().expect("a stream ends with its last event").event {
            Event::PromptCached { .. } | Event::PromptScored { .. } | Event::Committed { .. } => {}
            last => return last,
        }
    }
}

fn wait_for(mut is: impl FnMut() -> bool) {
    // A minute: other tests may have the processors.
    for _ in 0..30_000 {
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
    assert_eq!(engine.check(&with(vec![1], 0)), Ok(()), "the prompt alone");
    assert_eq!(engine.check(&with(vec![50], 5)), Err(SubmitError::TokenOutOfRange { token: 50, vocab: 50 }));
    let long = engine.check(&with(vec![1; 10], 65_530));
    assert_eq!(long, Err(SubmitError::ContextLength { context: 65_536, prompt: 10, max_tokens: 65_530 }));
    assert!(engine.check(&with(vec![1; 10], 65_526)).is_ok());
}

/// Not when its client gets to it.
#[test]
fn events_have_the_moment_of_their_step() {
    let (engine, _) = engine(Fault::None);
    let submitted = Instant::now();
    let mut stream = engine.submit(request(&engine, "m0", 20)).unwrap();
    wait_for(|| engine.live_requests() == 0);
    let over = Instant::now();
    let moments: Vec<Instant> = std::iter::from_fn(|| stream.events.blocking_recv()).map(|told| told.at).collect();
    assert!(moments.len() == 21 && moments.is_sorted(), "{moments:?}");
    assert!(submitted < moments[0] && moments[0] < moments[19] && moments[20] < over, "{moments:?}");
}

#[test]
fn runners_come_back_for_another_engine() {
    let (engine, _) = engine(Fault::None);
    let greedy = |engine: &Engine| {
        let mut stream = engine.submit(request(engine, "m1", 20)).unwrap();
        let mut tokens = Vec::new();
        while let Some(Event::Committed { tokens: new, .. }) = stream.events.blocking_recv().map(|told| told.event) {
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
