//! `linear_rows.cu`, and for many rows `linear_wgmma.cu` or `linear_tiled.cu`.

use super::{Find, Kernels};
use crate::gpu::{Args, DevicePtr, Function, GpuError, Launch, Stream, launch};

/// Outputs of a tile of packed weights.
pub const TILE: usize = 16;
/// Most rows for which weights are streamed past the rows; more are computed in tiles.
pub const MAX_STREAMED_ROWS: u32 = 64;

/// Blocks of `linear_tiled`.
const TILED: Block = Block { tiles: 8, rows: 128, threads: 256, shared: 5 * 32 * 1024 };

/// Numbers of packed weights `[outputs, inputs]`.
pub fn packed_numbers(outputs: usize, inputs: usize) -> usize {
    outputs.next_multiple_of(TILE) * inputs
}

/// Slices into which the inputs of a weight are dealt, by its tiles of outputs. It must not depend on
/// anything but the shape: the order of sums follows from it.
pub fn slices(tiles: u32, inputs: u32) -> u32 {
    // Few tiles fill the chip better as few large blocks than as many small ones (an H200's 132
    // multiprocessors hold 2 of 16 warps or 3 of 8), measured with the shapes of Qwen3.
    let (large, small) = (tiles.div_ceil(264), tiles.div_ceil(396));
    if inputs >= 1024 && tiles < 1024 && 2 * large <= 3 * small { 16 } else { 8 }
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
    /// By size of blocks, epilogue and slices; `None` on chips without these instructions.
    wgmma: Option<[[[Function; 2]; 3]; 2]>,
}

/// Blocks of `linear_wgmma`: tiles of outputs, rows, threads, bytes of shared memory.
struct Block {
    tiles: u32,
    rows: u32,
    threads: u32,
    shared: u32,
}
const WGMMA: [(&str, Block); 2] = [
    ("", Block { tiles: 12, rows: 128, threads: 512, shared: 212_992 }),
    ("small_", Block { tiles: 8, rows: 64, threads: 384, shared: 106_496 }),
];

const NAMES: [&str; 3] = ["store", "residual", "gated"];

/// Tiles of outputs a block of `linear_rows`, by tiles of 8 rows and by slices.
const BLOCK_TILES: [[u32; 2]; 4] = [[1, 1], [1, 1], [2, 1], [4, 2]];

fn array<T, const N: usize>(make: impl FnMut(usize) -> Result<T, GpuError>) -> Result<[T; N], GpuError> {
    let made: Vec<T> = (0..N).map(make).collect::<Result<_, _>>()?;
    made.try_into().map_err(|_| GpuError::NoFunction { program: "linear".into(), function: "all".into() })
}

impl Functions {
    pub(super) fn new(find: Find<'_>, hopper: bool) -> Result<Self, GpuError> {
        let rows = array(|e| {
            array(|n| {
                array(|s| {
                    let function = find("linear_rows.cu", &format!("rows_{}_{}_{}", NAMES[e], 1 << n, 8 << s))?;
                    function.set_max_dynamic_shared(shared(n, s))?;
                    Ok(function)
                })
            })
        })?;
        let tiled = array(|e| {
            array(|s| {
                let function = find("linear_tiled.cu", &format!("tiled_{}_{}", NAMES[e], 8 << s))?;
                function.set_max_dynamic_shared(TILED.shared)?;
                Ok(function)
            })
        })?;
        let wgmma = || {
            array(|size| {
                array(|e| {
                    array(|s| {
                        let (name, block) = &WGMMA[size];
                        let function = find("linear_wgmma.cu", &format!("wgmma_{name}{}_{}", NAMES[e], 8 << s))?;
                        function.set_max_dynamic_shared(block.shared)?;
                        Ok(function)
                    })
                })
            })
        };
        let wgmma = if hopper { Some(wgmma()?) } else { None };
        Ok(Self { rows, tiled, wgmma })
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
            let (function, block) = match &functions.wgmma {
                Some(wgmma) => {
                    let blocks = |block: &Block| args.rows.div_ceil(block.rows) * tiles.div_ceil(block.tiles);
                    // Large blocks must nearly fill the chip.
                    let size = usize::from(blocks(&WGMMA[0].1) * 4 < self.multiprocessors * 3);
                    (&wgmma[size][epilogue as usize][slices], &WGMMA[size].1)
                }
                None => (&functions.tiled[epilogue as usize][slices], &TILED),
            };
            let grid = [args.rows.div_ceil(block.rows), tiles.div_ceil(block.tiles), 1];
            let how = Launch { grid, block: block.threads, cluster: 1, shared: block.shared, overlap: self.clusters };
            // SAFETY: the caller's.
            return unsafe { launch(function, &how, stream, Args::new().value(&args)) };
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
