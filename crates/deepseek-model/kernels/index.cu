// Scores of the compressed entries that a row may choose from.
#include "index.cuh"

#define WARPS (THREADS / 32)
#define ROUND (WARPS * WARP_KEYS) // slots that the warps of a block take at a time
#define PASS_HEADS 16             // heads that a warp multiplies at a time

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
// chunk. Block b takes part b % tiles of the slots of row b / tiles: so many that its warps have work all
// the time. Dynamic shared memory: the heads' queries, then their weights, f32, padded to whole passes.
template <typename T> __device__ void index_scores(const IndexArgs &args) {
    extern __shared__ __align__(16) float queries[];
    const uint32_t index = blockIdx.x / args.tiles, part = (args.slots + args.tiles - 1) / args.tiles;
    const uint32_t taken = (part + ROUND - 1) / ROUND * ROUND, first = blockIdx.x % args.tiles * taken;
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
    const uint32_t end = min(first + taken, row.slots);
    for (uint32_t slot = first + threadIdx.x / 32 * WARP_KEYS; slot < end; slot += ROUND)
        score_slots<T>(args, row, slot, queries, head_weights, work);
}
FOR_ACTIVATIONS(index_scores, IndexArgs, THREADS)
