// What the attention kernels for tensor cores share: tiles of keys and queries in shared memory, the
// softmax of a tile's scores, and sums of values that a warp holds in registers. Weights are rounded to
// bf16 before they multiply values; else as attention.cu.
#pragma once

#include "attention.cuh"
#include "tensor_core.cuh"

#define DIM 512
#define KEYS 64
#define WARPS (THREADS / 32)
#define CHUNK 8                          // values of a copy, 16 bytes
#define CHUNKS (DIM / CHUNK)             // of a row
#define COPIERS (THREADS / KEYS)         // threads that copy a key
#define OWN (DIM / WARPS)                // channels of a warp
#define SCORE_STRIDE (KEYS + 16)         // of a head's scores: two heads fill all banks
#define WEIGHT_STRIDE (KEYS + CHUNK)     // of a head's weights: eight heads fill all banks

// Of a block that takes HEADS heads, in dynamic shared memory.
template <int HEADS> struct Shared {
    bf16 queries[HEADS * DIM];
    bf16 keys[2][KEYS * DIM];
    float scores[HEADS * SCORE_STRIDE];
    bf16 weights[HEADS * WEIGHT_STRIDE];
    float factors[HEADS];
    bool there[2][KEYS];
};

// Where channel `c` of a row lies, in rows of DIM. Chunks change places within groups of eight, so
// that the same chunk of eight rows lies in all banks.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t c) {
    return row * DIM + ((c / CHUNK ^ row % 8) * CHUNK + c % CHUNK);
}

// Begins to copy the keys from number `first` on; one that there is not is filled with zeros.
__device__ __forceinline__ void copy_keys(const AttentionArgs &args, const RowKeys &keys, uint32_t first,
                                          bf16 *tile, bool *there) {
    const uint32_t key = threadIdx.x / COPIERS, part = threadIdx.x % COPIERS;
    const bf16 *source = key_at<bf16>(args, keys, first + key);
    if (part == 0) there[key] = source != nullptr;
#pragma unroll
    for (uint32_t chunk = part; chunk < CHUNKS; chunk += COPIERS) {
        bf16 *to = tile + swizzled(key, chunk * CHUNK);
        if (source)
            copy_async(to, source + chunk * CHUNK);
        else
            *reinterpret_cast<uint4 *>(to) = make_uint4(0, 0, 0, 0);
    }
}

// Begins to copy the queries of `heads` heads; those up to HEADS are filled with zeros.
template <int HEADS> __device__ __forceinline__ void copy_queries(const bf16 *q, uint32_t heads, bf16 *queries) {
    for (uint32_t i = threadIdx.x; i < HEADS * CHUNKS; i += THREADS) {
        const uint32_t head = i / CHUNKS, c = i % CHUNKS * CHUNK;
        bf16 *to = queries + swizzled(head, c);
        if (head < heads)
            copy_async(to, q + (size_t)head * DIM + c);
        else
            *reinterpret_cast<uint4 *>(to) = make_uint4(0, 0, 0, 0);
    }
}

// The running softmax of one head, which PARTS neighbouring threads have: each takes four keys of every
// 4 * PARTS. In powers of two.
template <int HEADS> struct Softmax {
    static constexpr int PARTS = THREADS / HEADS;
    static constexpr int FOURS = KEYS / 4 / PARTS; // of a thread
    float top;
    float total; // of this thread's keys, and of the sink in the first one if that counts

    // No score is below the sink as far as `top` goes, so that it is a number whatever keys there are.
    __device__ __forceinline__ void start(float sink, bool sink_counts) {
        top = sink * LOG2_E;
        total = sink_counts && threadIdx.x % PARTS == 0 ? 1.0f : 0.0f;
    }

    // Turns the scores of a tile into weights, and says how much older sums shrink.
    __device__ __forceinline__ void add(const float *scores, const bool *there, float scale, bf16 *weights,
                                        float *factors) {
        const uint32_t head = threadIdx.x / PARTS, part = threadIdx.x % PARTS * 4;
        float values[4 * FOURS];
        float most = top;
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            const uint32_t k = part + 4 * PARTS * i;
            const float4 four = *reinterpret_cast<const float4 *>(scores + head * SCORE_STRIDE + k);
            const float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                values[4 * i + j] = there[k + j] ? each[j] * (scale * LOG2_E) : -INFINITY;
                most = fmaxf(most, values[4 * i + j]);
            }
        }
#pragma unroll
        for (int step = 1; step < PARTS; step *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, step));
        const float factor = exp2f(top - most);
        total *= factor;
        top = most;
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            __nv_bfloat162 pairs[2];
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                const float low = exp2f(values[4 * i + j] - most), high = exp2f(values[4 * i + j + 1] - most);
                total += low + high;
                pairs[j / 2] = __floats2bfloat162_rn(low, high);
            }
            *reinterpret_cast<uint2 *>(weights + head * WEIGHT_STRIDE + part + 4 * PARTS * i) =
                *reinterpret_cast<const uint2 *>(pairs);
        }
        if (part == 0) factors[head] = factor;
    }

    // The total of the head, to all of its threads.
    __device__ __forceinline__ float finish() {
#pragma unroll
        for (int step = 1; step < PARTS; step *= 2) total += __shfl_xor_sync(FULL_WARP, total, step);
        return total;
    }
};

// A warp's sums of weighted values: of all heads, its OWN channels.
template <int HEADS> struct Values {
    float sums[HEADS / 16][OWN / 8][4];

    __device__ __forceinline__ void scale(const float *factors) {
        const uint32_t row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < HEADS / 16; i++) {
            const float low = factors[16 * i + row], high = factors[16 * i + 8 + row];
#pragma unroll
            for (int j = 0; j < OWN / 8; j++) {
                sums[i][j][0] *= low;
                sums[i][j][1] *= low;
                sums[i][j][2] *= high;
                sums[i][j][3] *= high;
            }
        }
    }

    __device__ __forceinline__ void add(const bf16 *weights, const bf16 *tile) {
        const uint32_t lane = threadIdx.x % 32, first = threadIdx.x / 32 * OWN;
        const uint32_t head = lane % 16, column = lane / 16 * 8;
        // Turned: rows of the matrices are keys.
        const uint32_t key = lane % 16, channel = first + lane / 16 * 8;
#pragma unroll
        for (uint32_t k = 0; k < KEYS; k += 16) {
            uint32_t a[HEADS / 16][4];
#pragma unroll
            for (int i = 0; i < HEADS / 16; i++)
                load_matrices(a[i], weights + (16 * i + head) * WEIGHT_STRIDE + k + column);
#pragma unroll
            for (int j = 0; j < OWN / 16; j++) {
                uint32_t b[4];
                load_turned(b, tile + swizzled(k + key, channel + 16 * j));
#pragma unroll
                for (int i = 0; i < HEADS / 16; i++) {
                    multiply_add(sums[i][2 * j], a[i], b[0], b[1]);
                    multiply_add(sums[i][2 * j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }

    // Calls `body` with a head, a channel, and the sums of that channel and of the next one.
    template <typename Body> __device__ __forceinline__ void for_pairs(Body body) const {
        const uint32_t lane = threadIdx.x % 32, first = threadIdx.x / 32 * OWN + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < HEADS / 16; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < OWN / 8; j++)
                    body(16 * i + 8 * half + lane / 4, first + 8 * j, sums[i][j][2 * half], sums[i][j][2 * half + 1]);
    }
};

// Adds up the keys of a row from number `begin` to `end`. The queries of HEADS heads are there or being
// copied; `multiply` makes the scores of a tile of them. While a tile is multiplied, the next one is
// copied.
template <int HEADS, typename Multiply>
__device__ __forceinline__ void add_keys(const AttentionArgs &args, const RowKeys &keys, uint32_t begin,
                                         uint32_t end, Shared<HEADS> &shared, Softmax<HEADS> &softmax,
                                         Values<HEADS> &values, Multiply multiply) {
    copy_keys(args, keys, begin, shared.keys[0], shared.there[0]);
    close_copies();
    uint32_t stage = 0;
    for (uint32_t start = begin; start < end; start += KEYS, stage ^= 1) {
        wait_copies<0>();
        // The tile is there for all warps, and none still reads the other one.
        __syncthreads();
        if (start + KEYS < end)
            copy_keys(args, keys, start + KEYS, shared.keys[stage ^ 1], shared.there[stage ^ 1]);
        close_copies();
        multiply(shared.queries, shared.keys[stage], shared.scores);
        __syncthreads();
        softmax.add(shared.scores, shared.there[stage], args.scale, shared.weights, shared.factors);
        __syncthreads();
        values.scale(shared.factors);
        values.add(shared.weights, shared.keys[stage]);
    }
}
