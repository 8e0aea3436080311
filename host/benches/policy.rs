//! One call of a policy's `route` hook: linked into the program, in a loaded library, in WASM modules, in a module that
//! uses up nearly all of its fuel, and in modules that never come back, each of one kind of operator that takes long:
//! with their repetitions by fresh instances, that is the longest for which a module can hold its model up. After
//! criterion's report comes a table of all of them. Build
//! the plugin for the same profile first: `cargo build --release -p tokenrouter-plugin-rstitch`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use criterion::{BenchmarkId, Criterion};
use tokenrouter::policy::native::NativePlugin;
use tokenrouter::policy::wasm::WasmPlugin;
use tokenrouter::policy::{Linked, PolicyFactory, PolicyInstance};
use tokenrouter_plugin_api::{
    Context, Decision, ModelDescription, ModelIndex, NoServices, Policy, PolicyError, RouteBatch, SignalColumns,
};

/// The rule of R-Stitch at its small model.
struct Threshold;

impl Policy for Threshold {
    const NAME: &'static str = "threshold";
    fn create(_: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self)
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (decision, &entropy) in out.iter_mut().zip(batch.signals.entropy_norm) {
            if entropy > 0.03 {
                *decision = Decision::to(1);
            }
        }
    }
}

/// Uses up the fuel of a call for 256 rows but for a little, and stays.
const GREEDY: &str = r#"(module
    (@custom "tokenrouter:policy" "{\"abi\": 1, \"name\": \"greedy\", \"version\": \"1\"}")
    (memory (export "memory") 1)
    (global (export "tr_block") i32 (i32.const 0))
    (func (export "tr_route") (param $rows i32) (result i32) (local $i i32)
      ;; A turn takes 5 units, a call has 10000 + 200 for each row.
      (local.set $i (i32.add (i32.const 1900) (i32.mul (local.get $rows) (i32.const 39))))
      (loop $next (br_if $next (local.tee $i (i32.sub (local.get $i) (i32.const 1)))))
      (local.get $rows)))"#;

/// Does `turn` for ever where a row's position is 1000, as no rehearsal has it.
fn endless(turn: &str) -> String {
    format!(
        r#"(module
    (@custom "tokenrouter:policy" "{{\"abi\": 1, \"name\": \"endless\", \"version\": \"1\"}}")
    (memory (export "memory") 1)
    (global (export "tr_block") i32 (i32.const 0))
    (table 8 funcref)
    (elem (i32.const 0) $nothing $nothing)
    (func $nothing)
    (func (export "tr_route") (param $rows i32) (result i32) (local $i i32) (local $w i64) (local $x f64) (local $v v128)
      (local.set $w (i64.const 0x7eadbeefdeadbeef))
      (local.set $x (f64.const 3.7))
      (local.set $v (v128.const i64x2 0x123456789abcdef1 0x3ff123456789abcd))
      (if (i32.eq (i32.load (i32.const 0x2800)) (i32.const 1000)) (then (loop $next {turn} (br $next))))
      (local.get $rows)))"#
    )
}

/// `operator` of itself, 16 times over, of what the local variable has, and back into it.
fn chain(variable: &str, operator: &str) -> String {
    let open = format!("({operator} ").repeat(16);
    let close = ")".repeat(open.matches('(').count() - open.matches(')').count());
    format!("(local.set {variable} {open}(local.get {variable}){close})")
}

/// Turns of endless modules, by what they are made of.
fn turns() -> Vec<(&'static str, String)> {
    let random = "(local.set $i (i32.add (i32.mul (local.get $i) (i32.const 1664525)) (i32.const 1013904223)))";
    let places = "(block $a (block $b (block $c (block $d (br_table $a $b $c $d";
    let arms = "(local.set $w (i64.const 1))) (local.set $w (i64.const 2))) (local.set $w (i64.const 3)))";
    vec![
        ("endless", String::new()),
        ("load", chain("$i", "i32.load")),
        (
            "quotient",
            chain("$w", "i64.rem_u (i64.const 0x7fffffffffffffe7)")
                .replace("(local.get $w)", "(i64.or (local.get $w) (i64.const 1))"),
        ),
        ("divide", chain("$x", "f64.div (f64.const 1.7)")),
        ("root", chain("$x", "f64.sqrt")),
        ("round", chain("$x", "f64.nearest")),
        ("least", chain("$x", "f64.min (f64.const 3.7)")),
        ("convert", chain("$x", "f64.convert_i64_u (i64.trunc_sat_f64_u")),
        ("vector-bits", chain("$v", "i8x16.popcnt")),
        ("vector-product", format!("(local.set $v (i64x2.mul (local.get $v) {}))", "(local.get $v)")),
        ("vector-root", chain("$v", "f64x2.sqrt")),
        ("call", "(call $nothing)".repeat(16)),
        ("call-indirect", "(call_indirect (i32.and (local.get $i) (i32.const 1)))".repeat(16)),
        (
            "branch",
            format!("{random}{places} (i32.and (i32.shr_u (local.get $i) (i32.const 20)) (i32.const 3)))) {arms}"),
        ),
        ("grow", "(drop (memory.grow (i32.const 0)))".into()),
        ("fill", "(memory.fill (i32.const 60000) (i32.const 0) (i32.const 1))".into()),
        ("copy", "(memory.copy (i32.const 0) (i32.const 30000) (i32.const 30000))".into()),
        ("table", "(drop (table.grow (ref.null func) (i32.const 0)))".into()),
    ]
}

/// Follows references all over its memory, once they are there.
const CHASE: &str = r#"(module
    (@custom "tokenrouter:policy" "{\"abi\": 1, \"name\": \"chase\", \"version\": \"1\"}")
    (memory (export "memory") 32)
    (global (export "tr_block") i32 (i32.const 0))
    (global $made (mut i32) (i32.const 0))
    (global $at (mut i32) (i32.const 40960))
    ;; The place of a number in the order of steps: 31744 lines of 64 bytes after the first 640.
    (func $place (param $n i32) (result i32)
      (i32.add (i32.const 40960) (i32.mul (i32.const 64)
        (i32.rem_u (i32.mul (local.get $n) (i32.const 12289)) (i32.const 31744)))))
    (func (export "tr_route") (param $rows i32) (result i32) (local $i i32) (local $p i32)
      (local.set $p (global.get $at))
      (if (i32.lt_u (global.get $made) (i32.const 31744))
        (then
          (local.set $i (i32.const 50))
          (loop $next
            (if (i32.lt_u (global.get $made) (i32.const 31744)) (then
              (i32.store offset=64 (call $place (global.get $made))
                (i32.add (i32.const 64) (call $place (i32.add (global.get $made) (i32.const 1)))))
              (global.set $made (i32.add (global.get $made) (i32.const 1)))))
            (br_if $next (local.tee $i (i32.sub (local.get $i) (i32.const 1))))))
        (else
          (local.set $p (i32.add (local.get $p) (i32.mul (i32.eq (local.get $p) (i32.const 40960)) (i32.const 64))))
          ;; A turn takes 200 units.
          (local.set $i (i32.add (i32.const 40) (local.get $rows)))
          (loop $next
            (local.set $p CHAIN)
            (br_if $next (local.tee $i (i32.sub (local.get $i) (i32.const 1)))))
          (global.set $at (local.get $p))))
      (local.get $rows)))"#;

const ROWS: [usize; 3] = [1, 64, 256];
/// More than a call may take, in nanoseconds: of a library, of a module, and of one that means harm.
const LIMITS: [(&str, f64); 3] = [("policy/native", 1e3), ("policy/wasm", 2e3), ("policy/wasm-script", 2e3)];
/// The same for all modules that mean harm.
const HOSTILE: (&str, f64) = ("policy/wasm-hostile/", 150e3);

/// A row of the table: nanoseconds a call by the number of rows, NaN where it was not measured.
type Line = (String, [f64; 3]);

fn create(factory: &dyn PolicyFactory) -> anyhow::Result<Box<dyn PolicyInstance>> {
    let models = ["slm", "llm"].map(|role| ModelDescription { name: role.to_owned(), role: role.to_owned() });
    let context =
        Context { route: "r", model: 0, models: &models, entry: 0, vocab_size: 10, eos: &[], services: &NoServices };
    Ok(factory.create(&context, "{}")?)
}

/// Time calls for so many rows at `position`: `timed` is given the call and how often to make it. The median.
fn calls(
    criterion: &mut Criterion,
    name: &str,
    rows: usize,
    position: u32,
    mut timed: impl FnMut(&mut dyn FnMut(&mut dyn PolicyInstance) -> bool, u64) -> Duration,
) -> f64 {
    let (ids, ones) = ((0..rows as u64).collect::<Vec<_>>(), vec![1 as ModelIndex; rows]);
    let positions = vec![position; rows];
    let entropy: Vec<f32> = (0..rows).map(|row| row as f32 * 0.007 % 0.1).collect();
    let batch = RouteBatch {
        request_ids: &ids,
        slots: &ones,
        seeds: &ids,
        positions: &positions,
        candidates: &ones,
        drafts: &ones,
        last_models: &ones,
        remaining: &ones,
        signals: SignalColumns { entropy_norm: &entropy, ..SignalColumns::default() },
    };
    let mut out = vec![Decision::STAY; rows];
    let mut call = |policy: &mut dyn PolicyInstance| {
        out.fill(Decision::STAY);
        policy.route(black_box(&batch), &mut out).is_ok()
    };
    let mut samples = Vec::new();
    criterion.benchmark_group(name).bench_function(BenchmarkId::from_parameter(rows), |bencher| {
        bencher.iter_custom(|times| {
            let took = timed(&mut call, times);
            samples.push(took.as_nanos() as f64 / times as f64);
            took
        });
    });
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(f64::NAN)
}

/// An instance that is called again and again.
fn measure(criterion: &mut Criterion, name: &str, factory: &dyn PolicyFactory) -> anyhow::Result<Line> {
    let mut policy = create(factory)?;
    let medians = ROWS.map(|rows| {
        calls(criterion, name, rows, 1, |call, times| {
            let start = Instant::now();
            for _ in 0..times {
                black_box(call(&mut *policy));
            }
            start.elapsed()
        })
    });
    Ok((name.to_owned(), medians))
}

/// A new instance for each call, which fails in the end.
fn measure_failing(criterion: &mut Criterion, name: &str, factory: &dyn PolicyFactory) -> anyhow::Result<Line> {
    create(factory)?;
    let median = calls(criterion, name, 256, 1000, |call, times| {
        let mut took = Duration::ZERO;
        for _ in 0..times {
            let Ok(mut policy) = create(factory) else { continue };
            let start = Instant::now();
            let decided = call(&mut *policy);
            took += start.elapsed();
            assert!(!decided, "an endless loop came back");
        }
        took
    });
    Ok((name.to_owned(), [f64::NAN, f64::NAN, median]))
}

fn print_table(lines: &[Line]) {
    println!(
        "\nmedian ns a call                   {:>10}{:>10}{:>10}   of linked, 256 rows",
        "1 row", "64 rows", "256 rows"
    );
    let linked = lines.first().map_or(f64::NAN, |(_, medians)| medians[2]);
    for (name, medians) in lines {
        let cell = |ns: f64| if ns.is_nan() { format!("{:>10}", "") } else { format!("{ns:>10.0}") };
        let limit = LIMITS.iter().find(|(limited, _)| limited == name).map(|(_, limit)| *limit);
        let limit = limit.or(name.starts_with(HOSTILE.0).then_some(HOSTILE.1));
        let verdict = match limit {
            Some(limit) if medians[2] > limit => format!(", ABOVE its limit of {limit:.0} ns"),
            Some(limit) => format!(", within its limit of {limit:.0} ns"),
            None => String::new(),
        };
        let cells: String = medians.iter().map(|&ns| cell(ns)).collect();
        println!("{name:<35}{cells}   {:.1} times{verdict}", medians[2] / linked);
    }
}

fn main() -> anyhow::Result<()> {
    let exe = std::env::current_exe()?;
    let built = exe.ancestors().nth(2).context("the benchmark is not in target/<profile>/deps")?;
    let plugin = NativePlugin::load(&built.join("librstitch.so"), None)?;
    let mut criterion = Criterion::default().configure_from_args();
    let mut lines = vec![
        measure(&mut criterion, "policy/linked", &Linked::<Threshold>::default())?,
        measure(&mut criterion, "policy/native", &plugin)?,
    ];
    let script = include_bytes!("../../plugins/rstitch/assemblyscript/rstitch.wasm").to_vec();
    for (name, module) in [
        ("policy/wasm", wat::parse_str(include_str!("../../plugins/rstitch/rstitch.wat"))?),
        ("policy/wasm-script", script),
        ("policy/wasm-greedy", wat::parse_str(GREEDY)?),
    ] {
        lines.push(measure(&mut criterion, name, &WasmPlugin::from_bytes(module, None)?)?);
    }
    let chase = CHASE.replace("CHAIN", &format!("{}(local.get $p){}", "(i32.load ".repeat(16), ")".repeat(16)));
    let chase = WasmPlugin::from_bytes(wat::parse_str(chase)?, None)?;
    lines.push(measure(&mut criterion, &format!("{}chase", HOSTILE.0), &chase)?);
    for (name, turn) in turns() {
        let module = wat::parse_str(endless(&turn)).with_context(|| format!("the module `{name}`"))?;
        let plugin = WasmPlugin::from_bytes(module, None)?;
        lines.push(measure_failing(&mut criterion, &format!("{}{name}", HOSTILE.0), &plugin)?);
    }
    criterion.final_summary();
    print_table(&lines);
    Ok(())
}
