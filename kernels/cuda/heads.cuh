// From a row's products to its heads: biases, norms, rotary positions. One order of arithmetic for all
// who do it.
#pragma once
#include "common.cuh"

struct PrepareArgs {
    const float* qkv;          // [rows, (heads + 2 kv_heads) dim]
    const float* bias;         // [(heads + 2 kv_heads) dim] or null
    const float* q_norm;       // [dim] or null
    const float* k_norm;
    const float* frequencies;  // [dim / 2], radians a position
    const u32* positions;      // [rows]
    const u32* page_starts;    // [rows]: where the pages of the row's sequence begin in the page list
    const u32* page_list;
    const Header* header;
    void* q;                   // [rows, heads, dim]
    void* kv;                  // of the layer: [pages][kv_heads][2][PAGE dim]
    float eps;
    u32 heads;
    u32 kv_heads;
    u32 dim;
};

// Place of (position in page, d) among the values of a page and head in bf16: in fragment order, so that
// attention loads them as they are.
__device__ __forceinline__ u32 value_index(const u16*, u32 slot, u32 d, u32) {
    u32 r = d % 16, lane = (r % 8) * 4 + (slot % 8) / 2, reg = r / 8 + 2 * (slot / 8);
    return ((d / 16) * 32 + lane) * 8 + reg * 2 + slot % 2;
}

// The same for keys. Of inputs 32 i to 32 i + 31 two products are made; lane 4 g + t gives to the first
// inputs 32 i + 8 t + {0, 1, 2, 3} of positions g and g + 8, to the second the four after them.
__device__ __forceinline__ u32 key_index(const u16*, u32 slot, u32 d, u32) {
    u32 lane = (slot % 8) * 4 + d % 32 / 8, reg = slot / 8 + 2 * (d % 4 / 2);
    return ((d / 32 * 2 + d % 8 / 4) * 32 + lane) * 8 + reg * 2 + d % 2;
}

// Head `index` of a row by a warp: lane i has elements i, i + 32, ...; dim <= 32 MOST.
template <int MOST>
__device__ __forceinline__ void load_head(const PrepareArgs& a, u32 row, u32 index, u32 dim, float (&x)[MOST]) {
    const u32 lane = threadIdx.x % WARP;
    const float* from = a.qkv + ((u64)row * (a.heads + 2 * a.kv_heads) + index) * dim;
#pragma unroll
    for (u32 j = 0; j < MOST; j++) {
        const u32 i = lane + j * WARP;
        x[j] = i < dim ? __fadd_rn(from[i], a.bias ? a.bias[index * dim + i] : 0.0f) : 0.0f;
    }
}
template <int MOST>
__device__ __forceinline__ void load_norm(const float* norm, u32 dim, float (&weights)[MOST]) {
    const u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (u32 j = 0; j < MOST; j++) weights[j] = norm != nullptr && lane + j * WARP < dim ? norm[lane + j * WARP] : 0.0f;
}
template <int MOST>
__device__ __forceinline__ void norm_head(const float (&weights)[MOST], float eps, u32 dim, float (&x)[MOST]) {
    float sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < MOST; j++) sum = __fmaf_rn(x[j], x[j], sum);
    const float scale = rsqrtf(__fadd_rn(__fdiv_rn(warp_sum(sum), (float)dim), eps));
#pragma unroll
    for (u32 j = 0; j < MOST; j++) x[j] = __fmul_rn(x[j], __fmul_rn(scale, weights[j]));
}
// Sines (x) and cosines (y) of a position for pairs i, i + 32, ... of lane i.
template <int PAIRS>
__device__ __forceinline__ void rotation(const float* frequencies, u32 position, u32 dim, float2 (&turn)[PAIRS]) {
    const u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (u32 j = 0; j < PAIRS; j++)
        if (lane + j * WARP < dim / 2) sincosf(__fmul_rn((float)position, frequencies[lane + j * WARP]), &turn[j].x, &turn[j].y);
}
__device__ __forceinline__ float2 turned(float x, float y, float2 turn) {
    return make_float2(__fmaf_rn(x, turn.y, -__fmul_rn(y, turn.x)), __fmaf_rn(y, turn.y, __fmul_rn(x, turn.x)));
}
// A head's rotated pairs, given to `put` as (place, value). Pairs of a lane need not be in it: `v` [dim], of the
// warp, is where all lanes see them.
template <int MOST, int PAIRS, typename Put>
__device__ __forceinline__ void rotate_head(const float (&x)[MOST], const float2 (&turn)[PAIRS], u32 dim, float* v, Put put) {
    const u32 lane = threadIdx.x % WARP;
    if (2 * PAIRS == MOST && dim == MOST * WARP) {
#pragma unroll
        for (u32 j = 0; j < PAIRS; j++) {
            const float2 pair = turned(x[j], x[j + MOST - PAIRS], turn[j]);
            put(lane + j * WARP, pair.x);
            put(lane + j * WARP + dim / 2, pair.y);
        }
        return;
    }
    __syncwarp();
#pragma unroll
    for (u32 j = 0; j < MOST; j++)
        if (lane + j * WARP < dim) v[lane + j * WARP] = x[j];
    __syncwarp();
#pragma unroll
    for (u32 j = 0; j < PAIRS; j++) {
        const u32 i = lane + j * WARP;
        if (i >= dim / 2) break;
        const float2 pair = turned(v[i], v[i + dim / 2], turn[j]);
        put(i, pair.x);
        put(i + dim / 2, pair.y);
    }
}
