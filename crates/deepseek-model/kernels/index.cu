// The indexer: scores of compressed entries, and the choice of the best of each row.
//
// `index_scores` scores the entries that a row may choose from, `index_choose` chooses. Both number
// these entries by slots: all visible entries, or those of the blocks that were kept before. A slot
// may be vacant. Slots ascend with the entries, so the lower of two slots is the lower entry.
//
// Rows are taken in chunks, because the scores between the two kernels take memory.
#include "index.cuh"

#define WARPS (THREADS / 32)
#define SLOTS 256         // that a block of index_scores takes
#define PASS_HEADS 16     // that a warp multiplies at a time
#define CHOOSERS 1024     // threads of a block of index_choose

// Scores the WARP_KEYS slots from `first` on, one warp. Heads are in shared memory, as f32, a whole
// number of PASS_HEADS of them.
template <typename T>
__device__ __forceinline__ void score_slots(const IndexArgs &args, const Row &row, uint32_t first,
                                            const float *queries, const float *head_weights, float *work) {
    constexpr int GROUP = PASS_HEADS / 4;
    typedef Products<GROUP> HeadProducts;
    static_assert(HeadProducts::PER_LANE == 2 && GROUP == 4, "the two sums of a lane are of one key");
    const uint32_t lane = threadIdx.x % 32, group = lane / 8, own = lane % 8 / 2;
    const uint32_t entry = entry_of_slot(args, row, first + lane % WARP_KEYS);
    const uint32_t *pages = at<const uint32_t>(args.pages) + (size_t)row.request * args.max_pages;
    const size_t place =
        entry == NONE ? NO_ROW : entry_row(entry, pages, args.max_pages, args.per_page, args.pool_rows);
    const T *keys[WARP_KEYS];
#pragma unroll
    for (int k = 0; k < WARP_KEYS; k++) {
        const size_t key_row = __shfl_sync(FULL_WARP, place, k);
        keys[k] = key_row == NO_ROW ? nullptr : at<const T>(args.keys) + key_row * args.dim;
    }
    float score = 0.0f; // of key `own`, by the heads that this lane sums
    for (uint32_t head = 0; head < args.heads; head += PASS_HEADS) {
        HeadProducts products;
        products.take(queries + (size_t)(head + group * GROUP) * args.dim, args.dim, [&](int k, uint32_t c) {
            return keys[k] ? load4(keys[k] + c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        });
#pragma unroll
        for (int i = 0; i < HeadProducts::PER_LANE; i++) {
            const uint32_t h = head + group * GROUP + products.head_of(i);
            // fmaxf would turn a NaN into 0 and hide it.
            const float x = products.sums[i] <= 0.0f ? 0.0f : products.sums[i];
            if (h < args.heads) score += head_weights[h] * x;
        }
    }
    // Over the lane that has the key's other heads of the group, and over the groups.
    score += __shfl_xor_sync(FULL_WARP, score, 1);
    score += __shfl_xor_sync(FULL_WARP, score, 8);
    score += __shfl_xor_sync(FULL_WARP, score, 16);
    const uint32_t own_entry = __shfl_sync(FULL_WARP, entry, own);
    const bool there = __shfl_sync(FULL_WARP, place, own) != NO_ROW;
    const uint32_t slot = first + own;
    if (lane >= 8 || lane % 2 != 0 || slot >= row.slots) return;
    work[slot] = there ? score : -INFINITY;
    if (!there) return;
    if (isnan(score)) atomicMin(at<uint32_t>(args.fault), args.code);
    if (args.scores != 0) at<float>(args.scores)[row.row * args.most + own_entry] = score;
}

// score = sum over heads of scale * head weight * relu(query . key), for every slot of the rows of a
// chunk. Block b takes slots SLOTS * (b % tiles) on of row b / tiles. Dynamic shared memory: the
// heads' queries, then their weights, f32, padded to whole passes.
template <typename T> __device__ void index_scores(const IndexArgs &args) {
    extern __shared__ __align__(16) float queries[];
    const uint32_t index = blockIdx.x / args.tiles, first = blockIdx.x % args.tiles * SLOTS;
    const Row row = row_of_chunk(args, index);
    if (!row.scored || first >= row.slots) return;
    const uint32_t padded = (args.heads + PASS_HEADS - 1) / PASS_HEADS * PASS_HEADS;
    float *head_weights = queries + (size_t)padded * args.dim;
    const T *q = at<const T>(args.queries) + row.row * args.heads * args.dim;
    const T *w = at<const T>(args.head_weights) + row.row * args.heads;
    for (uint32_t i = threadIdx.x; i < padded * args.dim; i += THREADS)
        queries[i] = i < args.heads * args.dim ? load(q + i) : 0.0f;
    for (uint32_t h = threadIdx.x; h < padded; h += THREADS)
        head_weights[h] = h < args.heads ? load(w + h) * args.scale : 0.0f;
    __syncthreads();
    float *work = at<float>(args.work) + (size_t)index * args.slots;
    const uint32_t end = min(first + SLOTS, row.slots);
    for (uint32_t slot = first + threadIdx.x / 32 * WARP_KEYS; slot < end; slot += WARPS * WARP_KEYS)
        score_slots<T>(args, row, slot, queries, head_weights, work);
}
FOR_ACTIVATIONS(index_scores, IndexArgs, THREADS)

// A number that orders as the score does; 0 for what never counts: -inf, and what is no number.
__device__ __forceinline__ uint32_t sortable(float score) {
    if (!(score > -INFINITY)) return 0;
    const uint32_t bits = __float_as_uint(score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What is chosen: numbers above `key`, and the first `ties` of those equal to it. With no ties, all
// numbers but 0.
struct Cut {
    uint32_t key;
    uint32_t ties;
};

// Finds the bin of 8 bits, those from `shift` on, that holds the last number to be chosen: `cut.ties`
// are still to be, among those that agree with `cut.key` in the bits above. One warp.
__device__ __forceinline__ void narrow_cut(const uint32_t *counts, int shift, const Cut cut, Cut &narrower) {
    const uint32_t lane = threadIdx.x % 32, high = 255 - 8 * lane, wanted = cut.ties;
    uint32_t sum = 0;
    for (uint32_t i = 0; i < 8; i++) sum += counts[high - i];
    uint32_t upto = sum;
    for (uint32_t step = 1; step < 32; step *= 2) {
        const uint32_t below = __shfl_up_sync(FULL_WARP, upto, step);
        if (lane >= step) upto += below;
    }
    if (shift == 24 && __shfl_sync(FULL_WARP, upto, 31) <= wanted) {
        if (lane == 0) narrower = {0, 0};
        return;
    }
    uint32_t before = upto - sum;
    if (before >= wanted || wanted > upto) return; // one lane goes on
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t count = counts[high - i];
        if (wanted <= before + count) {
            narrower = {cut.key | (high - i) << shift, wanted - before};
            return;
        }
        before += count;
    }
}

// The cut that leaves the k greatest of n numbers, k > 0. Every thread of the block takes part.
template <typename Key> __device__ Cut find_cut(Key key, uint32_t n, uint32_t k) {
    __shared__ uint32_t counts[256];
    __shared__ Cut narrower;
    Cut cut = {0, k};
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) counts[threadIdx.x] = 0;
        __syncthreads();
        for (uint32_t first = threadIdx.x; first < n; first += 4 * CHOOSERS) {
            // Four loads before the first count, which waits for its own.
            uint32_t numbers[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t i = first + j * CHOOSERS;
                numbers[j] = i < n ? key(i) : 0;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const bool counts_here = numbers[j] != 0 && ((numbers[j] ^ cut.key) >> shift) >> 8 == 0;
                if (counts_here) atomicAdd(&counts[(numbers[j] >> shift) & 255], 1);
            }
        }
        __syncthreads();
        if (threadIdx.x < 32) narrow_cut(counts, shift, cut, narrower);
        __syncthreads();
        cut = narrower;
        if (cut.ties == 0) break;
    }
    return cut;
}

// Writes the values of what the cut leaves, in the order of the numbers, then NONE up to `width`.
template <typename Key, typename Value>
__device__ void write_chosen(Key key, Value value, uint32_t n, const Cut &cut, uint32_t *out, uint32_t width) {
    // Of each warp: numbers above the cut in the low half, equal ones in the high half. Two of them,
    // since a warp may be a round ahead of one that still reads.
    __shared__ uint32_t counts[2][32];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, below = (1u << lane) - 1;
    uint32_t above = 0, equal = 0; // in the rounds before
    for (uint32_t first = 0, round = 0; first < n; first += CHOOSERS, round ^= 1) {
        const uint32_t i = first + threadIdx.x, number = i < n ? key(i) : 0;
        const bool is_above = number > cut.key, is_equal = number != 0 && number == cut.key;
        const uint32_t aboves = __ballot_sync(FULL_WARP, is_above);
        const uint32_t equals = __ballot_sync(FULL_WARP, is_equal);
        if (lane == 0) counts[round][warp] = __popc(aboves) | __popc(equals) << 16;
        __syncthreads();
        uint32_t upto = counts[round][lane];
        for (uint32_t step = 1; step < 32; step *= 2) {
            const uint32_t other = __shfl_up_sync(FULL_WARP, upto, step);
            if (lane >= step) upto += other;
        }
        const uint32_t total = __shfl_sync(FULL_WARP, upto, 31);
        const uint32_t upto_warp = __shfl_sync(FULL_WARP, upto, (warp + 31) % 32);
        const uint32_t others = warp > 0 ? upto_warp : 0;
        const uint32_t above_before = above + (others & 0xffffu) + __popc(aboves & below);
        const uint32_t equal_before = equal + (others >> 16) + __popc(equals & below);
        if (is_above || (is_equal && equal_before < cut.ties)) {
            const uint32_t place = above_before + min(equal_before, cut.ties);
            if (place < width) out[place] = value(i);
        }
        above += total & 0xffffu;
        equal += total >> 16;
    }
    for (uint32_t i = above + min(equal, cut.ties) + threadIdx.x; i < width; i += CHOOSERS) out[i] = NONE;
}

// The values of the `width` greatest of n numbers, but for those of 0; the first of equal ones.
template <typename Key, typename Value>
__device__ __forceinline__ void choose(Key key, Value value, uint32_t n, uint32_t *out, uint32_t width) {
    const Cut cut = find_cut(key, n, width);
    write_chosen(key, value, n, cut, out, width);
}

// Keeps the best blocks of a row: by their best visible score, the newest block always.
__device__ __forceinline__ void keep_blocks(const IndexArgs &args, const Row &row, const float *scores) {
    uint32_t *out = at<uint32_t>(args.candidates) + row.row * args.top_blocks;
    if (row.blocks <= args.top_blocks) {
        for (uint32_t i = threadIdx.x; i < args.top_blocks; i += CHOOSERS) out[i] = i < row.blocks ? i : NONE;
        return;
    }
    float *best = at<float>(args.best) + (size_t)blockIdx.x * args.blocks;
    for (uint32_t b = threadIdx.x; b < row.blocks; b += CHOOSERS) {
        float most = b + 1 == row.blocks ? INFINITY : -INFINITY;
        const uint32_t first = b * args.block_size, end = min(first + args.block_size, row.visible);
        for (uint32_t e = first; e < end; e++) most = fmaxf(most, scores[e]);
        best[b] = most;
    }
    __syncthreads();
    choose([&](uint32_t b) { return sortable(best[b]); }, [](uint32_t b) { return b; }, row.blocks, out,
           args.top_blocks);
}

// One block per row of the chunk.
extern "C" __global__ void __launch_bounds__(CHOOSERS) index_choose(const IndexArgs args) {
    const Row row = row_of_chunk(args, blockIdx.x);
    const float *scores = at<const float>(args.work) + (size_t)blockIdx.x * args.slots;
    if (args.top_blocks > 0) keep_blocks(args, row, scores);
    uint32_t *out = at<uint32_t>(args.choice) + row.row * args.topk;
    const auto entry = [&](uint32_t slot) { return entry_of_slot(args, row, slot); };
    if (row.scored)
        choose([&](uint32_t slot) { return sortable(scores[slot]); }, entry, row.slots, out, args.topk);
    else
        choose([&](uint32_t slot) { return entry(slot) == NONE ? 0u : 1u; }, entry, row.slots, out, args.topk);
}
