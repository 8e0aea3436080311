//! Recordings of evaluations that no engine made.

use std::collections::BTreeMap;

use tokenrouter_plugin_api::{Decision, Requirements, SignalSet};

use super::super::writer::Message;
use super::*;
use crate::request::RequestId;
use crate::runner::{Columns, SignalRequest};
use crate::subserver::observe::{Evaluation, Wanted};

/// Signals of one row that a forward gave.
fn signals() -> (Columns, SignalRequest) {
    let mut columns = Columns::default();
    columns.entropy.push(0.5);
    columns.topk_values.extend((0..VOCAB).map(|i| -(i as f32)));
    columns.topk_ids.extend(0..VOCAB);
    (columns, SignalRequest { scalars: SignalSet::ENTROPY, top_k: VOCAB, token_logits: Vec::new() })
}

/// Call `tell` with an evaluation of request 1 at position 0.
fn with_evaluation(tell: impl FnOnce(Evaluation<'_>)) {
    let (columns, computed) = signals();
    tell(Evaluation {
        request: 1,
        route: RouteId(0),
        model: ModelId(0),
        position: 0,
        candidate: 1,
        logprob: -1.0,
        draft: None,
        decision: Some(Decision::STAY),
        requirements: &Requirements::default(),
        nets: &[],
        columns: &columns,
        computed: &computed,
        row: 0,
        hidden: &[1.0],
    });
}

/// Tell `observer` of `count` evaluations of request `id`.
fn evaluate(observer: &dyn Observer, id: RequestId, count: u32) {
    with_evaluation(|one| {
        (0..count).for_each(|position| observer.evaluated(&Evaluation { request: id, position, ..one }));
    });
}

fn serve(recording: &Recording, requests: u64) {
    let observer = recording.observer();
    for id in 0..requests {
        observer.submitted(id, &request(0, 1, 9));
        evaluate(&*observer, id, 30);
        observer.event(id, &Event::Finished { reason: FinishReason::Length, handoffs: 0 });
    }
}

/// Whatever the bound, files never exceed it, and what the manifest names is whole.
#[test]
fn the_bound_is_kept_to_the_byte() {
    let mut ended = BTreeMap::new();
    for max in (0..200_000).step_by(4999) {
        let directory = tempfile::tempdir().unwrap();
        let one = || setup(directory.path(), settings(max, 70), 1, vec![route("r", &[0], true)]);
        let recording = match Recording::start(one()) {
            Ok(recording) => recording,
            Err(StartError::Full { .. }) => {
                assert_eq!(size(directory.path()), 0);
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let run = recording.directory().clone();
        serve(&recording, 10);
        drop(recording);
        assert!(size(directory.path()) <= max, "{} > {max}", size(directory.path()));
        let (manifest, rows) = (manifest(&run), rows(&run));
        let stopped = manifest.stopped.unwrap();
        if stopped == "shutdown" {
            assert_eq!((rows.len(), lines(&run).len()), (300, 10));
        } else {
            // Room for at least one more row or line would have been used: batches have 64 rows.
            assert!(size(directory.path()) + 64 * 600 + 20_000 > max, "{} of {max}", size(directory.path()));
        }
        *ended.entry(stopped).or_insert(0) += 1;
    }
    assert_eq!(ended.keys().collect::<Vec<_>>(), ["max_bytes", "shutdown"], "{ended:?}");
}

/// The bound holds for all runs of a directory together.
#[test]
fn runs_share_the_bound() {
    let directory = tempfile::tempdir().unwrap();
    let max = 400_000;
    let start = || Recording::start(setup(directory.path(), settings(max, 70), 1, vec![route("r", &[0], true)]));
    let mut runs = 0;
    let full = loop {
        match start() {
            Ok(recording) => {
                assert!(recording.directory().ends_with(format!("run-{runs:05}")));
                assert!(start().is_err_and(|e| e.to_string().contains("another server records into")));
                serve(&recording, 10);
            }
            Err(error) => break error.to_string(),
        }
        assert!(size(directory.path()) <= max);
        runs += 1;
    };
    assert!(runs >= 2, "{runs}");
    assert!(full.contains("of earlier runs and record.max_bytes is 400000"), "{full}");
}

/// A recorder whose writer never takes anything.
fn stuck() -> (Recorder, Receiver<Message>) {
    let directory = tempfile::tempdir().unwrap();
    let setup = setup(directory.path(), settings(1 << 30, 1000), 1, vec![route("r", &[0], true)]);
    let shapes = [Shape { hidden: 1, top_k: VOCAB as usize }];
    let (sender, receiver) = bounded(1);
    (Recorder::new(&describe(&setup, &shapes, 0), &shapes, sender), receiver)
}

#[test]
fn a_full_channel_drops_and_counts() {
    let (recorder, receiver) = stuck();
    recorder.submitted(1, &request(0, 1, 9));
    evaluate(&recorder, 1, 300);
    recorder.event(1, &Event::Finished { reason: FinishReason::Length, handoffs: 0 });
    // One batch of 64 waits in the channel, 44 rows in the next batch.
    assert_eq!((recorder.status.dropped_rows(), recorder.status.dropped_requests()), (192, 1));
    recorder.close(Instant::now() + Duration::from_millis(10));
    assert_eq!(recorder.status.dropped_rows(), 236);
    evaluate(&recorder, 1, 300);
    assert_eq!(recorder.status.dropped_rows(), 236, "closed");
    assert!(matches!(receiver.recv().unwrap(), Message::Rows(ModelId(0), rows) if rows.rows() == 64));
    assert!(receiver.try_recv().is_err());
}

#[test]
fn a_runner_that_gives_too_little_is_noticed() {
    let (recorder, _receiver) = stuck();
    with_evaluation(|whole| {
        recorder.evaluated(&whole);
        assert_eq!(recorder.status.dropped_rows(), 0);
        recorder.evaluated(&Evaluation { hidden: &[], ..whole });
        recorder.evaluated(&Evaluation { computed: &SignalRequest { top_k: 3, ..whole.computed.clone() }, ..whole });
        recorder.evaluated(&Evaluation { row: 1, ..whole });
        assert_eq!(recorder.status.dropped_rows(), 3);
    });
}

#[test]
fn which_requests_are_recorded() {
    let directory = tempfile::tempdir().unwrap();
    let routes = vec![route("r", &[0], true), route("s", &[0], false)];
    let setup = setup(directory.path(), Settings { sample: 0.3, ..settings(1 << 30, 9) }, 1, routes);
    let recorder = |run| Recorder::new(&describe(&setup, &[Shape::default()], run), &[Shape::default()], bounded(1).0);
    let drawn = |run| -> Vec<u64> { (0..2000).filter(|&id| recorder(run).records(RouteId(0), id)).collect() };
    let first = drawn(0);
    assert!((540..660).contains(&first.len()), "{}", first.len());
    assert_eq!(first, drawn(0));
    assert_ne!(first, drawn(1));
    assert!((0..2000).all(|id| !recorder(0).records(RouteId(1), id) && !recorder(0).records(RouteId(9), id)));
}

fn wait_for(mut is: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if is() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("it never became true");
}

/// A process that is killed leaves what the manifest names, and no reason.
#[test]
fn a_killed_run_can_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let one = || setup(directory.path(), settings(1 << 30, 64), 1, vec![route("r", &[0], true)]);
    let recording = Recording::start(one()).unwrap();
    let run = recording.directory().clone();
    assert_eq!((manifest(&run).rows, rows(&run).len()), (0, 0));
    serve(&recording, 10);
    wait_for(|| manifest(&run).shards.len() == 4);
    assert_eq!((rows(&run).len(), manifest(&run).stopped), (256, None));
    std::mem::forget(recording);
}

/// Few requests are on the disk after a while, too.
#[test]
fn what_waits_is_written_in_time() {
    let directory = tempfile::tempdir().unwrap();
    let one = setup(directory.path(), settings(1 << 30, 100_000), 1, vec![route("r", &[0], true)]);
    let recording = Recording::start(Setup { kept_in_memory: Duration::from_millis(1), ..one }).unwrap();
    serve(&recording, 10);
    wait_for(|| manifest(recording.directory()).rows >= 256);
    wait_for(|| manifest(recording.directory()).requests.iter().map(|file| file.rows).sum::<u64>() == 10);
}

#[test]
fn a_disk_that_fails_stops_the_recording_alone() {
    // Batches have 64 rows. Shards of as many are written after the first one, those of 70 when the second
    // one comes, which is lost with it.
    for (shard_rows, lost) in [(64, 64), (70, 128)] {
        let directory = tempfile::tempdir().unwrap();
        let setup = setup(directory.path(), settings(1 << 30, shard_rows), 1, vec![route("r", &[0], true)]);
        let recording = Recording::start(setup).unwrap();
        let observer = recording.observer();
        assert_eq!(observer.wanted(), Wanted { scalars: SignalSet::ALL, top_k: 100, hidden: true });
        std::fs::remove_dir_all(recording.directory()).unwrap();
        serve(&recording, 10);
        wait_for(|| observer.wanted() == Wanted::default());
        wait_for(|| recording.recorder.status.dropped_rows() >= lost);
        serve(&recording, 10);
        assert_eq!(recording.recorder.status.dropped_rows(), lost, "{shard_rows}");
    }
}
