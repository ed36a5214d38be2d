// What the kernels that score on tensor cores share: the heads that they are made for, and how products
// become scores.
#pragma once

#include "index.cuh"
#include "tensor_core.cuh"

#define HEADS 32
#define DIM 128
#define CHUNK 8              // values of a copy, 16 bytes
#define CHUNKS (DIM / CHUNK) // of a head or key
#define OWN 64               // keys that a warp scores at a time

// The lane's head weights: those of heads l / 4, and 8, 16 and 24 on.
__device__ __forceinline__ void load_head_weights(const IndexArgs &args, size_t row, float (&head_weights)[4]) {
    const bf16 *from = at<const bf16>(args.head_weights) + row * HEADS + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) head_weights[i] = load(from + 8 * i) * args.scale;
}

// weight * relu(product), summed over the four heads of a lane, for the two keys that it has of a
// matrix of products: `low` is of heads l / 4 and 8 on, `high` of those 16 on.
__device__ __forceinline__ void weigh(const float (&low)[4], const float (&high)[4],
                                      const float (&head_weights)[4], float (&scores)[2]) {
#pragma unroll
    for (int column = 0; column < 2; column++) {
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = (i < 2 ? low : high)[i % 2 * 2 + column];
            // fmaxf would turn a NaN into 0 and hide it.
            score += head_weights[i] * (x <= 0.0f ? 0.0f : x);
        }
        scores[column] = score;
    }
}

// Sums over the lanes that have a key's other heads: lane l gets the scores of keys 2 l and 2 l + 1. Of
// the columns that both lanes of a pair have, the upper lane goes on with the upper half: in the end
// lane l has those of matrix l / 4.
__device__ __forceinline__ float2 fold_scores(float (&scores)[OWN / 8][2]) {
#pragma unroll
    for (int held = OWN / 16, step = 16; held > 0; held /= 2, step /= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int j = 0; j < held; j++)
#pragma unroll
            for (int column = 0; column < 2; column++) {
                const float kept = upper ? scores[j + held][column] : scores[j][column];
                const float given = upper ? scores[j][column] : scores[j + held][column];
                scores[j][column] = kept + __shfl_xor_sync(FULL_WARP, given, step);
            }
    }
    return make_float2(scores[0][0], scores[0][1]);
}

// Writes the score of a slot that holds `entry`, or that none does.
__device__ __forceinline__ void write_score(const IndexArgs &args, const Row &row, float *work, uint32_t slot,
                                            uint32_t entry, bool there, float score) {
    if (slot >= row.slots) return;
    work[slot] = there ? score : -INFINITY;
    if (!there) return;
    if (isnan(score)) atomicMin(at<uint32_t>(args.fault), args.code);
    if (args.scores != 0) at<float>(args.scores)[row.row * args.most + entry] = score;
}
