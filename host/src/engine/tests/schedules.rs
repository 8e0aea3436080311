//! Schedules between the threads of models.

use std::sync::atomic::AtomicUsize;

use tokenrouter_plugin_api::{Context, Decision, Policy, PolicyError, RouteBatch};

use super::*;
use crate::online::Settings;
use crate::policy::Linked;
use crate::policy::monitor::DEFAULT_BUDGET;
use crate::policy::overrides::Overrides;
use crate::subserver::coordinator::LadderError;

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
        prefix_cache: false,
        max_rows: 64,
        prefill_chunk: 64,
    });
    let route = RouteSetup {
        name: "both".into(),
        models: vec![(ModelId(0), "a".into()), (ModelId(1), "b".into())],
        entry: 0,
        policy: Arc::new(Linked::<Alternate>::default()),
        settings: "{}".into(),
        overrides: Overrides::default(),
        on_error: OnError::default(),
        budget: DEFAULT_BUDGET,
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
            let steps: f64 = seen[1].sizes.iter().map(|size| size.steps).sum();
            assert_eq!(steps as u64 + seen[1].prompts, engine.snapshot(ModelId(1)).counters.steps);
            assert_eq!(seen[0].begun + seen[1].begun, 6, "{schedule:?}");
            // The one that was cancelled may have ended before.
            assert!(matches!(seen[0].finished + seen[1].finished, 5 | 6), "{schedule:?}: {seen:?}");
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

#[test]
fn ladders_follow_the_traffic() {
    let (mut engine, _) = scheduled(Schedule::Delayed, [vec![1], vec![1]], Duration::ZERO);
    assert_eq!(engine.tuning(), None);
    engine.follow(Settings { interval: Duration::from_millis(5), p99_tpot_ms: None, p99_ttft_ms: None }).unwrap();
    assert!(engine.tuning().unwrap().thin);
    let mut streams: Vec<_> = (0..4).map(|_| engine.submit(request(&engine, "both", 50_000)).unwrap()).collect();
    let mut seen = None;
    wait_for(|| {
        seen = engine.tuning().filter(|status| !status.thin);
        seen.is_some()
    });
    let status = seen.unwrap();
    // Every second token goes to the other model.
    assert!((status.routing[0][1] - 0.5).abs() < 0.05 && (status.routing[1][0] - 0.5).abs() < 0.05, "{status:?}");
    assert!(status.stretch.iter().all(|stretch| *stretch >= 1.0), "{status:?}");
    engine.fail_all();
    assert_eq!(last(&mut streams[0]), Event::Failed(RequestError::ShuttingDown));
}
