//! Requests with settings of their own.

use serde_json::{Map, Value, json};

use super::reload::world::{Every, V, W, World, alone, text};
use super::*;
use crate::engine::at_model::{AtModel, Line};

/// Tokens that take a while.
const LONG: u32 = 20_000;

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other}"),
    }
}

impl World {
    /// The route `r` with settings of a request.
    fn with(&self, settings: Value) -> Result<Arc<ServedRoute>, VariantError> {
        let route = self.engine.route("r").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        match route.settings_with(object(settings)).unwrap() {
            None => Ok(route),
            Some(settings) => runtime.block_on(self.engine.variant(&route, &settings)),
        }
    }

    fn tokens(&self, tokens: u32) -> Result<Arc<ServedRoute>, VariantError> {
        self.with(json!({"tokens": tokens}))
    }

    /// The same when those who made it have let go of it: until then it is in use.
    fn settled(&self, tokens: u32) -> Arc<ServedRoute> {
        let route = self.tokens(tokens).unwrap();
        wait_for(|| Arc::strong_count(&route) == 2);
        route
    }

    fn submit_to(&self, route: &ServedRoute, length: u32) -> RequestStream {
        self.engine.submit(NewRequest { route: route.id, ..request(&self.engine, "m0", length) }).unwrap()
    }
}

#[test]
fn a_variant_is_its_route_with_other_settings() {
    let world = World::new(0);
    let two = Every::new(2).letting(&["tokens"], 8);
    world.set(&[("r", &two)]).unwrap();
    let own = world.engine.route("r").unwrap();
    assert_eq!(world.tokens(2).unwrap().id, own.id);
    assert_eq!(world.with(json!({"tokens": 2.0})).unwrap().id, own.id);
    assert_eq!(world.with(json!({"tokens": null})).unwrap().id, own.id);
    let three = world.tokens(3).unwrap();
    assert_eq!((&*three.name, three.variant.as_ref().unwrap().of), ("r", own.id));
    assert_eq!(world.with(json!({"tokens": 3.0})).unwrap().id, three.id);
    assert_eq!((two.instances(), own.variants()), (4, 1));
    assert_eq!(text(&mut world.submit_to(&three, 60)), alone(3, 60));
    assert_eq!(text(&mut world.submit_to(&own, 60)), alone(2, 60));
    // Both count as the one route that clients know.
    assert_eq!(world.engine.route_counts().into_keys().filter(|name| name.starts_with('r')).collect::<Vec<_>>(), ["r"]);
    assert_eq!(world.engine.policy_counts().len(), 2);
    let settings: Vec<_> =
        world.engine.known_routes().iter().filter_map(|route| Some(route.info.variant.as_ref()?.values())).collect();
    assert_eq!(settings, [json!({"tokens": 3, "weights": null})]);
    assert!(world.engine.known_routes().iter().all(|route| route.state == RouteState::Serving));
}

#[test]
fn what_requests_may_not_set_is_named() {
    let world = World::new(0);
    world.set(&[("r", &Every::new(2).letting(&["tokens"], 8)), ("s", &Every::new(2))]).unwrap();
    let error = |route: &str, settings: Value| {
        world.engine.route(route).unwrap().settings_with(object(settings)).unwrap_err().to_string()
    };
    let refused = "`weights` cannot be set by a request: route `r` lets requests set `tokens`";
    assert_eq!(error("r", json!({"tokens": 3, "weights": "v"})), refused);
    let nothing = "`tokens` cannot be set by a request: route `s` lets requests set nothing; leave it out";
    assert_eq!(error("s", json!({"tokens": 3})), nothing);
    assert!(error("m0", json!({"tokens": 3})).contains("route `m0` lets requests set nothing"));
    let high = "settings/tokens = 1001: the value is greater than the maximum of 1000";
    assert_eq!(error("r", json!({"tokens": 1001})), high);
    assert_eq!(error("r", json!({"tokens": "3"})), "settings/tokens = \"3\": the value is not of type \"integer\"");
    let long = json!({"tokens": "x".repeat(5000)});
    assert_eq!(error("r", long), "has 5013 bytes as JSON, and at most 4096 are allowed");
    assert_eq!(world.engine.known_routes().len(), 4, "nothing was made");
}

#[test]
fn the_longest_idle_one_makes_place() {
    let world = World::new(0);
    let two = Every::new(2).letting(&["tokens"], 2);
    world.set(&[("r", &two)]).unwrap();
    let ids = |tokens: [u32; 2]| tokens.map(|tokens| world.settled(tokens).id);
    let [three, four] = ids([3, 4]);
    // Used last, so that the other goes.
    assert_eq!(ids([4, 3]), [four, three]);
    let five = world.settled(5);
    assert_eq!(world.tokens(3).unwrap().id, three);
    // In use, by somebody who prepares a request, and by a request.
    let mut running = world.submit_to(&world.tokens(3).unwrap(), 50_000);
    let full = VariantError::Full { route: "r".into(), most: 2 };
    assert_eq!(world.tokens(4).unwrap_err(), full);
    assert_eq!(full.to_string(), "all 2 variants of route `r` (max_variants) are in use with other settings");
    drop(five);
    let anew = world.tokens(4).unwrap();
    assert!(anew.id > four);
    assert_eq!(world.tokens(5).unwrap_err(), full);
    assert_eq!(text(&mut world.submit_to(&anew, 60)), alone(4, 60));
    running.events.close();
    drop((running, anew));
    wait_for(|| world.tokens(6).is_ok());
    // The route and two more, whatever was there.
    wait_for(|| two.instances() == 6 && world.engine.known_routes().len() == 5);
    wait_for(|| (0..2).all(|model| world.engine.snapshot(ModelId(model)).routes == 4));
}

#[test]
fn those_who_ask_for_the_same_wait_for_one() {
    let world = World::new(0);
    let two = Every::new(2).letting(&["tokens"], 8);
    world.set(&[("r", &two)]).unwrap();
    two.holds.set(Some(Hook::Create));
    let ids: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..8).map(|_| scope.spawn(|| world.tokens(3).unwrap().id)).collect();
        wait_for(|| two.holds.waits() && world.engine.route("r").unwrap().variants() == 1);
        // Neither the route nor a reload waits with them.
        assert_eq!(text(&mut world.engine.submit(request(&world.engine, "r", 20)).unwrap()), alone(2, 20));
        let kept = world.engine.set_routes(vec![Wanted::AsServed("r".into())]).unwrap();
        assert_eq!(kept.unchanged, ["r"]);
        two.holds.set(None);
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    assert_eq!(two.instances(), 4);
}

#[test]
fn a_variant_is_made_although_nobody_waits_any_more() {
    let world = World::new(0);
    let two = Every::new(2).letting(&["tokens"], 8);
    world.set(&[("r", &two)]).unwrap();
    let route = world.engine.route("r").unwrap();
    let settings = route.settings_with(object(json!({"tokens": 3}))).unwrap().unwrap();
    two.holds.set(Some(Hook::Create));
    let mut asked = Box::pin(world.engine.variant(&route, &settings));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(std::future::poll_fn(|cx| {
        assert!(asked.as_mut().poll(cx).is_pending());
        std::task::Poll::Ready(())
    }));
    drop(asked);
    two.holds.set(None);
    wait_for(|| two.instances() == 4);
    assert_eq!(route.variants(), 1);
    assert_eq!(text(&mut world.submit_to(&world.tokens(3).unwrap(), 20)), alone(3, 20));
}

#[test]
fn what_a_policy_does_not_take_is_not_kept() {
    let world = World::new(1);
    let two = Every::with_net(2, V).letting(&["tokens", "weights"], 2);
    world.set(&[("r", &two)]).unwrap();
    for _ in 0..3 {
        let refused = world.tokens(0).unwrap_err();
        let says = "route `r`, model `m1`: policy `every` refuses to start: 0 tokens";
        assert_eq!(refused, VariantError::Refused(says.into()));
        assert_eq!(world.tokens(13).unwrap_err(), VariantError::Failed { route: "r".into() });
        let nets = world.with(json!({"weights": W})).unwrap_err().to_string();
        assert!(nets.contains("asks for another router network (`score`) than the route has"), "{nets}");
    }
    world.settles(1, 1);
    wait_for(|| two.instances() == 2);
    // A net that the route has is there for all; no other has room.
    let three = world.tokens(3).unwrap();
    assert_eq!(text(&mut world.submit_to(&three, 60)), alone(3, 60));
    assert_eq!((world.engine.nets(ModelId(0)), world.engine.nets(ModelId(1))), (1, 1));
    // It outlives its route.
    let mut running = world.submit_to(&three, 3000);
    drop(three);
    world.set(&[]).unwrap();
    assert_eq!(text(&mut running), alone(3, 3000));
    world.settles(0, 0);
}

#[test]
fn settings_that_no_policy_takes_push_nobody_out() {
    let world = World::new(0);
    let two = Every::new(2).letting(&["tokens"], 2);
    world.set(&[("r", &two)]).unwrap();
    let ids = [3, 4].map(|tokens| world.settled(tokens).id);
    for _ in 0..3 {
        assert!(matches!(world.tokens(0), Err(VariantError::Refused(_))));
        assert!(matches!(world.tokens(13), Err(VariantError::Failed { .. })));
    }
    assert_eq!([3, 4].map(|tokens| world.settled(tokens).id), ids);
    // While another is made all that are there are at hand.
    two.holds.set(Some(Hook::Create));
    std::thread::scope(|scope| {
        let five = scope.spawn(|| world.settled(5).id);
        wait_for(|| two.holds.waits());
        assert_eq!([4, 3].map(|tokens| world.tokens(tokens).unwrap().id), [ids[1], ids[0]]);
        two.holds.set(None);
        five.join().unwrap();
    });
    assert_eq!(world.engine.route("r").unwrap().variants(), 2);
    assert_eq!(world.tokens(3).unwrap().id, ids[0]);
    wait_for(|| two.instances() == 6);
}

/// Clients that use all that are there while others are made.
#[test]
fn no_more_are_kept_than_the_route_says() {
    let world = World::new(0);
    let two = Every::new(2).letting(&["tokens"], 1);
    world.set(&[("r", &two)]).unwrap();
    let mut last = 3;
    world.settled(last);
    for tokens in 4..10 {
        two.holds.set(Some(Hook::Create));
        std::thread::scope(|scope| {
            let made = scope.spawn(|| world.tokens(tokens).unwrap());
            wait_for(|| world.engine.route("r").unwrap().variants() == 2);
            let used = world.tokens(last).unwrap();
            two.holds.set(None);
            let made = made.join().unwrap();
            // Who asked for it has it, though there is no place.
            assert_eq!(text(&mut world.submit_to(&made, 20)), alone(tokens, 20));
            assert_eq!(world.engine.route("r").unwrap().variants(), 1);
            assert_eq!(world.tokens(last).unwrap().id, used.id);
        });
        last = tokens;
        wait_for(|| world.tokens(last).is_ok());
        world.settled(last);
    }
    wait_for(|| two.instances() == 4);
}

#[test]
fn one_whose_policy_failed_is_made_anew() {
    for on_error in [OnError::StayLocal, OnError::FailRequest] {
        let world = World::new(0);
        let mut two = Every::new(2).letting(&["tokens"], 2);
        two.on_error = on_error;
        world.set(&[("r", &two)]).unwrap();
        let bad = world.tokens(99).unwrap();
        let mut stream = world.submit_to(&bad, 60);
        while !matches!(stream.events.blocking_recv().unwrap().event, Event::Finished { .. } | Event::Failed(_)) {}
        drop(stream);
        wait_for(|| bad.has_failed());
        // Whoever holds it may be about to submit another request.
        assert_eq!(world.tokens(99).unwrap().id, bad.id);
        let id = bad.id;
        drop(bad);
        wait_for(|| world.tokens(99).unwrap().id != id);
        assert_eq!(world.engine.route("r").unwrap().variants(), 1);
        assert!(!world.engine.route("r").unwrap().has_failed());
        wait_for(|| two.instances() == 4);
    }
}

/// Each of them is told for the route itself. Clients choose how many other settings there are.
#[test]
fn faults_of_all_variants_are_told_as_those_of_one() {
    let world = World::new(0);
    world.set(&[("r", &Every::new(2).letting(&["tokens"], 8))]).unwrap();
    let [own, three, four] = [2, 3, 4].map(|tokens| world.tokens(tokens).unwrap().id);
    let (events, _) = crossbeam_channel::unbounded();
    let model = AtModel { shared: world.engine.shared.clone(), model: ModelId(0), events };
    let start = Instant::now();
    let line = |route, hook, fails, second| model.line(route, hook, fails, start + Duration::from_secs(second));
    let told =
        |route: &str, untold| Some(Line { route: route.into(), plugin: "every".into(), model: "m0".into(), untold });
    let with = |tokens| format!("r with settings {{\"tokens\":{tokens},\"weights\":null}}");
    assert_eq!(line(three, "route", true, 0), told(&with(3), None));
    assert_eq!((line(four, "route", true, 1), line(three, "route", true, 2)), (None, None));
    // Other hooks and what does not end a policy are told apart.
    assert_eq!(line(four, "send", true, 2), told(&with(4), None));
    assert_eq!((line(four, "route", false, 2), line(three, "route", false, 3)), (told(&with(4), None), None));
    assert_eq!([3, 4].map(|second| line(own, "route", true, second)), [told("r", None), told("r", None)]);
    assert_eq!(line(four, "route", true, 10), told(&with(4), Some(2)));
}

#[test]
fn variants_go_with_their_route() {
    let world = World::new(0);
    let (two, five) = (Every::new(2).letting(&["tokens"], 8), Every::new(5).letting(&["tokens"], 8));
    world.set(&[("r", &two)]).unwrap();
    let old = world.engine.route("r").unwrap();
    let mut running = world.submit_to(&world.tokens(3).unwrap(), LONG);
    world.tokens(4).unwrap();
    world.set(&[("r", &five)]).unwrap();
    // One that is in use, and none that is idle.
    wait_for(|| two.instances() == 4);
    let states = world.engine.known_routes();
    let draining = states.iter().filter(|route| route.state == RouteState::Draining).count();
    assert_eq!((draining, old.variants()), (2, 0), "{states:?}");
    let mut anew = world.submit_to(&world.tokens(3).unwrap(), 60);
    assert_eq!((text(&mut running), text(&mut anew)), (alone(3, LONG), alone(3, 60)));
    // Whoever has prepared a request for the old one can have it still.
    let settings = old.settings_with(object(json!({"tokens": 4}))).unwrap().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let late = runtime.block_on(world.engine.variant(&old, &settings)).unwrap();
    assert_eq!(text(&mut world.submit_to(&late, 60)), alone(4, 60));
    drop((late, old));
    wait_for(|| (two.instances(), five.instances()) == (0, 4));
}

#[test]
fn a_variant_that_fails_disables_itself_alone() {
    let world = World::new(0);
    let mut two = Every::new(2).letting(&["tokens"], 8);
    two.on_error = OnError::DisableRoute;
    world.set(&[("r", &two)]).unwrap();
    let bad = world.tokens(99).unwrap();
    // Its request goes on.
    assert_eq!(text(&mut world.submit_to(&bad, 60)).len(), 60);
    wait_for(|| bad.disabled().is_some());
    let why = bad.disabled().unwrap().to_string();
    let says = "route `r` is disabled with these settings: hook `route` of plugin `every` failed";
    assert!(why.starts_with(says), "{why}");
    let new = NewRequest { route: bad.id, ..request(&world.engine, "m0", 5) };
    assert!(matches!(world.engine.submit(new).err(), Some(SubmitError::RouteDisabled(_))));
    assert!(world.engine.route("r").unwrap().disabled().is_none());
    assert_eq!(text(&mut world.submit_to(&world.tokens(3).unwrap(), 60)), alone(3, 60));
    assert_eq!(world.tokens(99).unwrap().id, bad.id);
    // A reload lets it be tried again.
    world.engine.set_routes(vec![Wanted::AsServed("r".into())]).unwrap();
    let anew = world.tokens(99).unwrap();
    assert!(anew.id != bad.id && anew.disabled().is_none());
}

/// Whoever chooses settings cannot fill the memory with instances that hang.
#[test]
fn hooks_that_hang_let_no_variants_come() {
    let mut world = World::new(0);
    world.engine.workshop.makers.limit = Some(Duration::from_secs(1));
    let two = Every::new(2).letting(&["tokens"], 2);
    world.set(&[("r", &two)]).unwrap();
    let three = world.tokens(3).unwrap();
    let hung = Err(VariantError::Hung { route: "r".into() });
    let id = |tokens| world.tokens(tokens).map(|route| route.id);
    two.holds.set(Some(Hook::Create));
    assert_eq!(id(4), hung);
    // Not even others, and at once; what is there is there.
    assert_eq!((id(5), id(3)), (hung.clone(), Ok(three.id)));
    two.holds.set(None);
    wait_for(|| id(4).is_ok());
    two.holds.set(Some(Hook::Drop));
    drop(three);
    // Two are there; as many more as may be about to go.
    let made = (20..60).take_while(|tokens| id(*tokens).is_ok()).count();
    assert!((1..=6).contains(&made), "{made}");
    wait_for(|| id(70) == hung);
    two.holds.set(None);
    wait_for(|| id(70).is_ok());
    wait_for(|| two.instances() == 6);
}

/// The first of two instances is there when the second is refused.
#[test]
fn half_a_variant_that_hangs_in_its_drop_holds_nobody_up() {
    let world = World::new(0);
    let two = Every::new(2).letting(&["tokens"], 2);
    world.set(&[("r", &two)]).unwrap();
    two.holds.set(Some(Hook::Drop));
    assert!(matches!(world.tokens(0), Err(VariantError::Refused(_))));
    assert_eq!(world.engine.route("r").unwrap().variants(), 0);
    wait_for(|| two.holds.waits());
    assert_eq!(two.instances(), 3);
    two.holds.set(None);
    wait_for(|| two.instances() == 2);
    assert_eq!(text(&mut world.submit_to(&world.tokens(3).unwrap(), 20)), alone(3, 20));
}

/// More settings than there is place for, asked for at random while the route changes.
#[test]
fn no_accepted_request_is_lost_in_a_crowd() {
    const MOST: usize = 4;
    let world = World::new(0);
    let texts: Vec<_> = (0..=12).map(|tokens| if tokens > 0 { alone(tokens, 200) } else { Vec::new() }).collect();
    let every = [1, 2].map(|tokens| Every::new(tokens).letting(&["tokens"], MOST));
    world.set(&[("r", &every[0])]).unwrap();
    let (done, answers, refused) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for client in 0..8u32 {
            let (world, texts, done, answers, refused) = (&world, &texts, &done, &answers, &refused);
            scope.spawn(move || {
                for number in 0.. {
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    let tokens = 1 + (client + 5 * number) % 12;
                    match world.tokens(tokens) {
                        Ok(route) => {
                            let mut stream = world.submit_to(&route, 200);
                            drop(route);
                            assert!(text(&mut stream) == texts[tokens as usize], "not the text of its settings");
                            answers.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(VariantError::Full { .. } | VariantError::Leaving { .. }) => {
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
            });
        }
        let changes = (1..).take_while(|change| *change < 50 || answers.load(Ordering::Relaxed) < 500);
        for change in changes {
            world.set(&[("r", &every[change % 2])]).unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(refused.load(Ordering::Relaxed) > 0, "eight clients never needed more than {MOST}");
    world.set(&[]).unwrap();
    world.settles(0, 0);
    wait_for(|| every.iter().all(|policy| policy.instances() == 0));
}
