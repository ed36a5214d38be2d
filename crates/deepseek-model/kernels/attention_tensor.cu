// Attention on tensor cores, for many rows of bf16.
//
// A block takes HEADS heads of one row, whose keys they share. It goes through the keys in tiles of
// KEYS. Products of a tile with the queries are spread over the warps by heads and keys, sums of
// values by channels: each warp holds all heads of its channels in registers.
#include "attention_tensor.cuh"

#define HEADS 64

// Products of all heads with a tile's keys, to `scores`. A warp takes 32 heads and 16 keys.
__device__ __forceinline__ void multiply_keys(const bf16 *queries, const bf16 *tile, float *scores) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t first_head = warp / 4 * 32, first_key = warp % 4 * 16;
    // Rows and columns of the 8 x 8 matrices whose addresses this lane gives.
    const uint32_t head = first_head + lane % 16, head_column = lane / 16 * 8;
    const uint32_t key = first_key + lane % 8 + lane / 16 * 8, key_column = lane / 8 % 2 * 8;
    float sums[2][2][4] = {};
#pragma unroll 8
    for (uint32_t c = 0; c < DIM; c += 16) {
        uint32_t a[2][4], b[4];
        load_matrices(a[0], queries + swizzled(head, c + head_column));
        load_matrices(a[1], queries + swizzled(head + 16, c + head_column));
        load_matrices(b, tile + swizzled(key, c + key_column));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            multiply_add(sums[i][0], a[i], b[0], b[1]);
            multiply_add(sums[i][1], a[i], b[2], b[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t h = first_head + i * 16 + half * 8 + lane / 4;
                const uint32_t k = first_key + j * 8 + lane % 4 * 2;
                *reinterpret_cast<float2 *>(scores + h * SCORE_STRIDE + k) =
                    make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
            }
}

// Block b takes heads HEADS * (b % groups) on of row b / groups.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_tensor(const AttentionArgs args) {
    extern __shared__ __align__(128) uint8_t memory[];
    Shared<HEADS> &shared = *reinterpret_cast<Shared<HEADS> *>(memory);
    const uint32_t groups = (args.heads + HEADS - 1) / HEADS;
    const size_t row = blockIdx.x / groups;
    const uint32_t first_head = blockIdx.x % groups * HEADS;
    const uint32_t heads = min((uint32_t)HEADS, args.heads - first_head);
    const size_t place = (row * args.heads + first_head) * DIM;
    bf16 *out = at<bf16>(args.out) + place;
    const uint32_t request = at<const uint32_t>(args.requests)[row];
    if (request >= args.n_requests) {
        for (uint32_t i = threadIdx.x; i < heads * DIM; i += THREADS) store(out + i, 0.0f);
        return;
    }
    copy_queries<HEADS>(at<const bf16>(args.q) + place, heads, shared.queries);
    const RowKeys keys = keys_of_row(args, row, request);
    Softmax<HEADS> softmax;
    const uint32_t own_head = threadIdx.x / softmax.PARTS;
    softmax.start(own_head < heads ? at<const float>(args.sink)[first_head + own_head] : 0.0f, true);
    Values<HEADS> values = {};
    add_keys(args, keys, 0, keys.in_window + keys.chosen, shared, softmax, values, multiply_keys);
    const float total = softmax.finish();
    __syncthreads();
    if (threadIdx.x % softmax.PARTS == 0) shared.factors[own_head] = 1.0f / total;
    __syncthreads();
    values.scale(shared.factors);
    values.for_pairs([&](uint32_t head, uint32_t c, float low, float high) {
        if (head < heads)
            *reinterpret_cast<__nv_bfloat162 *>(out + (size_t)head * DIM + c) = __floats2bfloat162_rn(low, high);
    });
}
