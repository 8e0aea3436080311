//! `attention.cu`: attention of rows over paged keys and values in bf16.

use super::{Find, Kernels};
use crate::gpu::{Args, DevicePtr, Function, GpuError, Launch, Stream, launch};

/// Sizes of heads that the bf16 kernels know.
pub const ATTENTION_DIMS: [usize; 4] = [32, 64, 96, 128];
/// Words of an item, see `attention.cu`.
pub const ITEM_WORDS: usize = 8;
/// Columns (rows by query heads of a block) of an item for decoding and for prompts.
const SPLIT_COLUMNS: u32 = 8;
pub const WHOLE_COLUMNS: u32 = 32;
const CHUNKS: u32 = 8;
const BLOCK: u32 = 128;
/// With the warp that copies.
const SINGLE_BLOCK: u32 = 160;
/// Percent of a multiprocessor's shared memory: enough for one block. The linear layer that starts beside it reads
/// its rows through what is left, as L1. By default the driver leaves no more than two blocks do (measured on an
/// H200: a step of 8B at one row took 4.39 ms instead of 3.98).
const SINGLE_CARVEOUT: u32 = 46;

/// Blocks that share a key/value head of `group` query heads: as few as make equal parts of at most
/// [`SPLIT_COLUMNS`] heads. Each reads the head's keys and values for itself.
pub fn parts(group: u32) -> u32 {
    (1..=group).find(|&parts| group.is_multiple_of(parts) && group / parts <= SPLIT_COLUMNS).unwrap_or(1)
}

/// Rows that an item can have, at least one.
pub fn item_rows(group: u32, whole: bool) -> u32 {
    (if whole { WHOLE_COLUMNS } else { SPLIT_COLUMNS }) / (group / parts(group))
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
    /// Blocks a key/value head, see [`parts`].
    pub parts: u32,
    /// Query heads of a block.
    pub group: u32,
}

#[derive(Debug)]
pub(super) struct Functions {
    split: Vec<Function>,
    /// Empty without clusters.
    single: Vec<Function>,
    whole: Vec<Function>,
}

impl Functions {
    pub(super) fn new(find: Find<'_>, clusters: bool) -> Result<Self, GpuError> {
        let all = |kind: &str| -> Result<Vec<Function>, GpuError> {
            ATTENTION_DIMS.iter().map(|dim| find("attention.cu", &format!("attention_{kind}_{dim}"))).collect()
        };
        let (split, whole) = (all("split")?, all("whole")?);
        for (function, dim) in whole.iter().zip(ATTENTION_DIMS) {
            function.set_max_dynamic_shared(whole_shared(dim as u32, clusters))?;
        }
        let single = if clusters { all("single")? } else { Vec::new() };
        for (function, dim) in single.iter().zip(ATTENTION_DIMS) {
            function.set_max_dynamic_shared(single_shared(dim as u32))?;
            function.prefer_shared(SINGLE_CARVEOUT)?;
        }
        Ok(Self { split, single, whole })
    }
}

/// As `attention.cu` says.
fn split_shared(dim: u32) -> u32 {
    256 * dim
}

fn single_shared(dim: u32) -> u32 {
    768 * dim
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
        let how = self.split(dim, items, args.kv_heads * args.parts);
        let (function, how) = match self.attention.single.get(index(dim)) {
            Some(single) if items == 1 => {
                (single, Launch { block: SINGLE_BLOCK, shared: single_shared(dim as u32), ..how })
            }
            _ => (&self.attention.split[index(dim)], how),
        };
        // SAFETY: the caller's.
        unsafe { launch(function, &how, stream, Args::new().value(&args)) }
    }

    fn split(&self, dim: usize, items: u32, parts: u32) -> Launch {
        let chunks = if self.clusters { CHUNKS } else { 1 };
        Launch {
            grid: [chunks, items, parts],
            block: BLOCK,
            cluster: chunks,
            shared: split_shared(dim as u32),
            overlap: self.clusters,
        }
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
        let grid = [items, args.kv_heads * args.parts, 1];
        let how = Launch { grid, block: BLOCK, cluster: 1, shared, overlap: self.clusters };
        // SAFETY: the caller's.
        unsafe { launch(&self.attention.whole[index(dim)], &how, stream, Args::new().value(&args)) }
    }
}

fn index(dim: usize) -> usize {
    dim / 32 - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_cut_into_as_few_equal_parts_as_fit() {
        for (group, of) in [(1, 1), (7, 1), (8, 1), (9, 3), (10, 2), (11, 11), (12, 2), (16, 2), (24, 3), (64, 8)] {
            assert_eq!(parts(group), of, "{group}");
        }
        for group in 1..=256 {
            let of = parts(group);
            assert!(group % of == 0 && group / of <= SPLIT_COLUMNS, "{group}");
            assert!((1..of).all(|fewer| group % fewer != 0 || group / fewer > SPLIT_COLUMNS), "{group}");
            assert!(item_rows(group, false) >= 1, "{group}");
        }
    }
}
