// Scores of compressed entries on tensor cores, for bf16 rows that choose from all they see: as
// index_scores.
//
// A block takes ROWS rows of a chunk and SLOTS of their slots, in tiles of KEYS, which serve all rows
// of one request. A warp takes one row and half of a tile. While a tile is multiplied, the next one is
// copied.
#include "index_tensor.cuh"

#define ROWS 4
#define KEYS 128
#define SLOTS 1024

static_assert(KEYS == 2 * OWN, "two warps for each row");
static_assert(THREADS == 32 * 2 * ROWS, "two warps for each row");

// Of a block, in dynamic shared memory.
struct Shared {
    bf16 queries[ROWS][HEADS * DIM];
    bf16 keys[2][KEYS * DIM];
    bool there[2][KEYS];
};

// Where channel `c` of a row lies, in rows of DIM: the same chunk of eight rows lies in all banks.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t c) {
    return row * DIM + ((c / CHUNK ^ row % 8) * CHUNK + c % CHUNK);
}

// Begins to copy the keys of the entries from `first` on; one that there is not is left as it is.
__device__ __forceinline__ void copy_keys(const IndexArgs &args, uint32_t request, uint32_t first, uint32_t end,
                                          bf16 *tile, bool *there) {
    const uint32_t *pages = at<const uint32_t>(args.pages) + (size_t)request * args.max_pages;
    const uint32_t key = threadIdx.x / 2, part = threadIdx.x % 2, entry = first + key;
    const size_t place =
        entry < end ? entry_row(entry, pages, args.max_pages, args.per_page, args.pool_rows) : NO_ROW;
    if (part == 0) there[key] = place != NO_ROW;
    if (place == NO_ROW) return;
    const bf16 *source = at<const bf16>(args.keys) + place * DIM;
#pragma unroll
    for (uint32_t chunk = part; chunk < CHUNKS; chunk += 2)
        copy_async(tile + swizzled(key, chunk * CHUNK), source + chunk * CHUNK);
}

// Sums over heads of weight * relu(query . key) for the warp's keys: lane l gets keys 2 l and 2 l + 1.
__device__ __forceinline__ float2 score_keys(const bf16 *queries, const bf16 *tile, uint32_t first_key,
                                             const float (&head_weights)[4]) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t head = lane % 16, head_column = lane / 16 * 8;
    const uint32_t key = first_key + lane % 8 + lane / 16 * 8, key_column = lane / 8 % 2 * 8;
    float sums[2][OWN / 8][4] = {};
#pragma unroll
    for (uint32_t c = 0; c < DIM; c += 16) {
        uint32_t a[2][4];
        load_matrices(a[0], queries + swizzled(head, c + head_column));
        load_matrices(a[1], queries + swizzled(head + 16, c + head_column));
#pragma unroll
        for (int j = 0; j < OWN / 16; j++) {
            uint32_t b[4];
            load_matrices(b, tile + swizzled(key + 16 * j, c + key_column));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                multiply_add(sums[i][2 * j], a[i], b[0], b[1]);
                multiply_add(sums[i][2 * j + 1], a[i], b[2], b[3]);
            }
        }
    }
    float scores[OWN / 8][2];
#pragma unroll
    for (int j = 0; j < OWN / 8; j++) weigh(sums[0][j], sums[1][j], head_weights, scores[j]);
    return fold_scores(scores);
}

// Block b takes slots SLOTS * (b % tiles) on of rows ROWS * (b / tiles) on of the chunk, which has
// `chunk_rows` of them.
extern "C" __global__ void __launch_bounds__(THREADS, 2) index_scores_tensor(const IndexArgs args) {
    extern __shared__ __align__(128) uint8_t memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const uint32_t first_index = blockIdx.x / args.tiles * ROWS, begin = blockIdx.x % args.tiles * SLOTS;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t own_index = min(first_index + warp / 2, args.chunk_rows - 1);
    const Row own = row_of_chunk(args, own_index);
    const bool has_row = first_index + warp / 2 < args.chunk_rows && own.scored;

    for (uint32_t i = threadIdx.x; i < ROWS * HEADS * CHUNKS; i += THREADS) {
        const uint32_t index = i / (HEADS * CHUNKS), head = i / CHUNKS % HEADS, c = i % CHUNKS * CHUNK;
        const size_t row = (size_t)args.first_row + min(first_index + index, args.chunk_rows - 1);
        copy_async(shared.queries[index] + swizzled(head, c),
                   at<const bf16>(args.queries) + (row * HEADS + head) * DIM + c);
    }
    close_copies();
    float head_weights[4];
    load_head_weights(args, own.row, head_weights);
    float *work = at<float>(args.work) + (size_t)own_index * args.slots;

    // Rows of the same request share keys; each request among the rows takes a pass.
    for (uint32_t next = 0; next < ROWS;) {
        const uint32_t leader = min(first_index + next, args.chunk_rows - 1);
        const uint32_t request = row_of_chunk(args, leader).request;
        uint32_t end = 0; // of the slots that any of the rows takes
        uint32_t index = next;
        for (; index < ROWS && first_index + index < args.chunk_rows; index++) {
            const Row row = row_of_chunk(args, first_index + index);
            if (row.request != request) break;
            if (row.scored) end = max(end, min(row.slots, begin + SLOTS));
        }
        const bool takes_part = has_row && warp / 2 >= next && warp / 2 < index;
        next = first_index + index < args.chunk_rows ? index : ROWS;
        if (begin >= end) continue;
        __syncthreads();
        copy_keys(args, request, begin, end, shared.keys[0], shared.there[0]);
        close_copies();
        uint32_t stage = 0;
        for (uint32_t first = begin; first < end; first += KEYS, stage ^= 1) {
            wait_copies<0>();
            // The tile is there for all warps, and none still reads the other one.
            __syncthreads();
            if (first + KEYS < end)
                copy_keys(args, request, first + KEYS, end, shared.keys[stage ^ 1], shared.there[stage ^ 1]);
            close_copies();
            const uint32_t first_key = warp % 2 * OWN;
            if (!takes_part || first + first_key >= own.slots) continue;
            const float2 scores =
                score_keys(shared.queries[warp / 2], shared.keys[stage], first_key, head_weights);
            const uint32_t key = first_key + 2 * lane;
            const uint32_t slot = first + key; // an entry's own number
            write_score(args, own, work, slot, slot, shared.there[stage][key], scores.x);
            write_score(args, own, work, slot + 1, slot + 1, shared.there[stage][key + 1], scores.y);
        }
    }
}
