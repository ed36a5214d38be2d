// Attention on tensor cores, for many rows of bf16: as attention.cu, but that weights are rounded to
// bf16 before they multiply values.
//
// A block takes HEADS heads of one row, whose keys they share. It goes through the keys in tiles of
// KEYS. Products of a tile with the queries are spread over the warps by heads and keys, sums of
// values by channels: each warp holds all heads of its channels in registers. While a tile is
// multiplied, the next one is copied.
#include "attention.cuh"
#include "tensor_core.cuh"

#define DIM 512
#define HEADS 64
#define KEYS 64
#define WARPS (THREADS / 32)
#define CHUNK 8                          // values of a copy, 16 bytes
#define CHUNKS (DIM / CHUNK)             // of a row
#define COPIERS (THREADS / KEYS)         // threads that copy a key
#define OWN (DIM / WARPS)                // channels of a warp
#define SCORE_STRIDE (KEYS + 16)         // of a head's scores: two heads fill all banks
#define WEIGHT_STRIDE (KEYS + CHUNK)     // of a head's weights: eight heads fill all banks

static_assert(COPIERS == 4 && THREADS == 4 * HEADS, "four threads for a key, and for a head");

// Of a block, in dynamic shared memory.
struct Shared {
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

__device__ __forceinline__ void copy_queries(const bf16 *q, uint32_t heads, bf16 *queries) {
    for (uint32_t i = threadIdx.x; i < HEADS * CHUNKS; i += THREADS) {
        const uint32_t head = i / CHUNKS, c = i % CHUNKS * CHUNK;
        bf16 *to = queries + swizzled(head, c);
        if (head < heads)
            copy_async(to, q + (size_t)head * DIM + c);
        else
            *reinterpret_cast<uint4 *>(to) = make_uint4(0, 0, 0, 0);
    }
}

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

// The running softmax of one head, which four neighbouring threads have: each takes four keys of
// every sixteen. In powers of two.
struct Softmax {
    float top;
    float total; // of this thread's keys, and of the sink in the first one

    __device__ __forceinline__ void start(float sink) {
        top = sink * LOG2_E;
        total = threadIdx.x % 4 == 0 ? 1.0f : 0.0f;
    }

    // Turns the scores of a tile into weights, and says how much older sums shrink.
    __device__ __forceinline__ void add(const float *scores, const bool *there, float scale, bf16 *weights,
                                        float *factors) {
        const uint32_t head = threadIdx.x / 4, part = threadIdx.x % 4 * 4;
        float values[KEYS / 4];
        float most = top;
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            const uint32_t k = part + 16 * i;
            const float4 four = *reinterpret_cast<const float4 *>(scores + head * SCORE_STRIDE + k);
            const float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                values[4 * i + j] = there[k + j] ? each[j] * (scale * LOG2_E) : -INFINITY;
                most = fmaxf(most, values[4 * i + j]);
            }
        }
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
        const float factor = exp2f(top - most);
        total *= factor;
        top = most;
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) {
            __nv_bfloat162 pairs[2];
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                const float low = exp2f(values[4 * i + j] - most), high = exp2f(values[4 * i + j + 1] - most);
                total += low + high;
                pairs[j / 2] = __floats2bfloat162_rn(low, high);
            }
            *reinterpret_cast<uint2 *>(weights + head * WEIGHT_STRIDE + part + 16 * i) =
                *reinterpret_cast<const uint2 *>(pairs);
        }
        if (part == 0) factors[head] = factor;
    }

    // The inverse of the head's denominator.
    __device__ __forceinline__ void finish(float *factors) {
        total += __shfl_xor_sync(FULL_WARP, total, 1);
        total += __shfl_xor_sync(FULL_WARP, total, 2);
        if (threadIdx.x % 4 == 0) factors[threadIdx.x / 4] = 1.0f / total;
    }
};

// A warp's sums of weighted values: of all heads, its OWN channels.
struct Values {
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

    __device__ __forceinline__ void write(bf16 *out, uint32_t heads) const {
        const uint32_t lane = threadIdx.x % 32, first = threadIdx.x / 32 * OWN;
#pragma unroll
        for (int i = 0; i < HEADS / 16; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t head = 16 * i + 8 * half + lane / 4;
                if (head >= heads) continue;
#pragma unroll
                for (int j = 0; j < OWN / 8; j++)
                    *reinterpret_cast<__nv_bfloat162 *>(out + (size_t)head * DIM + first + 8 * j + lane % 4 * 2) =
                        __floats2bfloat162_rn(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
            }
    }
};

// Block b takes heads HEADS * (b % groups) on of row b / groups.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_tensor(const AttentionArgs args) {
    extern __shared__ __align__(128) uint8_t memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
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
    copy_queries(at<const bf16>(args.q) + place, heads, shared.queries);
    const RowKeys keys = keys_of_row(args, row, request);
    const uint32_t n = keys.in_window + keys.chosen;
    copy_keys(args, keys, 0, shared.keys[0], shared.there[0]);
    close_copies();
    Softmax softmax;
    const uint32_t own_head = threadIdx.x / 4;
    softmax.start(own_head < heads ? at<const float>(args.sink)[first_head + own_head] : 0.0f);
    Values values = {};
    uint32_t stage = 0;
    for (uint32_t start = 0; start < n; start += KEYS, stage ^= 1) {
        wait_copies<0>();
        // The tile is there for all warps, and none still reads the other one.
        __syncthreads();
        if (start + KEYS < n) copy_keys(args, keys, start + KEYS, shared.keys[stage ^ 1], shared.there[stage ^ 1]);
        close_copies();
        multiply_keys(shared.queries, shared.keys[stage], shared.scores);
        __syncthreads();
        softmax.add(shared.scores, shared.there[stage], args.scale, shared.weights, shared.factors);
        __syncthreads();
        values.scale(shared.factors);
        values.add(shared.weights, shared.keys[stage]);
    }
    __syncthreads();
    softmax.finish(shared.factors);
    __syncthreads();
    values.scale(shared.factors);
    values.write(out, heads);
}
