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
    wait_for_previous();
    let_next_start();

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
        if (tile <= last) finish<E>(a, v, old, tile, first, a.squares ? scales + first : nullptr);
    }
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
