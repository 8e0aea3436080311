//! One call of a policy's `route` hook: in a loaded library, linked in, in a WASM module, and in a module that uses
//! up nearly all of its fuel, which is how long a module can hold its model up. Build the plugin for the same
//! profile first: `cargo build --release -p tokenrouter-plugin-rstitch`.

use std::hint::black_box;

use anyhow::Context as _;
use criterion::{BenchmarkId, Criterion};
use tokenrouter::policy::native::NativePlugin;
use tokenrouter::policy::wasm::WasmPlugin;
use tokenrouter::policy::{Linked, PolicyFactory};
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

fn measure(criterion: &mut Criterion, name: &str, factory: &dyn PolicyFactory) -> anyhow::Result<()> {
    let models = ["slm", "llm"].map(|role| ModelDescription { name: role.to_owned(), role: role.to_owned() });
    let context =
        Context { route: "r", model: 0, models: &models, entry: 0, vocab_size: 10, eos: &[], services: &NoServices };
    let mut policy = factory.create(&context, "{}")?;
    let mut group = criterion.benchmark_group(name);
    for rows in [1, 16, 256] {
        let (ids, ones) = ((0..rows as u64).collect::<Vec<_>>(), vec![1 as ModelIndex; rows]);
        let entropy: Vec<f32> = (0..rows).map(|row| row as f32 * 0.007 % 0.1).collect();
        let batch = RouteBatch {
            request_ids: &ids,
            slots: &ones,
            seeds: &ids,
            positions: &ones,
            candidates: &ones,
            drafts: &ones,
            last_models: &ones,
            remaining: &ones,
            signals: SignalColumns { entropy_norm: &entropy, ..SignalColumns::default() },
        };
        let mut out = vec![Decision::STAY; rows];
        group.bench_function(BenchmarkId::from_parameter(rows), |bencher| {
            bencher.iter(|| {
                out.fill(Decision::STAY);
                policy.route(black_box(&batch), &mut out).is_ok()
            });
        });
    }
    group.finish();
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let exe = std::env::current_exe()?;
    let built = exe.ancestors().nth(2).context("the benchmark is not in target/<profile>/deps")?;
    let plugin = NativePlugin::load(&built.join("librstitch.so"), None)?;
    let mut criterion = Criterion::default().configure_from_args();
    measure(&mut criterion, "policy/native", &plugin)?;
    measure(&mut criterion, "policy/linked", &Linked::<Threshold>::default())?;
    for (name, text) in [("wasm", include_str!("../../plugins/rstitch/rstitch.wat")), ("wasm-greedy", GREEDY)] {
        let plugin = WasmPlugin::from_bytes(wat::parse_str(text)?, None)?;
        measure(&mut criterion, &format!("policy/{name}"), &plugin)?;
    }
    criterion.final_summary();
    Ok(())
}
