//! `linear_rows.cu`, for large weights `linear_wide.cu`, and for many rows `linear_wgmma.cu` or `linear_tiled.cu`.

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
    /// As in [`SHORT`], by tiles of 8 rows (1, 2); `None` on chips without what they need.
    short: Option<[[Function; 2]; 4]>,
    /// By epilogue and slices.
    tiled: [[Function; 2]; 3],
    /// By epilogue, tiles of 8 rows (2, 4) and kind: 8 slices, 16 slices, [`SPLIT`]; `None` without clusters.
    wide: Option<[[[Function; 3]; 2]; 3]>,
    /// By epilogue; `None` on chips without these instructions.
    wgmma: Option<[Wgmma; 3]>,
}

#[derive(Debug)]
struct Wgmma {
    /// By size of blocks and slices.
    whole: [[Function; 2]; 3],
    /// Of 8 slices, in clusters.
    split: Function,
}

/// Blocks of a cluster that deal out the slices of a weight with few outputs and many inputs.
const SPLIT: u32 = 4;
/// Tiles of outputs from which on blocks with all slices fill the chip: measured on an H200 with the shapes of
/// Qwen3, where those of fewer outputs than 10240 do not.
const MANY_TILES: u32 = 640;
/// Inputs from which on a weight with few outputs is worth a cluster's exchange of sums.
const MANY_INPUTS: u32 = 8192;

/// How a large weight is computed for 9 to 64 rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Large {
    Whole,
    Split,
}

/// `None` for a weight that `linear_rows` computes sooner, or as soon.
fn large(tiles: u32, inputs: u32) -> Option<Large> {
    if tiles >= MANY_TILES {
        Some(Large::Whole)
    } else if inputs >= MANY_INPUTS && slices(tiles, inputs) == 8 {
        Some(Large::Split)
    } else {
        None
    }
}

/// Blocks of `linear_wgmma`: tiles of outputs, rows, threads, bytes of shared memory.
struct Block {
    tiles: u32,
    rows: u32,
    threads: u32,
    shared: u32,
}
const WGMMA: [(&str, Block); 3] = [
    ("", Block { tiles: 12, rows: 128, threads: 512, shared: 196_608 }),
    ("mid_", Block { tiles: 8, rows: 128, threads: 384, shared: 196_608 }),
    ("small_", Block { tiles: 8, rows: 64, threads: 384, shared: 106_496 }),
];

/// Index of the small blocks.
const SMALL: usize = 2;

/// Blocks of `linear_short`: the slices of the weights that they are for, and the most lines of 64 inputs a slice.
struct Short {
    epilogue: Epilogue,
    slices: u32,
    lines: u32,
    tiles: u32,
}
const SHORT: [Short; 4] = [
    Short { epilogue: Epilogue::Store, slices: 16, lines: 1, tiles: 2 },
    Short { epilogue: Epilogue::Residual, slices: 16, lines: 2, tiles: 1 },
    Short { epilogue: Epilogue::Residual, slices: 16, lines: 3, tiles: 1 },
    Short { epilogue: Epilogue::Gated, slices: 8, lines: 2, tiles: 3 },
];

impl Short {
    fn fits(&self, epilogue: Epilogue, tiles: u32, inputs: u32, multiprocessors: u32) -> bool {
        epilogue == self.epilogue
            && slices(tiles, inputs) == self.slices
            && inputs.div_ceil(64) <= self.slices * self.lines
            && tiles.div_ceil(self.tiles) <= multiprocessors
    }

    /// Bytes of shared memory for weights and the slices' sums.
    fn shared(&self, row_tiles: usize) -> u32 {
        self.slices * self.tiles * (2048 * (self.lines - 1) + (512 << row_tiles))
    }
}

/// Tiles of outputs a block of `linear_wide`.
const WIDE_TILES: u32 = 4;

/// Bytes of shared memory of a block of `linear_wide`, by tiles of 8 rows.
fn wide_shared(row_tiles: u32, split: bool) -> u32 {
    61_440 + if split { row_tiles * 2048 } else { 0 }
}

const NAMES: [&str; 3] = ["store", "residual", "gated"];

/// Tiles of outputs a block of `linear_rows`, by tiles of 8 rows and by slices.
const BLOCK_TILES: [[u32; 2]; 4] = [[1, 1], [1, 1], [2, 1], [4, 2]];

/// Which of [`WGMMA`]: large blocks must nearly fill the chip, the next ones fill it nearly and once.
fn wgmma_size(rows: u32, tiles: u32, multiprocessors: u32) -> usize {
    let blocks = |size: usize| rows.div_ceil(WGMMA[size].1.rows) * tiles.div_ceil(WGMMA[size].1.tiles);
    let nearly = |size: usize| blocks(size) * 4 >= multiprocessors * 3;
    match (nearly(0), nearly(1) && blocks(1) <= multiprocessors) {
        (true, _) => 0,
        (false, true) => 1,
        (false, false) => 2,
    }
}

fn array<T, const N: usize>(make: impl FnMut(usize) -> Result<T, GpuError>) -> Result<[T; N], GpuError> {
    let made: Vec<T> = (0..N).map(make).collect::<Result<_, _>>()?;
    made.try_into().map_err(|_| GpuError::NoFunction { program: "linear".into(), function: "all".into() })
}

impl Functions {
    pub(super) fn new(find: Find<'_>, clusters: bool, hopper: bool) -> Result<Self, GpuError> {
        let find_for = |file: &str, name: &str, shared: u32| -> Result<Function, GpuError> {
            let function = find(file, name)?;
            function.set_max_dynamic_shared(shared)?;
            Ok(function)
        };
        let rows = array(|e| {
            array(|n| {
                array(|s| find_for("linear_rows.cu", &format!("rows_{}_{}_{}", NAMES[e], 1 << n, 8 << s), shared(n, s)))
            })
        })?;
        let tiled =
            array(|e| array(|s| find_for("linear_tiled.cu", &format!("tiled_{}_{}", NAMES[e], 8 << s), TILED.shared)))?;
        let short = || {
            array(|i| {
                let short = &SHORT[i];
                array(|n| {
                    let name = format!("short_{}_{}_{}", NAMES[short.epilogue as usize], 1 << n, short.lines);
                    find_for("linear_rows.cu", &name, short.shared(n))
                })
            })
        };
        let short = if clusters { Some(short()?) } else { None };
        let wide = || {
            array(|e| {
                array(|n| {
                    let row_tiles = 2 << n;
                    array(|kind| {
                        let (part, slices) = [("", 8), ("", 16), ("split_", 8)][kind];
                        let name = format!("wide_{part}{}_{row_tiles}_{slices}", NAMES[e]);
                        find_for("linear_wide.cu", &name, wide_shared(row_tiles, kind == 2))
                    })
                })
            })
        };
        let wgmma = || {
            array(|e| {
                let whole = array(|size| {
                    let (name, block) = &WGMMA[size];
                    array(|s| {
                        find_for("linear_wgmma.cu", &format!("wgmma_{name}{}_{}", NAMES[e], 8 << s), block.shared)
                    })
                })?;
                let split = format!("wgmma_split_{}_8", NAMES[e]);
                Ok(Wgmma { whole, split: find_for("linear_wgmma.cu", &split, WGMMA[SMALL].1.shared)? })
            })
        };
        let wide = if clusters { Some(wide()?) } else { None };
        let wgmma = if hopper { Some(wgmma()?) } else { None };
        Ok(Self { rows, short, tiled, wide, wgmma })
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
                    let size = wgmma_size(args.rows, tiles, self.multiprocessors);
                    (&wgmma[epilogue as usize].whole[size][slices], &WGMMA[size].1)
                }
                None => (&functions.tiled[epilogue as usize][slices], &TILED),
            };
            let grid = [args.rows.div_ceil(block.rows), tiles.div_ceil(block.tiles), 1];
            let how = Launch { grid, block: block.threads, cluster: 1, shared: block.shared, overlap: self.clusters };
            // SAFETY: the caller's.
            return unsafe { launch(function, &how, stream, Args::new().value(&args)) };
        }
        // Blocks that wait early take the places of the last ones: with few long blocks that costs more than
        // it gains (measured on an H200: 8 % for 5120 outputs of 25600 inputs).
        let (function, how) = functions.streamed(epilogue, args.rows, tiles, args.inputs, self.multiprocessors);
        let long = epilogue == Epilogue::Residual && args.inputs >= 16384 && how.cluster == 1;
        let how = Launch { overlap: self.clusters && !long, ..how };
        // SAFETY: the caller's.
        unsafe { launch(function, &how, stream, Args::new().value(&args)) }
    }
}

impl Functions {
    /// The kernel for up to [`MAX_STREAMED_ROWS`] rows.
    fn streamed(
        &self,
        epilogue: Epilogue,
        rows: u32,
        tiles: u32,
        inputs: u32,
        multiprocessors: u32,
    ) -> (&Function, Launch) {
        let fits = |short: &Short| short.fits(epilogue, tiles, inputs, multiprocessors);
        if let (Some(functions), Some(i)) = (&self.short, SHORT.iter().position(fits))
            && let Some(function) = functions[i].get((rows / 8).ilog2() as usize)
        {
            let short = &SHORT[i];
            let how = Launch {
                grid: [tiles.div_ceil(short.tiles), 1, 1],
                block: 32 * short.slices,
                cluster: 1,
                shared: short.shared((rows / 8).ilog2() as usize),
                overlap: false,
            };
            return (function, how);
        }
        let slices = usize::from(slices(tiles, inputs) == 16);
        let split = large(tiles, inputs) == Some(Large::Split);
        let cluster = if split { SPLIT } else { 1 };
        match (rows, large(tiles, inputs), &self.wide, &self.wgmma) {
            (16 | 32, Some(_), Some(wide), _) => {
                let row_tiles = rows / 8;
                let kind = if split { 2 } else { slices };
                let how = Launch {
                    grid: [tiles.div_ceil(WIDE_TILES) * cluster, 1, 1],
                    block: if epilogue == Epilogue::Residual { 128 } else { 160 },
                    cluster,
                    shared: wide_shared(row_tiles, split),
                    overlap: false,
                };
                (&wide[epilogue as usize][usize::from(row_tiles == 4)][kind], how)
            }
            (64, Some(_), _, Some(wgmma)) => {
                let (wgmma, block) = (&wgmma[epilogue as usize], &WGMMA[SMALL].1);
                let how = Launch {
                    grid: [cluster, tiles.div_ceil(block.tiles), 1],
                    block: block.threads,
                    cluster,
                    shared: block.shared,
                    overlap: false,
                };
                (if split { &wgmma.split } else { &wgmma.whole[SMALL][slices] }, how)
            }
            _ => {
                let row_tiles = (rows / 8).ilog2() as usize;
                let how = Launch {
                    grid: [tiles.div_ceil(BLOCK_TILES[row_tiles][slices]), 1, 1],
                    block: 256 << slices,
                    cluster: 1,
                    shared: shared(row_tiles, slices),
                    overlap: false,
                };
                (&self.rows[epilogue as usize][row_tiles][slices], how)
            }
        }
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
    fn large_weights_are_those_of_large_models() {
        let all = |hidden: u32, inner: u32, heads: u32, qkv: u32| {
            [(qkv / 16, hidden), (hidden / 16, heads), (inner / 8, hidden), (hidden / 16, inner)]
                .map(|(tiles, inputs)| large(tiles, inputs))
        };
        let (whole, split) = (Some(Large::Whole), Some(Large::Split));
        assert_eq!(all(5120, 25600, 8192, 10240), [whole, split, whole, split]);
        assert_eq!(all(4096, 12288, 4096, 6144), [None, None, whole, None]);
        assert_eq!(all(1024, 3072, 2048, 4096), [None; 4]);
    }

    #[test]
    fn shared_memory_fits() {
        for n in 0..4 {
            for s in 0..2 {
                assert!(shared(n, s) <= 160 * 1024);
            }
        }
        // Two of these, and more that wait, are on a multiprocessor at once.
        assert!(SHORT.iter().all(|short| short.shared(1) <= 96 * 1024));
    }

    #[test]
    fn blocks_for_many_rows_fill_the_chip() {
        // Qwen3-0.6B, a chunk of 2048 rows: qkv, o and down, gated.
        assert_eq!(wgmma_size(2048, 256, 132), 0);
        assert_eq!(wgmma_size(2048, 64, 132), 1);
        assert_eq!(wgmma_size(2048, 384, 132), 0);
        // Fewer rows, and one block too many for once.
        assert_eq!(wgmma_size(512, 64, 132), 2);
        assert_eq!(wgmma_size(2048, 72, 132), 2);
    }

    #[test]
    fn small_models_take_short_kernels_and_others_do_not() {
        let which = |epilogue, outputs: u32, inputs| {
            let tiles = LinearArgs { outputs, ..LinearArgs::default() }.tiles(epilogue);
            SHORT.iter().find(|short| short.fits(epilogue, tiles, inputs, 132)).map(|short| short.lines)
        };
        // Qwen3-0.6B: qkv, o, gated, down, head.
        assert_eq!(which(Epilogue::Store, 4096, 1024), Some(1));
        assert_eq!(which(Epilogue::Residual, 1024, 2048), Some(2));
        assert_eq!(which(Epilogue::Gated, 3072, 1024), Some(2));
        assert_eq!(which(Epilogue::Residual, 1024, 3072), Some(3));
        assert_eq!(which(Epilogue::Store, 151_936, 1024), None);
        // Qwen3-8B.
        assert_eq!(which(Epilogue::Store, 6144, 4096), None);
        assert_eq!(which(Epilogue::Residual, 4096, 4096), None);
        assert_eq!(which(Epilogue::Gated, 12_288, 4096), None);
        assert_eq!(which(Epilogue::Residual, 4096, 12_288), None);
    }
}
