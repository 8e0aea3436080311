use super::*;
use crate::subserver::gate::Schedule;

const MODELS: &str = "\
[models.s]
step_ms = 6
routing = { s = 0.65, l = 0.35 }
commit = { l = 0 }
[models.l]
step_ms = { 1 = 20, 8 = 27.9 }
routing = { s = 1 }
";
const SIMULATION: &str = "[simulation]\narrivals = { closed = 8 }\nrequests = 16\noutput = 100\n";

fn parse(text: &str) -> Result<Plan, String> {
    let read = |name: &str| match name {
        "good.csv" => Ok("arrival_ms,output_tokens\n0,5\n 2.5, 7\n".into()),
        "bad.csv" => Ok("arrival_ms,output_tokens\n1,0\n".into()),
        "unsorted.csv" => Ok("arrival_ms\n3\n1\n".into()),
        _ => Err("there is no such file".to_string()),
    };
    plan(text, &read).map_err(|fault| fault.in_file("p.toml").to_string())
}

#[test]
fn everything_that_can_be_written() {
    let plan = parse(
        "[batching]\nschedule = 'step-sync'\n\
         [simulation]\nentry = 'b'\narrivals = { bursts = 4, every_ms = 250 }\nrequests = 9\nprompt = [10, 20]\n\
         output = 7\nseed = 5\nnetwork_ms = 0.5\n\
         [models.a]\nstep_ms = { 8 = 5, 1 = 4 }\nrow_ms = 0.01\nhosts = ['x', 'y']\nstretch = [1.5, 2]\n\
         min_batch = [1, 2]\nmax_wait_ms = 9\nhold_ms = 3\nkv_tokens = 4096\nmax_rows = 64\nprefill_chunk = 32\n\
         routing = { a = 0.5, b = 0.5 }\ncommit = { b = 0.25 }\n\
         [models.b]\nstep_ms = 1\nhost = 'y'\nrouting = { a = 1 }\n",
    )
    .unwrap();
    let ms = Duration::from_millis;
    assert_eq!((plan.entry, plan.schedule, plan.seed), (1, Schedule::StepSync, 5));
    assert_eq!(plan.delay, Duration::from_micros(500));
    let load = &plan.load;
    assert_eq!((load.requests, load.prompt, load.output), (9, Lengths(10, 20), Lengths(7, 7)));
    assert_eq!(load.arrivals, Arrivals::Bursts { size: 4, every: ms(250) });
    let [a, b] = &plan.models[..] else { panic!() };
    assert_eq!((&a.hosts[..], &b.hosts[..], &a.stretch[..]), (&[0, 1][..], &[1][..], &[1.5, 2.0][..]));
    assert_eq!((a.latency.of(1, 101), a.latency.of(8, 8)), (ms(5), ms(5)));
    assert_eq!((&a.waiting.min_batch[..], a.waiting.max_wait, a.waiting.hold), (&[1, 2][..], ms(9), ms(3)));
    assert_eq!((a.kv_tokens, a.max_rows, a.prefill_chunk), (Some(4096), 64, 32));
    assert_eq!((&a.routing[..], &a.commit[..]), (&[0.5, 0.5][..], &[1.0, 0.25][..]));
    assert_eq!((&b.routing[..], &b.commit[..]), (&[1.0, 0.0][..], &[1.0, 1.0][..]));
    let traced = parse(&format!("[simulation]\narrivals = {{ trace = 'good.csv' }}\n{MODELS}")).unwrap();
    assert_eq!((traced.load.requests, traced.requests()[1].output), (2, 7));
    assert_eq!(traced.requests()[1].at, Duration::from_micros(2500));
}

#[test]
fn impossible_plans_get_one_line() {
    for (was, instead, message) in [
        ("l = 0.35", "l = 0.3", "p.toml:7: models.s.routing: the probabilities add up to 0.95, not to 1"),
        ("l = 0.35", "huge = 0.35", "p.toml:7: models.s.routing: there is no model `huge`: known are s, l"),
        ("s = 0.65", "s = -0.65", "p.toml:7: models.s.routing.s = -0.65: must be from 0 to 1"),
        ("step_ms = 6", "step_ms = -6", "p.toml:6: models.s.step_ms = -6: must be from 0.000001 to 1000000000"),
        ("8 = 27.9", "8 = -27.9", "p.toml:10: models.l.step_ms.8 = -27.9: must be from 0.000001 to 1000000000"),
        ("8 = 27.9", "0 = 2", "p.toml:10: models.l.step_ms.0: a batch size is a whole number from 1 to 1048576"),
        ("step_ms = 6\n", "", "p.toml:5: [models.s]: has no `step_ms`; add the time of a step, or { BATCH = TIME, … }"),
        ("closed = 8", "closed = 0", "p.toml:2: simulation.arrivals.closed = 0: must be from 1 to 1048576"),
        (
            "closed = 8",
            "poisson = -1",
            "p.toml:2: simulation.arrivals.poisson = -1: must be from 0.000001 to 1000000000",
        ),
        (
            "closed = 8",
            "closed = 8, poisson = 1",
            "p.toml:2: simulation.arrivals.poisson = 1: arrivals are of one kind; keep one of them",
        ),
        (
            "closed = 8",
            "bursts = 8",
            "p.toml:2: simulation.arrivals.bursts = 8: needs the time between two bursts; add `every_ms`",
        ),
        ("closed = 8", "", "p.toml:2: simulation.arrivals = {…}: must be one of closed, poisson, bursts and trace"),
        (
            "closed = 8",
            "clsoed = 8",
            "p.toml:2: simulation.arrivals = {…}: must be one of closed, poisson, bursts and trace",
        ),
        ("closed = 8", "trace = 'no.csv'", "p.toml:2: simulation.arrivals.trace = \"no.csv\": there is no such file"),
        (
            "closed = 8",
            "trace = 'bad.csv'",
            "p.toml:2: simulation.arrivals.trace = \"bad.csv\": line 2: output_tokens = \"0\" must be a number from 1 on",
        ),
        (
            "closed = 8",
            "trace = 'unsorted.csv'",
            "p.toml:2: simulation.arrivals.trace = \"unsorted.csv\": line 3: arrival_ms = 1 is before the line above; sort the file",
        ),
        (
            "closed = 8",
            "trace = 'good.csv'",
            "p.toml:3: simulation.requests = 16: the trace has its requests; leave it out",
        ),
        (
            "output = 100",
            "output = [9, 3]",
            "p.toml:4: simulation.output = [9, 3]: must be a number of tokens, or [LEAST, MOST]",
        ),
        (
            "output = 100\n",
            "",
            "p.toml:1: [simulation]: has no `output`; add the tokens of an answer, or [LEAST, MOST]",
        ),
        (
            "commit = { l = 0 }",
            "commit = { s = 0 }",
            "p.toml:8: models.s.commit.s: a request that stays has committed its token; leave it out",
        ),
        (
            "s = 0.65, l = 0.35",
            "s = 1",
            "p.toml:9: [models.l]: no request ever comes here; add it to a `routing`, or leave it out",
        ),
        (
            "routing = { s = 1 }\n",
            "routing = { s = 1 }\nhold = 1\n",
            "p.toml:12: unknown key `models.l.hold`: did you mean `host`?",
        ),
        (
            "[simulation]\n",
            "[batching]\nschedule = 'lazy'\n[simulation]\n",
            "p.toml:2: batching.schedule = \"lazy\": must be \"delayed\", \"eager\", \"model-sync\" or \"step-sync\"",
        ),
        (
            "[simulation]\n",
            "[batching]\nmode = 'online'\np99_tpot_ms = 9\n[simulation]\n",
            "p.toml:1: [batching]: mode = \"online\": ladders of a plan are fixed; leave `mode` and its limits out",
        ),
    ] {
        let text = format!("{SIMULATION}{MODELS}").replacen(was, instead, 1);
        assert_eq!(parse(&text).unwrap_err(), message, "{text}");
    }
    let never = "[models.s]\nstep_ms = 1\nrouting = { l = 1 }\ncommit = { l = 0 }\n\
                 [models.l]\nstep_ms = 1\nrouting = { s = 1 }\ncommit = { s = 0 }\n";
    let never = parse(&format!("{SIMULATION}{never}")).unwrap_err();
    assert!(never.contains("[models.s]: no token is ever committed from here on"), "{never}");
}

#[test]
fn loads_that_cannot_be() {
    let check = |more: &str| parse(&format!("{SIMULATION}{MODELS}{more}")).unwrap().check();
    assert_eq!(check(""), Ok(()));
    assert_eq!(check("min_batch = 8\n"), Ok(()));
    let locked = check("min_batch = 9\n").unwrap_err();
    assert!(locked.contains("with 8 requests under way the models could wait for each other for ever"), "{locked}");
    let small = check("kv_tokens = 100\n").unwrap_err();
    assert_eq!(small, "models.l.kv_tokens: a request may have 101 tokens; give at least these");
    let hosts: Vec<String> = (0..9).map(|host| host.to_string()).collect();
    let text = format!("{SIMULATION}[models.s]\nstep_ms = 1\nhosts = {hosts:?}\n");
    let apart = parse(&text).unwrap().check().unwrap_err();
    assert_eq!(apart, "arrivals: 8 requests under way leave instances without any; at least 9 are needed");
}
