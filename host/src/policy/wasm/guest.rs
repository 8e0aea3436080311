//! One instance of a module, and calls of its functions within their limits.

use wasmtime::{
    Engine, Extern, Instance, Memory, Module, Mutability, Store, StoreLimits, StoreLimitsBuilder, Trap, TypedFunc, Val,
    WasmParams, WasmResults,
};

use super::compile::{MAX_EPOCHS, one_line};
use super::gate;
use super::layout::{Seat, block_bytes, write_seat};

/// Fuel of a call for `rows` rows, see [`super::cost`].
pub fn fuel(rows: usize) -> u64 {
    10_000 + 200 * rows as u64
}

/// What a module did wrong.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error("{0}")]
    Trap(String),
    #[error("used up its fuel of {0}; do less for each row")]
    Fuel(u64),
    #[error("{function} returned {found}, expected {expected}")]
    Returned { function: &'static str, found: i32, expected: i32 },
    #[error("tr_configure refused the settings (code {0})")]
    Refused(i32),
    #[error(transparent)]
    Answer(#[from] super::layout::AnswerError),
    #[error("export `{name}` is not {wanted}")]
    Export { name: &'static str, wanted: &'static str },
    #[error("tr_block is {address}, but memory has {memory} bytes and the block {bytes}; reserve the block in memory")]
    Block { address: u32, memory: usize, bytes: usize },
}

pub struct Guest {
    store: Store<StoreLimits>,
    memory: Memory,
    block: usize,
    block_bytes: usize,
    route: TypedFunc<i32, i32>,
    finished: Option<TypedFunc<i32, ()>>,
    configure: Option<TypedFunc<(), i32>>,
}

impl Guest {
    /// Make an instance, whose exports are as documented. None of its functions is called.
    pub fn open(module: &Module, nets: usize) -> Result<Self, Fault> {
        let engine: &Engine = module.engine();
        let limits = StoreLimitsBuilder::new()
            .memory_size(gate::MAX_MEMORY as usize)
            .table_elements(gate::MAX_TABLE as usize)
            .instances(1)
            .memories(1)
            .tables(1)
            .build();
        let mut store = Store::new(engine, limits);
        store.limiter(|limits| limits);
        let started = fuel(1);
        refuel(&mut store, started)?;
        let instance = Instance::new(&mut store, module, &[]).map_err(|e| fault(&e, started))?;
        let memory = instance.get_memory(&mut store, "memory");
        let memory = memory.ok_or(Fault::Export { name: "memory", wanted: "a memory" })?;
        let address = address(&instance, &mut store)?;
        let route = function(&instance, &mut store, "tr_route", "a function (i32) -> i32")?;
        let route = route.ok_or(Fault::Export { name: "tr_route", wanted: "a function" })?;
        let finished = function(&instance, &mut store, "tr_finished", "a function (i32) without a result")?;
        let configure = function::<(), i32>(&instance, &mut store, "tr_configure", "a function () -> i32")?;
        let (block, block_bytes) = (address as usize, block_bytes(nets));
        let mut guest = Self { store, memory, block, block_bytes, route, finished, configure };
        guest.block()?;
        Ok(guest)
    }

    /// [`Self::open`], and tell the instance where it sits.
    pub fn start(module: &Module, seat: &Seat) -> Result<Self, Fault> {
        let mut guest = Self::open(module, seat.nets.len())?;
        write_seat(guest.block()?, seat);
        if let Some(configure) = guest.configure.clone() {
            // Also a fresh instance that stands in for a failed one waits for this.
            let started = fuel(1);
            refuel(&mut guest.store, started)?;
            match configure.call(&mut guest.store, ()).map_err(|e| fault(&e, started))? {
                0 => {}
                code => return Err(Fault::Refused(code)),
            }
        }
        Ok(guest)
    }

    /// The block in the module's memory as it is now.
    pub fn block(&mut self) -> Result<&mut [u8], Fault> {
        let data = self.memory.data_mut(&mut self.store);
        let (memory, address, bytes) = (data.len(), self.block, self.block_bytes);
        let block = data.get_mut(address..address.saturating_add(bytes));
        block.ok_or(Fault::Block { address: address as u32, memory, bytes })
    }

    /// Have the rows in the block decided within `left` of the call's fuel.
    pub fn route(&mut self, rows: usize, left: u64) -> Result<(), Fault> {
        refuel(&mut self.store, left)?;
        let found = self.route.call(&mut self.store, rows as i32).map_err(|e| fault(&e, fuel(rows)))?;
        let expected = rows as i32;
        if found == expected { Ok(()) } else { Err(Fault::Returned { function: "tr_route", found, expected }) }
    }

    /// What the last call did not use.
    pub fn fuel_left(&self) -> u64 {
        self.store.get_fuel().unwrap_or(0)
    }

    pub fn finished(&mut self, slot: u32) -> Result<(), Fault> {
        let Some(finished) = self.finished.clone() else { return Ok(()) };
        let fuel = fuel(1);
        refuel(&mut self.store, fuel)?;
        finished.call(&mut self.store, slot as i32).map_err(|e| fault(&e, fuel))
    }
}

fn refuel(store: &mut Store<StoreLimits>, fuel: u64) -> Result<(), Fault> {
    store.set_epoch_deadline(MAX_EPOCHS);
    store.set_fuel(fuel).map_err(|e| Fault::Trap(one_line(&e)))
}

fn fault(error: &wasmtime::Error, fuel: u64) -> Fault {
    match error.downcast_ref::<Trap>() {
        Some(Trap::OutOfFuel) => Fault::Fuel(fuel),
        Some(trap) => Fault::Trap(trap.to_string()),
        None => Fault::Trap(one_line(error)),
    }
}

/// The constant that says where the block is.
fn address(instance: &Instance, store: &mut Store<StoreLimits>) -> Result<u32, Fault> {
    let refused = Fault::Export { name: "tr_block", wanted: "a constant i32 global" };
    let Some(Extern::Global(global)) = instance.get_export(&mut *store, "tr_block") else { return Err(refused) };
    match (global.ty(&*store).mutability(), global.get(&mut *store)) {
        (Mutability::Const, Val::I32(address)) => Ok(address as u32),
        _ => Err(refused),
    }
}

/// An exported function, `None` if there is no export of that name.
fn function<P: WasmParams, R: WasmResults>(
    instance: &Instance,
    store: &mut Store<StoreLimits>,
    name: &'static str,
    wanted: &'static str,
) -> Result<Option<TypedFunc<P, R>>, Fault> {
    match instance.get_export(&mut *store, name) {
        None => Ok(None),
        Some(Extern::Func(function)) => function.typed(&*store).map(Some).map_err(|_| Fault::Export { name, wanted }),
        Some(_) => Err(Fault::Export { name, wanted }),
    }
}
