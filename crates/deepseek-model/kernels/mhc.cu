// Hyper-connections: the coefficients of a mixing site, and the write back to the streams.
#include "common.cuh"

#define MAX_STREAMS 8

struct MixArgs {
    uint64_t raw;       // f32 [rows, (2 + n) n]: the projection, before the norm
    uint64_t streams;   // T [rows, n h]
    uint64_t base;      // f32 [(2 + n) n]
    uint64_t scale;     // f32 [3]
    uint64_t pre;       // f32 [rows, n], written
    uint64_t post_comb; // f32 [rows, n + n n], written
    uint32_t n;         // at most MAX_STREAMS
    uint32_t width;     // n h
    uint32_t iterations;
    float eps;
    float norm_eps;
    uint32_t pad;
};

// One block per row: all threads take the norm, the first n n of one warp each hold a cell of comb.
template <typename T> __device__ void mix(const MixArgs &args) {
    __shared__ float scratch[32];
    __shared__ float m[MAX_STREAMS * MAX_STREAMS];
    __shared__ float sums[MAX_STREAMS];
    const uint32_t n = args.n, cells = n * n;
    const T *row = at<const T>(args.streams) + (size_t)blockIdx.x * args.width;
    float squares = 0.0f;
    for (uint32_t c = threadIdx.x; c < args.width; c += blockDim.x) {
        const float v = load(row + c);
        squares += v * v;
    }
    const float inv = inverse_root(block_sum(squares, scratch) / (float)args.width + args.norm_eps);
    const float *raw = at<const float>(args.raw) + (size_t)blockIdx.x * (2 + n) * n;
    const float *base = at<const float>(args.base), *scale = at<const float>(args.scale);
    float *pre = at<float>(args.pre) + (size_t)blockIdx.x * n;
    float *post = at<float>(args.post_comb) + (size_t)blockIdx.x * (n + cells);
    const uint32_t t = threadIdx.x;
    if (t < n) {
        pre[t] = sigmoid(raw[t] * inv * scale[0] + base[t]) + args.eps;
        post[t] = 2.0f * sigmoid(raw[n + t] * inv * scale[1] + base[n + t]);
    }
    // Cells are input stream by output stream; whole rows and columns of at most 8 are summed by one
    // thread each, so that the order of a sum does not depend on the block.
    if (t < cells) m[t] = raw[2 * n + t] * inv * scale[2] + base[2 * n + t];
    __syncthreads();
    if (t < n) {
        float top = -INFINITY;
        for (uint32_t j = 0; j < n; j++) top = fmaxf(top, m[t * n + j]);
        float sum = 0.0f;
        for (uint32_t j = 0; j < n; j++) sum += expf(m[t * n + j] - top);
        for (uint32_t j = 0; j < n; j++) m[t * n + j] = expf(m[t * n + j] - top) / sum + args.eps;
    }
    __syncthreads();
    for (uint32_t i = 0; i < args.iterations; i++) {
        if (i > 0) {
            if (t < n) {
                float sum = 0.0f;
                for (uint32_t j = 0; j < n; j++) sum += m[t * n + j];
                sums[t] = 1.0f / (sum + args.eps);
            }
            __syncthreads();
            if (t < cells) m[t] *= sums[t / n];
            __syncthreads();
        }
        if (t < n) {
            float sum = 0.0f;
            for (uint32_t j = 0; j < n; j++) sum += m[j * n + t];
            sums[t] = 1.0f / (sum + args.eps);
        }
        __syncthreads();
        if (t < cells) m[t] *= sums[t % n];
        __syncthreads();
    }
    if (t < cells) post[n + t] = m[t];
}
FOR_ACTIVATIONS(mix, MixArgs, 256)

struct ExpandArgs {
    uint64_t y;         // T [rows, h]
    uint64_t streams;   // T [rows, n, h]
    uint64_t post_comb; // f32 [rows, n + n n]
    uint64_t out;       // T [rows, n, h]
    uint32_t n;         // at most MAX_STREAMS
    uint32_t h;
};

// out[j] = post[j] * y + sum_i comb[i][j] * streams[i]. One block per row.
template <typename T> __device__ void expand(const ExpandArgs &args) {
    __shared__ float coefficients[MAX_STREAMS + MAX_STREAMS * MAX_STREAMS];
    const uint32_t n = args.n, h = args.h;
    const float *given = at<const float>(args.post_comb) + (size_t)blockIdx.x * (n + n * n);
    for (uint32_t i = threadIdx.x; i < n + n * n; i += blockDim.x) coefficients[i] = given[i];
    __syncthreads();
    const T *y = at<const T>(args.y) + (size_t)blockIdx.x * h;
    const T *streams = at<const T>(args.streams) + (size_t)blockIdx.x * n * h;
    T *out = at<T>(args.out) + (size_t)blockIdx.x * n * h;
    for (uint32_t c = threadIdx.x; c < h; c += blockDim.x) {
        float stream[MAX_STREAMS];
        for (uint32_t i = 0; i < n; i++) stream[i] = load(streams + (size_t)i * h + c);
        const float value = load(y + c);
        for (uint32_t j = 0; j < n; j++) {
            float sum = coefficients[j] * value;
            for (uint32_t i = 0; i < n; i++) sum += coefficients[n + i * n + j] * stream[i];
            store(out + (size_t)j * h + c, sum);
        }
    }
}
FOR_ACTIVATIONS(expand, ExpandArgs, 256)
