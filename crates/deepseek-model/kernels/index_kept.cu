// Scores of the entries of kept blocks on tensor cores, for bf16: as index_scores.
//
// Each row has blocks of its own, so a warp takes one row and finds its own keys. It holds the row's
// heads in registers, and loads keys from global memory into the registers that the tensor cores read,
// without a way through shared memory. What neighbouring rows have in common, their warps find in the
// cache of the multiprocessor: those of a block go through the same slots at the same time.
//
// The least that it can take, for 8,192 rows of 16,384 slots: 1.1e12 operations, 1.5 ms at the rate of
// large products on an H200, and keys of 256 bytes. If no two rows share any, those are 34 GB out of
// the L2 cache, 6 ms at the 5.5 TB/s of it; if the rows of a block share all, a quarter. The keys
// themselves, 8 MB of a context of 32K entries, stay there.
#include "index_tensor.cuh"

#define ROWS 4 // of a block, one for each warp
#define QUADS (CHUNKS / 4) // chunks that a lane loads of a head or key: every fourth

// The heads of a row, as the left matrices of products. A sum over channels may take them in any order:
// in products 2 q and 2 q + 1 a lane has the eight channels of chunk 4 q + lane % 4, which it loads at
// once, of heads and keys alike.
struct Heads {
    uint32_t a[HEADS / 16][2 * QUADS][4];

    __device__ __forceinline__ void load(const bf16 *queries) {
        const uint32_t lane = threadIdx.x % 32;
        const uint4 *from = reinterpret_cast<const uint4 *>(queries) + lane / 4 * CHUNKS + lane % 4;
#pragma unroll
        for (int i = 0; i < HEADS / 16; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int q = 0; q < QUADS; q++) {
                    const uint4 chunk = __ldg(from + (16 * i + 8 * half) * CHUNKS + 4 * q);
                    a[i][2 * q][half] = chunk.x;
                    a[i][2 * q][half + 2] = chunk.y;
                    a[i][2 * q + 1][half] = chunk.z;
                    a[i][2 * q + 1][half + 2] = chunk.w;
                }
    }
};

// Two slots of each lane: slots 2 l and 2 l + 1 of a step.
struct Slots {
    uint32_t entries[2];
    uint32_t places[2]; // rows of the pool, NONE for a vacant slot

    __device__ __forceinline__ void find(const IndexArgs &args, const Row &row, const uint32_t *pages,
                                         uint32_t first) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            entries[i] = entry_of_slot(args, row, first + threadIdx.x % 32 * 2 + i);
            places[i] = NONE;
            if (entries[i] == NONE) continue;
            const size_t place = entry_row(entries[i], pages, args.max_pages, args.per_page, args.pool_rows);
            if (place != NO_ROW) places[i] = (uint32_t)place; // below pool_rows
        }
    }

    // The place of slot 8 j + l / 4, for lane l.
    __device__ __forceinline__ uint32_t place_of(int j) const {
        const uint32_t slot = threadIdx.x % 32 / 4, holder = 4 * j + slot / 2;
        const uint32_t even = __shfl_sync(FULL_WARP, places[0], holder);
        const uint32_t odd = __shfl_sync(FULL_WARP, places[1], holder);
        return slot % 2 ? odd : even;
    }
};

// The lane's chunks of a key; zeros if there is none.
__device__ __forceinline__ void load_key(const uint4 *keys, uint32_t place, uint4 (&key)[QUADS]) {
    const uint4 *from = keys + (size_t)place * CHUNKS + threadIdx.x % 4;
#pragma unroll
    for (int q = 0; q < QUADS; q++) key[q] = place != NONE ? __ldg(from + 4 * q) : make_uint4(0, 0, 0, 0);
}

// Sums over heads of weight * relu(query . key) for a step's slots: lane l gets slots 2 l and 2 l + 1.
__device__ __forceinline__ float2 score_keys(const Heads &heads, const float (&head_weights)[4],
                                             const uint4 *keys, const Slots &slots) {
    float scores[OWN / 8][2];
    uint4 next[QUADS];
    load_key(keys, slots.place_of(0), next);
#pragma unroll
    for (int j = 0; j < OWN / 8; j++) {
        uint4 key[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; q++) key[q] = next[q];
        if (j + 1 < OWN / 8) load_key(keys, slots.place_of(j + 1), next);
        float sums[HEADS / 16][4] = {};
#pragma unroll
        for (int q = 0; q < QUADS; q++)
#pragma unroll
            for (int i = 0; i < HEADS / 16; i++) {
                multiply_add(sums[i], heads.a[i][2 * q], key[q].x, key[q].y);
                multiply_add(sums[i], heads.a[i][2 * q + 1], key[q].z, key[q].w);
            }
        weigh(sums[0], sums[1], head_weights, scores[j]);
    }
    return fold_scores(scores);
}

// Block b takes part b % tiles of the slots, in whole steps of a warp, of rows ROWS * (b / tiles) on of the
// chunk, which has `chunk_rows` of them. Nothing is shared between its warps.
extern "C" __global__ void __launch_bounds__(32 * ROWS, 3) index_scores_kept(const IndexArgs args) {
    const uint32_t index = blockIdx.x / args.tiles * ROWS + threadIdx.x / 32;
    const uint32_t steps = (args.slots + OWN - 1) / OWN;
    const uint32_t part = (steps + args.tiles - 1) / args.tiles * OWN;
    const uint32_t begin = blockIdx.x % args.tiles * part;
    if (index >= args.chunk_rows) return;
    const Row row = row_of_chunk(args, index);
    if (!row.scored || begin >= row.slots) return;
    const uint32_t *pages = at<const uint32_t>(args.pages) + (size_t)row.request * args.max_pages;
    const uint4 *keys = at<const uint4>(args.keys);
    float *work = at<float>(args.work) + (size_t)index * args.slots;
    Heads heads;
    heads.load(at<const bf16>(args.queries) + row.row * HEADS * DIM);
    float head_weights[4];
    load_head_weights(args, row.row, head_weights);
    const uint32_t end = min(begin + part, row.slots), own = threadIdx.x % 32 * 2;
    for (uint32_t first = begin; first < end; first += OWN) {
        Slots slots;
        slots.find(args, row, pages, first);
        float2 scores = make_float2(0.0f, 0.0f);
        if (__any_sync(FULL_WARP, slots.places[0] != NONE || slots.places[1] != NONE))
            scores = score_keys(heads, head_weights, keys, slots);
        write_score(args, row, work, first + own, slots.entries[0], slots.places[0] != NONE, scores.x);
        write_score(args, row, work, first + own + 1, slots.entries[1], slots.places[1] != NONE, scores.y);
    }
}
