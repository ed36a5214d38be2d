// The choice of the best entries of each row, by their scores, and of the blocks to keep.
//
// Scores become numbers that order as they do, of which the k greatest are found digit by digit. The
// numbers of a row are read several times: they stay in shared memory if it has room for them, so that
// the scores are read once.
#include "index.cuh"

#define CHOOSERS 1024 // threads of a block
#define WARPS (CHOOSERS / 32)
#define AT_ONCE 4     // loads of a thread before it waits for one

// A number that orders as the score does; 0 for what never counts: -inf, and what is no number.
__device__ __forceinline__ uint32_t sortable(float score) {
    if (!(score > -INFINITY)) return 0;
    const uint32_t bits = __float_as_uint(score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What is chosen: numbers above `key`, and the first `ties` of those equal to it, but never 0.
struct Cut {
    uint32_t key;
    uint32_t ties;
};

// What the threads of a block tell each other.
struct Scratch {
    uint32_t counts[256]; // of the digits
    Cut narrower;
    uint32_t above[WARPS]; // of each warp's numbers
    uint32_t equal[WARPS];
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
        const uint32_t count = counts[high - i], key = cut.key | (high - i) << shift;
        before += count;
        if (wanted > before) continue;
        // With the whole bin, the digits below do not matter.
        narrower = wanted == before ? Cut{max(key, 1u) - 1, 0} : Cut{key, wanted - (before - count)};
        return;
    }
}

// The cut that leaves the k greatest of n numbers, k > 0. Every thread of the block takes part.
template <typename Key> __device__ __forceinline__ Cut find_cut(Scratch &scratch, Key key, uint32_t n, uint32_t k) {
    Cut cut = {0, k};
    for (int shift = 24; shift >= 0 && cut.ties > 0; shift -= 8) {
        if (threadIdx.x < 256) scratch.counts[threadIdx.x] = 0;
        __syncthreads();
        for (uint32_t first = threadIdx.x; first < n; first += AT_ONCE * CHOOSERS) {
            uint32_t numbers[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const uint32_t i = first + j * CHOOSERS;
                numbers[j] = i < n ? key(i) : 0;
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const bool counts_here = numbers[j] != 0 && ((numbers[j] ^ cut.key) >> shift) >> 8 == 0;
                if (counts_here) atomicAdd(&scratch.counts[(numbers[j] >> shift) & 255], 1);
            }
        }
        __syncthreads();
        if (threadIdx.x < 32) narrow_cut(scratch.counts, shift, cut, scratch.narrower);
        __syncthreads();
        cut = scratch.narrower;
    }
    return cut;
}

// Calls `body` with the numbers of a warp's part [begin, end) by 32 of them, in their order, one for
// each lane; with 0 beyond the end.
template <typename Key, typename Body>
__device__ __forceinline__ void for_part(Key key, uint32_t begin, uint32_t end, Body body) {
    for (uint32_t first = begin + threadIdx.x % 32; first - threadIdx.x % 32 < end; first += AT_ONCE * 32) {
        uint32_t numbers[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) numbers[j] = first + 32 * j < end ? key(first + 32 * j) : 0;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) body(first + 32 * j, numbers[j]);
    }
}

// Writes the values of what the cut leaves, in the order of the numbers, then NONE up to `width`. Each
// warp has a part of the numbers, and finds out what those before it leave.
template <typename Key, typename Value>
__device__ __forceinline__ void write_chosen(Scratch &scratch, Key key, Value value, uint32_t n, const Cut &cut,
                                             uint32_t *out, uint32_t width) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t part = (n + CHOOSERS - 1) / CHOOSERS * 32, begin = min(warp * part, n), end = min(begin + part, n);
    uint32_t above = 0, equal = 0;
    for_part(key, begin, end, [&](uint32_t, uint32_t number) {
        above += number > cut.key;
        equal += number != 0 && number == cut.key;
    });
    above = __reduce_add_sync(FULL_WARP, above);
    equal = __reduce_add_sync(FULL_WARP, equal);
    if (lane == 0) {
        scratch.above[warp] = above;
        scratch.equal[warp] = equal;
    }
    __syncthreads();
    uint32_t all_above = scratch.above[lane], all_equal = scratch.equal[lane]; // of warp `lane`
    uint32_t above_before = __reduce_add_sync(FULL_WARP, lane < warp ? all_above : 0);
    uint32_t equal_before = __reduce_add_sync(FULL_WARP, lane < warp ? all_equal : 0);
    all_above = __reduce_add_sync(FULL_WARP, all_above);
    all_equal = __reduce_add_sync(FULL_WARP, all_equal);
    if (above + min(equal, cut.ties) > 0)
        for_part(key, begin, end, [&](uint32_t i, uint32_t number) {
            const uint32_t below = (1u << lane) - 1;
            const bool is_above = number > cut.key, is_equal = number != 0 && number == cut.key;
            const uint32_t aboves = __ballot_sync(FULL_WARP, is_above);
            const uint32_t equals = __ballot_sync(FULL_WARP, is_equal);
            const uint32_t own_equal = equal_before + __popc(equals & below);
            if (is_above || (is_equal && own_equal < cut.ties)) {
                const uint32_t place = above_before + __popc(aboves & below) + min(own_equal, cut.ties);
                if (place < width) out[place] = value(i);
            }
            above_before += __popc(aboves);
            equal_before += __popc(equals);
        });
    for (uint32_t i = all_above + min(all_equal, cut.ties) + threadIdx.x; i < width; i += CHOOSERS) out[i] = NONE;
}

// The numbers of a row's blocks: of their best visible entries, the greatest for the newest block.
template <typename Key>
__device__ __forceinline__ void find_best(const IndexArgs &args, const Row &row, Key key, uint32_t *best) {
    const uint32_t size = args.block_size;
    for (uint32_t b = threadIdx.x; b < row.blocks; b += CHOOSERS) {
        uint32_t most = b + 1 == row.blocks ? sortable(INFINITY) : 0;
        // The lanes of a warp do not begin at the same place of their blocks: with 8 entries, all banks.
        for (uint32_t i = 0, place = b / 4 % size; i < size; i++) {
            const uint32_t entry = b * size + place;
            if (entry < row.visible) most = max(most, key(entry));
            place = place + 1 < size ? place + 1 : 0;
        }
        best[b] = most;
    }
    __syncthreads();
}

// Chooses for a row with scores, by the numbers of its slots. `best` has room for those of its blocks.
template <typename Key>
__device__ __forceinline__ void choose_best(const IndexArgs &args, const Row &row, Scratch &scratch, Key key,
                                            uint32_t *best) {
    if (args.top_blocks > 0 && row.blocks > args.top_blocks) {
        find_best(args, row, key, best);
        const auto number = [&](uint32_t b) { return best[b]; };
        const Cut cut = find_cut(scratch, number, row.blocks, args.top_blocks);
        uint32_t *out = at<uint32_t>(args.candidates) + row.row * args.top_blocks;
        write_chosen(scratch, number, [](uint32_t b) { return b; }, row.blocks, cut, out, args.top_blocks);
    }
    const Cut cut = find_cut(scratch, key, row.slots, args.topk);
    write_chosen(scratch, key, [&](uint32_t slot) { return entry_of_slot(args, row, slot); }, row.slots, cut,
                 at<uint32_t>(args.choice) + row.row * args.topk, args.topk);
}

// Makes numbers of the scores of a row.
__device__ __forceinline__ void hold_numbers(const float *scores, uint32_t n, uint32_t *numbers) {
    for (uint32_t first = threadIdx.x; first < n; first += AT_ONCE * CHOOSERS) {
        float each[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const uint32_t i = first + j * CHOOSERS;
            each[j] = i < n ? __ldg(scores + i) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const uint32_t i = first + j * CHOOSERS;
            if (i < n) numbers[i] = sortable(each[j]);
        }
    }
    __syncthreads();
}

// One block per row of the chunk. Dynamic shared memory: `held` numbers.
extern "C" __global__ void __launch_bounds__(CHOOSERS, 2) index_choose(const IndexArgs args) {
    extern __shared__ uint32_t held[];
    __shared__ Scratch scratch;
    const Row row = row_of_chunk(args, blockIdx.x);
    if (args.top_blocks > 0 && row.blocks <= args.top_blocks) {
        uint32_t *out = at<uint32_t>(args.candidates) + row.row * args.top_blocks;
        for (uint32_t i = threadIdx.x; i < args.top_blocks; i += CHOOSERS) out[i] = i < row.blocks ? i : NONE;
    }
    if (!row.scored) {
        // All that there is.
        const auto entry = [&](uint32_t slot) { return entry_of_slot(args, row, slot); };
        const auto number = [&](uint32_t slot) { return entry(slot) == NONE ? 0u : 1u; };
        write_chosen(scratch, number, entry, row.slots, Cut{0, 0},
                     at<uint32_t>(args.choice) + row.row * args.topk, args.topk);
        return;
    }
    const float *scores = at<const float>(args.work) + (size_t)blockIdx.x * args.slots;
    const uint32_t blocks = args.top_blocks > 0 ? row.blocks : 0;
    if ((uint64_t)row.slots + blocks <= args.held) {
        hold_numbers(scores, row.slots, held);
        choose_best(args, row, scratch, [&](uint32_t slot) { return held[slot]; }, held + row.slots);
    } else {
        uint32_t *best = at<uint32_t>(args.best) + (size_t)blockIdx.x * args.blocks;
        choose_best(args, row, scratch, [&](uint32_t slot) { return sortable(__ldg(scores + slot)); }, best);
    }
}
