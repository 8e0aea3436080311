//! Keys and values in pages, and attention of single rows over them.

use crate::exp::exp;
use crate::norm::fold;
use crate::tile::{PANEL, accumulate, by_width, dots, row_tiles, store};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// Positions of a page.
pub const PAGE: usize = PANEL;
/// Multiply-adds below which the work is not shared between threads.
const PARALLEL_WORK: usize = 1 << 20;

/// Dimensions of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl KvShape {
    /// Keys of a page and head, `[head_dim][16 positions]`.
    fn key_panels(self) -> usize {
        self.head_dim
    }
    /// Values of a page and head, `[head_dim / 16][16 positions][16]`.
    fn value_panels(self) -> usize {
        self.head_dim.div_ceil(PANEL) * PAGE
    }
    /// Panels of a page over all layers and heads.
    fn page_panels(self) -> usize {
        self.layers * self.kv_heads * (self.key_panels() + self.value_panels())
    }
    /// Bytes of a page over all layers.
    pub fn page_bytes(self) -> u64 {
        (self.page_panels() * PANEL * size_of::<f32>()) as u64
    }
}

/// The keys and values of a model.
#[derive(Clone, Debug)]
pub struct KvPool {
    data: Vec<[f32; PANEL]>,
    shape: KvShape,
}

impl KvPool {
    /// A pool of `pages` pages.
    pub fn new(shape: KvShape, pages: usize) -> Self {
        Self { data: vec![[0.0; PANEL]; pages * shape.page_panels()], shape }
    }

    /// Store the keys and values (all heads side by side) of one position.
    pub fn store(&mut self, layer: usize, page: u32, slot: usize, keys: &[f32], values: &[f32]) {
        assert!(slot < PAGE, "slot {slot} of a page");
        let (key_panels, value_panels, dim) = (self.shape.key_panels(), self.shape.value_panels(), self.shape.head_dim);
        for (head, (key, value)) in keys.chunks_exact(dim).zip(values.chunks_exact(dim)).enumerate() {
            let start = self.start(layer, page, head);
            let (k, v) = self.data[start..start + key_panels + value_panels].split_at_mut(key_panels);
            for (cell, &x) in k.iter_mut().zip(key) {
                cell[slot] = x;
            }
            for (part, x) in v.chunks_exact_mut(PAGE).zip(value.chunks(PANEL)) {
                part[slot][..x.len()].copy_from_slice(x);
            }
        }
    }

    fn start(&self, layer: usize, page: u32, head: usize) -> usize {
        let shape = self.shape;
        page as usize * shape.page_panels()
            + (layer * shape.kv_heads + head) * (shape.key_panels() + shape.value_panels())
    }

    #[inline(always)]
    fn keys(&self, layer: usize, page: u32, head: usize) -> &[[f32; PANEL]] {
        &self.data[self.start(layer, page, head)..][..self.shape.key_panels()]
    }

    #[inline(always)]
    fn values(&self, layer: usize, page: u32, head: usize, part: usize) -> &[[f32; PANEL]] {
        &self.data[self.start(layer, page, head) + self.shape.key_panels() + part * PAGE..][..PAGE]
    }
}

/// One row that attends to the first `len` positions of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    pub pages: &'a [u32],
    pub len: usize,
}

/// Softmax attention of each row's heads to the keys and values of `layer`. A row of `q` is `q_stride`
/// long and begins with its heads; a row of `out` is `heads * head_dim` long.
pub fn attention(pool: &KvPool, layer: usize, queries: &[Query<'_>], q: &[f32], q_stride: usize, out: &mut [f32]) {
    let (kv_heads, dim) = (pool.shape.kv_heads, pool.shape.head_dim);
    if queries.is_empty() {
        return;
    }
    let width = out.len() / queries.len() / kv_heads;
    let arch = Arch::new();
    let one = |scores: &mut Vec<[f32; PANEL]>, index: usize, out: &mut [f32]| {
        let (row, head) = (index / kv_heads, index % kv_heads);
        let q = &q[row * q_stride + head * width..][..width];
        arch.dispatch(HeadGroup { pool, layer, head, query: queries[row], q, dim, scores, out });
    };
    let work: usize = queries.iter().map(|query| query.len).sum::<usize>() * width * kv_heads * 2;
    if work >= PARALLEL_WORK && rayon::current_num_threads() > 1 {
        out.par_chunks_mut(width).enumerate().for_each_init(Vec::new, |scores, (i, out)| one(scores, i, out));
    } else {
        let mut scores = Vec::new();
        out.chunks_exact_mut(width).enumerate().for_each(|(i, out)| one(&mut scores, i, out));
    }
}

/// The query heads that share one key-value head, for one row.
struct HeadGroup<'a> {
    pool: &'a KvPool,
    layer: usize,
    head: usize,
    query: Query<'a>,
    q: &'a [f32],
    dim: usize,
    scores: &'a mut Vec<[f32; PANEL]>,
    out: &'a mut [f32],
}

impl WithSimd for HeadGroup<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let heads = self.q.len() / self.dim;
        for range in row_tiles(heads) {
            let first = range.start;
            match range.len() {
                1 => by_width!(S, heads_of_group::<1>(simd, &mut self, first)),
                2 => by_width!(S, heads_of_group::<2>(simd, &mut self, first)),
                3 => by_width!(S, heads_of_group::<3>(simd, &mut self, first)),
                4 => by_width!(S, heads_of_group::<4>(simd, &mut self, first)),
                5 => by_width!(S, heads_of_group::<5>(simd, &mut self, first)),
                _ => by_width!(S, heads_of_group::<6>(simd, &mut self, first)),
            }
        }
    }
}

#[inline(always)]
fn heads_of_group<S: Simd, const N: usize, const R: usize>(simd: S, group: &mut HeadGroup<'_>, first: usize) {
    let (pool, layer, head, dim, len) = (group.pool, group.layer, group.head, group.dim, group.query.len);
    let pages = &group.query.pages[..len.div_ceil(PAGE)];
    let q: [&[f32]; R] = std::array::from_fn(|r| &group.q[(first + r) * dim..][..dim]);
    group.scores.resize(R * pages.len(), [0.0; PANEL]);
    let scores = &mut group.scores[..R * pages.len()];

    for (i, &page) in pages.iter().enumerate() {
        let sums = dots::<S, N, R, 1>(simd, q, [pool.keys(layer, page, head)]);
        for (r, sum) in sums.iter().enumerate() {
            store::<S, N>(&mut scores[r * pages.len() + i], &sum[0]);
        }
    }
    let scale = 1.0 / (dim as f32).sqrt();
    let sums: [f32; R] = std::array::from_fn(|r| soften(&mut scores[r * pages.len()..][..pages.len()], len, scale));

    let scores = &*scores;
    for part in 0..dim.div_ceil(PANEL) {
        let mut total = [[[simd.splat_f32s(0.0); N]; 1]; R];
        for (i, &page) in pages.iter().enumerate() {
            // Beyond the row's own position a page holds what others left there.
            let valid = (len - i * PAGE).min(PAGE);
            let weights: [&[f32]; R] = std::array::from_fn(|r| &scores[r * pages.len() + i][..valid]);
            let values = &pool.values(layer, page, head, part)[..valid];
            let sums = dots::<S, N, R, 1>(simd, weights, [values]);
            accumulate(simd, &mut total, &sums);
        }
        for (r, sum) in total.iter().enumerate() {
            let mut panel = [0.0; PANEL];
            store::<S, N>(&mut panel, &sum[0]);
            let out = &mut group.out[(first + r) * dim..][..dim][part * PANEL..];
            out.iter_mut().zip(panel).for_each(|(out, v)| *out = v / sums[r]);
        }
    }
}

/// Turn the first `len` scores into `exp(scale * (score - largest))` and the others into 0; gives the sum.
#[inline(always)]
fn soften(scores: &mut [[f32; PANEL]], len: usize, scale: f32) -> f32 {
    if let Some(last) = scores.last_mut() {
        let valid = len - (len - 1) / PANEL * PANEL;
        last[valid..].fill(f32::NEG_INFINITY);
    }
    let mut largest = [f32::NEG_INFINITY; PANEL];
    for panel in scores.iter() {
        for (m, &v) in largest.iter_mut().zip(panel) {
            *m = if v > *m { v } else { *m };
        }
    }
    let largest = largest.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
    let mut sums = [0.0; PANEL];
    for panel in scores.iter_mut() {
        for (sum, v) in sums.iter_mut().zip(panel) {
            *v = exp((*v - largest) * scale);
            *sum += *v;
        }
    }
    fold(sums)
}
