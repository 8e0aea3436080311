// Linear layers for 9 to 32 rows in bf16, where outputs or inputs are many.
//
// Such steps, too, are bound by reading the weights once. If a block had few outputs, its rows would be as
// many bytes from L2 as its weights. So here the warps of a block, each with tiles of its own, share the
// rows in shared memory, and the slices follow each other. Where outputs alone are too few blocks for the
// chip, the blocks of a cluster deal the slices out among them and add the sums at the end.
//
// Weights and rows are copied STAGES lines of 64 inputs ahead. A lane copies the weights that it reads.
#include "linear.cuh"

__device__ __forceinline__ void copy_or_zero(u32 to, const void* from, bool zero) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(zero ? 0 : 16) : "memory");
}
__device__ __forceinline__ uint4 load_staged(u32 place) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(place) : "memory");
    return v;
}

// A block: MT WARPS tiles of outputs by 8 NT rows, and its part of the slices; BLOCKS form a cluster. One warp
// more computes the scales of rows.
template <int NT, int MT, int WARPS, int STAGES, int SLICES, int BLOCKS, Epilogue E>
__device__ __forceinline__ void linear_wide(const LinearArgs& a) {
    constexpr bool SPLIT = BLOCKS > 1;
    constexpr int TILES = MT * WARPS, EACH = SLICES / BLOCKS, FRAGMENTS = TILES * NT;
    constexpr int STAGE_W = TILES * 2048, STAGE = STAGE_W + NT * 1024;  // bytes
    extern __shared__ __align__(128) u8 staged[];  // [STAGES][STAGE], then sums [EACH - 1][TILES][NT][WARP]
    __shared__ float scales[NT * 8];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 tiles = a.inputs / 32, lines = (tiles + 1) / 2;
    const u32 last = (E == GATED ? a.outputs + 7 : a.outputs + 15) / (E == GATED ? 8 : 16) - 1;
    const u32 nothing = a.rows >> 31;  // see `Fragments`
    const u32 rank = blockIdx.x % BLOCKS, first_tile = blockIdx.x / BLOCKS * TILES, first_slice = rank * EACH;
    // Of eight rows, this block finishes each NTth or more seldom: all if it has all slices.
    constexpr u32 TURN = SPLIT ? (BLOCKS < NT ? BLOCKS : NT) : 1;

    float acc[MT][NT][4], total[MT][NT][4];
    // Sums of slices but the last of the block; those of the last take the place of the stages.
    float4* sums = (float4*)(staged + STAGES * STAGE);
    auto put = [&](const float(&of)[MT][NT][4], float4* to) {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int n = 0; n < NT; n++)
                to[((warp * MT + i) * NT + n) * WARP + lane] = make_float4(of[i][n][0], of[i][n][1], of[i][n][2], of[i][n][3]);
    };
    if (warp == WARPS) {
        wait_for_previous();
        let_next_start();
        if (a.squares != nullptr) {
#pragma unroll 1
            for (u32 n = rank % TURN; n < NT; n += TURN) {
                float own[8];
                row_scales(a, n * 8, 1, own);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (lane == 0) scales[n * 8 + i] = own[i];
            }
        }
    } else {
        const u32 ring = (u32)__cvta_generic_to_shared(staged);
        // Tiles beyond the last output repeat it; what they give is not stored.
        const u16* from[MT];
#pragma unroll
        for (int i = 0; i < MT; i++) from[i] = a.w + (u64)min(first_tile + warp * MT + i, last) * 16 * a.inputs + lane * 8;
        const u32 own = (warp * MT) * 2048 + lane * 16;
        auto fetch_weights = [&](u32 stage, u32 line) {
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int p = 0; p < 4; p++) {
                    const bool zero = line * 2 + p / 2 >= tiles;
                    copy_or_zero(ring + stage * STAGE + own + i * 2048 + p * 512, from[i] + (zero ? 0 : line * 1024 + p * 256), zero);
                }
        };
        // A row has its 16-byte pieces in order or, if odd, with the halves exchanged: so eight lanes read
        // from all banks. A thread copies the same piece of each WARPS * 4th row.
        static_assert(NT * 8 % (WARPS * 4) == 0, "all threads copy as many pieces");
        const u32 piece = threadIdx.x % 8, row = threadIdx.x / 8;
        const u16* x = a.x + (u64)row * a.inputs + piece * 8;
        const u32 own_piece = STAGE_W + row * 128 + (piece ^ row % 2 * 4) * 16;
        auto fetch_rows = [&](u32 stage, u32 line) {
            const bool zero = line * 2 + piece / 4 >= tiles;
#pragma unroll
            for (int r = 0; r < NT * 8; r += WARPS * 4)
                copy_or_zero(ring + stage * STAGE + own_piece + r * 128, x + (u64)r * a.inputs + (zero ? 0 : line * 64), zero);
        };
        // Lines in the order of work.
        const u32 end_slice = first_slice + EACH;
        u32 slice = first_slice, line = slice;
        auto valid = [&] { return slice < end_slice && line < lines; };
        auto advance = [&] {
            line += SLICES;
            if (line >= lines) line = ++slice;
        };
#pragma unroll 1
        for (u32 s = 0; s < STAGES - 1 && valid(); s++, advance()) fetch_weights(s, line);
        wait_for_previous();
        let_next_start();
        slice = line = first_slice;
#pragma unroll 1
        for (u32 s = 0; s < STAGES - 1; s++) {
            if (valid()) {
                fetch_rows(s, line);
                advance();
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
        u32 stage = 0;
        const u32 own_row = STAGE_W + lane / 4 * 128 + (lane % 4 ^ lane / 4 % 2 * 4) * 16;
#pragma unroll 1
        for (u32 e = 0; e < EACH; e++) {
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int c = 0; c < 4; c++) acc[i][n][c] = 0.0f;
#pragma unroll 1
            for (u32 now = first_slice + e; now < lines; now += SLICES) {
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
                asm volatile("bar.sync 1, %0;" ::"n"(WARPS * WARP) : "memory");  // for all warps; the stage before is free
                if (valid()) {
                    const u32 to = stage == 0 ? STAGES - 1 : stage - 1;
                    fetch_weights(to, line);
                    fetch_rows(to, line);
                    advance();
                }
                asm volatile("cp.async.commit_group;" ::: "memory");
                const u32 at = ring + stage * STAGE;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    Fragments w[MT];
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        const u32 from = at + own + i * 2048 + half * 1024;
                        w[i].take(load_staged(from), load_staged(from + 512), nothing);
                    }
                    const u32 rows = (at + own_row) ^ (half * 64);
                    uint4 b[NT];
#pragma unroll
                    for (int n = 0; n < NT; n++) b[n] = load_staged(rows + n * 1024);
                    // A sum's two steps are as far apart as can be: the second waits for the first.
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int i = 0; i < MT; i++) mma(acc[i][n], w[i].first, b[n].x, b[n].y);
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int i = 0; i < MT; i++) mma(acc[i][n], w[i].second, b[n].z, b[n].w);
                }
                if (++stage == STAGES) stage = 0;
            }
            if (SPLIT) {
                if (e + 1 < EACH) put(acc, sums + e * FRAGMENTS * WARP);
            } else {
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int n = 0; n < NT; n++)
#pragma unroll
                        for (int c = 0; c < 4; c++) total[i][n][c] = e == 0 ? acc[i][n][c] : total[i][n][c] + acc[i][n][c];
            }
        }
    }
    if (!SPLIT) {
        __syncthreads();  // for the scales
        if (warp == WARPS) return;
#pragma unroll
        for (int i = 0; i < MT; i++) {
            const u32 tile = first_tile + warp * MT + i;
            if (tile > last) break;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const float4 v = make_float4(total[i][n][0], total[i][n][1], total[i][n][2], total[i][n][3]);
                finish<E>(a, v, before<E>(a, tile, n * 8), constants<E>(a, tile), tile, n * 8, a.squares ? scales + n * 8 : nullptr);
            }
        }
        return;
    }
#if __CUDA_ARCH__ >= 900
    if (warp < WARPS) {
        asm volatile("cp.async.wait_all;" ::: "memory");
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * WARP) : "memory");  // the stages are free
        put(acc, (float4*)staged);
    }
    cluster_sync();
    if (warp < WARPS) {
#pragma unroll 1
        for (u32 f = warp * BLOCKS + rank; f < FRAGMENTS; f += WARPS * BLOCKS) {
            const u32 tile = first_tile + f / NT, first = f % NT * 8;
            if (tile > last) break;
            const float4 old = before<E>(a, tile, first);
            float4 v[SLICES];
#pragma unroll
            for (int s = 0; s < SLICES; s++) {
                const float4* of = s % EACH + 1 < EACH ? sums + s % EACH * FRAGMENTS * WARP : (const float4*)staged;
                v[s] = load_of_block(of + f * WARP + lane, s / EACH);
            }
#pragma unroll
            for (int s = 1; s < SLICES; s++) add(v[0], v[s]);
            finish<E>(a, v[0], old, constants<E>(a, tile), tile, first, a.squares ? scales + first : nullptr);
        }
    }
    cluster_sync();  // others read this block's sums
#endif
}

// Names: wide_<epilogue>_<tiles of 8 rows>_<slices>; from sm_90 on also wide_split_..., in clusters of 4 blocks. A block
// has 64 outputs, 128 threads (160 where norms may be folded in) and 61,440 bytes of shared memory; a split one
// 2048 more for each tile of 8 rows. Stages and blocks a multiprocessor are as measured on an H200.
#define WIDE(NAME, E, NT, STAGES, SLICES, BLOCKS)                                                            \
    extern "C" __global__ void __launch_bounds__((4 + (E != RESIDUAL)) * WARP, 3) NAME(LinearArgs a) {       \
        linear_wide<NT, 1, 4, STAGES, SLICES, BLOCKS, E>(a);                                                 \
    }
#define ALL_WIDE(NAME, E)                    \
    WIDE(wide_##NAME##_2_8, E, 2, 6, 8, 1)   \
    WIDE(wide_##NAME##_4_8, E, 4, 5, 8, 1)   \
    WIDE(wide_##NAME##_2_16, E, 2, 6, 16, 1) \
    WIDE(wide_##NAME##_4_16, E, 4, 5, 16, 1)
ALL_WIDE(store, STORE)
ALL_WIDE(residual, RESIDUAL)
ALL_WIDE(gated, GATED)

#if __CUDA_ARCH__ >= 900
#define ALL_SPLIT(NAME, E)                       \
    WIDE(wide_split_##NAME##_2_8, E, 2, 6, 8, 4) \
    WIDE(wide_split_##NAME##_4_8, E, 4, 5, 8, 4)
ALL_SPLIT(store, STORE)
ALL_SPLIT(residual, RESIDUAL)
ALL_SPLIT(gated, GATED)
#endif
