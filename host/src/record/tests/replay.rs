//! Recordings of a whole engine, before policies again.

use tokenrouter_plugin_api::{NoServices, Services};

use super::engine::{Hop, Speculate, Turns, engine, routes};
use super::*;
use crate::policy::monitor::Monitors;
use crate::policy::{Linked, PolicyFactory};
use crate::replay::{Place, PlayError, Played, Team, TeamError, play, read};
use crate::request::Event;

/// A recording of requests of `hop`, `turns` and `speculate`.
fn recorded(directory: &std::path::Path) -> PathBuf {
    let recording = Recording::start(setup(directory, settings(1 << 30, 100), 3, routes())).unwrap();
    let engine = engine(recording.observer());
    let streams: Vec<_> = (0..15).map(|i| engine.submit(request(i % 3, i / 3, 20 + i)).unwrap()).collect();
    for mut stream in streams {
        while !matches!(stream.events.blocking_recv().unwrap().event, Event::Finished { .. }) {}
    }
    drop(engine);
    recording.directory().clone()
}

fn replay(run: &std::path::Path, recorded: &str, policy: &dyn PolicyFactory) -> Result<Vec<Played>, String> {
    let trace = read(run, Some(recorded))?;
    let (models, entry) = trace.route.clone().unwrap();
    let services: Vec<&dyn Services> = vec![&NoServices; models.len()];
    let place = Place {
        route: "r",
        models: &models,
        entry,
        vocab_size: trace.vocab_size,
        eos: &[],
        services: &services,
        monitors: &Monitors::default(),
    };
    let team = || Team::new(policy, "{}", &place, &trace).map_err(|e: TeamError| e.to_string());
    play(&trace, &mut team()?, &mut team()?).map_err(|e: PlayError| e.to_string())
}

#[test]
fn a_policy_before_its_own_recording_goes_the_recorded_course() {
    let directory = tempfile::tempdir().unwrap();
    let run = recorded(directory.path());
    let policies: [(&str, &dyn PolicyFactory); 2] =
        [("hop", &Linked::<Hop>::default()), ("turns", &Linked::<Turns>::default())];
    for (name, policy) in policies {
        let played = replay(&run, name, policy).unwrap();
        assert_eq!(played.len(), 5, "{name}");
        for played in played {
            assert!(played.compared > 10 && played.handoffs > 3, "{name}: {played:?}");
            assert_eq!((played.alike, played.unasked, &played.first), (played.compared, 0, &None), "{name}");
            assert_eq!(played.chosen, played.recorded, "{name}");
            assert_eq!(played.handoffs, played.recorded_handoffs, "{name}");
        }
    }
    // Another policy differs, and says where.
    let played = replay(&run, "hop", &Linked::<Turns>::default()).unwrap();
    assert!(played.iter().all(|played| played.first.as_ref().is_some_and(|first| first.chosen.starts_with("to "))));
    assert!(played.iter().any(|played| played.unasked > 0), "{played:?}");
}

#[test]
fn damaged_recordings_are_refused_by_file_and_line() {
    let directory = tempfile::tempdir().unwrap();
    let run = recorded(directory.path());
    let whole = manifest(&run);
    // Which part has a request depends on when it ended.
    let text = |file: &str| std::fs::read_to_string(run.join(file)).unwrap();
    let hop = whole.routes.iter().position(|route| route.name == "hop").unwrap();
    let hop = format!("\"route\":{hop},");
    let part = whole.requests.iter().map(|part| part.file.as_str()).find(|file| text(file).contains(&hop)).unwrap();
    let (file, lines) = (run.join(part), text(part));
    let with_line = |change: fn(&mut serde_json::Value)| {
        let mut changed: Vec<String> = lines.lines().map(str::to_owned).collect();
        let of_hop = changed.iter_mut().find(|line| line.contains(&hop)).unwrap();
        let mut line = serde_json::from_str(of_hop).unwrap();
        change(&mut line);
        *of_hop = line.to_string();
        std::fs::write(&file, changed.join("\n")).unwrap();
        let error = read(&run, Some("hop")).unwrap_err();
        std::fs::write(&file, &lines).unwrap();
        error
    };
    let error = with_line(|line| line["writers"][0] = 3.into());
    assert!(error.contains(&format!("{part}: line ")), "{error}");
    assert!(error.ends_with(": writers/0 = 3: the manifest has 3 models"), "{error}");
    let error = with_line(|line| line["prompt_tokens"] = u64::MAX.into());
    assert!(error.ends_with(": prompt_ids: has 3 ids, but prompt_tokens says 18446744073709551615"), "{error}");

    let error = with_line(|line| line["route"] = 77.into());
    assert!(error.ends_with(": route = 77: the manifest has 6 routes"), "{error}");
    let error = with_line(|line| line["max_tokens"] = 1.into());
    assert!(error.contains(": writers: are ") && error.ends_with(", more than max_tokens = 1"), "{error}");
    let error = with_line(|line| line["prompt_ids"] = serde_json::json!([1]));
    assert!(error.ends_with(": prompt_ids: has 1 ids, but prompt_tokens says 3"), "{error}");
    let error = with_line(|line| line["token_ids"][0] = 1_000_000.into());
    assert!(error.contains(": token_ids/0 = 1000000: no model has more than "), "{error}");
    let error = with_line(|line| line["token_ids"] = serde_json::json!([]));
    assert!(error.contains(": token_ids: has 0 ids, but the number of writers says "), "{error}");
    let first = lines.lines().next().unwrap();
    std::fs::write(&file, format!("{lines}{first}\n")).unwrap();
    let error = read(&run, Some("hop")).unwrap_err();
    assert!(error.contains(": id = ") && error.ends_with(": another line has it, too"), "{error}");
    std::fs::write(&file, &lines).unwrap();

    let with_manifest = |change: fn(&mut Manifest)| {
        let mut changed = whole.clone();
        change(&mut changed);
        std::fs::write(run.join("manifest.json"), serde_json::to_vec(&changed).unwrap()).unwrap();
        read(&run, Some("hop")).unwrap_err()
    };
    let error = with_manifest(|manifest| manifest.routes[0].entry = 9);
    assert!(error.contains("manifest.json: route `hop`: entry = 9, of "), "{error}");
    let error = with_manifest(|manifest| manifest.models.iter_mut().for_each(|model| model.vocab_size = 1));
    assert!(error.contains(": line ") && error.ends_with("no model has more than 1 tokens"), "{error}");
    let error = with_manifest(|manifest| manifest.shards[0].file = "../x".into());
    assert!(error.ends_with("manifest.json: file = \"../x\": is not the name of a file of the run"), "{error}");
    let error = with_manifest(|manifest| manifest.requests.clear());
    assert!(error.ends_with("has no request that ended"), "{error}");
    let error = with_manifest(|manifest| (manifest.requests, manifest.stopped) = (Vec::new(), None));
    assert!(error.contains("A part is written after 100 rows of a model, 64 MiB or ten minutes"), "{error}");

    // The last model goes, and with it what hand-offs to it name.
    let mut changed = whole.clone();
    let gone = changed.models.pop().unwrap().name;
    changed.shards.retain(|shard| shard.model != gone);
    std::fs::write(run.join("manifest.json"), serde_json::to_vec(&changed).unwrap()).unwrap();
    for part in &whole.requests {
        let lines = text(&part.file).replace("\"writers\":[", "\"writers\":[],\"was\":[");
        let lines = lines.replace("\"token_ids\":", "\"had\":");
        std::fs::write(run.join(&part.file), lines).unwrap();
    }
    let error = read(&run, Some("hop")).unwrap_err();
    assert!(
        error.contains(".safetensors: row ") && error.contains(": decision_model = 2: the manifest has 2"),
        "{error}"
    );
}

#[test]
fn what_cannot_be_replayed() {
    let directory = tempfile::tempdir().unwrap();
    let run = recorded(directory.path());
    let error = replay(&run, "speculate", &Linked::<Speculate>::default()).unwrap_err();
    assert!(error.contains("the policy keeps a draft; a replay follows policies that stay and hand over"), "{error}");
    // `hop` asks for a logit that only its own recording has.
    let error = replay(&run, "turns", &Linked::<Hop>::default()).unwrap_err();
    assert!(error.contains("has no `token_logit_5` at model `m/2`, which policy `hop` asks for"), "{error}");
    let error = read(&run, None).unwrap_err();
    assert!(error.ends_with("has requests of the routes hop, turns, speculate; choose one with --recorded"), "{error}");
    let error = read(&run, Some("m/0")).unwrap_err();
    assert!(error.contains("has no requests of --recorded \"m/0\"; it has those of hop, turns, speculate"), "{error}");
    assert!(read(directory.path(), Some("hop")).is_ok(), "its only run");
    let error = read(&directory.path().join("none"), None).unwrap_err();
    assert!(error.contains("there is no such file"), "{error}");
}
