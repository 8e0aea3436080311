// Linear layers for many rows in bf16 on chips with `wgmma` (sm_90a): blocks of 64 WGS outputs by ROWS rows.
//
// Sums are in the order of `linear.cuh`. A `wgmma` adds its 16 products as `mma.sync` does (measured: the
// bits are the same), so that each instruction here takes the same 16 inputs as one there, and a prompt's
// keys and values are those that single steps would have stored.
//
// The weights are the A operand, in registers: their packed tiles, copied to shared memory in bulk, are
// loaded as for `mma.sync`. The rows are the B operand, in shared memory, in cores of 8 rows by 16 bytes.
// A core's row must hold the inputs 8t and 8t + 1 (the next core 8t + 2 and 8t + 3, and so on) of all four
// lanes t. So a warpgroup of its own copies rows to shared memory as they are, and from there into cores,
// ahead of the WGS warpgroups that multiply.
#include "linear.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define WARPGROUP 128

__device__ __forceinline__ u32 shared_place(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_place(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_place(barrier)) : "memory");
}
// Bulk copies of so many bytes belong to the barrier's phase as well.
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_place(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n\t.reg .pred p;\n\t"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
            "selp.u32 %0, 1, 0, p;\n\t}"
            : "=r"(done)
            : "r"(shared_place(barrier)), "r"(parity)
            : "memory");
    } while (!done);
}
__device__ __forceinline__ void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_place(to)),
                 "l"(from), "r"(bytes), "r"(shared_place(barrier))
                 : "memory");
}
__device__ __forceinline__ void copy_async_or_zero(u32 to, const void* from, bool zero) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(zero ? 0 : 16) : "memory");
}
__device__ __forceinline__ uint4 load_shared(u32 place) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(place) : "memory");
    return v;
}
// Four 8 by 8 matrices; lane l gives the place of row l % 8 of matrix l / 8 and has of each matrix, in row
// l / 4, the numbers 2 (l % 4) and the next.
__device__ __forceinline__ void store_matrices(u32 place, const uint4& v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// d += a b for a[64, 16] in the registers of a warpgroup, each warp 16 rows as in `mma`, and b[16, 8 n] in
// shared memory; d[4 i ..] is what `mma` would have for the i-th 8 columns. Unless `more`, d begins with 0.
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D16(i) D8(i), D8(i + 8)
__device__ __forceinline__ void wgmma(float (&d)[32], const u32 (&a)[4], u64 b, u32 more) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n\t}"
        : D16(0), D16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}
__device__ __forceinline__ void wgmma(float (&d)[64], const u32 (&a)[4], u64 b, u32 more) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\twgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n\t}"
        : D16(0), D16(16), D16(32), D16(48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}
// STAGES of 64 inputs are ready or in work, RAW more of the rows alone on their way. The registers of a thread
// that produces and of one that multiplies, weighted by their numbers, fit what the block starts with.
// BLOCKS is 1, or the blocks of a cluster that deal out the slices, two to each, for at most ROWS rows.
template <int WGS, int ROWS, int STAGES, int RAW, int PRODUCER_REGS, int CONSUMER_REGS, int SLICES, int BLOCKS, Epilogue E>
__device__ __forceinline__ void linear_wgmma(const LinearArgs& a) {
    constexpr int TILES = 4 * WGS;                                   // of 16 outputs: one a warp
    constexpr int STAGE_W = TILES * 2048, STAGE_X = ROWS * 128, STAGE = STAGE_W + STAGE_X;  // bytes
    constexpr int PIECES = ROWS / 16;  // of 8 rows by 32 inputs that a producing warp loads a stage
    constexpr int CORES = ROWS * 16;   // bytes of a core's width
    constexpr bool SPLIT = BLOCKS > 1;
    static_assert(!SPLIT || BLOCKS * 2 == SLICES, "a block has registers for two sums");
    extern __shared__ __align__(128) u8 staged[];  // [STAGES][STAGE], then [RAW][STAGE_X]
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
    __shared__ float scales[ROWS];
    constexpr int FRAGMENTS = TILES * (ROWS / 8);
    float4* sums = (float4*)staged;  // [2][FRAGMENTS][WARP], when the stages are free
    static_assert(!SPLIT || FRAGMENTS * WARP * 32 <= STAGES * STAGE + RAW * STAGE_X, "sums fit");
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 tiles = a.inputs / 32, lines = (tiles + 1) / 2;
    const u32 last = (E == GATED ? a.outputs + 7 : a.outputs + 15) / (E == GATED ? 8 : 16) - 1;

    // Blocks at work together share weights and rows in L2: up to GROUP blocks of rows for each of outputs.
    constexpr u32 GROUP = 2048 / ROWS;
    const u32 id = blockIdx.y * gridDim.x + blockIdx.x;
    const u32 group = id / (GROUP * gridDim.y) * GROUP, group_rows = min(GROUP, gridDim.x - group);
    const u32 in_group = id % (GROUP * gridDim.y);
    const u32 rank = SPLIT ? blockIdx.x : 0;
    const u32 first_row = SPLIT ? 0 : (group + in_group % group_rows) * ROWS;
    const u32 first_tile = (SPLIT ? blockIdx.y : in_group / group_rows) * TILES;
    // Of this block: the first slice and how many lines.
    const u32 first_slice = rank * 2;
    auto slice_lines = [&](u32 slice) { return (lines + SLICES - 1 - min(slice, lines + SLICES - 1)) / SLICES; };
    const u32 steps = SPLIT ? slice_lines(first_slice) + slice_lines(first_slice + 1) : lines;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s, 4);
            barrier_init(empty + s, WGS * WARPGROUP);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp >= WGS * 4) {  // produces
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGS));
        const int producer = warp - WGS * 4, half = producer % 2;
        u32 row = first_row + producer / 2 * 8 + lane / 4, own_tile = first_tile + producer * WGS;
        const u16* x = a.x + half * 32 + lane % 4 * 8;
        // Rows wait in a place of each thread's own until they are stored as cores: [RAW][PIECES][128].
        const u32 raw = shared_place(staged + STAGES * STAGE) + (threadIdx.x - WGS * WARPGROUP) * 16;
        // Beyond the ends of w and x, repeat the last tile and row: what they give is not stored. Half a
        // line beyond the inputs is zero in the rows, and the half before in the weights.
        auto fetch_weights = [&](u32 stage, u32 line) {
            if (lane != 0) return;
            const bool whole = line * 2 + 1 < tiles;
            barrier_expect(full + stage, WGS * 2048);
#pragma unroll
            for (int i = 0; i < WGS; i++) {
                const u16* from = a.w + (u64)min(own_tile + i, last) * 16 * a.inputs + line * 1024;
                copy_bulk(staged + stage * STAGE + (producer * WGS + i) * 2048, from, whole ? 2048 : 1024, full + stage);
                if (!whole) copy_bulk(staged + stage * STAGE + (producer * WGS + i) * 2048 + 1024, from, 1024, full + stage);
            }
        };
        u32 stage = 0, parity = 1, slice = first_slice, line = slice;
        auto advance = [&](u32& line, u32& slice) {
            line += SLICES;
            if (line >= lines) line = ++slice;
        };
        // Weights are constant: the first are on their way while the kernel before ends.
#pragma unroll 1
        for (u32 s = 0; s < min((u32)STAGES, steps); s++) {
            fetch_weights(s, line);
            advance(line, slice);
        }
        slice = line = first_slice;
        wait_for_previous();
        let_next_start();
        u32 ahead_line = line, ahead_slice = slice, ahead_place = raw;
        auto fetch_rows = [&](u32 step) {
            if (step < steps) {
                asm volatile("" : "+r"(row), "+r"(own_tile));  // addresses are computed anew: registers are few
                const bool zero = ahead_line * 2 + half >= tiles;
                const u16* from = x + (zero ? 0 : ahead_line * 64);
#pragma unroll
                for (int p = 0; p < PIECES; p++)
                    copy_async_or_zero(ahead_place + p * 2048, from + (u64)min(row + p * 16, a.rows - 1) * a.inputs, zero);
                advance(ahead_line, ahead_slice);
                ahead_place += STAGE_X;
                if (ahead_place == raw + RAW * STAGE_X) ahead_place = raw;
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
        for (int s = 0; s < RAW; s++) fetch_rows(s);
        u32 now_place = raw;
        for (u32 step = 0; step < steps; step++) {
            barrier_wait(empty + stage, parity);
            if (step >= STAGES) fetch_weights(stage, line);
            u8* to = staged + stage * STAGE;
            __syncwarp();
            asm volatile("cp.async.wait_group %0;" ::"n"(RAW - 1) : "memory");
            const u32 place = shared_place(to + STAGE_W) + (half * 4 + lane / 8) * CORES + (producer / 2 * 8 + lane % 8) * 16;
#pragma unroll
            for (int first = 0; first < PIECES; first += 4) {
                uint4 v[4];
#pragma unroll
                for (int p = 0; p < 4; p++) v[p] = load_shared(now_place + (first + p) * 2048);
#pragma unroll
                for (int p = 0; p < 4; p++) store_matrices(place + (first + p) * 256, v[p]);
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) barrier_arrive(full + stage);
            fetch_rows(step + RAW);
            now_place += STAGE_X;
            if (now_place == raw + RAW * STAGE_X) now_place = raw;
            advance(line, slice);
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        if (SPLIT) {
            cluster_sync();
            cluster_sync();
        }
    } else {  // multiply
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGS));
        wait_for_previous();
        let_next_start();
        if (E != RESIDUAL && a.squares != nullptr) {
            constexpr int EACH = (ROWS + WGS * 4 - 1) / (WGS * 4);
            float own[EACH];
            row_scales(a, first_row + warp, WGS * 4, own);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (lane == 0 && warp + i * WGS * 4 < ROWS) scales[warp + i * WGS * 4] = own[i];
            asm volatile("bar.sync 1, %0;" ::"n"(WGS * WARPGROUP) : "memory");
        }
        float acc[ROWS / 2], total[ROWS / 2];
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) total[i] = -0.0f;  // -0 + x is x, for -0 as well
        const u8* const own_w = staged + warp * 2048 + lane * 16;
        // Descriptor: place, bytes from one core to the next along k and along the rows, all by 16. In a
        // cluster a place has the block's rank above its 18 bits.
        const u64 first_x = (u64)((shared_place(staged + STAGE_W) & 0x3ffff) / 16) | (u64)(CORES / 16) << 16 | (u64)(128 / 16) << 32;
        u32 stage = 0, parity = 0, slice = first_slice, line = slice, more = 0;
        if (SPLIT) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.0f;  // stays so in a slice without inputs
            more = 1;
        }
#pragma unroll 1
        for (u32 step = 0; step < steps; step++) {
            barrier_wait(full + stage, parity);
            u32 m[4][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 low = *(const uint4*)(own_w + stage * STAGE + half * 1024), high = *(const uint4*)(own_w + stage * STAGE + half * 1024 + 512);
                u32(&first)[4] = m[half * 2], (&second)[4] = m[half * 2 + 1];
                first[0] = low.x, first[1] = high.x, first[2] = low.y, first[3] = high.y;
                second[0] = low.z, second[1] = high.z, second[2] = low.w, second[3] = high.w;
            }
            const u64 x = first_x + stage * (STAGE / 16);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < 4; k++) wgmma(acc, m[k], x + k * (2 * CORES / 16), k > 0 ? 1 : more);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            barrier_arrive(empty + stage);
            line += SLICES;
            more = 1;
            if (line >= lines) {
                // The second of two slices stays as it is.
                if (!SPLIT || slice == first_slice) {
#pragma unroll
                    for (int i = 0; i < ROWS / 2; i++) {
                        total[i] += acc[i];
                        if (SPLIT) acc[i] = 0.0f;
                    }
                    more = SPLIT;
                }
                line = ++slice;
            }
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        if (SPLIT) {
            asm volatile("bar.sync 1, %0;" ::"n"(WGS * WARPGROUP) : "memory");  // the stages are free
#pragma unroll
            for (int n = 0; n < ROWS / 8; n++) {
                float4* to = sums + (warp * (ROWS / 8) + n) * WARP + lane;
                to[0] = make_float4(total[n * 4], total[n * 4 + 1], total[n * 4 + 2], total[n * 4 + 3]);
                to[FRAGMENTS * WARP] = make_float4(acc[n * 4], acc[n * 4 + 1], acc[n * 4 + 2], acc[n * 4 + 3]);
            }
            cluster_sync();
#pragma unroll 1
            for (u32 f = warp * BLOCKS + rank; f < FRAGMENTS; f += TILES * BLOCKS) {
                const u32 tile = first_tile + f / (ROWS / 8), first = f % (ROWS / 8) * 8;
                if (tile > last || first >= a.rows) continue;
                const float4 old = before<E>(a, tile, first);
                float4 v[SLICES];
#pragma unroll
                for (int s = 0; s < SLICES; s++) v[s] = load_of_block(sums + (s % 2 * FRAGMENTS + f) * WARP + lane, s / 2);
#pragma unroll
                for (int s = 1; s < SLICES; s++) add(v[0], v[s]);
                finish<E>(a, v[0], old, constants<E>(a, tile), tile, first, a.squares ? scales + first : nullptr);
            }
            cluster_sync();  // others read this block's sums
            return;
        }
        const u32 tile = first_tile + warp;
        if (tile > last) return;
        const Constants known = constants<E>(a, tile);
        float4 old[ROWS / 8];
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) old[n] = before<E>(a, tile, first_row + n * 8);
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++) {
            const float4 v = make_float4(total[n * 4], total[n * 4 + 1], total[n * 4 + 2], total[n * 4 + 3]);
            finish<E>(a, v, old[n], known, tile, first_row + n * 8, a.squares ? scales + n * 8 : nullptr);
        }
    }
}

// Names: wgmma_[mid_|small_]<epilogue>_<slices>, wgmma_split_<epilogue>_8. Grid (rows by ROWS, tiles of outputs by
// 4 WGS), of split blocks (the blocks of a cluster, tiles), 128 (WGS + 1) threads, shared memory of STAGES times
// (8192 WGS + 128 ROWS) and RAW times 128 ROWS bytes:
//         outputs  rows  threads  shared  blocks a multiprocessor
// large       192   128      512  196608  1
// mid         128   128      384  196608  1; faster where there are nearly as many as multiprocessors
// small       128    64      384  106496  2; faster where both are too few for the chip
// split       128    64      384  106496  2, in clusters of 4; for up to 64 rows, where small ones are too few
#define BLOCK(THREADS, EACH, NAME) extern "C" __global__ void __launch_bounds__(THREADS, EACH) NAME(LinearArgs a)
#define WGMMA(NAME, E, SLICES)                                                                                        \
    BLOCK(512, 1, wgmma_##NAME##_##SLICES) { linear_wgmma<3, 128, 4, 2, 56, 152, SLICES, 1, E>(a); }                  \
    BLOCK(384, 1, wgmma_mid_##NAME##_##SLICES) { linear_wgmma<2, 128, 4, 4, 56, 224, SLICES, 1, E>(a); }              \
    BLOCK(384, 2, wgmma_small_##NAME##_##SLICES) { linear_wgmma<2, 64, 3, 4, 48, 96, SLICES, 1, E>(a); }
#define WGMMA_SPLIT(NAME, E) BLOCK(384, 2, wgmma_split_##NAME##_8) { linear_wgmma<2, 64, 3, 4, 48, 96, 8, 4, E>(a); }
WGMMA(store, STORE, 8)
WGMMA(store, STORE, 16)
WGMMA(residual, RESIDUAL, 8)
WGMMA(residual, RESIDUAL, 16)
WGMMA(gated, GATED, 8)
WGMMA(gated, GATED, 16)
WGMMA_SPLIT(store, STORE)
WGMMA_SPLIT(residual, RESIDUAL)
WGMMA_SPLIT(gated, GATED)
#endif
