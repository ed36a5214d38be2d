// Attention of each row over its window and its chosen entries, with a sink. A key is a value too,
// and one for all heads.
//
// A block takes some heads of one row. It goes through the row's keys in tiles, which it holds in
// shared memory for all of its heads, with a running softmax: what was summed so far is scaled down
// whenever a greater score comes up.
#include "attention.cuh"

#define WARPS (THREADS / 32)
#define TILE (WARPS * WARP_KEYS)          // keys; one for each lane of a softmax
#define CHANNELS 2                        // of a thread, THREADS apart
#define WEIGHT_STRIDE(heads) ((heads) + 4) // of a key's weights: apart in banks, aligned to 16 bytes

static_assert(TILE == 32, "a softmax has one lane for each key of a tile");

// Copies the warp's WARP_KEYS keys, those from `first` on, to its rows of the tile. Returns to every
// lane the address of key lane % WARP_KEYS, 0 if there is none; such a key is filled with zeros.
template <typename T>
__device__ __forceinline__ unsigned long long load_keys(const AttentionArgs &args, const RowKeys &keys,
                                                        uint32_t first, float *rows) {
    const uint32_t lane = threadIdx.x % 32;
    const T *mine = key_at<T>(args, keys, first + lane % WARP_KEYS);
    const unsigned long long address = reinterpret_cast<unsigned long long>(mine);
    const T *sources[WARP_KEYS];
#pragma unroll
    for (int k = 0; k < WARP_KEYS; k++)
        sources[k] = reinterpret_cast<const T *>(__shfl_sync(FULL_WARP, address, k));
    for (uint32_t c = 4 * lane; c < args.dim; c += 128) {
        // All loads before all stores, which the compiler would not exchange.
        float4 values[WARP_KEYS];
#pragma unroll
        for (int k = 0; k < WARP_KEYS; k++)
            values[k] = sources[k] ? load4(sources[k] + c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int k = 0; k < WARP_KEYS; k++)
            *reinterpret_cast<float4 *>(rows + (size_t)k * args.dim + c) = values[k];
    }
    __syncwarp();
    return address;
}

// Scores of the warp's keys, to `weights`: -inf for a key that there is not.
template <int HEADS>
__device__ __forceinline__ void score_keys(const AttentionArgs &args, const float *queries, const float *rows,
                                           unsigned long long address, float *weights) {
    constexpr int GROUP = HEADS / 4;
    const uint32_t lane = threadIdx.x % 32, group = lane / 8;
    Products<GROUP> products;
    products.take(queries + (size_t)group * GROUP * args.dim, args.dim, [&](int k, uint32_t c) {
        return *reinterpret_cast<const float4 *>(rows + (size_t)k * args.dim + c);
    });
#pragma unroll
    for (int i = 0; i < Products<GROUP>::PER_LANE; i++) {
        const uint32_t key = products.key_of(i), head = group * GROUP + products.head_of(i);
        const bool there = __shfl_sync(FULL_WARP, address, key) != 0;
        // Where two lanes hold a sum, the even one writes it.
        if (Products<GROUP>::COUNT >= 8 || lane % 2 == 0)
            weights[key * WEIGHT_STRIDE(HEADS) + head] = there ? products.sums[i] * args.scale : -INFINITY;
    }
}

// The running softmax of the heads that a warp has: head warp + WARPS * i is its i-th.
template <int HEADS> struct Softmax {
    static constexpr int COUNT = (HEADS + WARPS - 1) / WARPS;
    float tops[COUNT];
    float totals[COUNT];

    // With the sink: a key without a value. `heads` of the block's heads are there.
    __device__ __forceinline__ void start(const float *sink, uint32_t heads) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const uint32_t head = threadIdx.x / 32 + WARPS * i;
            tops[i] = head < heads ? sink[head] : 0.0f;
            totals[i] = 1.0f;
        }
    }

    // Turns the scores of a tile into weights, and says how much older sums shrink.
    __device__ __forceinline__ void add(float *weights, float *factors) {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const uint32_t head = threadIdx.x / 32 + WARPS * i;
            if (head >= HEADS) continue;
            float *weight = weights + lane * WEIGHT_STRIDE(HEADS) + head;
            const float score = *weight;
            const float top = fmaxf(tops[i], warp_max(score));
            const float power = expf(score - top), factor = expf(tops[i] - top);
            totals[i] = totals[i] * factor + warp_sum(power);
            tops[i] = top;
            *weight = power;
            if (lane == 0) factors[head] = factor;
        }
    }

    // The inverse of each head's denominator.
    __device__ __forceinline__ void finish(float *factors) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const uint32_t head = threadIdx.x / 32 + WARPS * i;
            if (head < HEADS && threadIdx.x % 32 == 0) factors[head] = 1.0f / totals[i];
        }
    }
};

// sums = sums * factor + weights * keys, over `n` keys of a tile, for the thread's channels.
template <int HEADS>
__device__ __forceinline__ void add_values(float (&sums)[HEADS][CHANNELS], const float *tile, uint32_t dim,
                                           const float *weights, const float *factors, uint32_t n) {
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) sums[h][i] *= factors[h];
    for (uint32_t k = 0; k < n; k++) {
        float values[CHANNELS];
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) {
            const uint32_t c = threadIdx.x + THREADS * i;
            values[i] = c < dim ? tile[(size_t)k * dim + c] : 0.0f;
        }
#pragma unroll
        for (int h = 0; h < HEADS; h += 4) {
            const float4 w = *reinterpret_cast<const float4 *>(weights + k * WEIGHT_STRIDE(HEADS) + h);
#pragma unroll
            for (int i = 0; i < CHANNELS; i++) {
                sums[h][i] = fmaf(w.x, values[i], sums[h][i]);
                sums[h + 1][i] = fmaf(w.y, values[i], sums[h + 1][i]);
                sums[h + 2][i] = fmaf(w.z, values[i], sums[h + 2][i]);
                sums[h + 3][i] = fmaf(w.w, values[i], sums[h + 3][i]);
            }
        }
    }
}

// Block b takes heads HEADS * (b % groups) on of row b / groups. Dynamic shared memory: the queries
// of HEADS heads and the keys of a tile, f32.
template <typename T, int HEADS> __device__ __forceinline__ void attend(const AttentionArgs &args) {
    extern __shared__ __align__(16) float shared[];
    __shared__ __align__(16) float weights[TILE * WEIGHT_STRIDE(HEADS)];
    __shared__ float factors[HEADS];
    const uint32_t dim = args.dim, warp = threadIdx.x / 32;
    const uint32_t groups = (args.heads + HEADS - 1) / HEADS;
    const size_t row = blockIdx.x / groups;
    const uint32_t first_head = blockIdx.x % groups * HEADS;
    const uint32_t heads = min((uint32_t)HEADS, args.heads - first_head);
    const size_t place = (row * args.heads + first_head) * dim;
    T *out = at<T>(args.out) + place;
    const uint32_t request = at<const uint32_t>(args.requests)[row];
    if (request >= args.n_requests) {
        for (uint32_t i = threadIdx.x; i < heads * dim; i += THREADS) store(out + i, 0.0f);
        return;
    }
    float *queries = shared, *tile = shared + HEADS * dim;
    const T *q = at<const T>(args.q) + place;
    for (uint32_t i = threadIdx.x; i < HEADS * dim; i += THREADS)
        queries[i] = i < heads * dim ? load(q + i) : 0.0f;
    const RowKeys keys = keys_of_row(args, row, request);
    __syncthreads();
    Softmax<HEADS> softmax;
    softmax.start(at<const float>(args.sink) + first_head, heads);
    float sums[HEADS][CHANNELS] = {};
    const uint32_t n = keys.in_window + keys.chosen;
    for (uint32_t start = 0; start < n; start += TILE) {
        // Each warp scores the keys that it copied itself; the sums need those of all warps.
        float *rows = tile + (size_t)warp * WARP_KEYS * dim;
        const unsigned long long address = load_keys<T>(args, keys, start + warp * WARP_KEYS, rows);
        score_keys<HEADS>(args, queries, rows, address, weights + warp * WARP_KEYS * WEIGHT_STRIDE(HEADS));
        __syncthreads();
        softmax.add(weights, factors);
        __syncthreads();
        add_values<HEADS>(sums, tile, dim, weights, factors, min((uint32_t)TILE, n - start));
        __syncthreads();
    }
    softmax.finish(factors);
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < CHANNELS; i++) {
            const uint32_t c = threadIdx.x + THREADS * i;
            if (h < heads && c < dim) store(out + (size_t)h * dim + c, sums[h][i] * factors[h]);
        }
}

// For many rows: a key that was copied serves 16 heads.
template <typename T> __device__ void attention(const AttentionArgs &args) { attend<T, 16>(args); }
FOR_ACTIVATIONS(attention, AttentionArgs, THREADS)

// For few rows: more blocks. The results are the same, bit for bit.
template <typename T> __device__ void attention_few(const AttentionArgs &args) { attend<T, 4>(args); }
FOR_ACTIVATIONS(attention_few, AttentionArgs, THREADS)
