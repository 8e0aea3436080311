// The parts of a decoder between its matrix products, and the whole of it in f32.
//
// Templates over T: `u16` (bf16) or `float`, the type of weights, keys, values and of what matrix
// products read. The residual stream is always f32.
#include "common.cuh"
#include "heads.cuh"

#define PAGE 16

// Place of (position in page, d) among the keys or the values of a page and head in f32: row by row.
__device__ __forceinline__ u32 value_index(const float*, u32 slot, u32 d, u32 dim) { return slot * dim + d; }
__device__ __forceinline__ u32 key_index(const float*, u32 slot, u32 d, u32 dim) { return slot * dim + d; }

// Place of (row, column) in a matrix: packed for bf16, row by row for f32.
__device__ __forceinline__ u64 place(const u16*, u64 row, u32 column, u32 columns) { return packed_index(row, column, columns); }
__device__ __forceinline__ u64 place(const float*, u64 row, u32 column, u32 columns) { return row * columns + column; }

// x[row] = table[tokens[row]]; with `norm`, also normed = x * norm and sums of squares by 16 columns.
// One block a row; hidden is a multiple of 16 then.
template <typename T>
__device__ __forceinline__ void embed(const T* table, const u32* tokens, const Header* header, float* x, u32 hidden,
                                      const float* norm, u16* normed, float* squares) {
    wait_for_previous();
    let_next_start();
    const u32 row = blockIdx.x;
    const u32 token = row < header->rows ? tokens[row] : 0;
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) {
        float v = load(table + place(table, token, i, hidden));
        x[(u64)row * hidden + i] = v;
        if (norm == nullptr) continue;
        normed[(u64)row * hidden + i] = to_bf16(v * norm[i]);
        float square = v * v;
#pragma unroll
        for (int offset = 1; offset < 16; offset *= 2) square += __shfl_xor_sync(0xffffu << (threadIdx.x & 16), square, offset);
        if (i % 16 == 0) squares[row * (hidden / 16) + i / 16] = square;
    }
}
#define EMBED(SUFFIX, T)                                                                                     \
    extern "C" __global__ void embed_##SUFFIX(const T* table, const u32* tokens, const Header* header, float* x, \
                                              u32 hidden, const float* norm, u16* normed, float* squares) {      \
        embed(table, tokens, header, x, hidden, norm, normed, squares);                                          \
    }
EMBED(bf16, u16)
EMBED(f32, float)

// out[row] = x[row] / rms * weight, one block a row.
template <typename T>
__device__ __forceinline__ void norm_row(const float* x, const float* weight, float eps, u32 hidden, T* out, float* exact) {
    __shared__ float shared[32];
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) sum += x[i] * x[i];
    float scale = rsqrtf(block_sum(sum, shared) / (float)hidden + eps);
    for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) {
        float v = x[i] * scale * weight[i];
        store(out + i, v);
        if (exact != nullptr) exact[i] = v;
    }
}
#define NORM_ROWS(SUFFIX, T)                                                                                          \
    extern "C" __global__ void norm_rows_##SUFFIX(const float* x, const float* weight, float eps, u32 hidden, T* out) { \
        wait_for_previous();                                                                                          \
        let_next_start();                                                                                             \
        norm_row(x + (u64)blockIdx.x * hidden, weight, eps, hidden, out + (u64)blockIdx.x * hidden, (float*)nullptr); \
    }
NORM_ROWS(f32, float)

// The last norm at the sampled rows: out and hidden[slot] = norm of x[sampled[slot * stride]]. Slots
// beyond the sampled ones get zeros in `out`.
template <typename T>
__device__ __forceinline__ void final_rows(const float* x, const u32* sampled, u32 stride, const Header* header,
                                           const float* weight, float eps, u32 hidden, T* out, float* exact) {
    wait_for_previous();
    let_next_start();
    const u32 slot = blockIdx.x;
    out += (u64)slot * hidden;
    if (slot >= header->samples) {
        for (u32 i = threadIdx.x; i < hidden; i += blockDim.x) store(out + i, 0.0f);
        return;
    }
    norm_row(x + (u64)sampled[slot * stride] * hidden, weight, eps, hidden, out, exact + (u64)slot * hidden);
}
#define FINAL_ROWS(SUFFIX, T)                                                                                          \
    extern "C" __global__ void final_rows_##SUFFIX(const float* x, const u32* sampled, u32 stride, const Header* header, \
                                                   const float* weight, float eps, u32 hidden, T* out, float* exact) { \
        final_rows(x, sampled, stride, header, weight, eps, hidden, out, exact);                                       \
    }
FINAL_ROWS(bf16, u16)
FINAL_ROWS(f32, float)

// Hidden states of all rows into the pages of their positions, for nets that look back. One block a row.
extern "C" __global__ void store_hidden(const float* x, const u32* positions, const u32* page_starts, const u32* page_list,
                                        const Header* header, const float* weight, float eps, u32 hidden, float* pages) {
    wait_for_previous();
    let_next_start();
    const u32 row = blockIdx.x;
    if (row >= header->rows) return;
    const u32 position = positions[row], page = page_list[page_starts[row] + position / PAGE];
    float* to = pages + ((u64)page * PAGE + position % PAGE) * hidden;
    norm_row(x + (u64)row * hidden, weight, eps, hidden, to, (float*)nullptr);
}

// Biases, norms of heads, rotary positions; queries to `q`, keys and values to their pages. A warp a
// head: grid (rows, heads and kv heads by 4), 4 warps a block; dim up to 256.
template <typename T>
__device__ __forceinline__ void prepare(const PrepareArgs& a) {
    __shared__ float shared[4][256];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 row = blockIdx.x, index = blockIdx.y * 4 + warp, dim = a.dim;
    const bool active = row < a.header->rows && index < a.heads + 2 * a.kv_heads;
    const u32 position = active ? a.positions[row] : 0;
    const u32 page = active ? a.page_list[a.page_starts[row] + position / PAGE] : 0;
    const bool is_value = index >= a.heads + a.kv_heads, is_query = index < a.heads;
    float2 turn[4];
    float weights[8];
    const float* norm = is_value ? nullptr : is_query ? a.q_norm : a.k_norm;
    if (active && !is_value) rotation(a.frequencies, position, dim, turn);
    load_norm(norm, dim, weights);
    let_next_start();
    wait_for_previous();
    if (!active) return;
    float x[8];
    load_head(a, row, index, dim, x);
    T* kv = (T*)a.kv;
    if (is_value) {
        const u32 head = index - a.heads - a.kv_heads;
        T* to = kv + (((u64)page * a.kv_heads + head) * 2 + 1) * PAGE * dim;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            const u32 i = lane + j * WARP;
            if (i < dim) store(to + value_index((const T*)nullptr, position % PAGE, i, dim), x[j]);
        }
        return;
    }
    if (norm != nullptr) norm_head(weights, a.eps, dim, x);
    T* to = is_query ? (T*)a.q + ((u64)row * a.heads + index) * dim
                     : kv + ((u64)page * a.kv_heads + (index - a.heads)) * 2 * PAGE * dim;
    rotate_head(x, turn, dim, shared[warp], [=](u32 d, float v) {
        store(to + (is_query ? d : key_index((const T*)nullptr, position % PAGE, d, dim)), v);
    });
}
extern "C" __global__ void __launch_bounds__(128) prepare_bf16(PrepareArgs a) { prepare<u16>(a); }
extern "C" __global__ void __launch_bounds__(128) prepare_f32(PrepareArgs a) { prepare<float>(a); }

// out[row][i] = silu(gate) * up of gate_up[row] = [gate, up].
template <typename T>
__device__ __forceinline__ void silu_mul(const T* gate_up, const float* bias, u32 inner, T* out) {
    wait_for_previous();
    let_next_start();
    const u64 row = blockIdx.y;
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= inner) return;
    float gate = load(gate_up + row * 2 * inner + i) + (bias ? bias[i] : 0.0f);
    float up = load(gate_up + row * 2 * inner + inner + i) + (bias ? bias[inner + i] : 0.0f);
    store(out + row * inner + i, gate / (1.0f + expf(-gate)) * up);
}
extern "C" __global__ void silu_mul_f32(const float* gate_up, const float* bias, u32 inner, float* out) { silu_mul(gate_up, bias, inner, out); }

// x[row] += bias.
extern "C" __global__ void add_bias(float* x, const float* bias, u32 width) {
    wait_for_previous();
    let_next_start();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width) x[(u64)blockIdx.y * width + i] += bias[i];
}

// y[row][o] (+)= w[o] . x[row] in f32: a warp an output, eight rows a block. The order of a sum follows
// from `inputs` alone.
extern "C" __global__ void __launch_bounds__(256)
linear_f32(const float* w, const float* x, u32 rows, u32 inputs, u32 outputs, float* y, u32 pitch, u32 accumulate) {
    wait_for_previous();
    let_next_start();
    const u32 lane = threadIdx.x % WARP, o = blockIdx.x * 8 + threadIdx.x / WARP, first = blockIdx.y * 8;
    if (o >= outputs) return;
    float sums[8] = {};
    for (u32 i = lane; i < inputs; i += WARP) {
        float weight = w[(u64)o * inputs + i];
#pragma unroll
        for (u32 r = 0; r < 8; r++)
            if (first + r < rows) sums[r] = __fmaf_rn(weight, x[(u64)(first + r) * inputs + i], sums[r]);
    }
#pragma unroll
    for (u32 r = 0; r < 8; r++) {
        float sum = warp_sum(sums[r]);
        if (lane == 0 && first + r < rows) {
            float* to = y + (u64)(first + r) * pitch + o;
            *to = accumulate ? *to + sum : sum;
        }
    }
}

// Attention in f32: grid (rows, heads), 128 threads. Softmax as it goes, 128 positions at a time.
extern "C" __global__ void __launch_bounds__(128)
attention_f32(const float* q, const float* kv, const u32* positions, const u32* page_starts, const u32* page_list,
              const Header* header, float* out, float scale, u32 heads, u32 kv_heads, u32 dim) {
    __shared__ float query[256], weights[128], shared[32];
    const u32 row = blockIdx.x, head = blockIdx.y, kv_head = head / (heads / kv_heads), thread = threadIdx.x;
    if (row >= header->rows) {
        wait_for_previous();
        let_next_start();
        for (u32 d = thread; d < dim; d += 128) out[((u64)row * heads + head) * dim + d] = 0.0f;
        return;
    }
    const u32 length = positions[row] + 1;
    const u32* pages = page_list + page_starts[row];
    wait_for_previous();
    let_next_start();
    for (u32 d = thread; d < dim; d += 128) query[d] = q[((u64)row * heads + head) * dim + d];
    __syncthreads();
    float most = -INFINITY_F, sum = 0.0f, acc[2] = {0.0f, 0.0f};
    for (u32 start = 0; start < length; start += 128) {
        const u32 position = start + thread;
        float score = -INFINITY_F;
        if (position < length) {
            const float* key = kv + ((u64)pages[position / PAGE] * kv_heads + kv_head) * 2 * PAGE * dim + position % PAGE * dim;
            score = 0.0f;
            for (u32 d = 0; d < dim; d++) score = __fmaf_rn(query[d], key[d], score);
            score *= scale;
        }
        float best = warp_max(score);
        __syncthreads();
        if (thread % WARP == 0) shared[thread / WARP] = best;
        __syncthreads();
        best = fmaxf(fmaxf(shared[0], shared[1]), fmaxf(shared[2], shared[3]));
        const float to = fmaxf(most, best), f = expf(most - to);
        most = to;
        const float weight = position < length ? expf(score - to) : 0.0f;
        weights[thread] = weight;
        sum = sum * f + block_sum(weight, shared);
        for (u32 j = 0; j < 2; j++) {
            const u32 d = thread + 128 * j;
            if (d >= dim) continue;
            float value = acc[j] * f;
            const u32 end = min(128u, length - start);
            for (u32 p = 0; p < end; p++) {
                const float* values = kv + (((u64)pages[(start + p) / PAGE] * kv_heads + kv_head) * 2 + 1) * PAGE * dim;
                value = __fmaf_rn(weights[p], values[(start + p) % PAGE * dim + d], value);
            }
            acc[j] = value;
        }
        __syncthreads();
    }
    for (u32 j = 0; j < 2; j++) {
        const u32 d = thread + 128 * j;
        if (d < dim) out[((u64)row * heads + head) * dim + d] = acc[j] / sum;
    }
}

// Rows of a matrix [rows, inputs] as read from a file into packed weights: source row r becomes row
// r / run * stride + r % run + offset. One block a row.
extern "C" __global__ void pack_rows(const u16* from, u32 inputs, u32 run, u32 stride, u32 offset, u16* to) {
    const u32 r = blockIdx.x;
    const u64 row = (u64)(r / run) * stride + r % run + offset;
    for (u32 i = threadIdx.x; i < inputs; i += blockDim.x) to[packed_index(row, i, inputs)] = from[(u64)r * inputs + i];
}

// Random weights: out[i] uniform with the standard deviation `scale`, by a counter-based generator.
__device__ __forceinline__ float random_weight(u64 seed, u64 i, float scale) {
    u64 z = (i + seed * 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull + 0x94d049bb133111ebull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return ((float)(z >> 40) * (1.0f / 8388608.0f) - 1.0f) * 1.7320508f * scale;
}
template <typename T>
__device__ __forceinline__ void fill_random(T* out, u64 count, u64 seed, float mean, float scale) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x)
        store(out + i, mean + random_weight(seed, i, scale));
}
extern "C" __global__ void fill_random_bf16(u16* out, u64 count, u64 seed, float mean, float scale) { fill_random(out, count, seed, mean, scale); }
extern "C" __global__ void fill_random_f32(float* out, u64 count, u64 seed, float mean, float scale) { fill_random(out, count, seed, mean, scale); }
