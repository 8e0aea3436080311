//! From checked bytes to machine code, within limits that do not depend on what the bytes say.

use std::sync::{Arc, LazyLock, mpsc};
use std::thread;
use std::time::Duration;

use wasmtime::{Config, Engine, Module, OptLevel};

use super::cost::costs;
use super::gate;

/// Larger modules are compiled without optimisation: its time grows faster than theirs.
const MAX_OPTIMISED_BYTES: usize = 16 << 10;
/// How long a compilation may take. The gate bounds the work; this bounds the wait where it failed to.
const PATIENCE: Duration = Duration::from_secs(10);
/// Native stack for the compiler.
const COMPILER_STACK: usize = 16 << 20;
/// Stack of a module's calls.
const GUEST_STACK: usize = 128 << 10;

/// Time between two epochs. Fuel is the limit of a call; the epoch is there for what fuel would not
/// count. It must not end a call whose thread was merely not scheduled.
const EPOCH: Duration = Duration::from_millis(100);
/// Epochs that a call may last.
pub const MAX_EPOCHS: u64 = 20;

#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    #[error("WebAssembly cannot be run here ({0})")]
    Engine(String),
    #[error("the compiler refuses it ({0}); build it again with another compiler")]
    Refused(String),
    #[error("takes more than {} s to compile; build a smaller module", PATIENCE.as_secs())]
    TooSlow,
    #[error("the compiler failed; build the module in another way and report this")]
    Failed,
    #[error("no thread could be started to compile it ({0}); raise the limit on threads")]
    Thread(#[from] std::io::Error),
}

static OPTIMISING: LazyLock<Result<Engine, String>> = LazyLock::new(|| engine(OptLevel::Speed));
static PLAIN: LazyLock<Result<Engine, String>> = LazyLock::new(|| engine(OptLevel::None));

/// The compiler's settings: the same code and the same results for the same module on every machine, and
/// no signal handlers in the server.
fn engine(level: OptLevel) -> Result<Engine, String> {
    let mut config = Config::new();
    config
        .cranelift_opt_level(level)
        .cranelift_nan_canonicalization(true)
        .consume_fuel(true)
        .operator_cost(costs())
        .epoch_interruption(true)
        .max_wasm_stack(GUEST_STACK)
        .wasm_backtrace_max_frames(None)
        .generate_address_map(false)
        .signals_based_traps(false)
        // The whole memory at once: it never moves, and no address space beyond it is taken.
        .memory_reservation(gate::MAX_MEMORY)
        .memory_reservation_for_growth(0)
        .memory_guard_size(0)
        .guard_before_linear_memory(false)
        .memory_init_cow(false)
        // What the gate refuses is refused here, too.
        .wasm_relaxed_simd(false)
        .wasm_tail_call(false)
        .wasm_multi_value(false)
        .wasm_multi_memory(false)
        .wasm_memory64(false);
    let engine = Engine::new(&config).map_err(|e| e.to_string())?;
    let weak = engine.weak();
    let ticks = move || {
        while let Some(engine) = weak.upgrade() {
            engine.increment_epoch();
            drop(engine);
            thread::sleep(EPOCH);
        }
    };
    thread::Builder::new().name("wasm-epochs".to_owned()).spawn(ticks).map_err(|e| e.to_string())?;
    Ok(engine)
}

/// Compile a module that has passed the gate.
pub fn compile(bytes: Arc<[u8]>) -> Result<Module, CompileError> {
    let engine = if bytes.len() > MAX_OPTIMISED_BYTES { &*PLAIN } else { &*OPTIMISING };
    let engine = engine.as_ref().map_err(|e| CompileError::Engine(e.clone()))?;
    let (done, module) = mpsc::sync_channel(1);
    let work = move || {
        // Nobody waits any more after `PATIENCE`.
        let _ = done.send(Module::from_binary(engine, &bytes));
    };
    thread::Builder::new().name("wasm-compile".to_owned()).stack_size(COMPILER_STACK).spawn(work)?;
    match module.recv_timeout(PATIENCE) {
        Ok(module) => module.map_err(|e| CompileError::Refused(one_line(&e))),
        Err(mpsc::RecvTimeoutError::Timeout) => Err(CompileError::TooSlow),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(CompileError::Failed),
    }
}

/// An error with its causes, for a message of one line.
pub fn one_line(error: &wasmtime::Error) -> String {
    let text = format!("{error:#}");
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect()
}
