// Linear layers for up to 64 rows in bf16.
//
// Such steps are bound by reading the weights once: each warp streams tiles of weights straight from
// memory into the A fragments of tensor-core instructions, and the rows (small, in L1 and L2) into B
// fragments. The k index of an instruction is a name only: lane t takes 8 consecutive numbers of both,
// which makes all loads 16 bytes wide without any staging.
#include "linear.cuh"

// A block: MT tiles of outputs by 8 NT rows, each warp a slice. `x` and `y` have 8 NT rows.
template <int NT, int MT, int SLICES, int UNROLL, Epilogue E>
__device__ __forceinline__ void linear_rows(const LinearArgs& a) {
    constexpr int FRAGMENTS = MT * NT;
    extern __shared__ float4 sums[];  // [SLICES][MT][NT][WARP]
    __shared__ float scales[NT * 8];
    const int lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    const u32 tiles = a.inputs / 32;
    const u32 nothing = NT == 1 ? 0 : a.rows >> 31;  // see `Fragments`
    // The j-th tile of the slice.
    auto tile_at = [&](u32 j) { return (j / 2 * SLICES + slice) * 2 + j % 2; };

    // Tiles beyond the last output repeat it; what they give is not stored.
    const u32 last = (E == GATED ? a.outputs + 7 : a.outputs + 15) / (E == GATED ? 8 : 16) - 1;
    const u16* from[MT];
#pragma unroll
    for (int i = 0; i < MT; i++) from[i] = a.w + (u64)min(blockIdx.x * MT + i, last) * 16 * a.inputs + lane * 8;

    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 w[UNROLL][MT][2];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
        for (int i = 0; i < MT; i++) {
            const u32 k = tile_at(u);
            w[u][i][0] = k < tiles ? load_streamed(from[i] + k * 512) : zero;
            w[u][i][1] = k < tiles ? load_streamed(from[i] + k * 512 + 256) : zero;
        }
    // Before the wait where that was measured to gain, with few rows.
    if (NT == 1) let_next_start();
    wait_for_previous();
    if (NT > 1) let_next_start();

    if (E != RESIDUAL && a.squares != nullptr) {
        constexpr int EACH = NT * 8 > SLICES ? NT * 8 / SLICES : 1;
        if (slice < NT * 8) {
            float own[EACH];
            row_scales(a, slice, SLICES, own);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (lane == 0) scales[slice + i * SLICES] = own[i];
        }
    }
    float acc[MT][NT][4];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][n][c] = 0.0f;

    const u16* x = a.x + (u64)(lane / 4) * a.inputs + 8 * (lane % 4);
    for (u32 j = 0; tile_at(j) < tiles; j += UNROLL) {
        uint4 next[UNROLL][MT][2];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int i = 0; i < MT; i++) {
                const u32 k = tile_at(j + UNROLL + u);
                next[u][i][0] = k < tiles ? load_streamed(from[i] + k * 512) : zero;
                next[u][i][1] = k < tiles ? load_streamed(from[i] + k * 512 + 256) : zero;
            }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const u32 k = min(tile_at(j + u), tiles - 1);  // beyond the end w is zero
            Fragments tile[MT];
#pragma unroll
            for (int i = 0; i < MT; i++) tile[i].take(w[u][i][0], w[u][i][1], nothing);
            uint4 b[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) b[n] = *(const uint4*)(x + (u64)n * 8 * a.inputs + k * 32);
            // A sum's two steps are as far apart as can be: the second waits for the first.
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < MT; i++) mma(acc[i][n], tile[i].first, b[n].x, b[n].y);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < MT; i++) mma(acc[i][n], tile[i].second, b[n].z, b[n].w);
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
        const u32 tile = blockIdx.x * MT + f / NT, first = f % NT * 8;
        const float4 old = before<E>(a, tile, first);
        float4 v = sums[f * WARP + lane];
#pragma unroll
        for (int s = 1; s < SLICES; s++) add(v, sums[(s * FRAGMENTS + f) * WARP + lane]);
        if (tile <= last) finish<E>(a, v, old, constants<E>(a, tile), tile, first, a.squares ? scales + first : nullptr);
    }
}

// The same for weights of which each slice has at most 64 LINES inputs, and outputs that are one block a
// multiprocessor: latency is all there is to such a layer. All weights are on their way before the kernel
// before has ended, a slice's first 64 inputs to registers and the others to shared memory, and leave room for
// blocks of the kernels before and after. What the kernel before wrote is all asked for at once.
// Dynamic shared memory: SLICES MT (2048 (LINES - 1) + 512 NT) bytes.
template <int NT, int MT, int SLICES, int LINES, Epilogue E>
__device__ __forceinline__ void linear_short(const LinearArgs& a) {
#if __CUDA_ARCH__ >= 900
    constexpr int FRAGMENTS = MT * NT;
    constexpr u32 LINE = 2048;  // bytes of a tile's 64 inputs
    static_assert(FRAGMENTS <= SLICES, "a warp finishes at most one");
    extern __shared__ __align__(128) u8 staged[];  // [SLICES][LINES - 1][MT][LINE], then [SLICES][MT][NT][WARP] sums
    float4* sums = (float4*)(staged + SLICES * (LINES - 1) * MT * LINE);
    __shared__ u64 arrived[SLICES];
    __shared__ float scales[NT * 8];
    const int lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    const u32 tiles = a.inputs / 32;
    // Bytes of the slice's j-th 64 inputs: half of them may be beyond the end, or all.
    auto line_at = [&](u32 j) { return j * SLICES + slice; };
    auto bytes = [&](u32 j) { return min(LINE, (tiles - min(tiles, line_at(j) * 2)) * (LINE / 2)); };

    // Tiles beyond the last output repeat it; what they give is not stored.
    const u32 last = (E == GATED ? a.outputs + 7 : a.outputs + 15) / (E == GATED ? 8 : 16) - 1;
    const u16* from[MT];
#pragma unroll
    for (int i = 0; i < MT; i++) from[i] = a.w + (u64)min(blockIdx.x * MT + i, last) * 16 * a.inputs;

    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 w[2][MT][2];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < MT; i++) {
            const u32 k = line_at(0) * 2 + half;
            w[half][i][0] = k < tiles ? load_streamed(from[i] + k * 512 + lane * 8) : zero;
            w[half][i][1] = k < tiles ? load_streamed(from[i] + k * 512 + lane * 8 + 256) : zero;
        }
    u8* own = staged + slice * ((LINES - 1) * MT * LINE);
    const u32 place = (u32)__cvta_generic_to_shared(own), barrier = (u32)__cvta_generic_to_shared(arrived + slice);
    if (LINES > 1 && lane == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        u32 all = 0;
#pragma unroll
        for (int j = 1; j < LINES; j++) all += MT * bytes(j);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(all) : "memory");
#pragma unroll
        for (int j = 1; j < LINES; j++) {
            if (bytes(j) == 0) break;
#pragma unroll
            for (int i = 0; i < MT; i++)
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(place + ((j - 1) * MT + i) * LINE),
                             "l"(from[i] + line_at(j) * 1024), "r"(bytes(j)), "r"(barrier)
                             : "memory");
        }
    }
    __syncwarp();
    const u32 tile = blockIdx.x * MT + slice / NT, first = slice % NT * 8;  // of what the warp finishes
    Constants known = {};
    if (slice < FRAGMENTS) known = constants<E>(a, tile);
    let_next_start();
    wait_for_previous();

    const u16* x = a.x + (u64)(lane / 4) * a.inputs + 8 * (lane % 4);
    uint4 b[LINES][2][NT];
#pragma unroll
    for (int j = 0; j < LINES; j++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const u32 k = min(line_at(j) * 2 + half, tiles - 1);  // beyond the end w is zero
                b[j][half][n] = *(const uint4*)(x + (u64)n * 8 * a.inputs + k * 32);
            }
    float4 old = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (slice < FRAGMENTS) old = before<E>(a, tile, first);
    if (E != RESIDUAL && a.squares != nullptr && slice < NT * 8) {
        constexpr int EACH = NT * 8 > SLICES ? NT * 8 / SLICES : 1;
        float each[EACH];
        row_scales(a, slice, SLICES, each);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lane == 0) scales[slice + i * SLICES] = each[i];
    }

    float acc[MT][NT][4];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][n][c] = 0.0f;
    if (LINES > 1)
        asm volatile(
            "{\n\t.reg .pred done;\n\tagain:\n\t"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n\t@!done bra again;\n\t}" ::"r"(barrier)
            : "memory");
#pragma unroll
    for (int j = 0; j < LINES; j++) {
        if (bytes(j) == 0) break;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < MT; i++) {
                uint4 low, high;
                if (j == 0) {
                    low = w[half][i][0], high = w[half][i][1];
                } else {
                    const u8* at = own + ((j - 1) * MT + i) * LINE + half * (LINE / 2) + lane * 16;
                    const bool there = half == 0 || bytes(j) == LINE;
                    low = there ? *(const uint4*)at : zero, high = there ? *(const uint4*)(at + 512) : zero;
                }
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    mma(acc[i][n], low.x, high.x, low.y, high.y, b[j][half][n].x, b[j][half][n].y);
                    mma(acc[i][n], low.z, high.z, low.w, high.w, b[j][half][n].z, b[j][half][n].w);
                }
            }
    }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
            sums[((slice * MT + i) * NT + n) * WARP + lane] = make_float4(acc[i][n][0], acc[i][n][1], acc[i][n][2], acc[i][n][3]);
    __syncthreads();
    if (slice >= FRAGMENTS || tile > last) return;
    float4 v = sums[slice * WARP + lane];
#pragma unroll
    for (int s = 1; s < SLICES; s++) add(v, sums[(s * FRAGMENTS + slice) * WARP + lane]);
    finish<E>(a, v, old, known, tile, first, a.squares ? scales + first : nullptr);
#endif
}

// Names: rows_<epilogue>_<tiles of 8 rows>_<slices>. Tiles of outputs a block, tiles of inputs in flight and
// blocks a multiprocessor are as measured on an H200.
#define ROWS(NAME, E, NT, SLICES, MT, UNROLL, BLOCKS)                                                          \
    extern "C" __global__ void __launch_bounds__(SLICES * WARP, BLOCKS) NAME##_##NT##_##SLICES(LinearArgs a) { \
        linear_rows<NT, MT, SLICES, UNROLL, E>(a);                                                             \
    }
#define ALL_ROWS(NAME, E)         \
    ROWS(NAME, E, 1, 8, 1, 2, 3)  \
    ROWS(NAME, E, 2, 8, 1, 2, 3)  \
    ROWS(NAME, E, 4, 8, 2, 1, 2)  \
    ROWS(NAME, E, 8, 8, 4, 1, 1)  \
    ROWS(NAME, E, 1, 16, 1, 2, 2) \
    ROWS(NAME, E, 2, 16, 1, 1, 2) \
    ROWS(NAME, E, 4, 16, 1, 1, 2) \
    ROWS(NAME, E, 8, 16, 2, 2, 1)
ALL_ROWS(rows_store, STORE)
ALL_ROWS(rows_residual, RESIDUAL)
ALL_ROWS(rows_gated, GATED)

// Names: short_<epilogue>_<tiles of 8 rows>_<lines>; only from sm_90 on.
#define SHORT(NAME, E, MT, SLICES, LINES)                                                                      \
    extern "C" __global__ void __launch_bounds__(SLICES * WARP, 1) short_##NAME##_1_##LINES(LinearArgs a) {    \
        linear_short<1, MT, SLICES, LINES, E>(a);                                                              \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(SLICES * WARP, 1) short_##NAME##_2_##LINES(LinearArgs a) {    \
        linear_short<2, MT, SLICES, LINES, E>(a);                                                              \
    }
SHORT(store, STORE, 2, 16, 1)
SHORT(residual, RESIDUAL, 1, 16, 2)
SHORT(residual, RESIDUAL, 1, 16, 3)
SHORT(gated, GATED, 3, 8, 2)
