// Attention of rows over paged keys and values in bf16, split along the positions.
//
// The unit of work is an item at one key/value head: some consecutive rows of one sequence, whose
// positions lie in one page. Columns of the matrix products are (row, head of the group) pairs; a page
// of 16 positions is the 16 rows of a tensor-core instruction, so keys and values go from memory
// straight into fragments. Each row stops at its own position.
//
// The positions are cut into at most CHUNKS chunks. A row's result does not depend on the other rows:
// chunks follow from the number of pages up to its own, a chunk's pages go round its warps, warps are
// merged in their order and chunks in theirs.
//
// Pools, per layer, page and head: keys [16][D]; values [D / 16][32 lanes][8], see `value_index`.
#include "common.cuh"

#define PAGE 16
#define WARPS 4
#define CHUNKS 8

struct Item {
    u32 row;       // first row
    u32 rows;      // consecutive rows of one sequence in one page; rows * group <= 8 NT
    u32 position;  // of the first row
    u32 pages;     // where the sequence's pages begin in the page list
    u32 stored;    // positions of the sequence below this step's
    u32 reserved[3];
};

struct AttentionArgs {
    const u16* q;      // [rows, heads, D]
    const u16* kv;     // of the layer: [pages][kv heads][2][16 D]
    const Item* items;
    const u32* page_list;
    const Header* header;
    u16* out;          // [rows, heads, D]
    float scale;       // of scores, times log2 e
    u32 kv_heads;
    u32 group;         // query heads a key/value head
};

// Pages of a chunk of an item, and how many chunks there are.
__device__ __forceinline__ u32 chunk_pages(const Item& item) {
    return max((u32)WARPS, (item.position / PAGE + 1 + CHUNKS - 1) / CHUNKS);
}
__device__ __forceinline__ u32 chunks(const Item& item) {
    const u32 pages = chunk_pages(item);
    return (item.position / PAGE + 1 + pages - 1) / pages;
}

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
__device__ __forceinline__ float column_max(float v) {
#pragma unroll
    for (int offset = 4; offset < WARP; offset *= 2) v = fmaxf(v, __shfl_xor_sync(FULL_MASK, v, offset));
    return v;
}
__device__ __forceinline__ float column_sum(float v) {
#pragma unroll
    for (int offset = 4; offset < WARP; offset *= 2) v += __shfl_xor_sync(FULL_MASK, v, offset);
    return v;
}
// exp2(m - to), 0 for an empty part.
__device__ __forceinline__ float rescale(float m, float to) { return m == -INFINITY_F ? 0.0f : exp2_fast(m - to); }

// One chunk of an item at one head: the block's warps over its pages. Leaves, for each column, maximum and
// sum in `ml` and the unnormalised output in `o` (both shared, [8 NT] and [8 NT][D]). FIRST: nothing of
// this step has been waited for; pages of earlier steps are loaded ahead of that.
template <int D, int NT, bool FIRST>
__device__ __forceinline__ void chunk_of_item(const AttentionArgs& a, const Item& item, u32 head, u32 chunk,
                                              float* work, float2* work_ml, float* o, float2* ml, bool fresh) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const u32 columns = item.rows * a.group;
    const u32 heads = a.kv_heads * a.group;
    const u32 first = chunk * chunk_pages(item);
    const u32 end = min(first + chunk_pages(item), item.position / PAGE + 1);

    uint4 k[D / 32][2], v[D / 16];
    auto load_page = [&](u32 page) {
        const u64 at = ((u64)a.page_list[item.pages + page] * a.kv_heads + head) * 2 * PAGE * D;
        const u16* keys = a.kv + at + g * D + 8 * t;
        const u16* values = a.kv + at + PAGE * D + lane * 8;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            k[i][0] = *(const uint4*)(keys + 32 * i);
            k[i][1] = *(const uint4*)(keys + 8 * D + 32 * i);
        }
#pragma unroll
        for (int d = 0; d < D / 16; d++) v[d] = *(const uint4*)(values + d * 256);
    };
    bool loaded = false;
    if (FIRST) {
        loaded = first + warp < end && (first + warp + 1) * PAGE <= item.stored;
        if (loaded) load_page(first + warp);
        wait_for_previous();
        let_next_start();
    }

    uint4 q[NT][D / 32];
#pragma unroll
    for (int n = 0; n < NT; n++) {
        u32 c = n * 8 + g;
        const u16* from = a.q + ((u64)(item.row + c / a.group) * heads + head * a.group + c % a.group) * D + 8 * t;
#pragma unroll
        for (int k = 0; k < D / 32; k++) q[n][k] = c < columns ? *(const uint4*)(from + 32 * k) : make_uint4(0, 0, 0, 0);
    }
    // Columns 2t and 2t + 1 of each tile, as accumulators have them.
    u32 limit[NT][2];
    float m[NT][2], l[NT][2], acc[NT][D / 16][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 c = n * 8 + 2 * t + j;
            limit[n][j] = c < columns ? item.position + c / a.group : 0;
            m[n][j] = -INFINITY_F;
            l[n][j] = 0.0f;
#pragma unroll
            for (int d = 0; d < D / 16; d++) acc[n][d][j] = acc[n][d][j + 2] = 0.0f;
        }

    for (u32 page = first + warp; page < end; page += WARPS) {
        if (!loaded) load_page(page);
        loaded = false;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < D / 32; i++) {
                mma(s, k[i][0].x, k[i][1].x, k[i][0].y, k[i][1].y, q[n][i].x, q[n][i].y);
                mma(s, k[i][0].z, k[i][1].z, k[i][0].w, k[i][1].w, q[n][i].z, q[n][i].w);
            }
            const u32 p0 = page * PAGE + g;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                bool seen = p0 + (c / 2) * 8 <= limit[n][c % 2];
                s[c] = seen ? __fmul_rn(s[c], a.scale) : -INFINITY_F;
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float most = fmaxf(m[n][j], column_max(fmaxf(s[j], s[j + 2])));
                float f = rescale(m[n][j], most);
                m[n][j] = most;
                s[j] = most == -INFINITY_F ? 0.0f : exp2_fast(s[j] - most);
                s[j + 2] = most == -INFINITY_F ? 0.0f : exp2_fast(s[j + 2] - most);
                l[n][j] = __fadd_rn(__fmul_rn(l[n][j], f), __fadd_rn(s[j], s[j + 2]));
#pragma unroll
                for (int d = 0; d < D / 16; d++) {
                    acc[n][d][j] = __fmul_rn(acc[n][d][j], f);
                    acc[n][d][j + 2] = __fmul_rn(acc[n][d][j + 2], f);
                }
            }
            const u32 b0 = transpose8(to_bf16x2(s[0], s[1])), b1 = transpose8(to_bf16x2(s[2], s[3]));
#pragma unroll
            for (int d = 0; d < D / 16; d++) mma(acc[n][d], v[d].x, v[d].y, v[d].z, v[d].w, b0, b1);
        }
    }

    // Warps into one, a tile of columns at a time.
#pragma unroll
    for (int n = 0; n < NT; n++) {
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float sum = column_sum(l[n][j]);
            const int c = 2 * t + j;
            if (n * 8 + c >= (int)columns) continue;
            if (g == 0) work_ml[warp * 8 + c] = make_float2(m[n][j], sum);
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                work[(warp * 8 + c) * (D + 4) + d * 16 + g] = acc[n][d][j];
                work[(warp * 8 + c) * (D + 4) + d * 16 + g + 8] = acc[n][d][j + 2];
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 8 * D; i += WARPS * WARP) {
            const int c = i / D, d = i % D;
            if (n * 8 + c >= (int)columns) break;
            float most = -INFINITY_F;
#pragma unroll
            for (int w = 0; w < WARPS; w++) most = fmaxf(most, work_ml[w * 8 + c].x);
            float sum = 0.0f, out = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                float2 part = work_ml[w * 8 + c];
                float f = rescale(part.x, most);
                sum = __fmaf_rn(part.y, f, sum);
                out = __fmaf_rn(work[(w * 8 + c) * (D + 4) + d], f, out);
            }
            const int column = n * 8 + c;
            if (fresh) {
                o[column * D + d] = out;
                if (d == 0) ml[column] = make_float2(most, sum);
            } else {
                float2 had = ml[column];
                float to = fmaxf(had.x, most);
                float f = rescale(had.x, to), h = rescale(most, to);
                o[column * D + d] = __fmaf_rn(o[column * D + d], f, __fmul_rn(out, h));
                // Only the thread of d == 0 writes, after all have read: see below.
            }
        }
        if (!fresh) {
            __syncthreads();
            for (int c = threadIdx.x; c < 8; c += WARPS * WARP) {
                float most = -INFINITY_F, sum = 0.0f;
                for (int w = 0; w < WARPS; w++) most = fmaxf(most, work_ml[w * 8 + c].x);
                for (int w = 0; w < WARPS; w++) {
                    float2 part = work_ml[w * 8 + c];
                    sum = __fmaf_rn(part.y, rescale(part.x, most), sum);
                }
                float2 had = ml[n * 8 + c];
                float to = fmaxf(had.x, most);
                ml[n * 8 + c] = make_float2(to, __fmaf_rn(had.y, rescale(had.x, to), __fmul_rn(sum, rescale(most, to))));
            }
        }
    }
    __syncthreads();
}

template <int D>
__device__ __forceinline__ void write_out(const AttentionArgs& a, const Item& item, u32 head, const float* o, const float2* ml) {
    const u32 heads = a.kv_heads * a.group, columns = item.rows * a.group;
    for (u32 i = threadIdx.x; i < columns * D; i += WARPS * WARP) {
        const u32 c = i / D, d = i % D;
        u64 at = ((u64)(item.row + c / a.group) * heads + head * a.group + c % a.group) * D + d;
        a.out[at] = to_bf16(__fdiv_rn(o[i], ml[c].y));
    }
}

// For decoding: grid (CHUNKS, kv heads, items), each cluster an item at a head, each of its blocks a
// chunk. Before sm_90, grid (1, kv heads, items), each block all chunks.
template <int D>
__device__ __forceinline__ void attention_split(const AttentionArgs& a) {
    extern __shared__ float work[];  // [WARPS * 8][D + 4]
    __shared__ float2 work_ml[WARPS * 8];
    __shared__ float o[8 * D];
    __shared__ float2 ml[8];
    const u32 head = blockIdx.y, index = blockIdx.z;
    // What a step uploads is there before its first kernel.
    if (index >= a.header->items) return;
    const Item item = a.items[index];
    const u32 count = chunks(item);
#if __CUDA_ARCH__ >= 900
    const u32 rank = cluster_rank();
    if (rank >= count && count == 1) return;
    if (rank >= count) {
        cluster_sync();
        cluster_sync();
        return;
    }
    chunk_of_item<D, 1, true>(a, item, head, rank, work, work_ml, o, ml, true);
    if (count == 1) {
        write_out<D>(a, item, head, o, ml);
        return;
    }
    cluster_sync();
    // In the order of chunks, as a block that walks them all does.
    const u32 heads = a.kv_heads * a.group, columns = item.rows * a.group;
    for (u32 i = rank * WARPS * WARP + threadIdx.x; i < columns * D; i += count * WARPS * WARP) {
        const u32 c = i / D, d = i % D;
        float2 parts[CHUNKS];
        float outs[CHUNKS];
#pragma unroll
        for (u32 k = 0; k < CHUNKS; k++)
            if (k < count) {
                parts[k] = load_of_block(ml + c, k);
                outs[k] = load_of_block(o + i, k);
            }
        float2 had = parts[0];
        float out = outs[0];
#pragma unroll
        for (u32 k = 1; k < CHUNKS; k++)
            if (k < count) {
                const float to = fmaxf(had.x, parts[k].x), f = rescale(had.x, to), h = rescale(parts[k].x, to);
                out = __fmaf_rn(out, f, __fmul_rn(outs[k], h));
                had = make_float2(to, __fmaf_rn(had.y, f, __fmul_rn(parts[k].y, h)));
            }
        a.out[((u64)(item.row + c / a.group) * heads + head * a.group + c % a.group) * D + d] = to_bf16(__fdiv_rn(out, had.y));
    }
    cluster_sync();  // no block may end while another reads its part
#else
    wait_for_previous();
    for (u32 chunk = 0; chunk < count; chunk++) chunk_of_item<D, 1, false>(a, item, head, chunk, work, work_ml, o, ml, chunk == 0);
    write_out<D>(a, item, head, o, ml);
#endif
}

// For prompts, whose rows are enough blocks: grid (items, kv heads), each block all chunks of an item.
template <int D, int NT>
__device__ __forceinline__ void attention_whole(const AttentionArgs& a) {
    extern __shared__ float work[];  // [WARPS * 8][D + 4], then o: [NT * 8][D]
    __shared__ float2 work_ml[WARPS * 8];
    __shared__ float2 ml[NT * 8];
    float* o = work + WARPS * 8 * (D + 4);
    wait_for_previous();
    let_next_start();
    const Item item = a.items[blockIdx.x];
    const u32 count = chunks(item);
    for (u32 chunk = 0; chunk < count; chunk++)
        chunk_of_item<D, NT, false>(a, item, blockIdx.y, chunk, work, work_ml, o, ml, chunk == 0);
    write_out<D>(a, item, blockIdx.y, o, ml);
}

#define ATTENTION(D)                                                                                                              \
    extern "C" __global__ void __launch_bounds__(WARPS * WARP, 4) attention_split_##D(AttentionArgs a) { attention_split<D>(a); } \
    extern "C" __global__ void __launch_bounds__(WARPS * WARP) attention_whole_##D(AttentionArgs a) { attention_whole<D, 4>(a); }
ATTENTION(32)
ATTENTION(64)
ATTENTION(96)
ATTENTION(128)
