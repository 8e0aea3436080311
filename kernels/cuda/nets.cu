// Router networks: the operations of `runner/net.rs` in f32 over the sampled rows.
//
// Values are [slots, pitch], a node's own `width` columns of them being used, so that a part of a concatenation is
// written where it belongs. Slots from `header->samples` on do nothing. A slot's numbers depend on no other slot.
// `out` may be `x` where every element is computed from its own place: activation, add, norm and softmax.
#include "common.cuh"

#define THREADS 256
#define WARPS (THREADS / WARP)
#define PAGE 16
#define LIST 128  // columns of the top values of `sampling.cu`

enum Activation { GELU = 0, SILU = 1, RELU = 2, TANH = 3, SIGMOID = 4 };

// See `sampling.cu`.
struct SampleOut {
    u32 token;
    u32 finite;
    float logit, max, second, lse, entropy;
    u32 reserved;
};

// The products of a weight row with `SLOTS` rows of x, one warp. The order of sums depends on `wide` and `inputs` only.
template <int SLOTS>
__device__ __forceinline__ void dot_rows(const float* weight, const float* x, u32 x_pitch, u32 inputs, bool wide,
                                         float bias, float* out, u32 out_pitch) {
    u32 lane = threadIdx.x % WARP;
    float sums[SLOTS];
#pragma unroll
    for (int s = 0; s < SLOTS; s++) sums[s] = 0.0f;
    if (wide) {
#pragma unroll 4
        for (u32 i = lane * 4; i < inputs; i += WARP * 4) {
            float4 w = *(const float4*)(weight + i);
#pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                float4 v = *(const float4*)(x + (u64)s * x_pitch + i);
                sums[s] = __fmaf_rn(w.w, v.w, __fmaf_rn(w.z, v.z, __fmaf_rn(w.y, v.y, __fmaf_rn(w.x, v.x, sums[s]))));
            }
        }
    } else {
#pragma unroll 4
        for (u32 i = lane; i < inputs; i += WARP) {
            float w = weight[i];
#pragma unroll
            for (int s = 0; s < SLOTS; s++) sums[s] = __fmaf_rn(w, x[(u64)s * x_pitch + i], sums[s]);
        }
    }
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
        float sum = warp_sum(sums[s]);
        if (lane == 0) out[(u64)s * out_pitch] = sum + bias;
    }
}

// out = x weight^T + bias; weight [outputs, inputs], `bias` null for none. A warp an output: ceil(outputs / 8) blocks. Up
// to eight slots share a read of the weights.
extern "C" __global__ void __launch_bounds__(THREADS)
    net_linear(const Header* header, const float* weight, const float* bias, const float* x, u32 x_pitch, u32 inputs,
               u32 outputs, float* out, u32 out_pitch) {
    wait_for_previous();
    let_next_start();
    u32 output = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (output >= outputs) return;
    bool wide = (inputs | x_pitch) % 4 == 0 && ((u64)weight | (u64)x) % 16 == 0;
    float b = bias ? bias[output] : 0.0f;
    weight += (u64)output * inputs;
    out += output;
    for (u32 left = header->samples; left > 0;) {
        u32 slots = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        switch (slots) {
            case 8: dot_rows<8>(weight, x, x_pitch, inputs, wide, b, out, out_pitch); break;
            case 4: dot_rows<4>(weight, x, x_pitch, inputs, wide, b, out, out_pitch); break;
            case 2: dot_rows<2>(weight, x, x_pitch, inputs, wide, b, out, out_pitch); break;
            default: dot_rows<1>(weight, x, x_pitch, inputs, wide, b, out, out_pitch); break;
        }
        left -= slots;
        x += (u64)slots * x_pitch;
        out += (u64)slots * out_pitch;
    }
}

// `centred`: (x - mean) / sqrt(variance + eps) * weight + bias; otherwise x / sqrt(mean(x^2) + eps) * weight, and `bias`
// is null. Grid (slots).
extern "C" __global__ void __launch_bounds__(THREADS)
    net_norm(const Header* header, u32 centred, const float* weight, const float* bias, float eps, const float* x,
             u32 x_pitch, u32 width, float* out, u32 out_pitch) {
    __shared__ float shared[WARP];
    wait_for_previous();
    let_next_start();
    if (blockIdx.x >= header->samples) return;
    x += (u64)blockIdx.x * x_pitch;
    out += (u64)blockIdx.x * out_pitch;
    float mean = 0.0f;
    if (centred) {
        float sum = 0.0f;
        for (u32 i = threadIdx.x; i < width; i += THREADS) sum += x[i];
        mean = block_sum(sum, shared) / (float)width;
    }
    float squares = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += THREADS) squares += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / sqrtf(block_sum(squares, shared) / (float)width + eps);
    for (u32 i = threadIdx.x; i < width; i += THREADS)
        out[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
}

__device__ __forceinline__ float activate(u32 kind, float x) {
    switch (kind) {
        case GELU: return x * (0.5f * (1.0f + erff(x * 0.70710678f)));
        case SILU: return x / (1.0f + expf(-x));
        case RELU: return x < 0.0f ? 0.0f : x;  // NaN stays
        case TANH: return tanhf(x);
        case SIGMOID: return 1.0f / (1.0f + expf(-x));
        default: return NAN_F;
    }
}

// `kind` is an Activation. Grid (ceil(width / 256), slots), as of all kernels below that name no other.
extern "C" __global__ void __launch_bounds__(THREADS) net_activation(const Header* header, u32 kind, const float* x,
                                                                     u32 x_pitch, u32 width, float* out,
                                                                     u32 out_pitch) {
    wait_for_previous();
    let_next_start();
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (blockIdx.y >= header->samples || i >= width) return;
    out[(u64)blockIdx.y * out_pitch + i] = activate(kind, x[(u64)blockIdx.y * x_pitch + i]);
}

// Grid (slots).
extern "C" __global__ void __launch_bounds__(THREADS)
    net_softmax(const Header* header, const float* x, u32 x_pitch, u32 width, float* out, u32 out_pitch) {
    __shared__ float shared[WARP];
    wait_for_previous();
    let_next_start();
    if (blockIdx.x >= header->samples) return;
    x += (u64)blockIdx.x * x_pitch;
    out += (u64)blockIdx.x * out_pitch;
    float max = -INFINITY_F;
    for (u32 i = threadIdx.x; i < width; i += THREADS) max = fmaxf(max, x[i]);
    max = warp_max(max);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = max;
    __syncthreads();
    for (u32 w = 0; w < WARPS; w++) max = fmaxf(max, shared[w]);
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < width; i += THREADS) {
        float exponential = expf(x[i] - max);
        out[i] = exponential;
        sum += exponential;
    }
    sum = block_sum(sum, shared);
    for (u32 i = threadIdx.x; i < width; i += THREADS) out[i] /= sum;
}

// out = a + b.
extern "C" __global__ void __launch_bounds__(THREADS) net_add(const Header* header, const float* a, u32 a_pitch,
                                                              const float* b, u32 b_pitch, u32 width, float* out,
                                                              u32 out_pitch) {
    wait_for_previous();
    let_next_start();
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (blockIdx.y >= header->samples || i >= width) return;
    out[(u64)blockIdx.y * out_pitch + i] = a[(u64)blockIdx.y * a_pitch + i] + b[(u64)blockIdx.y * b_pitch + i];
}

// Hidden states of the slots, parts of a concatenation, and with an `x_pitch` of 0 constants.
extern "C" __global__ void __launch_bounds__(THREADS) net_copy(const Header* header, const float* x, u32 x_pitch,
                                                               u32 width, float* out, u32 out_pitch) {
    wait_for_previous();
    let_next_start();
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (blockIdx.y >= header->samples || i >= width) return;
    out[(u64)blockIdx.y * out_pitch + i] = x[(u64)blockIdx.y * x_pitch + i];
}

// The candidates' rows of `table` [vocabulary, width], in f32 row by row or in bf16 packed (`linear.cuh`).
__device__ __forceinline__ float at(const float* table, u32 row, u32 i, u32 width) { return table[(u64)row * width + i]; }
__device__ __forceinline__ float at(const u16* table, u32 row, u32 i, u32 width) { return from_bf16(table[packed_index(row, i, width)]); }
template <typename T>
__device__ __forceinline__ void embedding(const Header* header, const SampleOut* samples, const T* table, u32 width,
                                          float* out, u32 out_pitch) {
    wait_for_previous();
    let_next_start();
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (blockIdx.y >= header->samples || i >= width) return;
    out[(u64)blockIdx.y * out_pitch + i] = at(table, samples[blockIdx.y].token, i, width);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    net_embedding_f32(const Header* header, const SampleOut* samples, const float* table, u32 width, float* out,
                      u32 out_pitch) {
    embedding(header, samples, table, width, out, out_pitch);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    net_embedding_packed(const Header* header, const SampleOut* samples, const u16* table, u32 width, float* out,
                         u32 out_pitch) {
    embedding(header, samples, table, width, out, out_pitch);
}

// Hidden states `back` positions before the slots' rows, from `pages` [pages, PAGE, hidden]; zeros before the start. A
// slot's row is `rows[slot * row_stride]`; its sequence's pages begin at `page_list[page_starts[row]]`.
extern "C" __global__ void __launch_bounds__(THREADS)
    net_hidden_back(const Header* header, const u32* rows, u32 row_stride, u32 back, const u32* positions,
                    const u32* page_starts, const u32* page_list, const float* pages, u32 hidden, float* out,
                    u32 out_pitch) {
    wait_for_previous();
    let_next_start();
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (blockIdx.y >= header->samples || i >= hidden) return;
    u32 row = rows[(u64)blockIdx.y * row_stride], position = positions[row];
    float value = 0.0f;
    if (position >= back) {
        position -= back;
        u32 page = page_list[page_starts[row] + position / PAGE];
        value = pages[((u64)page * PAGE + position % PAGE) * hidden + i];
    }
    out[(u64)blockIdx.y * out_pitch + i] = value;
}

// The `count` (at most LIST) best logits that `sample_rows` listed; NaN for those that the vocabulary lacks.
extern "C" __global__ void __launch_bounds__(THREADS)
    net_top_logits(const Header* header, const float* top_values, u32 count, float* out, u32 out_pitch) {
    wait_for_previous();
    let_next_start();
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (blockIdx.y >= header->samples || i >= count) return;
    float value = top_values[(u64)blockIdx.y * LIST + i];
    out[(u64)blockIdx.y * out_pitch + i] = value == -INFINITY_F ? NAN_F : value;
}

// The `count` largest of `width` values, descending; NaN where fewer are above -inf. Every thread ranks one value, for
// rows of a few thousand. Grid (ceil(max(width, count) / 256), slots).
extern "C" __global__ void __launch_bounds__(THREADS)
    net_top(const Header* header, const float* x, u32 x_pitch, u32 width, u32 count, float* out, u32 out_pitch) {
    wait_for_previous();
    let_next_start();
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (blockIdx.y >= header->samples || i >= max(width, count)) return;
    x += (u64)blockIdx.y * x_pitch;
    out += (u64)blockIdx.y * out_pitch;
    float own = i < width ? x[i] : -INFINITY_F;
    u32 rank = 0, possible = 0;
    for (u32 j = 0; j < width; j++) {
        float other = x[j];
        rank += other > own || (other == own && j < i);
        possible += other > -INFINITY_F;
    }
    if (own > -INFINITY_F && rank < count) out[rank] = own;
    if (i >= possible && i < count) out[i] = NAN_F;
}

// The scores of a net: its last value, NaN for slots without a candidate.
extern "C" __global__ void __launch_bounds__(THREADS)
    net_scores(const Header* header, const SampleOut* samples, const float* x, u32 x_pitch, u32 width, float* out,
               u32 out_pitch) {
    wait_for_previous();
    let_next_start();
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (blockIdx.y >= header->samples || i >= width) return;
    out[(u64)blockIdx.y * out_pitch + i] = samples[blockIdx.y].finite ? x[(u64)blockIdx.y * x_pitch + i] : NAN_F;
}
