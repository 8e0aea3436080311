// From logits to candidates and signals: `runner/sampler.rs` on the device.
//
// Two launches a step: `logit_chunks` on (chunks, slots) blocks, then `sample_rows` on (slots) blocks.
// A slot is a sampled row. Grids are fixed; slots from `header->samples` on do nothing. All reductions
// have a fixed order, so that a slot's result depends on nothing but its logits and parameters.
// Requires: pitch % 4 == 0, logits aligned to 16 bytes, vocab <= MAX_CHUNKS * CHUNK. The columns from
// `vocab` to `pitch` may hold anything.
#include "common.cuh"

#define CHUNK 4096
#define CHUNK_THREADS 256
#define VECTORS (CHUNK / CHUNK_THREADS / 4)
#define ROW_THREADS 512
#define ROW_WARPS (ROW_THREADS / WARP)
#define MAX_CHUNKS 80
#define LIST 128         // most tokens in a list of the best
#define POOL 4096        // keys that `collect` may find: see `threshold`
#define TILE (4 * WARP)  // logits that a warp reads at once
#define NO_TOKEN 0xffffffffu

enum Mode { GREEDY = 0, DRAW_FROM_ALL = 1, DRAW_FROM_LIST = 2, HOST_SAMPLES = 3 };

struct SampleParams {
    u32 row;
    u32 mode;
    float inv_temperature;
    u32 top_k;  // DRAW_FROM_LIST: 1 to `list`
    float top_p;
    float min_p;
    u32 uniform_low, uniform_high;  // bits of an f64 in [0, 1)
    u32 masked_start, masked_count;  // range of `masked`
    u32 list;  // how many best tokens are wanted, at most LIST
    u32 allowed;  // one past where in `masked` the bits of the tokens that may be drawn begin; 0: all may. Neither for
                  // DRAW_FROM_LIST nor for HOST_SAMPLES
};

// With `finite` 0 the row has no distribution, the token is 0 and the floats are NaN.
struct SampleOut {
    u32 token;  // HOST_SAMPLES: the most likely one
    u32 finite;
    float logit;  // of the token
    float max;
    float second;  // largest of the others, -inf if there is none
    float lse;
    float entropy;  // nats
    u32 reserved;
};

// The two largest of some logits.
struct Best {
    float max;
    u32 argmax;  // lowest token of those with `max`
    float second;
};

struct ChunkStats {
    Best best;
    float sum;       // of e^t with t = logit - best.max
    float weighted;  // of t e^t
    u32 bad;         // a logit is NaN or +inf
    u32 reserved[2];
};

__device__ __forceinline__ void merge(Best& a, const Best& b) {
    float loser = fminf(a.max, b.max);
    a.second = fmaxf(fmaxf(a.second, b.second), loser);
    if (b.max > a.max || (b.max == a.max && b.argmax < a.argmax)) {
        a.max = b.max;
        a.argmax = b.argmax;
    }
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        Best other;
        other.max = __shfl_xor_sync(FULL_MASK, best.max, offset);
        other.argmax = __shfl_xor_sync(FULL_MASK, best.argmax, offset);
        other.second = __shfl_xor_sync(FULL_MASK, best.second, offset);
        merge(best, other);
    }
    return best;
}

__device__ __forceinline__ double warp_sum(double v) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(FULL_MASK, v, offset);
    return v;
}

// Larger for larger logits, then for lower tokens; 0 for a logit of -inf, which is never listed.
__device__ __forceinline__ u64 key_of(float logit, u32 token) {
    if (logit == -INFINITY_F) return 0;
    u32 bits = (u32)__float_as_int(logit + 0.0f);  // adding 0 makes -0 equal to 0
    u32 ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)ascending << 32 | (u32)~token;
}
__device__ __forceinline__ u32 token_of(u64 key) { return ~(u32)key; }

// A key that at least `wanted` keys of the block reach, if there are as many, and not many more do.
// `best` is the largest key of each thread, 0 for none; `wanted` is at most LIST and the number of threads.
// Between `wanted` and 1.5 `wanted` + 8 threads have keys that reach it (or all that have any, if those are
// at most `wanted`), so with 20 keys a thread at most POOL reach it. `shared` holds 2 numbers a warp.
__device__ u64 threshold(u64 best, u32 wanted, u32* shared) {
    u32 warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    u32 lowest = __reduce_min_sync(FULL_MASK, (u32)(best >> 32));
    u32 highest = __reduce_max_sync(FULL_MASK, (u32)(best >> 32));
    if (threadIdx.x % WARP == 0) {
        shared[warp] = lowest;
        shared[warps + warp] = highest;
    }
    if ((u32)__syncthreads_count(best != 0) <= wanted) return 1;
    for (u32 w = 0; w < warps; w++) {
        lowest = min(lowest, shared[w]);
        highest = max(highest, shared[warps + w]);
    }
    // At least `wanted` threads reach `low`, fewer reach `high`.
    u64 low = (u64)lowest << 32, high = ((u64)highest + 1) << 32;
    while (high - low > 1) {
        u64 middle = low + (high - low) / 2;
        u32 count = (u32)__syncthreads_count(best >= middle);
        if (count < wanted) {
            high = middle;
        } else {
            low = middle;
            if (count <= wanted + wanted / 2 + 8) break;
        }
    }
    return max(low, (u64)1);
}

// Sorts `count` different keys, largest first. Between this and what others wrote must be a barrier; one is at its end.
__device__ void sort_keys(u64* keys, u32 count) {
    if (count <= CHUNK_THREADS) {
        u64 key = threadIdx.x < count ? keys[threadIdx.x] : 0;
        u32 rank = 0;
        if (threadIdx.x < count)
            for (u32 i = 0; i < count; i++) rank += keys[i] > key;
        __syncthreads();
        if (threadIdx.x < count) keys[rank] = key;
        __syncthreads();
        return;
    }
    u32 size = 1u << (32 - __clz((int)count - 1));  // at most POOL
    for (u32 i = count + threadIdx.x; i < size; i += blockDim.x) keys[i] = 0;
    for (u32 run = 2; run <= size; run *= 2) {
        for (u32 distance = run / 2; distance > 0; distance /= 2) {
            __syncthreads();
            for (u32 pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
                u32 i = 2 * pair - (pair & (distance - 1)), j = i + distance;
                u64 a = keys[i], b = keys[j];
                if ((a < b) == ((i & run) == 0)) {
                    keys[i] = b;
                    keys[j] = a;
                }
            }
        }
    }
    __syncthreads();
}

// Copies the wanted raw logits of this chunk to `token_logits` [slots, LIST] (NaN for tokens that do not exist),
// then gives its masked tokens -inf.
__device__ void copy_and_mask(float* row, u32 vocab, u32 chunk, const u32* ids, u32 id_count, float* token_logits,
                              const u32* masked, u32 masked_count) {
    for (u32 i = threadIdx.x; i < id_count; i += CHUNK_THREADS) {
        u32 id = ids[i];
        if (id < vocab && id / CHUNK == chunk) token_logits[i] = row[id];
        if (id >= vocab && chunk == 0) token_logits[i] = NAN_F;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < masked_count; i += CHUNK_THREADS) {
        u32 id = masked[i];
        if (id < vocab && id / CHUNK == chunk) row[id] = -INFINITY_F;
    }
    __syncthreads();
}

__device__ __forceinline__ void read_chunk(float (&logits)[VECTORS][4], const float* row, u32 vocab, u32 first) {
#pragma unroll
    for (u32 v = 0; v < VECTORS; v++) {
        u32 id = first + v * CHUNK_THREADS * 4;
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (id < vocab) four = *(const float4*)(row + id);
        logits[v][0] = id < vocab ? four.x : -INFINITY_F;
        logits[v][1] = id + 1 < vocab ? four.y : -INFINITY_F;
        logits[v][2] = id + 2 < vocab ? four.z : -INFINITY_F;
        logits[v][3] = id + 3 < vocab ? four.w : -INFINITY_F;
    }
}

// Statistics of a chunk of a slot's logits to `stats` [slots, chunks], and the keys of its `list` best tokens, best
// first, to `keys` [slots, chunks, LIST], filled up with 0. Grid (chunks, slots).
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
    logit_chunks(const Header* header, const SampleParams* params, const u32* masked, const u32* token_logit_ids,
                 float* logits, u32 vocab, u32 pitch, float* token_logits, ChunkStats* stats, u64* keys) {
    __shared__ Best warp_bests[CHUNK_THREADS / WARP];
    __shared__ float sums[CHUNK_THREADS / WARP], weighted_sums[CHUNK_THREADS / WARP];
    __shared__ u32 ends[2 * CHUNK_THREADS / WARP];
    __shared__ u64 pool[POOL];
    __shared__ u32 pooled;
    wait_for_previous();
    let_next_start();
    u32 chunk = blockIdx.x, chunks = gridDim.x, slot = blockIdx.y;
    if (slot >= header->samples) return;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 first = chunk * CHUNK + threadIdx.x * 4;
    float* row = logits + (u64)slot * pitch;
    SampleParams p = params[slot];
    u32 id_count = header->token_logits;
    float l[VECTORS][4];
    if (id_count > 0 || p.masked_count > 0)
        copy_and_mask(row, vocab, chunk, token_logit_ids, id_count, token_logits + (u64)slot * LIST,
                      masked + p.masked_start, p.masked_count);
    read_chunk(l, row, vocab, first);
    if (threadIdx.x == 0) pooled = 0;

    Best best = {-INFINITY_F, first, -INFINITY_F};
    int bad = 0;
#pragma unroll
    for (u32 v = 0; v < VECTORS; v++) {
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            float logit = l[v][e];
            best.second = fmaxf(best.second, fminf(best.max, logit));
            if (logit > best.max) {
                best.max = logit;
                best.argmax = first + v * CHUNK_THREADS * 4 + e;
            }
            bad |= !(logit < INFINITY_F);
        }
    }
    u64 thread_best = key_of(best.max, best.argmax);
    best = warp_best(best);
    if (lane == 0) warp_bests[warp] = best;
    bad = __syncthreads_or(bad);
    best = warp_bests[0];
#pragma unroll
    for (u32 w = 1; w < CHUNK_THREADS / WARP; w++) merge(best, warp_bests[w]);

    // Where all are -inf, every term must become 0.
    float shift = best.max == -INFINITY_F ? 0.0f : best.max;
    float sum = 0.0f, weighted = 0.0f;
#pragma unroll
    for (u32 v = 0; v < VECTORS; v++) {
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            float t = l[v][e] - shift, exponential = expf(t);
            sum += exponential;
            weighted += exponential > 0.0f ? t * exponential : 0.0f;
        }
    }
    sum = warp_sum(sum);
    weighted = warp_sum(weighted);
    if (lane == 0) {
        sums[warp] = sum;
        weighted_sums[warp] = weighted;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        ChunkStats out = {best, 0.0f, 0.0f, (u32)bad, {0, 0}};
        for (u32 w = 0; w < CHUNK_THREADS / WARP; w++) {
            out.sum += sums[w];
            out.weighted += weighted_sums[w];
        }
        stats[slot * chunks + chunk] = out;
    }
    u32 list = p.list;
    if (list == 0 || bad) return;

    u64 least = threshold(thread_best, list, ends);
#pragma unroll
    for (u32 v = 0; v < VECTORS; v++) {
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            u64 key = key_of(l[v][e], first + v * CHUNK_THREADS * 4 + e);
            if (key >= least) pool[atomicAdd(&pooled, 1)] = key;
        }
    }
    __syncthreads();
    sort_keys(pool, pooled);
    u64* out = keys + ((u64)slot * chunks + chunk) * LIST;
    if (threadIdx.x < list) out[threadIdx.x] = threadIdx.x < pooled ? pool[threadIdx.x] : 0;
}

// A row's statistics from those of its chunks; called by one warp. The token is the most likely one.
__device__ SampleOut merge_chunks(const ChunkStats* stats, u32 chunks) {
    u32 lane = threadIdx.x % WARP, bad = 0;
    Best best = {-INFINITY_F, NO_TOKEN, -INFINITY_F};
    for (u32 c = lane; c < chunks; c += WARP) {
        merge(best, stats[c].best);
        bad |= stats[c].bad;
    }
    best = warp_best(best);
    if (__any_sync(FULL_MASK, bad) || best.max == -INFINITY_F)
        return {0, 0, NAN_F, NAN_F, NAN_F, NAN_F, NAN_F, 0};
    double sum = 0.0, weighted = 0.0;
    for (u32 c = lane; c < chunks; c += WARP) {
        if (stats[c].sum > 0.0f) {
            double t = (double)stats[c].best.max - (double)best.max, scale = exp(t);
            sum += scale * (double)stats[c].sum;
            weighted += scale * ((double)stats[c].weighted + t * (double)stats[c].sum);
        }
    }
    sum = warp_sum(sum);
    weighted = warp_sum(weighted);
    double log_sum = log(sum), entropy = log_sum - weighted / sum;
    return {best.argmax, 1, best.max, best.max, best.second, (float)((double)best.max + log_sum),
            entropy > 0.0 ? (float)entropy : 0.0f, 0};
}

// How the tokens of a row weigh in a draw; the best one weighs 1, so `min_p` is a bound on weights.
struct Weigh {
    float max, inv_temperature, min_p;
    const u32* allowed;  // bits of the tokens that weigh anything, null for all
    __device__ __forceinline__ float operator()(float logit) const {
        float weight = expf((logit - max) * inv_temperature);
        return weight < min_p ? 0.0f : weight;
    }
    // The weights of four logits from `id` on; those from `end` on weigh nothing.
    __device__ __forceinline__ void four(float (&weights)[4], const float* row, u32 id, u32 end) const {
        float4 logits = *(const float4*)(row + id);
        u32 bits = allowed ? allowed[id / 32] >> id % 32 : 15;  // of the four: `id` is a multiple of 4
        weights[0] = bits & 1 ? (*this)(logits.x) : 0.0f;
        weights[1] = bits & 2 && id + 1 < end ? (*this)(logits.y) : 0.0f;
        weights[2] = bits & 4 && id + 2 < end ? (*this)(logits.z) : 0.0f;
        weights[3] = bits & 8 && id + 3 < end ? (*this)(logits.w) : 0.0f;
    }
};

// The first token at which the running sum of weights exceeds the part `uniform` of their total; the last with a weight
// if rounding leaves none; NO_TOKEN if nothing has a weight. Called by the whole block; every thread gets the token.
__device__ u32 draw_from_all(const float* row, u32 vocab, const Weigh& weigh, double uniform) {
    __shared__ double sums[ROW_WARPS];
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 start = 0, end = vocab, width;
    double left = -1.0;
    do {  // Narrow [start, end) to one of ROW_WARPS parts.
        width = (end - start + ROW_WARPS * TILE - 1) / (ROW_WARPS * TILE) * TILE;
        u32 from = min(start + warp * width, end), to = min(from + width, end);
        double sum = 0.0;
#pragma unroll 4
        for (u32 id = from + lane * 4; id < to; id += TILE) {
            float w[4];
            weigh.four(w, row, id, to);
            sum += ((double)w[0] + (double)w[1]) + ((double)w[2] + (double)w[3]);
        }
        sum = warp_sum(sum);
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        if (left < 0.0) {
            double total = 0.0;
            for (u32 w = 0; w < ROW_WARPS; w++) total += sums[w];
            if (!(total > 0.0)) return NO_TOKEN;
            left = uniform * total;
        }
        u32 part = 0;
        bool found = false;
        for (u32 w = 0; w < ROW_WARPS && !found; w++) {
            if (sums[w] > 0.0) {
                part = w;
                found = left < sums[w];
                if (!found) left -= sums[w];
            }
        }
        if (!found) left = 1e300;  // beyond all: the last part with a weight, and the last token in it
        start += part * width;
        end = min(start + width, end);
        __syncthreads();
    } while (width > TILE);

    float w[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 id = start + lane * 4;
    if (id < end) weigh.four(w, row, id, end);
    double own = ((double)w[0] + (double)w[1]) + ((double)w[2] + (double)w[3]), up_to = own;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        double before = __shfl_up_sync(FULL_MASK, up_to, offset);
        if (lane >= (u32)offset) up_to += before;
    }
    double held = up_to - own;
    u32 chosen = NO_TOKEN, last = 0;
#pragma unroll
    for (u32 e = 0; e < 4; e++) {
        held += (double)w[e];
        if (w[e] > 0.0f) {
            last = id + e;
            if (left < held) chosen = min(chosen, id + e);
        }
    }
    chosen = __reduce_min_sync(FULL_MASK, chosen);
    last = __reduce_max_sync(FULL_MASK, last);
    return chosen != NO_TOKEN ? chosen : last;
}

// As `draw_from_all`, from the fewest of the best `count` tokens that hold `top_p` of their weight. `keys` are sorted.
__device__ u32 draw_from_list(const float* row, const u64* keys, u32 count, const Weigh& weigh, float top_p,
                              double uniform) {
    __shared__ double weights[LIST], kept[LIST];
    __shared__ u32 chosen, last;
    u32 own = threadIdx.x;
    if (own == 0) {
        chosen = NO_TOKEN;
        last = 0;
    }
    if (own < count) weights[own] = (double)weigh(row[token_of(keys[own])]);
    __syncthreads();
    if (own < count) {
        double total = 0.0, before = 0.0;
        for (u32 i = 0; i < count; i++) {
            if (i == own) before = total;
            total += weights[i];
        }
        bool keep = own == 0 || top_p >= 1.0f || before < total * (double)top_p;
        kept[own] = keep ? weights[own] : 0.0;
    }
    __syncthreads();
    double total = 0.0;
    if (own < count) {
        u32 token = token_of(keys[own]);
        double below = 0.0;
        for (u32 i = 0; i < count; i++) {
            total += kept[i];
            if (token_of(keys[i]) < token) below += kept[i];
        }
        if (kept[own] > 0.0) {
            if (uniform * total < below + kept[own]) atomicMin(&chosen, token);
            atomicMax(&last, token);
        }
    }
    // Thread 0 has an entry, so it knows the total.
    int possible = __syncthreads_or(own == 0 && total > 0.0);
    if (!possible) return NO_TOKEN;
    return chosen != NO_TOKEN ? chosen : last;
}

// The key of the most likely token that `allowed` has a bit for, 0 if there is none. Called by the whole block; every
// thread gets the key.
__device__ u64 best_allowed(const float* row, u32 vocab, const u32* allowed) {
    __shared__ u64 bests[ROW_WARPS];
    u64 best = 0;
    for (u32 id = threadIdx.x; id < vocab; id += ROW_THREADS)
        if (allowed[id / 32] >> id % 32 & 1) best = max(best, key_of(row[id], id));
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(FULL_MASK, best, offset));
    if (threadIdx.x % WARP == 0) bests[threadIdx.x / WARP] = best;
    __syncthreads();
    for (u32 w = 0; w < ROW_WARPS; w++) best = max(best, bests[w]);
    return best;
}

// The candidates and statistics to `out` [slots]; of slots with a list, the best tokens, best first, to `top_values` and
// `top_ids` [slots, LIST], filled up with -inf and NO_TOKEN. `chunks` is what `logit_chunks` was launched with.
// Grid (slots).
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    sample_rows(const Header* header, const SampleParams* params, const u32* masked, const float* logits, u32 vocab,
                u32 pitch, u32 chunks, const ChunkStats* stats, const u64* keys, SampleOut* out, float* top_values,
                u32* top_ids) {
    __shared__ SampleOut merged;
    __shared__ u32 ends[2 * ROW_WARPS];
    __shared__ u64 pool[POOL];
    __shared__ u32 pooled;
    wait_for_previous();
    let_next_start();
    u32 slot = blockIdx.x;
    if (slot >= header->samples) return;
    SampleParams p = params[slot];
    const float* row = logits + (u64)slot * pitch;
    keys += (u64)slot * chunks * LIST;
    if (threadIdx.x < WARP) {
        SampleOut result = merge_chunks(stats + slot * chunks, chunks);
        if (threadIdx.x == 0) {
            merged = result;
            pooled = 0;
        }
    }
    __syncthreads();
    SampleOut sample = merged;

    if (p.list > 0 && sample.finite) {
        u32 total = chunks * p.list;
        u64 best = 0;
        for (u32 i = threadIdx.x; i < total; i += ROW_THREADS) best = max(best, keys[i / p.list * LIST + i % p.list]);
        u64 least = threshold(best, p.list, ends);
        for (u32 i = threadIdx.x; i < total; i += ROW_THREADS) {
            u64 key = keys[i / p.list * LIST + i % p.list];
            if (key >= least) pool[atomicAdd(&pooled, 1)] = key;
        }
        __syncthreads();
        sort_keys(pool, pooled);
    }
    u32 listed = min(pooled, p.list);
    if (p.list > 0 && threadIdx.x < LIST) {
        bool any = threadIdx.x < listed;
        u32 token = any ? token_of(pool[threadIdx.x]) : NO_TOKEN;
        top_values[slot * LIST + threadIdx.x] = any ? row[token] : -INFINITY_F;
        top_ids[slot * LIST + threadIdx.x] = token;
    }
    const u32* allowed = p.allowed > 0 ? masked + p.allowed - 1 : nullptr;
    if (sample.finite && allowed) {
        u64 best = best_allowed(row, vocab, allowed);
        sample.token = best > 0 ? token_of(best) : NO_TOKEN;
    }
    if (sample.finite && sample.token != NO_TOKEN && (p.mode == DRAW_FROM_ALL || p.mode == DRAW_FROM_LIST)) {
        double uniform = __hiloint2double((int)p.uniform_high, (int)p.uniform_low);
        Weigh weigh = {row[sample.token], p.inv_temperature, p.min_p, allowed};
        sample.token = p.mode == DRAW_FROM_ALL
                           ? draw_from_all(row, vocab, weigh, uniform)
                           : draw_from_list(row, pool, min(listed, p.top_k), weigh, p.top_p, uniform);
    }
    if (sample.finite) {
        if (sample.token == NO_TOKEN)
            sample = {0, 0, NAN_F, NAN_F, NAN_F, NAN_F, NAN_F, 0};
        else
            sample.logit = row[sample.token];
    }
    if (threadIdx.x == 0) out[slot] = sample;
}
