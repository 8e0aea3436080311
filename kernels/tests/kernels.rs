//! Each kernel against a plain computation in f64, and bit equality alone and in company.

use proptest::prelude::*;
use tokenrouter_kernels::*;

/// Numbers in [-1, 1), different for each `stream`.
fn noise(stream: u64, n: usize) -> Vec<f32> {
    let mut state = stream.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

fn product(w: &PackedMatrix, x: &[f32]) -> Vec<f32> {
    let mut y = vec![f32::NAN; x.len() / w.inputs() * w.outputs()];
    linear(w, x, &mut y, &mut Vec::new());
    y
}

fn in_pool<T: Send>(threads: usize, f: impl FnOnce() -> T + Send) -> T {
    match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
        Ok(pool) => pool.install(f),
        Err(e) => panic!("{e}"),
    }
}

proptest! {
    #[test]
    fn linear_is_exact_enough_and_batch_invariant(
        outputs in 1usize..150, inputs in 1usize..700, rows in 1usize..40, seed in any::<u64>(),
    ) {
        let (weights, x) = (noise(seed, outputs * inputs), noise(seed ^ 1, rows * inputs));
        let w = PackedMatrix::from_rows(inputs, &weights);
        let y = product(&w, &x);
        for (x, y) in x.chunks(inputs).zip(y.chunks(outputs)) {
            prop_assert!(product(&w, x) == y, "alone");
            for (weights, y) in weights.chunks(inputs).zip(y) {
                let want: f64 = x.iter().zip(weights).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                prop_assert!((want - f64::from(*y)).abs() < 1e-5 * (inputs as f64).sqrt(), "{y}, not {want}");
            }
        }
        let mut row = vec![0.0; inputs];
        w.copy_row(outputs - 1, &mut row);
        prop_assert_eq!(&row[..], &weights[(outputs - 1) * inputs..]);
    }

    #[test]
    fn attention_is_exact_enough_and_batch_invariant(
        kv_heads in 1usize..4, group in 1usize..9, dim in prop::sample::select(&[2usize, 8, 16, 20, 64, 80][..]),
        lens in prop::collection::vec(1usize..70, 1..6), seed in any::<u64>(),
    ) {
        const LAYER: usize = 1;
        let shape = KvShape { layers: 2, kv_heads, head_dim: dim };
        let (rows, width, stride) = (lens.len(), kv_heads * group * dim, kv_heads * (group + 2) * dim);
        let mut pool = KvPool::new(shape, 5 * rows + 1);
        // What a page holds beyond a row's own position must not matter.
        for page in 0..5 * rows as u32 + 1 {
            (0..PAGE).for_each(|slot| pool.store(LAYER, page, slot, &vec![f32::NAN; kv_heads * dim], &vec![f32::NAN; kv_heads * dim]));
        }
        let (keys, values) = (noise(seed, 70 * kv_heads * dim), noise(seed ^ 1, 70 * kv_heads * dim));
        let at = |v: &[f32], position: usize| v[position * kv_heads * dim..][..kv_heads * dim].to_vec();
        let tables: Vec<Vec<u32>> = (0..rows as u32).map(|r| (0..5).map(|i| (i * rows as u32 + r) + 1).collect()).collect();
        for (&len, pages) in lens.iter().zip(&tables) {
            for position in 0..len {
                pool.store(LAYER, pages[position / PAGE], position % PAGE, &at(&keys, position), &at(&values, position));
            }
        }
        let q = noise(seed ^ 2, rows * stride);
        let queries: Vec<Query<'_>> = lens.iter().zip(&tables).map(|(&len, pages)| Query { pages, len }).collect();
        let mut out = vec![f32::NAN; rows * width];
        attention(&pool, LAYER, &queries, &q, stride, &mut out);
        for r in 0..rows {
            let (q, out) = (&q[r * stride..][..stride], &out[r * width..][..width]);
            let mut alone = vec![f32::NAN; width];
            attention(&pool, LAYER, &queries[r..=r], q, stride, &mut alone);
            prop_assert!(alone == out, "alone");
            for head in 0..kv_heads * group {
                let of = |v: &[f32], position: usize| v[(position * kv_heads + head / group) * dim..][..dim].to_vec();
                let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
                let e: Vec<f64> = (0..lens[r])
                    .map(|p| (dot(&q[head * dim..][..dim], &of(&keys, p)) / (dim as f64).sqrt()).exp())
                    .collect();
                for d in 0..dim {
                    let want = (0..lens[r]).map(|p| e[p] * f64::from(of(&values, p)[d])).sum::<f64>() / e.iter().sum::<f64>();
                    let got = out[head * dim + d];
                    prop_assert!((f64::from(got) - want).abs() < 1e-5, "{got}, not {want}");
                }
            }
        }
    }

    #[test]
    fn norms_agree(width in 1usize..300, rows in 1usize..5, seed in any::<u64>()) {
        let (x, weight) = (noise(seed, width * rows), noise(seed ^ 1, width));
        let mut out = vec![f32::NAN; x.len()];
        rms_norm(&x, &weight, 1e-6, &mut out);
        let mut in_place = x.clone();
        rms_norm_in_place(&mut in_place, &weight, 1e-6);
        prop_assert!(in_place == out);
        for (x, out) in x.chunks(width).zip(out.chunks(width)) {
            let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
            for i in 0..width {
                let want = f64::from(x[i]) / (mean + 1e-6).sqrt() * f64::from(weight[i]);
                prop_assert!((want - f64::from(out[i])).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn gated_products_agree(width in 1usize..100, rows in 1usize..4, scale in 0.1f32..100.0, seed in any::<u64>()) {
        let x: Vec<f32> = noise(seed, 2 * width * rows).iter().map(|v| v * scale).collect();
        let mut out = vec![f32::NAN; width * rows];
        silu_mul(&x, width, &mut out);
        for (x, out) in x.chunks(2 * width).zip(out.chunks(width)) {
            for i in 0..width {
                let (g, u) = (f64::from(x[i]), f64::from(x[width + i]));
                let want = g / (1.0 + (-g).exp()) * u;
                prop_assert!((want - f64::from(out[i])).abs() <= 1e-6 * want.abs().max(1.0), "{}, not {want}", out[i]);
            }
        }
    }

    #[test]
    fn distributions_agree(n in 1usize..3000, scale in 0.01f32..50.0, gone in 0usize..10, seed in any::<u64>()) {
        let mut logits: Vec<f32> = noise(seed, n).iter().map(|v| v * scale).collect();
        (0..gone).for_each(|i| logits[(i * 7919) % n] = f32::NEG_INFINITY);
        let left = logits.iter().filter(|v| v.is_finite()).count();
        let Some(d) = Distribution::of(&logits) else {
            prop_assert_eq!(left, 0);
            return Ok(());
        };
        let mut sorted = logits.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        prop_assert_eq!((d.max, logits[d.argmax]), (sorted[0], sorted[0]));
        prop_assert_eq!(d.second, sorted.get(1).copied().unwrap_or(f32::NEG_INFINITY));
        let sum: f64 = logits.iter().map(|v| f64::from(*v).exp()).sum();
        prop_assert!((sum.ln() - f64::from(d.log_sum_exp)).abs() < 1e-5 * f64::from(scale).max(1.0));
        let entropy: f64 = logits
            .iter()
            .map(|v| f64::from(*v).exp() / sum)
            .filter(|p| *p > 0.0)
            .map(|p| -p * p.ln())
            .sum();
        prop_assert!((entropy - f64::from(d.entropy)).abs() < 1e-5, "{}, not {entropy}", d.entropy);
    }

    #[test]
    fn the_best_are_found(n in 1usize..2000, k in 0usize..300, levels in 1i32..2000, seed in any::<u64>()) {
        // Few levels make many equal values.
        let values: Vec<f32> = noise(seed, n)
            .iter()
            .map(|v| if *v < -0.9 { f32::NEG_INFINITY } else { (v * levels as f32).round() })
            .collect();
        let mut want: Vec<u32> = (0..n as u32).filter(|&i| values[i as usize].is_finite()).collect();
        want.sort_by(|&a, &b| values[b as usize].partial_cmp(&values[a as usize]).unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(&b)));
        want.truncate(k);
        let mut got = Vec::new();
        top(&values, k, &mut got);
        prop_assert_eq!(got, want);
    }

    #[test]
    fn picks_are_where_the_running_sum_is(n in 1usize..4000, uniform in 0.0f64..1.0, seed in any::<u64>()) {
        let weights: Vec<f32> = noise(seed, n).iter().map(|v| v.max(0.0)).collect();
        let Some(i) = pick(&weights, uniform) else {
            prop_assert!(weights.iter().all(|w| *w == 0.0));
            return Ok(());
        };
        let sum = |w: &[f32]| w.iter().map(|w| f64::from(*w)).sum::<f64>();
        let target = uniform * sum(&weights);
        prop_assert!(weights[i] > 0.0);
        prop_assert!(sum(&weights[..i]) <= target + 1e-9 && target <= sum(&weights[..=i]) + 1e-9);
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let w = PackedMatrix::from_rows(700, &noise(1, 1500 * 700));
    let x = noise(2, 7 * 700);
    let one = in_pool(1, || product(&w, &x));
    for threads in [2, 3, 8] {
        assert!(in_pool(threads, || product(&w, &x)) == one, "{threads} threads");
    }
    let shape = KvShape { layers: 1, kv_heads: 2, head_dim: 64 };
    let mut pool = KvPool::new(shape, 128);
    for position in 0..2048u32 {
        let (k, v) = (noise(position.into(), 128), noise(u64::from(position) + 5000, 128));
        pool.store(0, position / PAGE as u32, position as usize % PAGE, &k, &v);
    }
    let pages: Vec<u32> = (0..128).collect();
    let queries: Vec<Query<'_>> = (1..=8).map(|r| Query { pages: &pages, len: 256 * r }).collect();
    let q = noise(3, 8 * 512);
    let all = |threads| {
        in_pool(threads, || {
            let mut out = vec![0.0; 8 * 512];
            attention(&pool, 0, &queries, &q, 512, &mut out);
            out
        })
    };
    assert!(all(1) == all(3));
}

#[test]
fn no_distribution_without_finite_logits() {
    for bad in [f32::NAN, f32::INFINITY] {
        for n in [1, 16, 40] {
            for place in [0, n / 2, n - 1] {
                let mut logits = noise(4, n);
                logits[place] = bad;
                assert_eq!(Distribution::of(&logits), None, "{bad} at {place} of {n}");
            }
        }
    }
    assert_eq!(Distribution::of(&[f32::NEG_INFINITY; 20]), None);
    assert_eq!(Distribution::of(&[]), None);
}

#[test]
fn equal_logits_give_the_lowest_index() {
    let d = Distribution::of(&[0.0, 3.0, 1.0, 3.0]);
    assert_eq!(d.map(|d| (d.argmax, d.second)), Some((1, 3.0)));
}

#[test]
fn nothing_is_picked_from_nothing() {
    assert_eq!(pick(&[], 0.5), None);
    assert_eq!(pick(&[0.0, 0.0], 0.5), None);
    assert_eq!(pick(&[f32::INFINITY], 0.5), None);
    assert_eq!(pick(&[0.0, 1.0, 0.0], 1.0 - f64::EPSILON / 2.0), Some(1));
}

#[test]
fn conversions_are_exact() {
    let mut out = [0.0; 3];
    bf16_to_f32(&[0x80, 0x3f, 0x20, 0xc0, 0x01, 0x00], &mut out);
    assert_eq!(out, [1.0, -2.5, f32::from_bits(0x0001_0000)]);
    f16_to_f32(&[0x00, 0x3c, 0x00, 0xc1, 0x01, 0x00], &mut out);
    assert_eq!(out, [1.0, -2.5, 2.0f32.powi(-24)]);
    f32_from_le(&[1.0f32.to_le_bytes(), (-2.5f32).to_le_bytes(), 1e-40f32.to_le_bytes()].concat(), &mut out);
    assert_eq!(out, [1.0, -2.5, 1e-40]);
}

#[test]
fn rotation_keeps_lengths_and_turns_by_the_angle() {
    let mut table = RopeTable::default();
    table.fill(&[1.0, 0.25], [0, 3].into_iter());
    let mut x = [1.0, 2.0, 0.0, 0.0];
    table.apply(0, 4, &mut x);
    assert_eq!(x, [1.0, 2.0, 0.0, 0.0]);
    table.apply(1, 4, &mut x);
    let want = [3f32.cos(), 2.0 * 0.75f32.cos(), 3f32.sin(), 2.0 * 0.75f32.sin()];
    assert!(x.iter().zip(want).all(|(x, w)| (x - w).abs() < 1e-6), "{x:?}");
}
