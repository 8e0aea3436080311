//! `attention.cu`: attention of rows over paged keys and values in bf16.

use super::{Find, Kernels};
use crate::gpu::{Args, Device, DevicePtr, Function, GpuError, Launch, Stream, launch};

/// Sizes of heads that the bf16 kernels know.
pub const ATTENTION_DIMS: [usize; 4] = [32, 64, 96, 128];
/// Words of an item, see `attention.cu`.
pub const ITEM_WORDS: usize = 8;
/// Columns (rows by heads of a group) of an item for decoding and for prompts.
const SPLIT_COLUMNS: u32 = 8;
pub const WHOLE_COLUMNS: u32 = 32;
const BLOCK: u32 = 128;
const CHUNKS: u32 = 8;
/// Of `attention_spread`: blocks of a cluster, and threads of a block.
const SPREAD_BLOCKS: u32 = 16;
const SPREAD_BLOCK: u32 = 64;
/// Most items of which `attention_spread` is faster, and fewest positions of the longest: measured on an H200 with
/// 8 key/value heads.
pub const SPREAD_ITEMS: u32 = 2;
pub const SPREAD_POSITIONS: usize = 3072;

/// Rows that an item can have.
pub fn item_rows(group: u32, whole: bool) -> u32 {
    (if whole { WHOLE_COLUMNS } else { SPLIT_COLUMNS }) / group
}

/// `AttentionArgs` of `attention.cu`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AttentionArgs {
    pub q: DevicePtr,
    pub kv: DevicePtr,
    pub items: DevicePtr,
    pub page_list: DevicePtr,
    pub header: DevicePtr,
    pub out: DevicePtr,
    pub scale: f32,
    pub kv_heads: u32,
    pub group: u32,
}

#[derive(Debug)]
pub(super) struct Functions {
    split: Vec<Function>,
    /// `None` where clusters of [`SPREAD_BLOCKS`] cannot be.
    spread: Option<Vec<Function>>,
    whole: Vec<Function>,
}

impl Functions {
    pub(super) fn new(find: Find<'_>, device: &Device, clusters: bool) -> Result<Self, GpuError> {
        let all = |kind: &str| -> Result<Vec<Function>, GpuError> {
            ATTENTION_DIMS.iter().map(|dim| find("attention.cu", &format!("attention_{kind}_{dim}"))).collect()
        };
        let (split, whole) = (all("split")?, all("whole")?);
        // Which clusters a part of the device has room for is not known.
        let spread = if clusters && !device.is_part() { spread(all("spread")?)? } else { None };
        for (function, dim) in whole.iter().zip(ATTENTION_DIMS) {
            function.set_max_dynamic_shared(whole_shared(dim as u32, clusters))?;
        }
        Ok(Self { split, spread, whole })
    }
}

/// The kernels, if the device can hold a cluster of each.
fn spread(functions: Vec<Function>) -> Result<Option<Vec<Function>>, GpuError> {
    for (function, dim) in functions.iter().zip(ATTENTION_DIMS) {
        let shared = spread_shared(dim as u32);
        function.allow_large_clusters()?;
        function.set_max_dynamic_shared(shared)?;
        if function.max_clusters(SPREAD_BLOCKS, SPREAD_BLOCK, shared)? == 0 {
            return Ok(None);
        }
    }
    Ok(Some(functions))
}

/// As `attention.cu` says.
fn split_shared(dim: u32) -> u32 {
    256 * dim
}

fn spread_shared(dim: u32) -> u32 {
    4 * 128 * dim
}

fn whole_shared(dim: u32, clusters: bool) -> u32 {
    (if clusters { 832 } else { 320 }) * dim + 512
}

impl Kernels {
    /// Attention of up to `items` items (the header has their number), for steps.
    ///
    /// # Safety
    /// See the module; `dim` is one of [`ATTENTION_DIMS`].
    pub unsafe fn attention_split(
        &self,
        stream: &Stream,
        dim: usize,
        items: u32,
        args: AttentionArgs,
    ) -> Result<(), GpuError> {
        let chunks = if self.clusters { CHUNKS } else { 1 };
        let how = Launch {
            grid: [chunks, items, args.kv_heads],
            block: BLOCK,
            cluster: chunks,
            shared: split_shared(dim as u32),
            overlap: self.clusters,
        };
        // SAFETY: the caller's.
        unsafe { launch(&self.attention.split[index(dim)], &how, stream, Args::new().value(&args)) }
    }

    /// Whether [`Self::attention_spread`] can be, and is faster than [`Self::attention_split`] before a linear layer
    /// of `outputs` outputs: its blocks take room on all multiprocessors, and where the layer's would fill them
    /// while they wait that costs more than it gains (measured on an H200: 11 us a layer of Qwen3-8B).
    pub fn spreads(&self, outputs: u32) -> bool {
        self.attention.spread.is_some() && outputs.div_ceil(super::TILE as u32) <= self.multiprocessors
    }

    /// [`Self::attention_split`] of up to [`SPREAD_ITEMS`] items, if [`Self::spreads`].
    ///
    /// # Safety
    /// As for [`Self::attention_split`].
    pub unsafe fn attention_spread(
        &self,
        stream: &Stream,
        dim: usize,
        items: u32,
        args: AttentionArgs,
    ) -> Result<(), GpuError> {
        let Some(functions) = &self.attention.spread else {
            let (program, function) = ("attention.cu".into(), format!("attention_spread_{dim}"));
            return Err(GpuError::NoFunction { program, function });
        };
        let how = Launch {
            grid: [SPREAD_BLOCKS, items, args.kv_heads],
            block: SPREAD_BLOCK,
            cluster: SPREAD_BLOCKS,
            shared: spread_shared(dim as u32),
            overlap: self.clusters,
        };
        // SAFETY: the caller's.
        unsafe { launch(&functions[index(dim)], &how, stream, Args::new().value(&args)) }
    }

    /// Attention of exactly `items` items, for prompts.
    ///
    /// # Safety
    /// As for [`Self::attention_split`].
    pub unsafe fn attention_whole(
        &self,
        stream: &Stream,
        dim: usize,
        items: u32,
        args: AttentionArgs,
    ) -> Result<(), GpuError> {
        let shared = whole_shared(dim as u32, self.clusters);
        let grid = [items, args.kv_heads, 1];
        let how = Launch { grid, block: BLOCK, cluster: 1, shared, overlap: self.clusters };
        // SAFETY: the caller's.
        unsafe { launch(&self.attention.whole[index(dim)], &how, stream, Args::new().value(&args)) }
    }
}

fn index(dim: usize) -> usize {
    dim / 32 - 1
}
