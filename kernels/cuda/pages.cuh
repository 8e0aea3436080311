// Where attention's keys and values come from: items, chunks, and the pages that a warp takes one after another.
#pragma once
#include "common.cuh"

#define PAGE 16
#define WARPS 4
#define CHUNKS 8

struct Item {
    u32 row;       // first row
    u32 rows;      // consecutive rows of one sequence in one page; rows * group <= 8 NT
    u32 position;  // of the first row
    u32 pages;     // where the sequence's pages begin in the page list
    u32 stored;    // positions of the sequence below this step's
    u32 reserved[3];
};

struct AttentionArgs {
    const u16* q;      // [rows, heads, D]
    const u16* kv;     // of the layer: [pages][kv heads][2][16 D]
    const Item* items;
    const u32* page_list;
    const Header* header;
    u16* out;          // [rows, heads, D]
    float scale;       // of scores, times log2 e; above 0
    u32 kv_heads;
    u32 parts;         // blocks that share a key/value head, each with query heads of its own
    u32 group;         // query heads of a block
};

// Where the query of a row is that is `index` of those of part `part` (key/value head * parts + part of it).
__device__ __forceinline__ u64 query_at(const AttentionArgs& a, u32 row, u32 part, u32 index) {
    return (u64)row * a.kv_heads * a.parts * a.group + part * a.group + index;
}

// Pages up to the item's own, of a chunk, and how many chunks there are. A chunk but the last has a page
// for every warp.
__device__ __forceinline__ u32 item_pages(const Item& item) { return item.position / PAGE + 1; }
__device__ __forceinline__ u32 chunk_pages(const Item& item) {
    return max((u32)WARPS, (item_pages(item) + CHUNKS - 1) / CHUNKS);
}
__device__ __forceinline__ u32 chunks(const Item& item) {
    const u32 pages = chunk_pages(item);
    return (item_pages(item) + pages - 1) / pages;
}

#if __CUDA_ARCH__ >= 900
// Until a barrier at a shared address has passed the phase of this parity.
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n\tagain:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// A value that is kept in a register.
__device__ __forceinline__ u32 kept(u32 v) {
    asm volatile("mov.u32 %0, %0;" : "+r"(v));
    return v;
}
#endif

// A warp's pages of a head, in the order it takes them. From sm_90 on they are copied to shared memory
// STAGES pages ahead, keys and values each for themselves; before, they are read where they are.
template <int D, int STAGES>
struct Pages {
    static constexpr u32 HALF = PAGE * D;  // elements of a page's keys, and of its values
    const AttentionArgs& a;
    u32 list, head;
    u32 page, end;      // the next page to fetch, and where its chunk ends
    u32 last, chunk;    // pages to walk, and of a chunk
    u32 id;             // where `page` is in the pool
    u32 warp;
    bool leads;         // the lane that starts copies
    __device__ __forceinline__ const u16* keys_of(u32 id) const { return a.kv + ((u64)id * a.kv_heads + head) * (2 * HALF); }
    __device__ __forceinline__ u32 id_of(u32 page) const { return a.page_list[list + page]; }
#if __CUDA_ARCH__ >= 900
    u16* ring;          // [STAGES][2][HALF]
    u32 place, barrier; // shared addresses of the ring and of its barriers [STAGES][2]
    u32 taken;          // pages taken so far

    __device__ __forceinline__ void copy(u32 stage, u32 half, u32 id) {
        if (!leads) return;
        const u32 at = stage * 2 + half;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier + at * 8), "r"(HALF * 2) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(place + at * HALF * 2),
                     "l"(keys_of(id) + half * HALF), "r"(HALF * 2), "r"(barrier + at * 8)
                     : "memory");
    }
    __device__ __forceinline__ void copy_both(u32 stage, u32 id) {
        copy(stage, 0, id);
        copy(stage, 1, id);
    }
    __device__ __forceinline__ const u16* half_of_page(u32 half) {
        const u32 at = taken % STAGES * 2 + half;
        await(barrier + at * 8, taken / STAGES & 1);
        return ring + at * HALF;
    }
#endif

    __device__ __forceinline__ void step() {
        page += WARPS;
        if (page >= end && end < last) {
            page = end + warp;
            end = min(end + chunk, last);
        }
    }
    // The pages from `first` to `to` of an item, chunk after chunk.
    __device__ __forceinline__ Pages(const AttentionArgs& a, const Item& item, u32 head, u32 first, u32 to, u16* rings, u64 (*barriers)[STAGES * 2])
        : a(a), list(item.pages), head(head) {
        warp = threadIdx.x / WARP, leads = threadIdx.x % WARP == 0;
        last = to, chunk = chunk_pages(item);
        page = first + warp, end = min(first + chunk, last);
#if __CUDA_ARCH__ >= 900
        ring = rings + warp * STAGES * 2 * HALF;
        place = (u32)__cvta_generic_to_shared(ring);
        barrier = (u32)__cvta_generic_to_shared(barriers[warp]);
        taken = 0;
        if (leads) {
            for (u32 i = 0; i < STAGES * 2; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + i * 8) : "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
#endif
    }
    // Copies begin for those of the first pages that are full below position `stored`: they may be read ahead
    // of the wait for the kernel before. `begin_rest` is for the others, after it.
    struct Start {
        u32 ids[STAGES];
        bool later[STAGES];
    };
    __device__ __forceinline__ Start begin(u32 stored) {
        Start start = {};
#if __CUDA_ARCH__ >= 900
        bool now[STAGES];
#pragma unroll
        for (int s = 0; s < STAGES; s++) {
            const bool live = page < end, full = (page + 1) * PAGE <= stored;
            now[s] = live && full, start.later[s] = live && !full;
            if (!live) continue;
            start.ids[s] = id_of(page);
            step();
        }
#endif
        id = page < end ? id_of(page) : 0;
#if __CUDA_ARCH__ >= 900
#pragma unroll
        for (int s = 0; s < STAGES; s++)
            if (now[s]) copy_both(s, start.ids[s]);
#endif
        return start;
    }
    __device__ __forceinline__ void begin_rest(const Start& start) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
        for (int s = 0; s < STAGES; s++)
            if (start.later[s]) copy_both(s, start.ids[s]);
#endif
    }
    // The next page's keys, then, when the warp has read those, its values.
    __device__ __forceinline__ const u16* keys() {
#if __CUDA_ARCH__ >= 900
        return half_of_page(0);
#else
        return keys_of(id);
#endif
    }
    __device__ __forceinline__ void keys_read() {
#if __CUDA_ARCH__ >= 900
        __syncwarp();
        if (page < end) copy(taken % STAGES, 0, id);
#endif
    }
    __device__ __forceinline__ const u16* values() {
#if __CUDA_ARCH__ >= 900
        return half_of_page(1);
#else
        return keys_of(id) + HALF;
#endif
    }
    __device__ __forceinline__ void values_read() {
#if __CUDA_ARCH__ >= 900
        __syncwarp();
        if (page < end) copy(taken % STAGES, 1, id);
        taken++;
#endif
        if (page < end) step();
        id = page < end ? id_of(page) : 0;
    }
};

#if __CUDA_ARCH__ >= 900
// A warp's pages of a head, STAGES at a time in shared memory, which another warp copies there.
template <int D, int STAGES>
struct Fed {
    static constexpr u32 SIZE = 2 * PAGE * D;  // elements of a page's keys and values
    u32 ring;         // shared addresses: of the warp's pages [STAGES][SIZE],
    u32 full, empty;  // of the barriers [STAGES] of those that are there, and of those that every lane has read
    u32 stage, phase;

    // All addresses go through registers of their own: the compiler would compute them anew for each page.
    __device__ __forceinline__ Fed(u16* rings, u64 (*barriers)[2][STAGES], u32 thread) : stage(0), phase(0) {
        const u32 warp = thread / WARP;
        ring = kept((u32)__cvta_generic_to_shared(rings + warp * STAGES * SIZE));
        full = kept((u32)__cvta_generic_to_shared(barriers[warp][0]));
        empty = kept((u32)__cvta_generic_to_shared(barriers[warp][1]));
    }
    __device__ __forceinline__ const u16* at(u32 half) { return (const u16*)__cvta_shared_to_generic(ring + (stage * SIZE + half * (SIZE / 2)) * 2); }
    __device__ __forceinline__ const u16* keys() {
        await(full + stage * 8, phase);
        return at(0);
    }
    __device__ __forceinline__ void keys_read() {}
    __device__ __forceinline__ const u16* values() { return at(1); }
    __device__ __forceinline__ void values_read() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + stage * 8) : "memory");
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Copy the pages from `first` to `end` for all warps of the block, in the order of pages. Called by one warp, which waits
// for the kernel before.
template <int D, int STAGES>
__device__ __forceinline__ void feed(const AttentionArgs& a, const Item& item, u32 head, u32 first, u32 end, u16* rings, u64 (*barriers)[2][STAGES]) {
    constexpr u32 SIZE = Fed<D, STAGES>::SIZE;
    const u32 lane = threadIdx.x % WARP;
    const u16* kv = a.kv + (u64)head * SIZE;
    const u64 pitch = (u64)a.kv_heads * SIZE;
    const u32* list = a.page_list + item.pages;
    const u32 ring = (u32)__cvta_generic_to_shared(rings), all = (u32)__cvta_generic_to_shared(barriers);
    bool waited = false;
    u32 warp = 0, stage = 0, phase = 1;  // all are empty
    // Where WARP pages are in the pool, and the WARP after them.
    u32 ids = 0, next = first + lane < end ? list[first + lane] : 0;
#pragma unroll 1
    for (u32 page = first; page < end; page++) {
        const u32 at = (page - first) % WARP;
        if (at == 0) {
            ids = next;
            next = page + WARP + lane < end ? list[page + WARP + lane] : 0;
        }
        const u32 id = __shfl_sync(FULL_MASK, ids, at);
        // What is not full below `stored` gets keys and values by this step.
        if (!waited && (page + 1) * PAGE > item.stored) {
            wait_for_previous();
            waited = true;
        }
        const u32 full = all + (warp * 2 * STAGES + stage) * 8, empty = full + STAGES * 8;
        await(empty, phase);
        if (lane == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full), "r"(SIZE * 2) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(ring + (warp * STAGES + stage) * SIZE * 2),
                         "l"(kv + id * pitch), "r"(SIZE * 2), "r"(full)
                         : "memory");
        }
        __syncwarp();
        if (++warp == WARPS) {
            warp = 0;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
    if (!waited) wait_for_previous();
}
#endif
