//! Routes that come and go among requests, on networks that delay, repeat and reorder: every request ends under
//! the policy that it began with, and no model remembers a route that is over.

use super::*;

/// A name that clients ask for, and the routes that have had it: from when on, and as which route.
struct Name {
    versions: Vec<(Duration, RouteId)>,
}

impl Name {
    /// The newest route at `at`; `None` while there is none.
    fn at(&self, at: Duration, removed: &[(Duration, RouteId)]) -> Option<RouteId> {
        let newest = self.versions.iter().rev().find(|(since, _)| *since <= at)?.1;
        (!removed.iter().any(|(since, route)| *route == newest && *since <= at)).then_some(newest)
    }
}

#[derive(Debug, Default)]
struct Met {
    tokens: u64,
    handoffs: u64,
    changes: u64,
    /// Requests that were live when their route was retired.
    drained: u64,
}

fn reloaded(seed: u64, met: &mut Met) -> Result<(), String> {
    let mut rng = Rng(seed);
    let models = 2 + rng.below(3) as usize;
    let mut routes = random_routes(&mut rng, models, false);
    let first = routes.len() - models;
    let mut names: Vec<Name> =
        (0..first as u32).map(|route| Name { versions: vec![(Duration::ZERO, RouteId(route))] }).collect();
    let simulated = (0..models as u32).map(ModelId).map(|id| {
        let pages = 8 + rng.below(24) as u32;
        let limits = Limits { max_rows: 1 + rng.below(40) as usize, prefill_chunk: 1 + rng.below(24) as usize };
        let runner = SimulatedRunner::new(&name(id), id.0, VOCAB, pages).ending_with(vec![eos(id)]);
        let attachments = routes.iter().map(|route| attachment(route, id)).collect();
        SimulatedModel {
            server: SubServer::new(id, Box::new(runner), attachments, limits),
            latency: Latency::constant(micros(1 + rng.below(300))),
            waiting: Waiting {
                min_batch: random_ladder(&mut rng),
                max_wait: micros(rng.below(500)),
                hold: if rng.chance(0.5) { Duration::ZERO } else { micros(rng.below(400)) },
            },
            host: 0,
            stretch: Vec::new(),
        }
    });
    let simulated: Vec<_> = simulated.collect();
    let network = Network {
        delay: (Duration::ZERO, micros(rng.below(400))),
        within_hosts: rng.chance(0.8),
        duplicate: rng.unit() * 0.5,
        lose: rng.unit() * 0.4,
        resend: micros(1 + rng.below(500)),
    };
    let shapes = routes.iter().map(|r| (r.models[r.entry], r.models.clone())).collect();
    let schedule = Schedule::ALL[rng.below(4) as usize];
    let mut world = World::new(simulated, shapes, (schedule, network), rng.next(), Ledgers::default());
    // Changes happen at even microseconds and requests come at odd ones.
    let mut retired: Vec<(Duration, RouteId)> = Vec::new();
    let mut at = Duration::ZERO;
    for _ in 0..1 + rng.below(8) {
        at += micros(2 * (1 + rng.below(400)));
        let place = rng.below(names.len() as u64) as usize;
        let old = names[place].at(at, &retired);
        if rng.chance(0.8) || old.is_none() {
            let Some(route) = random_routes(&mut rng, models, false).into_iter().next() else { continue };
            let attachments = route.models.iter().filter_map(|&m| Some((m, attachment(&route, m)?))).collect();
            let id = world.attach(at, (route.models[route.entry], route.models.clone()), attachments);
            assert_eq!(id.index(), routes.len());
            routes.push(route);
            names[place].versions.push((at, id));
        }
        if let Some(old) = old {
            world.retire(at, old);
            retired.push((at, old));
        }
        met.changes += 1;
    }
    let mut specs = Vec::new();
    let mut cancelled = Vec::new();
    for id in 1..=1 + rng.below(10) {
        let at = micros(1 + 2 * rng.below(1600));
        let Some(route) = names[rng.below(names.len() as u64) as usize].at(at, &retired) else { continue };
        let prompt = (0..1 + rng.below(40)).map(|_| 1 + rng.below(u64::from(VOCAB) - 1) as u32).collect();
        let sampling = SamplingParams { seed: rng.next(), ignore_eos: rng.chance(0.3), ..SamplingParams::greedy() };
        let max_tokens = 1 + rng.below(24) as u32;
        let new = NewRequest { route, prompt, max_tokens, sampling, return_signals: false, cache_salt: None };
        let spec = Arc::new(RequestSpec::new(id, new));
        world.submit(at, spec.clone());
        if rng.chance(0.2) {
            world.cancel(at + micros(rng.below(4000)), id);
            cancelled.push(id);
        }
        if rng.chance(0.2) {
            world.lose_state(at + micros(rng.below(3000)), ModelId(rng.below(models as u64) as u32), id);
        }
        specs.push((at, spec));
    }
    let mut turns = 0;
    while world.advance() {
        turns += 1;
        if turns > 200_000 {
            return Err("7: no end in sight".into());
        }
        if let Some(server) = world.servers().find(|server| server.pages_held() != server.pool().in_use()) {
            return Err(format!("3: {} pages in use, {} held", server.pool().in_use(), server.pages_held()));
        }
    }
    for (at, spec) in &specs {
        let client = &world.audience.0[&spec.id];
        let route = &routes[spec.new.route.index()];
        let got: Vec<_> = client.ledger.tokens().iter().map(|t| (t.token, t.model)).collect();
        if let Some(error) = &client.contradiction {
            return Err(format!("1: {error}"));
        }
        if client.late > 0 {
            return Err(format!("1: {} events after the last", client.late));
        }
        let (want, reason) = oracle(&spec.new, &route.models, route.entry, route.key, VOCAB);
        match &client.ending {
            Some(Ending::Cancelled) if cancelled.contains(&spec.id) && want.starts_with(&got) => {}
            Some(Ending::Finished(ended)) if *ended == reason && got == want => {}
            other => return Err(format!("6: request {} ended by {other:?}: {got:?}, not {want:?}", spec.id)),
        }
        met.tokens += got.len() as u64;
        let over = retired.iter().find(|(_, route)| *route == spec.new.route);
        met.drained += u64::from(over.is_some_and(|(over, _)| (*at..client.ended_at).contains(over)));
    }
    for (model, server) in world.servers().enumerate() {
        if (server.pool().in_use(), server.replicas(), server.ready(), server.open_slots()) != (0, 0, 0, 0) {
            return Err("3: something is left over".into());
        }
        let served = |route: &usize| !retired.iter().any(|(_, over)| over.index() == *route);
        let here = |route: &usize| routes[*route].models.contains(&ModelId(model as u32));
        let want = (0..routes.len()).filter(served).filter(here).count();
        if server.routes() != want {
            return Err(format!("3: model {model} has {} routes, not {want}", server.routes()));
        }
        met.handoffs += server.counters().handoffs;
    }
    Ok(())
}

#[test]
fn invariants_hold_while_routes_come_and_go() {
    let mut met = Met::default();
    for seed in 0..SCHEDULES / 2 {
        if let Err(broken) = reloaded(seed, &mut met) {
            panic!("schedule {seed} breaks invariant {broken}");
        }
    }
    println!("{met:?}");
    let Met { tokens, handoffs, changes, drained } = met;
    assert!(tokens > 50_000 && handoffs > 10_000 && changes > 10_000 && drained > 2000, "it tests too little");
}
