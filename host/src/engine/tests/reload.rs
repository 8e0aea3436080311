//! Routes that change while requests are under way.

pub mod world;

use std::collections::HashMap;
use std::sync::Mutex;

use tokenrouter_plugin_api::random::uniform;

use super::*;
use world::{Every, V, W, World, X, alone, text};

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
    wait_for(|| (two.instances(), three.instances()) == (2, 2));
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
    wait_for(|| two.instances() == 0);
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
    wait_for(|| two.instances() == 0);
}

#[test]
fn what_is_refused_changes_nothing() {
    let world = World::new(2);
    let (two, bad, wide) = (Every::with_net(2, V), Every::with_net(0, W), Every::with_net(2, X));
    world.set(&[("r", &two)]).unwrap();
    let refused = |routes: &[(&str, &Every)]| {
        let error = world.set(routes).unwrap_err();
        world.settles(1, 1);
        // What the configuration can mend is told from what it cannot.
        assert_eq!(matches!(error, StartError::NotTaken { .. }), routes.len() == 2 && routes[0].0 == "a");
        error.to_string()
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
    wait_for(|| (two.instances(), bad.instances(), wide.instances()) == (2, 0, 0));
    assert_eq!(text(&mut world.engine.submit(request(&world.engine, "r", 60)).unwrap()), alone(2, 60));
}

/// The change that follows a refused one at once takes over no net that the refused one was to bring.
#[test]
fn what_is_refused_lends_no_nets() {
    let world = World::new(4);
    let (two, bad) = (Every::with_net(2, W), Every::with_net(0, W));
    let want = alone(2, 20);
    for _ in 0..100 {
        world.set(&[("r", &bad)]).unwrap_err();
        world.set(&[("r", &bad)]).unwrap_err();
        let known = world.engine.known_routes();
        assert!(known.iter().all(|route| route.state != RouteState::Preparing), "{known:?}");
        world.set(&[("r", &two)]).unwrap();
        assert!(text(&mut world.engine.submit(request(&world.engine, "r", 20)).unwrap()) == want);
        world.set(&[]).unwrap();
    }
    world.settles(0, 0);
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
    assert!(matches!(error, StartError::AtStartOnly { .. }));
    assert_eq!(
        error.to_string(),
        "route `r`, model `m0`: net `score`: the model's runner takes router networks at its start alone; restart the server"
    );
    world.settles(0, 0);
}

#[test]
fn a_drop_that_hangs_holds_nothing_up() {
    let world = World::new(1);
    let (two, net) = (Every::new(2), Every::with_net(3, V));
    two.holds.set(Some(Hook::Drop));
    world.set(&[("r", &two)]).unwrap();
    world.set(&[]).unwrap();
    // Others come and go meanwhile.
    for _ in 0..2 {
        world.set(&[("s", &net)]).unwrap();
        assert_eq!(text(&mut world.engine.submit(request(&world.engine, "s", 20)).unwrap()), alone(3, 20));
        world.set(&[]).unwrap();
        world.settles(0, 0);
    }
    wait_for(|| world.engine.monitors.hung().iter().any(|hung| hung.hook == Hook::Drop));
    // It holds no model up.
    assert_eq!(world.engine.hung_hooks(), []);
    // This one is still served as the engine ends.
    world.set(&[("t", &two)]).unwrap();
    drop(world);
    assert_eq!(two.instances(), 4);
    two.holds.set(None);
    wait_for(|| two.instances() + net.instances() == 0);
}

/// Its change is given up, and the next ones do not wait for it.
#[test]
fn a_create_that_hangs_holds_nothing_up() {
    let mut world = World::new(0);
    let (two, three) = (Every::new(2), Every::new(3));
    world.set(&[("r", &two)]).unwrap();
    three.holds.set(Some(Hook::Create));
    world.engine.workshop.makers.limit = Some(Duration::from_secs(1));
    let first = world.set(&[("r", &two), ("s", &three)]).unwrap_err();
    let says = "route `s`, model `m0`: hook `create` of plugin `every` has not come back for ";
    assert!(matches!(first, StartError::Hung { .. }) && first.to_string().starts_with(says), "{first}");
    world.settles(1, 0);
    // It would wait for ever for another one.
    world.engine.workshop.makers.limit = None;
    let again = world.set(&[("t", &three)]).unwrap_err();
    assert!(matches!(again, StartError::Hung { .. }) && again.to_string().starts_with(says), "{again}");
    // It is seen, for `abort_on_hung_plugin`, but no model stands still.
    wait_for(|| world.engine.monitors.hung().iter().any(|hung| hung.hook == Hook::Create));
    assert_eq!(world.engine.hung_hooks(), []);
    assert_eq!(world.set(&[("s", &two)]).unwrap().removed, names(&["r"]));
    assert_eq!(text(&mut world.engine.submit(request(&world.engine, "s", 20)).unwrap()), alone(2, 20));
    three.holds.set(None);
    wait_for(|| world.set(&[("s", &three)]).is_ok());
    assert_eq!(text(&mut world.engine.submit(request(&world.engine, "s", 20)).unwrap()), alone(3, 20));
    wait_for(|| (two.instances(), three.instances()) == (0, 2));
}

#[test]
fn a_model_that_stands_still_refuses_a_change_at_once() {
    let world = World::new(0);
    let (two, three) = (Every::new(2), Every::new(3));
    world.set(&[("r", &two)]).unwrap();
    two.holds.set(Some(Hook::Route));
    let mut running = world.engine.submit(request(&world.engine, "r", 20)).unwrap();
    wait_for(|| two.holds.waits());
    let change = || {
        let new = Wanted::New(three.route("s", world.directory.path()));
        world.engine.set_routes(vec![Wanted::AsServed("r".into()), new]).map_err(|error| error.to_string())
    };
    let says = "route `s`, model `m0`: hook `route` of plugin `every` has not come back for ";
    // The watchdog sees it while the change waits for the model, and then before it begins.
    for _ in 0..2 {
        let error = change().unwrap_err();
        assert!(error.starts_with(says), "{error}");
        assert!(world.engine.route("s").is_none());
    }
    two.holds.set(None);
    assert_eq!(text(&mut running), alone(2, 20));
    wait_for(|| change().is_ok());
    world.settles(2, 0);
}

#[test]
fn an_engine_that_ends_changes_nothing() {
    let world = World::new(0);
    let two = Every::new(2);
    world.set(&[("r", &two)]).unwrap();
    world.engine.stop_accepting();
    assert_eq!(world.set(&[]), Err(StartError::Stopping));
    world.settles(1, 0);
}

#[test]
fn routes_and_ladders_change_together_or_not_at_all() {
    let world = World::new(0);
    let two = Every::new(2);
    let change = |ladders| {
        let new = Wanted::New(two.route("r", world.directory.path()));
        world.engine.set_routes_and_ladders(vec![new], Some(ladders))
    };
    for bad in [vec![vec![1]], vec![vec![1], vec![]], vec![vec![0], vec![1]]] {
        assert!(matches!(change(bad), Err(StartError::Ladders(_))));
        world.settles(0, 0);
        assert_eq!(*world.engine.ladders(), [[1], [1]]);
    }
    change(vec![vec![1], vec![1, 2]]).unwrap();
    world.settles(1, 0);
    assert_eq!(*world.engine.ladders(), [vec![1], vec![1, 2]]);
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
    wait_for(|| every.iter().all(|policy| policy.instances() == 0));
}
