// Hyper-connections: the write back to the streams.
#include "streams.cuh"

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

template <typename T, bool ALIGNED, uint32_t N> __device__ void expand_wide(const ExpandArgs &args) {
    const uint32_t h = args.h;
    const size_t row = blockIdx.x / args.row_blocks;
    const uint32_t c = (blockIdx.x % args.row_blocks * blockDim.x + threadIdx.x) * Wide<T>::COUNT;
    if (c >= h) return;
    Wide<T> wides[N];
    write_back<T, ALIGNED, N>(wides, at<const T>(args.y) + row * h,
                              at<const T>(args.streams) + row * N * h,
                              at<const float>(args.post_comb) + row * (N + N * N),
                              at<T>(args.out) + row * N * h, c, h);
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
