// Hyper-connections: the write back to the streams.
#include "wide.cuh"

struct ExpandArgs {
    uint64_t y;         // T [rows, h]
    uint64_t streams;   // T [rows, n, h]
    uint64_t post_comb; // f32 [rows, n + n n]
    uint64_t out;       // T [rows, n, h]
    uint32_t n;         // 1 to 8
    uint32_t h;
    uint32_t row_blocks; // blocks of a row: each takes a wide per thread
    uint32_t pad;
};

// A thread's channels of all streams. The coefficients are the same for all threads of a block.
template <typename T, bool ALIGNED, uint32_t N> __device__ void expand_wide(const ExpandArgs &args) {
    typedef Wide<T> W;
    const uint32_t h = args.h;
    const size_t row = blockIdx.x / args.row_blocks;
    const uint32_t c = (blockIdx.x % args.row_blocks * blockDim.x + threadIdx.x) * W::COUNT;
    if (c >= h) return;
    const T *streams = at<const T>(args.streams) + row * N * h;
    const W y = load_within<T, ALIGNED>(at<const T>(args.y) + row * h, c, h);
    W stream[N];
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        stream[i] = load_within<T, ALIGNED>(streams + (size_t)i * h, c, h);
    const float *post = at<const float>(args.post_comb) + row * (N + N * N), *comb = post + N;
    T *out = at<T>(args.out) + row * N * h;
#pragma unroll
    for (uint32_t j = 0; j < N; j++) {
        float weights[N];
#pragma unroll
        for (uint32_t i = 0; i < N; i++) weights[i] = __ldg(comb + i * N + j);
        const float weight = __ldg(post + j);
        W wide = W::zeros();
#pragma unroll
        for (uint32_t v = 0; v < W::COUNT; v++) {
            float sum = weight * y.get(v);
#pragma unroll
            for (uint32_t i = 0; i < N; i++) sum += weights[i] * stream[i].get(v);
            wide.set(v, sum);
        }
        store_within<T, ALIGNED>(out + (size_t)j * h, c, h, wide);
    }
}

template <typename T, bool ALIGNED, uint32_t MORE>
__device__ void expand_streams(const ExpandArgs &args) {
    switch (args.n - MORE) {
    case 1: return expand_wide<T, ALIGNED, MORE + 1>(args);
    case 2: return expand_wide<T, ALIGNED, MORE + 2>(args);
    case 3: return expand_wide<T, ALIGNED, MORE + 3>(args);
    case 4: return expand_wide<T, ALIGNED, MORE + 4>(args);
    }
}

// out[j] = post[j] * y + sum_i comb[i][j] * streams[i].
template <typename T, uint32_t MORE> __device__ void expand_rows(const ExpandArgs &args) {
    if (rows_aligned<T>(args.y | args.streams | args.out, args.h))
        expand_streams<T, true, MORE>(args);
    else
        expand_streams<T, false, MORE>(args);
}

// Up to 4 streams; more in a kernel of their own, whose registers leave room for fewer threads.
template <typename T> __device__ void expand(const ExpandArgs &args) { expand_rows<T, 0>(args); }
FOR_ACTIVATIONS(expand, ExpandArgs, 128)

template <typename T> __device__ void expand_more(const ExpandArgs &args) { expand_rows<T, 4>(args); }
FOR_ACTIVATIONS(expand_more, ExpandArgs, 128)
