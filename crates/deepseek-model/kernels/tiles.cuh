// Products of a few keys with the queries of many heads, and where the keys lie.
#pragma once

#include "common.cuh"

#define FULL_WARP 0xffffffffu

// A row that there is not.
#define NO_ROW ((size_t)-1)

// The row of a pool that holds an entry of the request with these pages; NO_ROW if it has no such
// page or the pool no such row.
__device__ __forceinline__ size_t entry_row(uint32_t entry, const uint32_t *pages, uint32_t max_pages,
                                            uint32_t per_page, uint32_t pool_rows) {
    const uint32_t index = entry / per_page;
    if (index >= max_pages) return NO_ROW;
    const size_t row = (size_t)pages[index] * per_page + entry % per_page;
    return row < pool_rows ? row : NO_ROW;
}

// Four neighbouring values, at an address that is a multiple of their size.
template <typename T> __device__ __forceinline__ float4 load4(const T *p);
template <> __device__ __forceinline__ float4 load4<float>(const float *p) {
    return *reinterpret_cast<const float4 *>(p);
}
template <> __device__ __forceinline__ float4 load4<bf16>(const bf16 *p) {
    const uint2 raw = *reinterpret_cast<const uint2 *>(p);
    return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
                       __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u));
}

// Keys that a warp multiplies at a time.
#define WARP_KEYS 4

// A warp multiplies its keys with the queries of 4 groups of HEADS heads. Lane 8 g + p takes part p
// of the channels (every eighth four of them) for the heads of group g, so that 8 lanes read 128
// neighbouring bytes of shared memory and a value that was read serves WARP_KEYS or HEADS products.
//
// The products are key-major: that of key k and head h is number k * HEADS + h. When all are summed
// over the parts, lane p holds numbers p * PER_LANE on; with PER_LANE < 1, two lanes hold each.
// The order of a sum does not depend on HEADS.
template <int HEADS> struct Products {
    static constexpr int COUNT = WARP_KEYS * HEADS;
    static constexpr int PER_LANE = COUNT >= 8 ? COUNT / 8 : 1;
    float sums[COUNT];

    // `queries` are those of the lane's group, f32 [HEADS, dim] in shared memory; `key(k, c)` gives
    // channels c to c + 3 of key k. dim is a multiple of 4.
    template <typename Key>
    __device__ __forceinline__ void take(const float *queries, uint32_t dim, Key key) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) sums[i] = 0.0f;
        for (uint32_t c = 4 * (threadIdx.x % 8); c < dim; c += 32) {
            float4 keys[WARP_KEYS];
#pragma unroll
            for (int k = 0; k < WARP_KEYS; k++) keys[k] = key(k, c);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const float4 q = *reinterpret_cast<const float4 *>(queries + (size_t)h * dim + c);
#pragma unroll
                for (int k = 0; k < WARP_KEYS; k++) {
                    float &sum = sums[k * HEADS + h];
                    sum = fmaf(q.x, keys[k].x, sum);
                    sum = fmaf(q.y, keys[k].y, sum);
                    sum = fmaf(q.z, keys[k].z, sum);
                    sum = fmaf(q.w, keys[k].w, sum);
                }
            }
        }
        fold<COUNT, 4>();
    }

    // Sums over the lanes that differ in STEP and the steps below it. Of the HELD sums that both
    // lanes of a pair have, the upper lane goes on with the upper half.
    template <int HELD, int STEP> __device__ __forceinline__ void fold() {
        constexpr int HALF = HELD > 1 ? HELD / 2 : 1;
        const bool upper = threadIdx.x & STEP;
        if constexpr (HELD == 1) {
            sums[0] += __shfl_xor_sync(FULL_WARP, sums[0], STEP);
        } else {
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                const float kept = upper ? sums[i + HALF] : sums[i];
                const float given = upper ? sums[i] : sums[i + HALF];
                sums[i] = kept + __shfl_xor_sync(FULL_WARP, given, STEP);
            }
        }
        if constexpr (STEP > 1) fold<HALF, STEP / 2>();
    }

    // The key, and the head within the group, of the lane's i-th sum.
    __device__ __forceinline__ static uint32_t key_of(int i) { return number(i) / HEADS; }
    __device__ __forceinline__ static uint32_t head_of(int i) { return number(i) % HEADS; }
    __device__ __forceinline__ static uint32_t number(int i) {
        return threadIdx.x % 8 * COUNT / 8 + i;
    }
};
