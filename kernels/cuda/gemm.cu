// Linear layers for up to 64 rows in bf16: y[rows, outputs] = x[rows, inputs] w[outputs, inputs]^T.
//
// These steps are bound by reading w once, so each warp streams 16 outputs of w straight from memory
// into the A fragments of tensor-core instructions, and x (small, in L1 and L2) into B fragments. The
// k index of an instruction is a name only: lane t takes 8 consecutive numbers of both w and x, which
// makes all loads 16 bytes wide without any staging.
//
// A result does not depend on the other rows: inputs are cut into slices, one a warp, summed in their
// order, whatever the number of rows. The number of slices follows from the weight's shape alone.
#include "common.cuh"

// What becomes of a sum.
enum Epilogue {
    STORE,     // y[row][output] = sum * scale, f32
    RESIDUAL,  // x[row][output] += sum; the next norm's input and sums of squares
    GATED      // w holds gate, then up: y[row][output] = silu(gate) * up, bf16
};

struct GemmArgs {
    const u16* w;        // [outputs, inputs]; GATED: [2 outputs, inputs]
    const u16* x;        // [8 NT, inputs], the rows times the norm's weight
    const float* bias;   // [outputs] or null
    const float* squares;   // [8 NT, partials]: sums of squares of the rows before the norm; null: scale 1
    u32 partials;
    float eps;
    u32 inputs;          // multiple of 32
    u32 outputs;
    // STORE, GATED
    void* y;
    u32 pitch;           // of y
    // RESIDUAL
    float* stream;       // residual stream [8 NT, outputs]
    const float* norm;   // [outputs]: the next norm's weight
    u16* normed;         // [8 NT, outputs]: stream * norm
    float* squares_out;  // [8 NT, outputs / 16]
};

__device__ __forceinline__ float silu(float v) { return v / (1.0f + expf(-v)); }

__device__ __forceinline__ void add(float4& to, const float4& v) {
    to.x += v.x;
    to.y += v.y;
    to.z += v.z;
    to.w += v.w;
}

// A block: MT tiles of 16 outputs (GATED: of 8 gates and 8 ups) by 8 NT rows.
template <int NT, int MT, int SLICES, int UNROLL, Epilogue E>
__device__ __forceinline__ void gemm(const GemmArgs& a) {
    constexpr int FRAGMENTS = MT * NT;
    extern __shared__ float4 sums[];  // [SLICES][MT][NT][WARP]
    __shared__ float scales[NT * 8];
    const int lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    const int g = lane / 4, t = lane % 4;
    const u32 tiles = a.inputs / 32;
    const u32 begin = tiles * slice / SLICES, end = tiles * (slice + 1) / SLICES;
    constexpr int OUT = E == GATED ? 8 : 16;  // outputs of a tile

    // Rows of w beyond the last output repeat it; what they give is not stored.
    const u16* low[MT];
    const u16* high[MT];
#pragma unroll
    for (int i = 0; i < MT; i++) {
        u32 first = (blockIdx.x * MT + i) * OUT + g;
        u32 second = E == GATED ? first : first + 8;
        first = min(first, a.outputs - 1);
        second = min(second, a.outputs - 1);
        if (E == GATED) second += a.outputs;
        low[i] = a.w + (u64)first * a.inputs + 8 * t;
        high[i] = a.w + (u64)second * a.inputs + 8 * t;
    }
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 w[UNROLL][MT][2];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
        for (int i = 0; i < MT; i++) {
            bool in = begin + u < end;
            w[u][i][0] = in ? load_streamed(low[i] + (begin + u) * 32) : zero;
            w[u][i][1] = in ? load_streamed(high[i] + (begin + u) * 32) : zero;
        }
    wait_for_previous();
    let_next_start();

    if (E != RESIDUAL && a.squares != nullptr) {
        for (int r = slice; r < NT * 8; r += SLICES) {
            float sum = 0.0f;
            for (u32 p = lane; p < a.partials; p += WARP) sum += a.squares[r * a.partials + p];
            sum = warp_sum(sum);
            if (lane == 0) scales[r] = rsqrtf(sum / (float)(a.partials * 16) + a.eps);
        }
    }
    float acc[MT][NT][4];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][n][c] = 0.0f;

    const u16* x = a.x + (u64)g * a.inputs + 8 * t;
    for (u32 tile = begin; tile < end; tile += UNROLL) {
        uint4 next[UNROLL][MT][2];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int i = 0; i < MT; i++) {
                u32 k = tile + UNROLL + u;
                next[u][i][0] = k < end ? load_streamed(low[i] + k * 32) : zero;
                next[u][i][1] = k < end ? load_streamed(high[i] + k * 32) : zero;
            }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            u32 k = min(tile + u, end - 1);  // beyond the end w is zero
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint4 b = *(const uint4*)(x + (u64)n * 8 * a.inputs + k * 32);
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    mma(acc[i][n], w[u][i][0].x, w[u][i][1].x, w[u][i][0].y, w[u][i][1].y, b.x, b.y);
                    mma(acc[i][n], w[u][i][0].z, w[u][i][1].z, w[u][i][0].w, w[u][i][1].w, b.z, b.w);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int i = 0; i < MT; i++) {
                w[u][i][0] = next[u][i][0];
                w[u][i][1] = next[u][i][1];
            }
    }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
            sums[((slice * MT + i) * NT + n) * WARP + lane] = make_float4(acc[i][n][0], acc[i][n][1], acc[i][n][2], acc[i][n][3]);
    __syncthreads();

    for (int f = slice; f < FRAGMENTS; f += SLICES) {
        float4 v = sums[f * WARP + lane];
#pragma unroll
        for (int s = 1; s < SLICES; s++) add(v, sums[(s * FRAGMENTS + f) * WARP + lane]);
        const int n = f % NT;
        const u32 tile = blockIdx.x * MT + f / NT;
        const int r = n * 8 + 2 * t;  // and r + 1
        const u32 o = tile * OUT + g;
        if (E == GATED) {
            if (o >= a.outputs) continue;
            float gb = a.bias ? a.bias[o] : 0.0f, ub = a.bias ? a.bias[a.outputs + o] : 0.0f;
            float s0 = scales[r], s1 = scales[r + 1];
            u16* y = (u16*)a.y + o;
            y[(u64)r * a.pitch] = to_bf16(silu(v.x * s0 + gb) * (v.z * s0 + ub));
            y[(u64)(r + 1) * a.pitch] = to_bf16(silu(v.y * s1 + gb) * (v.w * s1 + ub));
        } else if (E == STORE) {
            float s0 = a.squares ? scales[r] : 1.0f, s1 = a.squares ? scales[r + 1] : 1.0f;
            float* y = (float*)a.y + o;
            if (o < a.outputs) {
                y[(u64)r * a.pitch] = v.x * s0;
                y[(u64)(r + 1) * a.pitch] = v.y * s1;
            }
            if (o + 8 < a.outputs) {
                y[(u64)r * a.pitch + 8] = v.z * s0;
                y[(u64)(r + 1) * a.pitch + 8] = v.w * s1;
            }
        } else {
            float q0 = 0.0f, q1 = 0.0f;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 out = o + 8 * half;
                if (out < a.outputs) {
                    float b = a.bias ? a.bias[out] : 0.0f, norm = a.norm[out];
                    u64 at = (u64)r * a.outputs + out;
                    float x0 = a.stream[at] + ((half ? v.z : v.x) + b);
                    float x1 = a.stream[at + a.outputs] + ((half ? v.w : v.y) + b);
                    a.stream[at] = x0;
                    a.stream[at + a.outputs] = x1;
                    a.normed[at] = to_bf16(x0 * norm);
                    a.normed[at + a.outputs] = to_bf16(x1 * norm);
                    q0 += x0 * x0;
                    q1 += x1 * x1;
                }
            }
#pragma unroll
            for (int offset = 4; offset < WARP; offset *= 2) {
                q0 += __shfl_xor_sync(FULL_MASK, q0, offset);
                q1 += __shfl_xor_sync(FULL_MASK, q1, offset);
            }
            if (g == 0 && tile * 16 < a.outputs) {
                u32 partials = (a.outputs + 15) / 16;
                a.squares_out[r * partials + tile] = q0;
                a.squares_out[(r + 1) * partials + tile] = q1;
            }
        }
    }
}

// Names: gemm_<epilogue>_<tiles of 8 rows>_<slices>. Tiles of outputs a block, tiles of inputs in flight and
// blocks a multiprocessor are as measured on an H200.
#define GEMM(NAME, E, NT, SLICES, MT, UNROLL, BLOCKS)                                                        \
    extern "C" __global__ void __launch_bounds__(SLICES * WARP, BLOCKS) NAME##_##NT##_##SLICES(GemmArgs a) { \
        gemm<NT, MT, SLICES, UNROLL, E>(a);                                                                  \
    }
#define GEMMS(NAME, E)            \
    GEMM(NAME, E, 1, 8, 1, 2, 3)  \
    GEMM(NAME, E, 2, 8, 2, 2, 2)  \
    GEMM(NAME, E, 4, 8, 2, 2, 2)  \
    GEMM(NAME, E, 8, 8, 2, 1, 2)  \
    GEMM(NAME, E, 1, 16, 1, 2, 2) \
    GEMM(NAME, E, 2, 16, 1, 2, 2) \
    GEMM(NAME, E, 4, 16, 1, 2, 1) \
    GEMM(NAME, E, 8, 16, 1, 2, 1)
GEMMS(gemm_store, STORE)
GEMMS(gemm_residual, RESIDUAL)
GEMMS(gemm_gated, GATED)
