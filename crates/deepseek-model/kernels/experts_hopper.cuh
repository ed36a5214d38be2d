// What the grouped products of the routed experts on Hopper have in common.
#pragma once

#include "hopper.cuh"

struct GroupedGemmArgs {
    uint64_t x;       // bf16 [rows, inner]
    uint64_t order;   // u32 [choices]: place p takes row order[p] / k of x; 0: row p
    uint64_t weights; // bf16 [experts, width, inner]
    uint64_t tiles;   // u32 [slots, 3], as sort_choices wrote them for the kernel's tiles
    uint64_t out;     // bf16 [choices, width], or of a swiglu [choices, width / 2], written at the
                      // places of the tiles
    uint32_t k;
    uint32_t inner; // a multiple of 64. All addresses are multiples of 16
    uint32_t width; // a multiple of 64, of a swiglu of 128
    uint32_t slots;
    uint32_t column_tiles; // tiles of a slot: each takes so many rows of its matrix
    float limit;           // of a swiglu; INFINITY: none
    uint32_t height; // rows of its matrix that a tile takes: for experts_hopper.cu as many as it has in a
                     // stage, else a multiple of 16 up to that
    uint32_t pad;
};

// Slots whose tiles of the same columns are neighbours.
#define GROUP 8u

// The part of `out` that a block computes at a time.
struct Tile {
    uint32_t expert; // or NONE, where there is nothing to compute
    uint32_t first;  // place
    uint32_t rows;   // places
    uint32_t column; // of the column tiles

    // Tile `index` of all. Blocks that run together take some slots and some of their columns, so that
    // most of what one reads is read by others at the same time.
    __device__ static Tile of(const GroupedGemmArgs &args, uint32_t index) {
        if (index >= args.slots * args.column_tiles) return {NONE, 0, 0, 0};
        const uint32_t whole = GROUP * args.column_tiles;
        const uint32_t start = index / whole * GROUP, rest = index % whole;
        const uint32_t height = min(GROUP, args.slots - start);
        const uint32_t slot = start + rest % height;
        const uint32_t *tile = at<const uint32_t>(args.tiles) + 3 * (size_t)slot;
        return {tile[0], tile[1], tile[2], rest / height};
    }
};

// The stage of STAGES that comes next, and how often it has been filled before.
template <uint32_t STAGES> struct Turns {
    uint32_t stage = 0, round = 0;

    __device__ __forceinline__ void next() {
        stage++;
        if (stage == STAGES) {
            stage = 0;
            round++;
        }
    }
};
