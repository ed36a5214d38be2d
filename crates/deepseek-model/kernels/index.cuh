// What the indexer's kernels take, and what a row may choose from.
//
// `index_scores` and its kin score the entries that a row may choose from, `index_choose` chooses. They
// number these entries by slots: all visible entries, or those of the blocks that were kept before. A
// slot may be vacant. Slots ascend with the entries, so the lower of two slots is the lower entry.
//
// Rows are taken in chunks, because the scores between the two kernels take memory.
#pragma once

#include "tiles.cuh"

#define THREADS 256 // of a block that scores

struct IndexArgs {
    uint64_t queries;      // T [rows, heads, dim]
    uint64_t head_weights; // T [rows, heads]
    uint64_t positions;    // u32 [rows]
    uint64_t requests;     // u32 [rows]; NONE in pad rows, which see nothing
    uint64_t keys;         // T [pool_rows, dim]
    uint64_t pages;        // u32 [n_requests, max_pages]
    uint64_t within;       // u32 [rows, kept]: the blocks a row may choose from, up to the first NONE
    uint64_t work;         // f32 [rows of a chunk, slots]: scores, -inf for a vacant slot; written
    uint64_t best;         // u32 [rows of a chunk, blocks]: room for numbers of blocks; written
    uint64_t scores;       // f32 [rows, most]: a copy of the scores, by entry; written. 0: not wanted
    uint64_t choice;       // u32 [rows, topk], ascending, then NONE; written
    uint64_t candidates;   // u32 [rows, top_blocks], ascending, then NONE; written
    uint64_t fault;        // u32 [1]: takes the minimum with `code` if a score is not a number
    uint32_t first_row;    // of the chunk
    uint32_t tiles;        // blocks that share the slots of a row
    uint32_t slots;        // at most kept * block_size, if blocks were kept
    uint32_t blocks;
    uint32_t most;         // entries that any row sees
    uint32_t ratio;        // tokens of an entry
    uint32_t topk;         // at least 1
    uint32_t top_blocks;   // to keep; 0: none are
    uint32_t kept;         // blocks kept before; 0: a row may choose from all it sees
    uint32_t block_size;   // entries of a block
    uint32_t heads;
    uint32_t dim;          // a multiple of 4
    uint32_t n_requests;
    uint32_t max_pages;
    uint32_t per_page;
    uint32_t pool_rows;
    uint32_t code;
    uint32_t chunk_rows;
    float scale;           // of a head's weight
    uint32_t held;         // numbers that index_choose has room for in shared memory
};

// A row of a chunk, and what it may choose from.
struct Row {
    size_t row;
    uint32_t request;
    uint32_t visible; // entries
    uint32_t blocks;  // of visible entries
    uint32_t slots;
    bool scored;      // whether scores decide anything
};

__device__ __forceinline__ Row row_of_chunk(const IndexArgs &args, uint32_t index) {
    Row row;
    row.row = (size_t)args.first_row + index;
    row.request = at<const uint32_t>(args.requests)[row.row];
    const uint32_t position = at<const uint32_t>(args.positions)[row.row];
    row.visible = row.request < args.n_requests ? min((position + 1) / args.ratio, args.most) : 0;
    row.blocks = (row.visible + args.block_size - 1) / args.block_size;
    row.slots = row.visible;
    // The blocks of the list are among those of the row, each once.
    if (args.kept > 0) row.slots = min(row.blocks * args.block_size, args.slots);
    const bool some_blocks = args.top_blocks > 0 && row.blocks > args.top_blocks;
    row.scored = row.visible > 0 && (row.visible > args.topk || some_blocks || args.scores != 0);
    return row;
}

// The entry of a slot, NONE if the slot is vacant.
__device__ __forceinline__ uint32_t entry_of_slot(const IndexArgs &args, const Row &row, uint32_t slot) {
    if (slot >= row.slots) return NONE;
    if (args.kept == 0) return slot;
    const uint32_t *within = at<const uint32_t>(args.within) + row.row * args.kept;
    const uint32_t block = within[slot / args.block_size];
    if (block >= row.blocks) return NONE;
    const uint32_t entry = block * args.block_size + slot % args.block_size;
    return entry < row.visible ? entry : NONE;
}
