// What all kernels share. No system header is included, so that NVRTC needs no toolkit.
//
// bf16 is stored as `u16`. Kernels that run in a step begin with `wait_for_previous()`: launches may
// overlap with kernels before (programmatic dependent launch), and nothing that an earlier kernel of the
// step wrote may be read, and nothing written, before it. Constant data (weights) may be read, and what was
// there before the step: its upload, and keys and values of earlier steps.
//
// Small kernels call `let_next_start()` before they wait, so that several are on a multiprocessor at once and
// fetch weights. The wait is for the kernel before alone, which in turn has waited for its own: so a block of
// every grid must wait. A step's first kernel calls it after its wait: no kernel of a step starts while an
// earlier step is at work.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fffffff)
#define WARP 32
#define FULL_MASK 0xffffffffu

// All kernels before this one in the stream are complete and what they wrote is visible.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start, up to its own `wait_for_previous`.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float from_bf16(u16 v) { return __int_as_float((u32)v << 16); }
__device__ __forceinline__ float low_bf16(u32 pair) { return __int_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __int_as_float(pair & 0xffff0000u); }

// Round to nearest even; `low` lands in the lower half.
__device__ __forceinline__ u32 to_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ u16 to_bf16(float v) { return (u16)to_bf16x2(v, 0.0f); }

// An activation or a weight of either type.
__device__ __forceinline__ float load(const u16* p) { return from_bf16(*p); }
__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ void store(u16* p, float v) { *p = to_bf16(v); }
__device__ __forceinline__ void store(float* p, float v) { *p = v; }

// Streamed once: not kept in L1.
__device__ __forceinline__ uint4 load_streamed(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// c += a b for a[16, 16] and b[16, 8] of bf16, c[16, 8] of f32. With g = lane / 4 and t = lane % 4:
// a0 = a[g][2t..], a1 = a[g + 8][2t..], a2 = a[g][2t + 8..], a3 = a[g + 8][2t + 8..];
// b0 = b[2t..][g], b1 = b[2t + 8..][g]; c0, c1 = c[g][2t..], c2, c3 = c[g + 8][2t..].
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Place of (output, input) in packed weights, see `linear.cuh`; also the input embedding's layout.
__device__ __forceinline__ u64 packed_index(u64 output, u32 input, u32 inputs) {
    const u32 r = output % 16, c = input % 32;
    return output / 16 * 16 * inputs + input / 32 * 512 + r / 8 * 256 + (r % 8 * 4 + c / 8) * 8 + c % 8;
}

// Sums over a warp in a fixed order; every lane gets the result.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(FULL_MASK, v, offset);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(FULL_MASK, v, offset));
    return v;
}

// Sum over a block of up to 1024 threads, in a fixed order; `shared` holds 32 floats.
__device__ __forceinline__ float block_sum(float v, float* shared) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = (blockDim.x + WARP - 1) / WARP;
    v = warp_sum(v);
    __syncthreads();
    if (lane == 0) shared[warp] = v;
    __syncthreads();
    v = lane < warps ? shared[lane] : 0.0f;
    return warp_sum(v);
}

__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
#if __CUDA_ARCH__ >= 900
// Blocks of a cluster, which see each other's shared memory.
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// What block `rank` has at this place of its shared memory.
__device__ __forceinline__ u32 place_in_block(const void* place, u32 rank) {
    u32 own = (u32)__cvta_generic_to_shared(place), remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
    return remote;
}
__device__ __forceinline__ float4 load_of_block(const float4* place, u32 rank) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(place_in_block(place, rank)));
    return v;
}
__device__ __forceinline__ float2 load_of_block(const float2* place, u32 rank) {
    float2 v;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(place_in_block(place, rank)));
    return v;
}
__device__ __forceinline__ float load_of_block(const float* place, u32 rank) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(place_in_block(place, rank)));
    return v;
}
#endif

// The head of a step's upload. See `step.rs` for the whole layout.
struct Header {
    u32 rows;          // rows of the batch; a bucket's other rows compute nothing that is kept
    u32 samples;       // sampled rows
    u32 items;         // attention work items: (row, chunk) pairs
    u32 top_k;         // largest logits wanted of each sample, at most 128
    u32 token_logits;  // tokens whose raw logit is wanted of each sample
    u32 reserved[11];
};
