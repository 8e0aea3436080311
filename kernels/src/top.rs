//! The largest values of a row, without sorting all of it.

use crate::tile::PANEL;

/// Above this many, selecting by index is faster than inserting.
const INSERT: usize = 64;

/// Orders larger values first, then lower indices. NaN must not occur.
#[inline(always)]
fn key(value: f32, index: usize) -> u64 {
    // Adding 0 makes -0 equal to 0.
    let bits = (value + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(!ascending) << 32 | index as u64
}

/// Indices of the `n` largest values above `-inf`, best first; equal values by ascending index.
pub fn top(values: &[f32], n: usize, out: &mut Vec<u32>) {
    out.clear();
    if n == 0 {
        return;
    }
    if n > INSERT {
        let possible = values.iter().enumerate().filter(|(_, v)| **v > f32::NEG_INFINITY);
        let mut keys: Vec<u64> = possible.map(|(i, &v)| key(v, i)).collect();
        if n < keys.len() {
            keys.select_nth_unstable(n);
            keys.truncate(n);
        }
        keys.sort_unstable();
        out.extend(keys.iter().map(|&key| key as u32));
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
