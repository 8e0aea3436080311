// What the kernels of linear layers share: the layout of weights, their arguments and what becomes of sums.
//
// Packed weights. [outputs, inputs] in tiles of 16 outputs by 32 inputs, each 1 KiB, in the order in which
// the lanes of a warp load them as the A fragments of tensor-core instructions: see `packed_index`. Tiles
// of 16 outputs follow each other; within, tiles of 32 inputs. Missing outputs of the last tile are zero.
// A gate and an up matrix are packed as one, eight rows of the gate and eight of the up a tile.
//
// Order of a sum. Inputs are dealt to slices by 64 in turn; each slice is summed in order, then the slices
// in theirs. All kernels keep to it, so that a row's result does not depend on the kernel or on the other
// rows. The number of slices follows from the weight's shape alone.
#pragma once
#include "common.cuh"

// What becomes of a sum.
enum Epilogue {
    STORE,     // y[row][output] = sum * scale, f32
    RESIDUAL,  // stream[row][output] += sum; the next norm's input and sums of squares
    GATED      // of gate and up: y[row][output] = silu(gate) * up, bf16
};

struct LinearArgs {
    const u16* w;          // packed
    const u16* x;          // [rows, inputs]; for the layer after a norm, the rows times the norm's weight
    const float* bias;     // [outputs] (GATED: gates, then ups) or null
    const float* squares;  // [rows, inputs / 16]: sums of squares of the rows before the norm; null: scale 1
    float eps;             // of the norm
    u32 rows;
    u32 inputs;            // multiple of 32
    u32 outputs;
    // STORE, GATED
    void* y;
    u32 pitch;             // of y
    // RESIDUAL
    float* stream;         // [rows, outputs]
    const float* norm;     // [outputs]: the next norm's weight
    u16* normed;           // [rows, outputs]: stream * norm
    float* squares_out;    // [rows, outputs / 16]
};

// The A fragments of the two instructions that take a tile of weights, from the halves that a lane has of it.
// Registers of a fragment must be neighbours, as those of a half must. Were these mere copies, the compiler
// would make them anew for each instruction, so they are something more: `nothing` is 0 unknown to it.
struct Fragments {
    u32 first[4], second[4];
    __device__ __forceinline__ void take(const uint4& low, const uint4& high, u32 nothing) {
        first[0] = low.x ^ nothing, first[1] = high.x ^ nothing, first[2] = low.y ^ nothing, first[3] = high.y ^ nothing;
        second[0] = low.z ^ nothing, second[1] = high.z ^ nothing, second[2] = low.w ^ nothing, second[3] = high.w ^ nothing;
    }
};
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(c, a[0], a[1], a[2], a[3], b0, b1); }

// Its relative error is below 1e-5 where it counts, far below what bf16 keeps; -0 for v below about -87.
__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

__device__ __forceinline__ void add(float4& to, const float4& v) {
    to.x += v.x;
    to.y += v.y;
    to.z += v.z;
    to.w += v.w;
}

// Scales of N rows by their norm, `first` and each `stride` further (beyond the last row: repeated); a warp
// computes them. The rows go side by side, because what takes long is to wait for memory.
template <int N>
__device__ __forceinline__ void row_scales(const LinearArgs& a, u32 first, u32 stride, float (&scales)[N]) {
    const u32 partials = a.inputs / 16;
    const float* from[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        from[i] = a.squares + (u64)min(first + i * stride, a.rows - 1) * partials;
        scales[i] = 0.0f;
    }
#pragma unroll 4
    for (u32 p = threadIdx.x % WARP; p < partials; p += WARP)
#pragma unroll
        for (int i = 0; i < N; i++) scales[i] += from[i][p];
#pragma unroll
    for (int i = 0; i < N; i++) scales[i] = rsqrtf(warp_sum(scales[i]) / (float)a.inputs + a.eps);
}

// What `finish` needs of weights at a lane's outputs of a tile: they may be read before the kernel before has
// ended. For RESIDUAL of outputs g and g + 8; for GATED the biases of gate g and of up g.
struct Constants {
    float bias[2], norm[2];
};
template <Epilogue E>
__device__ __forceinline__ Constants constants(const LinearArgs& a, u32 tile) {
    const u32 g = threadIdx.x % WARP / 4;
    Constants c = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        // Beyond the end, repeat the last: that is not stored.
        const u32 o = min(E == GATED ? tile * 8 + g : tile * 16 + g + 8 * half, a.outputs - 1);
        if (E != STORE && a.bias) c.bias[half] = a.bias[E == GATED ? o + half * a.outputs : o];
        if (E == RESIDUAL) c.norm[half] = a.norm[o];
    }
    return c;
}

// What `finish` adds to, read early: for RESIDUAL, the stream at a lane's places of a tile.
template <Epilogue E>
__device__ __forceinline__ float4 before(const LinearArgs& a, u32 tile, u32 first) {
    const int lane = threadIdx.x % WARP;
    const u32 r = first + lane % 4 * 2, o = tile * 16 + lane / 4;
    if (E != RESIDUAL) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    // Beyond the ends, repeat the last: that is not stored.
    const float* at0 = a.stream + (u64)min(r, a.rows - 1) * a.outputs;
    const float* at1 = a.stream + (u64)min(r + 1, a.rows - 1) * a.outputs;
    const u32 o0 = min(o, a.outputs - 1), o1 = min(o + 8, a.outputs - 1);
    return make_float4(at0[o0], at1[o0], at0[o1], at1[o1]);
}

// Finish the sums of a tile of outputs at the rows `first` to `first + 7`, of which those below a.rows are
// stored. A lane has v = (output g, row 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1), and of `before` the
// same; `scales` are of the eight rows.
template <Epilogue E>
__device__ __forceinline__ void finish(const LinearArgs& a, const float4& v, const float4& before, const Constants& c, u32 tile, u32 first, const float* scales) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const u32 r = first + 2 * t;  // and r + 1
    const bool in0 = r < a.rows, in1 = r + 1 < a.rows;
    if (E == GATED) {
        const u32 o = tile * 8 + g;
        if (o >= a.outputs) return;
        const float s0 = scales[2 * t], s1 = scales[2 * t + 1];
        u16* y = (u16*)a.y + (u64)r * a.pitch + o;
        if (in0) y[0] = to_bf16(silu(__fmaf_rn(v.x, s0, c.bias[0])) * __fmaf_rn(v.z, s0, c.bias[1]));
        if (in1) y[a.pitch] = to_bf16(silu(__fmaf_rn(v.y, s1, c.bias[0])) * __fmaf_rn(v.w, s1, c.bias[1]));
    } else if (E == STORE) {
        const u32 o = tile * 16 + g;
        const float s0 = scales ? scales[2 * t] : 1.0f, s1 = scales ? scales[2 * t + 1] : 1.0f;
        float* y = (float*)a.y + (u64)r * a.pitch + o;
        if (o < a.outputs) {
            if (in0) y[0] = v.x * s0;
            if (in1) y[a.pitch] = v.y * s1;
        }
        if (o + 8 < a.outputs) {
            if (in0) y[8] = v.z * s0;
            if (in1) y[a.pitch + 8] = v.w * s1;
        }
    } else {
        float q0 = 0.0f, q1 = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 o = tile * 16 + g + 8 * half;
            if (o >= a.outputs) continue;
            const float b = c.bias[half], norm = c.norm[half];
            const u64 at = (u64)r * a.outputs + o;
            if (in0) {
                const float x = (half ? before.z : before.x) + ((half ? v.z : v.x) + b);
                a.stream[at] = x;
                a.normed[at] = to_bf16(x * norm);
                q0 = __fmaf_rn(x, x, q0);
            }
            if (in1) {
                const float x = (half ? before.w : before.y) + ((half ? v.w : v.y) + b);
                a.stream[at + a.outputs] = x;
                a.normed[at + a.outputs] = to_bf16(x * norm);
                q1 = __fmaf_rn(x, x, q1);
            }
        }
#pragma unroll
        for (int offset = 4; offset < WARP; offset *= 2) {
            q0 += __shfl_xor_sync(FULL_MASK, q0, offset);
            q1 += __shfl_xor_sync(FULL_MASK, q1, offset);
        }
        const u32 partials = a.outputs / 16;
        if (g == 0 && in0) a.squares_out[(u64)r * partials + tile] = q0;
        if (g == 0 && in1) a.squares_out[(u64)(r + 1) * partials + tile] = q1;
    }
}
