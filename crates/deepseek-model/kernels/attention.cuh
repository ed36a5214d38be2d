// What the attention kernels take, and where the keys of a row lie.
#pragma once

#include "tiles.cuh"

#define THREADS 256

struct AttentionArgs {
    uint64_t q;         // T [rows, heads, dim], rotated
    uint64_t positions; // u32 [rows]
    uint64_t requests;  // u32 [rows]; NONE in pad rows, whose results are zero
    uint64_t spans;     // u32 [n_requests, 4] of the entering rows: slot, first row, first position, rows
    uint64_t kv_start;  // u32 [n_requests]: no window key is read below it, but a row's own
    uint64_t current;   // T [entering, dim]: window keys of this step
    uint64_t ring;      // T [ring_rows, dim], of earlier steps: row slot * capacity + position % capacity
    uint64_t choice;    // u32 [rows, width]: entries, up to the first NONE
    uint64_t pool;      // T [pool_rows, dim]
    uint64_t pages;     // u32 [n_requests, max_pages]
    uint64_t sink;      // f32 [heads]
    uint64_t out;       // T [rows, heads, dim], written
    uint64_t sums;      // f32 [rows, splits, heads, dim]: what each split adds up; written if keys are split
    uint64_t totals;    // f32 [rows, splits, heads, 2]: its greatest score and its weights; the same
    uint32_t heads;
    uint32_t dim; // a multiple of 4, at most 512; DIM of the kernels for tensor cores
    uint32_t n_requests;
    uint32_t entering;
    uint32_t ring_rows;
    uint32_t capacity;
    uint32_t window;
    uint32_t width; // 0: no entries, and neither pool nor pages
    uint32_t pool_rows;
    uint32_t per_page;
    uint32_t max_pages;
    uint32_t splits;     // of the keys of a row; 0: they are not split
    uint32_t split_keys; // of a split, a multiple of KEYS of the kernel
    float scale;         // of a product
};

// Where the keys of one row lie: its window, oldest first, then its chosen entries.
struct RowKeys {
    const uint32_t *span;
    const uint32_t *choice;
    const uint32_t *pages;
    uint32_t oldest; // position
    uint32_t in_window;
    uint32_t chosen;
};

// The number of entries before the first NONE. Every thread of the block takes part.
__device__ __forceinline__ uint32_t count_chosen(const uint32_t *choice, uint32_t width) {
    __shared__ uint32_t end;
    if (threadIdx.x == 0) end = width;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < width; i += THREADS) {
        if (choice[i] == NONE) {
            atomicMin(&end, i);
            break;
        }
    }
    __syncthreads();
    return end;
}

__device__ __forceinline__ RowKeys keys_of_row(const AttentionArgs &args, size_t row, uint32_t request) {
    const uint32_t pos = at<const uint32_t>(args.positions)[row];
    const uint32_t start = at<const uint32_t>(args.kv_start)[request];
    const uint32_t oldest = max(pos + 1 > args.window ? pos + 1 - args.window : 0, start);
    RowKeys keys;
    keys.span = at<const uint32_t>(args.spans) + 4 * (size_t)request;
    keys.choice = at<const uint32_t>(args.choice) + row * args.width;
    keys.pages = at<const uint32_t>(args.pages) + (size_t)request * args.max_pages;
    keys.oldest = min(oldest, pos);
    keys.in_window = min(pos + 1 - keys.oldest, args.window);
    keys.chosen = count_chosen(keys.choice, args.width);
    return keys;
}

// A key by its number among those of the row; null if there is no such key.
template <typename T>
__device__ __forceinline__ const T *key_at(const AttentionArgs &args, const RowKeys &keys, uint32_t index) {
    if (index >= keys.in_window) {
        index -= keys.in_window;
        if (index >= keys.chosen) return nullptr;
        const size_t row = entry_row(keys.choice[index], keys.pages, args.max_pages, args.per_page, args.pool_rows);
        return row == NO_ROW ? nullptr : at<const T>(args.pool) + row * args.dim;
    }
    const uint32_t pos = keys.oldest + index;
    const uint32_t slot = keys.span[0], first_row = keys.span[1], first_pos = keys.span[2];
    if (pos >= first_pos) {
        const size_t row = (size_t)first_row + (pos - first_pos);
        return row < args.entering ? at<const T>(args.current) + row * args.dim : nullptr;
    }
    const size_t row = (size_t)slot * args.capacity + pos % args.capacity;
    return row < args.ring_rows ? at<const T>(args.ring) + row * args.dim : nullptr;
}
