//! The largest values of a row, without sorting all of it.

use crate::tile::PANEL;
use std::cmp::Ordering;

/// Above this many, selecting by index is faster than inserting.
const INSERT: usize = 64;

/// Larger values first, then lower indices. NaN must not occur.
#[inline(always)]
fn better(values: &[f32], a: u32, b: u32) -> Ordering {
    values[b as usize].partial_cmp(&values[a as usize]).unwrap_or(Ordering::Equal).then(a.cmp(&b))
}

/// Indices of the `n` largest values above `-inf`, best first; equal values by ascending index.
pub fn top(values: &[f32], n: usize, out: &mut Vec<u32>) {
    out.clear();
    if n == 0 {
        return;
    }
    if n > INSERT {
        out.extend((0..values.len() as u32).filter(|&i| values[i as usize] > f32::NEG_INFINITY));
        select(values, n, out);
        return;
    }
    let mut worst = f32::NEG_INFINITY;
    for (c, chunk) in values.chunks(PANEL).enumerate() {
        if !chunk.iter().fold(false, |any, &v| any | (v > worst)) {
            continue;
        }
        for (i, &v) in chunk.iter().enumerate() {
            if v > worst {
                let place = out.partition_point(|&o| values[o as usize] >= v);
                out.insert(place, (c * PANEL + i) as u32);
                if out.len() > n {
                    out.pop();
                }
                if out.len() == n {
                    worst = values[out[n - 1] as usize];
                }
            }
        }
    }
}

/// Keep the `n` best of `indices`, best first.
pub fn select(values: &[f32], n: usize, indices: &mut Vec<u32>) {
    if n < indices.len() {
        indices.select_nth_unstable_by(n, |&a, &b| better(values, a, b));
        indices.truncate(n);
    }
    indices.sort_unstable_by(|&a, &b| better(values, a, b));
}
