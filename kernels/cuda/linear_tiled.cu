// Linear layers for many rows in bf16: blocks of 128 outputs by 128 rows, staged through shared memory.
//
// Sums are in the order of `linear.cuh`, so that a prompt's keys and values are those that single steps
// would have stored.
#include "linear.cuh"

#define TILE_OUTPUTS 8   // tiles of 16 outputs a block
#define TILE_ROWS 128
#define STAGES 5
#define STAGE_W (TILE_OUTPUTS * 1024)    // numbers: 64 inputs
#define STAGE_X (TILE_ROWS * 64)

__device__ __forceinline__ void copy_async(void* to, const void* from) {
    u32 place = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from));
}

// 8 warps, 2 along the outputs by 4 along the rows: a warp has 4 tiles of outputs by 4 of 8 rows.
template <int SLICES, Epilogue E>
__device__ __forceinline__ void linear_tiled(const LinearArgs& a) {
    extern __shared__ __align__(128) u16 stages[];  // [STAGES][STAGE_W + STAGE_X]
    __shared__ float scales[TILE_ROWS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int warp_outputs = warp % 2 * 4, warp_rows = warp / 2 * 4;
    const u32 first_row = blockIdx.x * TILE_ROWS, first_tile = blockIdx.y * TILE_OUTPUTS;
    const u32 tiles = a.inputs / 32, lines = (tiles + 1) / 2;
    const u32 last = (E == GATED ? a.outputs + 7 : a.outputs + 15) / (E == GATED ? 8 : 16) - 1;

    // The inputs come by lines of 64, those of slice 0 first.
    struct Place {
        u32 slice, line;
        __device__ __forceinline__ void advance(u32 lines) {
            line += SLICES;
            if (line >= lines) line = ++slice;
        }
    };
    // Beyond the ends of w and x, repeat the last tile and row: what they give is not stored. Half a line
    // beyond the inputs is zero.
    auto fetch = [&](u32 stage, u32 line) {
        u16* to_w = stages + stage * (STAGE_W + STAGE_X);
        u16* to_x = to_w + STAGE_W;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 c = threadIdx.x + i * 256;  // 16 bytes each: [8 tiles][2][64]
            const u32 tile = c / 128, k = line * 2 + c / 64 % 2;
            u16* to = to_w + c * 8;
            if (k < tiles) copy_async(to, a.w + (u64)min(first_tile + tile, last) * 16 * a.inputs + (u64)k * 512 + c % 64 * 8);
            else *(uint4*)to = make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 c = threadIdx.x + i * 256;  // 16 bytes each: [128 rows][2][4]
            const u32 row = c / 8, half = c / 4 % 2;
            u16* to = to_x + half * (TILE_ROWS * 32) + row * 32 + c % 4 * 8;
            if (line * 2 + half < tiles) copy_async(to, a.x + (u64)min(first_row + row, a.rows - 1) * a.inputs + line * 64 + c % 8 * 8);
            else *(uint4*)to = make_uint4(0, 0, 0, 0);
        }
    };
    wait_for_previous();
    let_next_start();

    Place ahead = {0, 0}, now = {0, 0};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (ahead.line < lines && ahead.slice < SLICES) {
            fetch(s, ahead.line);
            ahead.advance(lines);
        }
        asm volatile("cp.async.commit_group;");
    }
    if (E != RESIDUAL && a.squares != nullptr) {
#pragma unroll 1
        for (u32 r = warp; r < TILE_ROWS; r += 32) {
            float own[4];
            row_scales(a, first_row + r, 8, own);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (lane == 0) scales[r + i * 8] = own[i];
        }
    }

    float acc[4][4][4], total[4][4][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) acc[i][n][c] = total[i][n][c] = 0.0f;

    for (u32 step = 0; step < lines; step++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();
        if (ahead.line < lines && ahead.slice < SLICES) {
            fetch((step + STAGES - 1) % STAGES, ahead.line);
            ahead.advance(lines);
        }
        asm volatile("cp.async.commit_group;");
        const u16* w = stages + step % STAGES * (STAGE_W + STAGE_X);
        const u16* x = w + STAGE_W;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint4 b[4];
#pragma unroll
            for (int n = 0; n < 4; n++)
                b[n] = *(const uint4*)(x + k * (TILE_ROWS * 32) + ((warp_rows + n) * 8 + lane / 4) * 32 + lane % 4 * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u16* from = w + (warp_outputs + i) * 1024 + k * 512 + lane * 8;
                const uint4 low = *(const uint4*)from, high = *(const uint4*)(from + 256);
#pragma unroll
                for (int n = 0; n < 4; n++) mma(acc[i][n], low.x, high.x, low.y, high.y, b[n].x, b[n].y);
#pragma unroll
                for (int n = 0; n < 4; n++) mma(acc[i][n], low.z, high.z, low.w, high.w, b[n].z, b[n].w);
            }
        }
        const u32 slice = now.slice;
        now.advance(lines);
        if (now.slice != slice) {
            // The first slice is taken as it is: 0 + -0 would lose the sign.
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        total[i][n][c] = slice == 0 ? acc[i][n][c] : total[i][n][c] + acc[i][n][c];
                        acc[i][n][c] = 0.0f;
                    }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 tile = first_tile + warp_outputs + i;
        if (tile > last) continue;
        const Constants known = constants<E>(a, tile);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const u32 first = (warp_rows + n) * 8;
            const float4 v = make_float4(total[i][n][0], total[i][n][1], total[i][n][2], total[i][n][3]);
            finish<E>(a, v, before<E>(a, tile, first_row + first), known, tile, first_row + first, a.squares ? scales + first : nullptr);
        }
    }
}

// Grid (rows by 128, tiles of outputs by 8).
#define TILED(NAME, E)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 1) NAME##_8(LinearArgs a) { linear_tiled<8, E>(a); } \
    extern "C" __global__ void __launch_bounds__(256, 1) NAME##_16(LinearArgs a) { linear_tiled<16, E>(a); }
TILED(tiled_store, STORE)
TILED(tiled_residual, RESIDUAL)
TILED(tiled_gated, GATED)
