//! `linear_rows.cu` and `linear_tiled.cu`.

use super::{Find, Kernels};
use crate::gpu::{Args, DevicePtr, Function, GpuError, Launch, Stream, launch};

/// Outputs of a tile of packed weights.
pub const TILE: usize = 16;
/// Most rows for which weights are streamed past the rows; more are computed in tiles.
pub const MAX_STREAMED_ROWS: u32 = 64;

const TILED_ROWS: u32 = 128;
const TILED_TILES: u32 = 8;
const TILED_SHARED: u32 = 5 * 32 * 1024;

/// Numbers of packed weights `[outputs, inputs]`.
pub fn packed_numbers(outputs: usize, inputs: usize) -> usize {
    outputs.next_multiple_of(TILE) * inputs
}

/// Slices into which the inputs of a weight are dealt, by its tiles of outputs. It must not depend on
/// anything but the shape: the order of sums follows from it.
pub fn slices(tiles: u32, inputs: u32) -> u32 {
    if tiles <= 256 && inputs >= 2048 { 16 } else { 8 }
}

/// What becomes of a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    Store,
    Residual,
    Gated,
}

/// `LinearArgs` of `linear.cuh`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct LinearArgs {
    pub w: DevicePtr,
    pub x: DevicePtr,
    pub bias: DevicePtr,
    pub squares: DevicePtr,
    pub eps: f32,
    pub rows: u32,
    pub inputs: u32,
    pub outputs: u32,
    pub y: DevicePtr,
    pub pitch: u32,
    pub stream: DevicePtr,
    pub norm: DevicePtr,
    pub normed: DevicePtr,
    pub squares_out: DevicePtr,
}

impl Default for LinearArgs {
    fn default() -> Self {
        let none = DevicePtr(0);
        Self {
            w: none,
            x: none,
            bias: none,
            squares: none,
            eps: 0.0,
            rows: 0,
            inputs: 0,
            outputs: 0,
            y: none,
            pitch: 0,
            stream: none,
            norm: none,
            normed: none,
            squares_out: none,
        }
    }
}

impl LinearArgs {
    fn tiles(&self, epilogue: Epilogue) -> u32 {
        self.outputs.div_ceil(if epilogue == Epilogue::Gated { 8 } else { TILE as u32 })
    }
}

#[derive(Debug)]
pub(super) struct Functions {
    /// By epilogue, tiles of 8 rows (1, 2, 4, 8) and slices (8, 16).
    rows: [[[Function; 2]; 4]; 3],
    /// By epilogue and slices.
    tiled: [[Function; 2]; 3],
}

const NAMES: [&str; 3] = ["store", "residual", "gated"];

/// Tiles of outputs a block of `linear_rows`, by tiles of 8 rows and by slices.
const BLOCK_TILES: [[u32; 2]; 4] = [[1, 1], [1, 1], [2, 1], [2, 1]];

fn array<T, const N: usize>(make: impl FnMut(usize) -> Result<T, GpuError>) -> Result<[T; N], GpuError> {
    let made: Vec<T> = (0..N).map(make).collect::<Result<_, _>>()?;
    made.try_into().map_err(|_| GpuError::NoFunction { program: "linear".into(), function: "all".into() })
}

impl Functions {
    pub(super) fn new(find: Find<'_>) -> Result<Self, GpuError> {
        let rows = array(|e| {
            array(|n| {
                array(|s| {
                    let function = find(&format!("rows_{}_{}_{}", NAMES[e], 1 << n, 8 << s))?;
                    function.set_max_dynamic_shared(shared(n, s))?;
                    Ok(function)
                })
            })
        })?;
        let tiled = array(|e| {
            array(|s| {
                let function = find(&format!("tiled_{}_{}", NAMES[e], 8 << s))?;
                function.set_max_dynamic_shared(TILED_SHARED)?;
                Ok(function)
            })
        })?;
        Ok(Self { rows, tiled })
    }
}

/// Bytes of shared memory for the slices' sums.
fn shared(row_tiles: usize, slices: usize) -> u32 {
    (8 << slices) * BLOCK_TILES[row_tiles][slices] * (1 << row_tiles) * 512
}

impl Kernels {
    /// A linear layer over packed weights in bf16. Up to [`MAX_STREAMED_ROWS`] rows, `rows` must be 8, 16, 32
    /// or 64, and all of them are computed.
    ///
    /// # Safety
    /// See the module. For streamed rows nothing else may hold for `rows`.
    pub unsafe fn linear(&self, stream: &Stream, epilogue: Epilogue, args: LinearArgs) -> Result<(), GpuError> {
        let tiles = args.tiles(epilogue);
        let slices = usize::from(slices(tiles, args.inputs) == 16);
        let functions = &self.linear;
        if args.rows > MAX_STREAMED_ROWS {
            let grid = [args.rows.div_ceil(TILED_ROWS), tiles.div_ceil(TILED_TILES), 1];
            let how = Launch { grid, block: 256, cluster: 1, shared: TILED_SHARED, overlap: self.clusters };
            // SAFETY: the caller's.
            return unsafe {
                launch(&functions.tiled[epilogue as usize][slices], &how, stream, Args::new().value(&args))
            };
        }
        let row_tiles = (args.rows / 8).ilog2() as usize;
        let grid = [tiles.div_ceil(BLOCK_TILES[row_tiles][slices]), 1, 1];
        // Blocks that wait early take the places of the last ones: with few long blocks that costs more than
        // it gains (measured on an H200: 8 % for 5120 outputs of 25600 inputs).
        let long = epilogue == Epilogue::Residual && args.inputs >= 16384;
        let overlap = self.clusters && !long;
        let block = 256 << slices;
        let how = Launch { grid, block, cluster: 1, shared: shared(row_tiles, slices), overlap };
        let function = &functions.rows[epilogue as usize][row_tiles][slices];
        // SAFETY: the caller's.
        unsafe { launch(function, &how, stream, Args::new().value(&args)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_of_the_arguments() {
        // As the compiler lays out the structure of `linear.cuh`.
        assert_eq!(size_of::<LinearArgs>(), 96);
        assert_eq!(std::mem::offset_of!(LinearArgs, y), 48);
        assert_eq!(std::mem::offset_of!(LinearArgs, stream), 64);
    }

    #[test]
    fn packed_weights_are_whole_tiles() {
        assert_eq!(packed_numbers(2049, 160), 2064 * 160);
        assert_eq!(packed_numbers(16, 32), 512);
    }

    #[test]
    fn shared_memory_fits() {
        for n in 0..4 {
            for s in 0..2 {
                assert!(shared(n, s) <= 160 * 1024);
            }
        }
    }
}
