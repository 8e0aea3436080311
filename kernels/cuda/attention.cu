// Attention of rows over paged keys and values in bf16, split along the positions.
//
// The unit of work is an item at one part of a key/value head: some consecutive rows of one sequence, whose
// positions lie in one page, and as many of the head's queries as have columns. Columns of the matrix products
// are (row, query head of the part) pairs; a page of 16 positions is the 16 rows of a tensor-core instruction,
// so keys and values go from their pages straight into fragments. Each row stops at its own position.
//
// The positions are cut into at most CHUNKS chunks. A row's result does not depend on the other rows:
// chunks follow from the number of pages up to its own, a chunk's pages go round its warps, warps are
// merged in their order and chunks in theirs.
//
// Pools, per layer, page and head: keys and values, each [D / 16][32 lanes][8], in the order of fragments: see
// `key_index` and `value_index`.
#include "pages.cuh"

#define TILES 4         // of 8 columns, in `whole`
// Pages that a warp has under way. One is enough in `split`, where more blocks to a multiprocessor do better.
#define SPLIT_STAGES 1
#define SINGLE_STAGES 3
#define WHOLE_STAGES 2

// From rows of 8x8 to columns across the warp.
__device__ __forceinline__ u32 transpose8(u32 v) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}
__device__ __forceinline__ float exp2_fast(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
__device__ __forceinline__ float column_sum(float v) {
#pragma unroll
    for (int offset = 4; offset < WARP; offset *= 2) v += __shfl_xor_sync(FULL_MASK, v, offset);
    return v;
}

// Queries of an item at a part as fragments: column n * 8 + g in lane 4 g + t.
template <int D, int NT>
__device__ __forceinline__ void load_queries(const AttentionArgs& a, const Item& item, u32 part, uint4 (&q)[NT][D / 32]) {
    const u32 lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, columns = item.rows * a.group;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const u32 c = n * 8 + g;
        const u16* from = a.q + query_at(a, item.row + c / a.group, part, c % a.group) * D + 8 * t;
#pragma unroll
        for (int i = 0; i < D / 32; i++) q[n][i] = c < columns ? *(const uint4*)(from + 32 * i) : make_uint4(0, 0, 0, 0);
    }
}

// What a warp has of its pages: of columns 2t and 2t + 1 of each tile, as accumulators have them, the
// maximum, this lane's part of the sum, and the unnormalised output.
template <int D, int NT>
struct Partial {
    float m[NT][2], l[NT][2], acc[NT][D / 16][4];
};

// A warp's pages of the chunk from `first` to `end`, of the block's thread `thread`.
template <int D, int NT, typename Source>
__device__ __forceinline__ void attend(const AttentionArgs& a, const Item& item, const uint4 (&q)[NT][D / 32], Source& pages, u32 thread, u32 first, u32 end, Partial<D, NT>& r) {
    const u32 lane = thread % WARP, g = lane / 4, t = lane % 4;
    const u32 columns = item.rows * a.group;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        r.m[n][0] = r.m[n][1] = -INFINITY_F;
        r.l[n][0] = r.l[n][1] = 0.0f;
#pragma unroll
        for (int d = 0; d < D / 16; d++) r.acc[n][d][0] = r.acc[n][d][1] = r.acc[n][d][2] = r.acc[n][d][3] = 0.0f;
    }
#pragma unroll 1
    for (u32 page = first + thread / WARP; page < end; page += WARPS) {
        float s[NT][4] = {};
        const u16* keys = pages.keys() + lane * 8;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const uint4 k0 = *(const uint4*)(keys + i * 512), k1 = *(const uint4*)(keys + i * 512 + 256);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                mma(s[n], k0.x, k0.y, k0.z, k0.w, q[n][i].x, q[n][i].y);
                mma(s[n], k1.x, k1.y, k1.z, k1.w, q[n][i].z, q[n][i].w);
            }
        }
        pages.keys_read();
        if (page * PAGE + PAGE - 1 > item.position) {
            // Every column sees some position of its item's last page.
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const u32 c = n * 8 + 2 * t + j, limit = item.position + (c < columns ? c / a.group : 0);
                    if (page * PAGE + g > limit) s[n][j] = -INFINITY_F;
                    if (page * PAGE + g + 8 > limit) s[n][j + 2] = -INFINITY_F;
                }
        }
        // Step by step for all columns: the chains of one column are long.
        float most[NT][2], f[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) most[n][j] = fmaxf(s[n][j], s[n][j + 2]);
#pragma unroll
        for (int offset = 4; offset < WARP; offset *= 2)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) most[n][j] = fmaxf(most[n][j], __shfl_xor_sync(FULL_MASK, most[n][j], offset));
        bool grows = false;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float to = fmaxf(r.m[n][j], __fmul_rn(most[n][j], a.scale));
                f[n][j] = exp2_fast(r.m[n][j] - to);
                grows |= r.m[n][j] != to;
                r.m[n][j] = to;
                s[n][j] = exp2_fast(__fmaf_rn(s[n][j], a.scale, -to));
                s[n][j + 2] = exp2_fast(__fmaf_rn(s[n][j + 2], a.scale, -to));
                r.l[n][j] = __fmaf_rn(r.l[n][j], f[n][j], __fadd_rn(s[n][j], s[n][j + 2]));
            }
        // A factor of 1 changes no bit.
        if (__any_sync(FULL_MASK, grows)) {
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int d = 0; d < D / 16; d++)
#pragma unroll
                    for (int j = 0; j < 4; j++) r.acc[n][d][j] = __fmul_rn(r.acc[n][d][j], f[n][j % 2]);
        }
        u32 b[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            b[n][0] = transpose8(to_bf16x2(s[n][0], s[n][1]));
            b[n][1] = transpose8(to_bf16x2(s[n][2], s[n][3]));
        }
        // Slots that no row of the item sees may hold what an earlier owner of the page left. They count 0
        // times, but 0 times NaN is NaN.
        u32 low = FULL_MASK, high = FULL_MASK;
        const u32 seen = item.position + item.rows - page * PAGE;
        if (seen < PAGE) {
            low = (2 * t < seen ? 0xffffu : 0) | (2 * t + 1 < seen ? 0xffff0000u : 0);
            high = (2 * t + 8 < seen ? 0xffffu : 0) | (2 * t + 9 < seen ? 0xffff0000u : 0);
        }
        const u16* values = pages.values() + lane * 8;
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            uint4 v = *(const uint4*)(values + d * 256);
            if (seen < PAGE) {
                v.x &= low;
                v.y &= low;
                v.z &= high;
                v.w &= high;
            }
#pragma unroll
            for (int n = 0; n < NT; n++) mma(r.acc[n][d], v.x, v.y, v.z, v.w, b[n][0], b[n][1]);
        }
        pages.values_read();
    }
}

// The first `live` columns of a warp's tile into shared memory: `work` [8][D + 4] and `ml` [8] of the warp.
template <int D, int NT>
__device__ __forceinline__ void put_tile(const Partial<D, NT>& r, int n, u32 live, float* work, float2* ml) {
    const u32 lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const float sum = column_sum(r.l[n][j]);
        const u32 c = 2 * t + j;
        if (c >= live) continue;
        if (g == 0) ml[c] = make_float2(r.m[n][j], sum);
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            work[c * (D + 4) + d * 16 + g] = r.acc[n][d][j];
            work[c * (D + 4) + d * 16 + g + 8] = r.acc[n][d][j + 2];
        }
    }
}

// exp2 of a part's maximum less the whole's, which is finite; 0 for an empty part.
__device__ __forceinline__ float rescale(float m, float to) { return exp2_fast(m - to); }

__device__ __forceinline__ float4 scaled(float4 v, float f) {
    return make_float4(__fmul_rn(v.x, f), __fmul_rn(v.y, f), __fmul_rn(v.z, f), __fmul_rn(v.w, f));
}
__device__ __forceinline__ float4 fma4(float4 v, float f, float4 add) {
    return make_float4(__fmaf_rn(v.x, f, add.x), __fmaf_rn(v.y, f, add.y), __fmaf_rn(v.z, f, add.z), __fmaf_rn(v.w, f, add.w));
}

// A column's maximum and sum over the warps of a block, and four of its outputs.
__device__ __forceinline__ float2 merge_warps(const float2* ml, u32 c) {
    float most = ml[c].x, sum = 0.0f;
#pragma unroll
    for (int w = 1; w < WARPS; w++) most = fmaxf(most, ml[w * 8 + c].x);
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum = __fmaf_rn(ml[w * 8 + c].y, rescale(ml[w * 8 + c].x, most), sum);
    return make_float2(most, sum);
}
__device__ __forceinline__ float4 merge_warps(const float* work, u32 pitch, const float2* ml, u32 c, float most) {
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) out = fma4(*(const float4*)(work + w * pitch), rescale(ml[w * 8 + c].x, most), out);
    return out;
}
// One more chunk to those before.
__device__ __forceinline__ void merge_chunk(float2& had, float4& out, float2 part, float4 add) {
    const float to = fmaxf(had.x, part.x), f = rescale(had.x, to), h = rescale(part.x, to);
    out = fma4(out, f, scaled(add, h));
    had = make_float2(to, __fmaf_rn(had.y, f, __fmul_rn(part.y, h)));
}

// Outputs d to d + 3 of a column.
template <int D>
__device__ __forceinline__ void write_out(const AttentionArgs& a, const Item& item, u32 part, u32 c, u32 d, float4 out, float sum) {
    const u64 at = query_at(a, item.row + c / a.group, part, c % a.group) * D + d;
    *(uint2*)(a.out + at) = make_uint2(to_bf16x2(__fdiv_rn(out.x, sum), __fdiv_rn(out.y, sum)), to_bf16x2(__fdiv_rn(out.z, sum), __fdiv_rn(out.w, sum)));
}

// An item at a part by one block, chunk after chunk. `work` [WARPS][8][D + 4]; `o` [8 NT][D]; `ml`
// [8 NT][D / 4], for each thread of a column.
template <int D, int NT, int STAGES>
__device__ __forceinline__ void all_chunks(const AttentionArgs& a, const Item& item, u32 part, u16* rings, u64 (*barriers)[STAGES * 2], float* work,
                                           float* o, float2* ml) {
    __shared__ float2 work_ml[WARPS * 8];
    const u32 warp = threadIdx.x / WARP, columns = item.rows * a.group, count = chunks(item), step = chunk_pages(item);
    Pages<D, STAGES> pages(a, item, part / a.parts, 0, item_pages(item), rings, barriers);
    pages.begin_rest(pages.begin(0));
    uint4 q[NT][D / 32];
    load_queries<D, NT>(a, item, part, q);
#pragma unroll 1
    for (u32 chunk = 0; chunk < count; chunk++) {
        Partial<D, NT> r;
        attend(a, item, q, pages, threadIdx.x, chunk * step, min((chunk + 1) * step, item_pages(item)), r);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            __syncthreads();
            put_tile<D, NT>(r, n, columns - min(columns, n * 8u), work + warp * 8 * (D + 4), work_ml + warp * 8);
            __syncthreads();
#pragma unroll 1
            for (u32 i = threadIdx.x; i < 2 * D; i += WARPS * WARP) {
                const u32 c = i / (D / 4), d = i % (D / 4) * 4, column = n * 8 + c;
                if (column >= columns) break;
                float2 sum = merge_warps(work_ml, c);
                float4 add = merge_warps(work + c * (D + 4) + d, 8 * (D + 4), work_ml, c, sum.x);
                float2* sums = ml + column * (D / 4) + d / 4;
                float4* to = (float4*)(o + column * D + d);
                if (chunk > 0) {
                    float2 had = *sums;
                    float4 out = *to;
                    merge_chunk(had, out, sum, add);
                    sum = had, add = out;
                }
                if (chunk + 1 == count) {
                    write_out<D>(a, item, part, column, d, add, sum.y);
                    continue;
                }
                *sums = sum;
                *to = add;
            }
        }
    }
}

// For decoding: grid (CHUNKS, items, parts), each cluster an item at a part, each of its blocks a
// chunk; the output's places are dealt out to the blocks, and each block sends the others what it has of
// theirs. Before sm_90, grid (1, items, parts), each block all chunks. Items go before parts: of a bucket
// that is not full the blocks without an item are then between the others, which would all have been put
// on a few multiprocessors.
// Dynamic shared memory: 4 PAGE WARPS SPLIT_STAGES D = 256 D bytes.
//
// SINGLE is for one item, whose blocks have multiprocessors for themselves: one more warp copies pages for the
// others, further ahead. 4 PAGE WARPS SINGLE_STAGES D = 768 D bytes; only from sm_90 on.
template <int D, bool SINGLE>
__device__ __forceinline__ void attention_split(const AttentionArgs& a) {
    extern __shared__ __align__(128) float work[];
    const u32 index = blockIdx.y, part = blockIdx.z;
    // What a step uploads is there before its first kernel.
    if (index >= a.header->items) {
        if (index == 0) wait_for_previous();  // some block must
        return;
    }
    const Item item = a.items[index];
#if __CUDA_ARCH__ >= 900
    constexpr int STAGES = SINGLE ? SINGLE_STAGES : SPLIT_STAGES;
    __shared__ u64 arrived;
    __shared__ float2 work_ml[WARPS * 8], part_ml[CHUNKS * 8];
    __shared__ float4 parts[2 * D + CHUNKS - 1];  // [chunk][places of this block]
    const u32 rank = cluster_rank(), count = chunks(item), columns = item.rows * a.group, warp = threadIdx.x / WARP;
    if (rank >= count) return;
    const u32 quads = columns * (D / 4), own = (quads + count - 1) / count;
    const u32 mine = min(own, quads - min(quads, rank * own));
    const u32 arrival = (u32)__cvta_generic_to_shared(&arrived);
    if (count > 1) {
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrival) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        if (threadIdx.x == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrival), "r"(count * (mine * 16 + columns * 8)) : "memory");
        __syncwarp();
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    }
    const u32 first = rank * chunk_pages(item), end = min(first + chunk_pages(item), item_pages(item));
    uint4 q[1][D / 32];
    Partial<D, 1> r;
    if constexpr (SINGLE) {
        __shared__ u64 barriers[WARPS][2][STAGES];
        if (warp == WARPS) {
            if (threadIdx.x % WARP < WARPS) {
                for (u32 i = 0; i < 2 * STAGES; i++) {
                    const u32 barrier = (u32)__cvta_generic_to_shared(&barriers[threadIdx.x % WARP][0][i]);
                    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(i < STAGES ? 1 : WARP) : "memory");
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            }
            __syncwarp();
            asm volatile("bar.arrive 2, %0;" ::"n"((WARPS + 1) * WARP) : "memory");
            feed<D, STAGES>(a, item, part / a.parts, first, end, (u16*)work, barriers);
            return;
        }
        asm volatile("bar.sync 2, %0;" ::"n"((WARPS + 1) * WARP) : "memory");  // the barriers are there
        const u32 thread = kept(threadIdx.x);
        Fed<D, STAGES> pages((u16*)work, barriers, thread);
        wait_for_previous();
        load_queries<D, 1>(a, item, part, q);
        attend(a, item, q, pages, thread, first, end, r);
        let_next_start();  // not before: its reading of weights would be in the way
    } else {
        __shared__ u64 barriers[WARPS][STAGES * 2];
        Pages<D, STAGES> pages(a, item, part / a.parts, first, end, (u16*)work, barriers);
        const auto start = pages.begin(item.stored);
        let_next_start();
        wait_for_previous();
        pages.begin_rest(start);
        load_queries<D, 1>(a, item, part, q);
        attend(a, item, q, pages, threadIdx.x, first, end, r);
    }

    __syncwarp();  // every lane has read the warp's pages: its ring is free
    constexpr u32 pitch = STAGES * PAGE * D;
    put_tile<D, 1>(r, 0, columns, work + warp * pitch, work_ml + warp * 8);
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * WARP) : "memory");
    if (count > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all barriers are there
    for (u32 i = threadIdx.x; i < quads; i += WARPS * WARP) {
        const u32 c = i / (D / 4), d = i % (D / 4) * 4;
        const float2 ml = merge_warps(work_ml, c);
        const float4 out = merge_warps(work + c * (D + 4) + d, pitch, work_ml, c, ml.x);
        if (count == 1) {
            write_out<D>(a, item, part, c, d, out, ml.y);
            continue;
        }
        const u32 to = i / own;
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(place_in_block(parts + rank * own + i % own, to)),
                     "f"(out.x), "f"(out.y), "f"(out.z), "f"(out.w), "r"(place_in_block(&arrived, to))
                     : "memory");
    }
    if (count == 1) return;
    if (threadIdx.x < count * 8) {
        const u32 c = threadIdx.x % 8, to = threadIdx.x / 8;
        if (c < columns) {
            const float2 ml = merge_warps(work_ml, c);
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(place_in_block(part_ml + rank * 8 + c, to)),
                         "f"(ml.x), "f"(ml.y), "r"(place_in_block(&arrived, to))
                         : "memory");
        }
    }
    if (threadIdx.x >= max(mine, (u32)WARP)) return;  // the first warp stays until all has arrived
    asm volatile(
        "{\n\t.reg .pred done;\n\tagain:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n\t@!done bra again;\n\t}" ::"r"(arrival)
        : "memory");
    for (u32 i = threadIdx.x; i < mine; i += WARPS * WARP) {
        const u32 at = rank * own + i, c = at / (D / 4), d = at % (D / 4) * 4;
        float2 had = part_ml[c];
        float4 out = parts[i];
#pragma unroll
        for (u32 k = 1; k < CHUNKS; k++)
            if (k < count) merge_chunk(had, out, part_ml[k * 8 + c], parts[k * own + i]);
        write_out<D>(a, item, part, c, d, out, had.y);
    }
#else
    __shared__ float o[8 * D];
    __shared__ float2 ml[2 * D];
    wait_for_previous();
    all_chunks<D, 1, 1>(a, item, part, nullptr, nullptr, work, o, ml);
#endif
}

// For prompts, whose rows are enough blocks: grid (items, parts), each block all chunks of an item.
// Dynamic shared memory: 832 D + 512 bytes; before sm_90, which has no rings, 320 D + 512.
template <int D>
__device__ __forceinline__ void attention_whole(const AttentionArgs& a) {
    extern __shared__ __align__(128) float work[];
    __shared__ u64 barriers[WARPS][WHOLE_STAGES * 2];
#if __CUDA_ARCH__ >= 900
    float* merging = work + WARPS * WHOLE_STAGES * PAGE * D;
#else
    float* merging = work;
#endif
    float* o = merging + WARPS * 8 * (D + 4);
    wait_for_previous();
    let_next_start();
    // Heads first: blocks that run at the same time then ask for different pages.
    const u32 id = blockIdx.y * gridDim.x + blockIdx.x, part = id % gridDim.y, index = id / gridDim.y;
    all_chunks<D, TILES, WHOLE_STAGES>(a, a.items[index], part, (u16*)work, barriers, merging, o, (float2*)(o + 8 * TILES * D));
}

#define ATTENTION(D)                                                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * WARP, 5) attention_split_##D(AttentionArgs a) {     \
        attention_split<D, false>(a);                                                                        \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS * WARP, 2) attention_whole_##D(AttentionArgs a) {     \
        attention_whole<D>(a);                                                                               \
    }
#if __CUDA_ARCH__ >= 900
#define SINGLE(D)                                                                                                  \
    extern "C" __global__ void __launch_bounds__((WARPS + 1) * WARP, 2) attention_single_##D(AttentionArgs a) {    \
        attention_split<D, true>(a);                                                                               \
    }
SINGLE(32)
SINGLE(64)
SINGLE(96)
SINGLE(128)
#endif
ATTENTION(32)
ATTENTION(64)
ATTENTION(96)
ATTENTION(128)
